"""One rollout as the gateway sees it: calls come in, turns are recorded, until it is sealed.

Always true: an answer is recorded by the session before a client hears of it; after `seal` nothing is recorded any
more, and calls are refused; an engine's failure that no later try made good ends the rollout as that failure,
whatever the agent made of it, because it must not pass as a result; a client's own sampling changes nothing unless that
was allowed; a turn whose answer reached nobody is out of the loss.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from rollwright.agents import EpisodeFailure, Interrupted, OutOfRoom, ReplayDiffers, Session
from rollwright.errors import RollwrightError
from rollwright.gateway.asked import Api, Asked, Reply
from rollwright.gateway.conversations import Conversations, answered
from rollwright.gateway.retries import Call, Calls
from rollwright.gateway.settings import CaptureRules
from rollwright.policies.base import RateLimited, Sampling
from rollwright.store.contract import StoreError, StoreUnavailable
from rollwright.store.http.refusals import HttpRefusal
from rollwright.trajectory import UNDELIVERED, Boundary, ErrorRecord, FinishReason, Message, Turn

REPLAYED, REWRITTEN, UNHEARD = "gateway_replayed", "gateway_rewritten", "gateway_undelivered"
"""Metrics of a trajectory: requests that got an answer again; conversations that the client had changed, so that they
began anew; turns whose answer reached nobody."""

PINNED, HONOURED = "gateway_sampling_ignored", "gateway_sampling_honoured"
"""Metrics of a trajectory: calls that wanted tokens drawn otherwise than the rollout does, in vain or not."""

NO_CALL = "no_call"
"""`ErrorRecord.kind` of a rollout whose agent got no answer at all."""

PASSING = frozenset({429, 500, 503})
"""Statuses that are not the client's doing: the same request may be answered; SDKs are told not to repeat the others."""

USUAL_RULES = CaptureRules()

OVER = "the rollout is over: its trajectory is sealed"

_log = logging.getLogger(__name__)


class Given(NamedTuple):
    """How the agent says that it fared."""

    reward: float
    success: bool | None = None


