"""Calls of a rollout's agent that come in without HTTP: the same recording, limits and refusals."""

import asyncio

import msgspec

from rollwright.gateway.chat_completions import ChatCompletions
from rollwright.gateway.recorder import RolloutRecorder, error_of, refusal_of
from rollwright.gateway.requests import check_limits, check_room, name_request
from rollwright.store.http.errors import HttpRefusal

_API = ChatCompletions()
_encode = msgspec.json.Encoder().encode


async def complete(recorder: RolloutRecorder, body: bytes, agent: str) -> tuple[int, bytes]:
    """Answers the body of a chat completion; returns the HTTP status and the body of the answer."""
    try:
        named = name_request(_API, body)
        check_limits(named.asked)
        check_room(recorder, named, agent)
        call = recorder.call(_API, named.asked, named.name, marked=False, agent=agent)
        try:
            await asyncio.wait(
                {call.task}
            )  # it goes on if its caller is cancelled: sampled tokens are recorded
            error = error_of(call.task)
            if error is not None:
                raise refusal_of(error)
            call.delivered = True
            return 200, _encode(_API.answer(named.asked, call.task.result()))
        finally:
            call.clients -= 1
    except HttpRefusal as refusal:
        if refusal.status in (400, 404, 422):
            recorder.note_refusal(refusal)
        message = " ".join(str(refusal).splitlines())
        return refusal.status, _encode(_API.error(refusal.status, refusal.kind, message))