class CapturedRollout:
    def __init__(
        self,
        session: Session,
        sampling: Sampling,
        *,
        rules: CaptureRules = USUAL_RULES,
        on_replay_differs: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`sampling` bounds what a client may ask for.

        `on_replay_differs` forgets what the journal still has; then the call is sampled. Without it such a call ends
        the attempt, because whoever plays it starts the agent again.
        """
        self.session = session
        self.given: Given | None = None
        """What an agent said by HTTP, the last time it did."""
        self.interrupted: Interrupted | None = None
        """Why the attempt may not go on."""
        self._last_seen = time.monotonic()
        """When a request came or was answered last."""
        self._sampling = sampling
        self._rules = rules
        self._on_replay_differs = on_replay_differs
        self._conversations = Conversations()
        self._instructed: dict[int, bool] = {}
        """For each turn, whether its conversation begins with instructions that stand apart from it."""
        self._calls = Calls()
        self._failures: dict[bytes, EpisodeFailure] = {}
        """By the name of the request that failed; made good by another try of it."""
        self.out_of_room = False
        """Whether the last call was refused for want of room."""
        self._sealed = False

    @property
    def silent_seconds(self) -> float:
        """How long its agent has neither asked nor waited for an answer."""
        return 0.0 if self._calls.under_way else time.monotonic() - self._last_seen

    def call(self, api: Api, asked: Asked, name: bytes, *, marked: bool, agent: str) -> Call:
        """The call that this request makes, or the earlier one that it repeats.

        Whoever asks says when it leaves, by `Call.clients`.
        """
        self._last_seen = time.monotonic()
        if self._sealed or self.interrupted is not None:
            raise HttpRefusal(410, "sealed", OVER)
        repeated = self._calls.repeated(name, marked)
        if repeated is not None:
            self._count(REPLAYED)
            return repeated
        task = asyncio.create_task(self._reply(api, asked, agent))
        call = self._calls.add(name, task)
        task.add_done_callback(lambda done: self._ended(name, done))
        return call

    async def seal(self) -> None:
        """From now on nothing is recorded; calls under way are given up."""
        if self._sealed:
            return
        self._sealed = True
        under_way = self._calls.under_way
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        turns = self.session.trajectory.turns
        for reply in self._calls.undelivered():
            self._count(UNHEARD)
            turns[reply.turn_id] = msgspec.structs.replace(turns[reply.turn_id], filtered=UNDELIVERED)

    def raise_failure(self) -> None:
        """Raises what kept the attempt from being played as it should have been."""
        if self.interrupted is not None:
            raise self.interrupted
        for failure in self._failures.values():
            raise failure

    def raise_unused(self) -> None:
        """Raises if not one call was answered: a reward would be for nothing that was recorded."""
        if not self.session.trajectory.turns and not self._rules.allow_no_calls:
            why = "no call of the agent was answered, so there is nothing that its reward could be for"
            raise EpisodeFailure(ErrorRecord(Boundary.AGENT, NO_CALL, why, 0))

    # -- one call ---------------------------------------------------------------------------------------

    async def _reply(self, api: Api, asked: Asked, agent: str) -> Reply:
        messages = self._whole(asked)
        honoured = self._rules.client_sampling == "honoured"
        sampling = asked.wishes.within(self._sampling, honoured=honoured)
        continues, new = self._place(messages, asked)
        if asked.wishes.apart_from(self._sampling):
            self._count(HONOURED if honoured else PINNED)

        async def generate() -> Turn:
            return await self.session.generate(
                new, continues=continues, agent=agent, tools=asked.tools, sampling=sampling
            )

        try:
            turn = await generate()
        except ReplayDiffers:
            if self._on_replay_differs is None:
                raise
            await self._on_replay_differs()
            turn = await generate()
        said, stop = self._said(turn, asked.wishes.stop)
        said = api.present(said)
        self._conversations.add(messages, asked.tools, said, turn.id)
        self._instructed[turn.id] = bool(asked.instructions)
        return Reply(
            name=f"{self.session.trajectory.attempt_id}-{turn.id}",
            created=int(time.time()),
            message=said,
            finish=turn.finish,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            sampling=sampling,
            stop_sequence=stop,
            turn_id=turn.id,
        )

    def _whole(self, asked: Asked) -> tuple[Message, ...]:
        """The conversation from its beginning."""
        said = asked.messages
        if asked.previous is not None:
            _, _, number = asked.previous.rpartition("-")
            turn_id = int(number) if number.isdecimal() else -1
            earlier = self._conversations.until(turn_id)
            if earlier is None:
                raise HttpRefusal(404, "not_found", f"no response {asked.previous[:80]!r} in this rollout")
            said = (*earlier[self._instructed[turn_id] :], *said)
        if asked.instructions:
            said = (Message("system", asked.instructions), *said)
        return said

    def _place(self, messages: tuple[Message, ...], asked: Asked) -> tuple[Turn | None, tuple[Message, ...]]:
        """The turn that the conversation goes on from, and what is new behind it."""
        found = self._conversations.find(messages, asked.tools)
        if found is None:
            if len(self._conversations) and answered(messages):
                self._count(REWRITTEN)
            return None, messages
        turn_id, covered = found
        self._calls.heard(turn_id)
        return self.session.trajectory.turns[turn_id], messages[covered:]

    def _said(self, turn: Turn, stops: Sequence[str]) -> tuple[Message, str | None]:
        """The answer as a message, and which of the client's stop texts ended it. What looks like a call and cannot be
        read is told as text, not left out; a stop text is not part of an answer, though the sampled ids have it."""
        parsed = self.session.parse(turn)
        content = "\n".join(part for part in (parsed.content, *parsed.malformed) if part)
        stop = None
        if turn.finish is FinishReason.STOP:
            content, stop = _until(content, stops)
            stop = stop or self._stop_behind(turn, stops)
        calls = parsed.tool_calls
        if not turn.tool_calls:  # an API's own ids stand in the conversation that it is sent
            calls = tuple(
                msgspec.structs.replace(call, id=f"call_{turn.id}_{place}")
                for place, call in enumerate(calls)
            )
        return Message("assistant", content, parsed.reasoning, calls), stop

    def _stop_behind(self, turn: Turn, stops: Sequence[str]) -> str | None:
        """The stop text that the ids have and the message does not, because the engine or the parser cut it off."""
        renderer = self.session.policy_of(turn.agent).renderer
        return None if renderer is None or not stops else _until(renderer.decode(turn.sampled_ids), stops)[1]

    def _ended(self, name: bytes, task: "asyncio.Task[Reply]") -> None:
        """Keeps what came of a call: an answer to be told again, or what went wrong."""
        self._last_seen = time.monotonic()
        error = error_of(task)
        if error is None:
            self._calls.answered(name, task)
            self._failures.pop(name, None)
            self.out_of_room = False
            return
        self._calls.forget(name, task)
        if isinstance(error, Interrupted):
            self.interrupted = error
        elif (refusal := refusal_of(error)).status in PASSING:
            if not isinstance(error, EpisodeFailure):
                _log.error("a call failed", exc_info=error)
                error = EpisodeFailure(ErrorRecord(Boundary.SYSTEM, type(error).__name__, str(refusal), 0))
            # Other calls may have been recorded since this one began.
            turns = len(self.session.trajectory.turns)
            self._failures[name] = EpisodeFailure(msgspec.structs.replace(error.record, turn=turns))
        self.out_of_room = isinstance(error, OutOfRoom)

    def _count(self, metric: str) -> None:
        metrics = self.session.trajectory.metrics
        metrics[metric] = metrics.get(metric, 0.0) + 1.0


def _until(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text up to where the first stop text begins, and which that is."""
    places = [(place, each) for each in stops if each and (place := text.find(each)) >= 0]
    if not places:
        return text, None
    place, found = min(places)
    return text[:place], found


def error_of(task: "asyncio.Task[Reply]") -> BaseException | None:
    """What a call that has ended came to grief with."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def refusal_of(error: BaseException) -> HttpRefusal:
    """What a client is told when its call came to nothing."""
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, asyncio.CancelledError | Interrupted):
        return HttpRefusal(410, "sealed", OVER)
    if isinstance(error, OutOfRoom):
        return HttpRefusal(400, "context_length_exceeded", str(error))
    if isinstance(error, EpisodeFailure):
        if error.record.kind == RateLimited.__name__:
            return HttpRefusal(429, "rate_limited", str(error))
        return HttpRefusal(503, "engine_failed", str(error))
    if isinstance(error, StoreError | StoreUnavailable):
        return HttpRefusal(503, "store_failed", str(error))
    if isinstance(error, RollwrightError):
        return HttpRefusal(400, "refused", str(error))
    return HttpRefusal(500, "internal", "the gateway failed at this call; its log says why")
