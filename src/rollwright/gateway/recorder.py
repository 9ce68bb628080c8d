"""The recorder of one rollout: answers the model calls of an unmodified agent and records them as turns.

Always true: the session records an answer before it is sent to a client; after `seal` nothing is recorded any more, and
calls are refused; an engine failure without a later successful retry of the same request ends the rollout as that failure,
even if the agent handled it, because it must not count as a result; a client's sampling parameters are ignored unless they
are allowed; a turn whose answer reached no client is masked out of the loss.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from rollwright.agents import AttemptInterrupted, EpisodeFailure, OutOfRoom, ReplayDiffers, Session
from rollwright.engines.base import RateLimited, Sampling
from rollwright.errors import RollwrightError
from rollwright.gateway.conversations import Conversations, answered
from rollwright.gateway.retries import CallLog, ModelCall
from rollwright.gateway.settings import CaptureRules
from rollwright.gateway.types import ApiFormat, ModelReply, ModelRequest
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import UNDELIVERED, Boundary, ErrorRecord, FinishReason, Message, Turn

REPLAYED, REWRITTEN, UNHEARD = "gateway_replayed", "gateway_rewritten", "gateway_undelivered"
"""Metrics of a trajectory: repeated requests that received the recorded answer; conversations that the client changed, so
that a new sequence started; turns whose answer reached no client."""

PINNED, HONOURED = "gateway_sampling_ignored", "gateway_sampling_honoured"
"""Metrics of a trajectory: calls with other sampling parameters than the rollout's, ignored and honoured."""

NO_CALL = "no_call"
"""`ErrorRecord.kind` of a rollout whose agent received no answer."""

PASSING = frozenset({429, 500, 503})
"""Statuses of transient errors, for which a retry may succeed; SDKs are told not to retry the others."""

USUAL_RULES = CaptureRules()

OVER = "the rollout is over: its trajectory is sealed"

_log = logging.getLogger(__name__)


class Given(NamedTuple):
    """The reward that the agent reported over HTTP."""

    reward: float
    success: bool | None = None


class RolloutRecorder:
    """Records calls until `seal`. Requests of one rollout may be concurrent, and may be repeated."""

    def __init__(
        self,
        session: Session,
        sampling: Sampling,
        *,
        rules: CaptureRules = USUAL_RULES,
        on_replay_differs: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`sampling`: upper limits for client requests.

        `on_replay_differs`: clears the rest of the journal, after which the call is sampled. Without it, such a call ends
        the attempt, because its owner restarts the agent.
        """
        self.session = session
        self.given: Given | None = None
        """The reward that the agent reported last."""
        self.interrupted: AttemptInterrupted | None = None
        """Why the attempt must stop; `None`: it continues."""
        self._last_seen = time.monotonic()
        """Time of the latest request or response."""
        self._sampling = sampling
        self._rules = rules
        self._on_replay_differs = on_replay_differs
        self._conversations = Conversations()
        self._instructed: dict[int, bool] = {}
        """For each turn, whether its conversation begins with separate instructions."""
        self._calls = CallLog()
        self._failures: dict[bytes, EpisodeFailure] = {}
        """Failures by request digest; removed by a successful retry."""
        self.out_of_room = False
        """Whether the last call was refused because the sequence was full."""
        self._sealed = False

    @property
    def silent_seconds(self) -> float:
        """Seconds without a request in progress."""
        return 0.0 if self._calls.under_way else time.monotonic() - self._last_seen

    def note_sign_of_life(self) -> None:
        """Ends the silence without a call: the agent is at work on something else."""
        self._last_seen = time.monotonic()

    def call(
        self, api: ApiFormat, asked: ModelRequest, name: bytes, *, marked: bool, agent: str
    ) -> ModelCall:
        """Starts the call of this request, or returns the earlier call that it repeats.

        The request counts in `ModelCall.clients` until its handler removes it.
        """
        self._last_seen = time.monotonic()
        if self._sealed or self.interrupted is not None:
            raise HttpRefusal(410, "sealed", OVER)
        repeated = self._calls.find_repeated(name, marked)
        if repeated is not None:
            self._count(REPLAYED)
            return repeated
        # In a separate task: a client that gives up and repeats its request receives the answer of the first one, and no
        # turn is sampled twice or recorded without an answer.
        task = asyncio.create_task(self._answer(api, asked, agent))
        call = self._calls.add(name, task)
        task.add_done_callback(lambda done: self._note_end(name, done))
        return call

    async def seal(self) -> None:
        """Ends the recording; calls in progress are cancelled."""
        if self._sealed:
            return
        self._sealed = True
        under_way = self._calls.under_way
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        # The agent never saw these answers, so no reward is for them: they stay in the record, out of the loss.
        turns = self.session.trajectory.turns
        for reply in self._calls.undelivered():
            self._count(UNHEARD)
            turns[reply.turn_id] = msgspec.structs.replace(turns[reply.turn_id], filtered=UNDELIVERED)

    def raise_failure(self) -> None:
        """Raises the interruption or the engine failure of the attempt, if there is one."""
        if self.interrupted is not None:
            raise self.interrupted
        for failure in self._failures.values():
            raise failure

    def raise_unused(self) -> None:
        """Raises if no call was answered: a reward without a recorded turn is meaningless."""
        if not self.session.trajectory.turns and not self._rules.allow_no_calls:
            why = "no call of the agent was answered, so there is nothing that its reward could be for"
            raise EpisodeFailure(ErrorRecord(Boundary.AGENT, NO_CALL, why, 0))

    async def _answer(self, api: ApiFormat, asked: ModelRequest, agent: str) -> ModelReply:
        """Samples the answer to one call, and records the turn and the conversation that it ends."""
        messages = self._full_conversation(asked)
        honoured = self._rules.client_sampling == "honoured"
        sampling = asked.wishes.within(self._sampling, honoured=honoured)
        continues, new = self._find_turn(messages, asked)
        if asked.wishes.apart_from(self._sampling):
            self._count(HONOURED if honoured else PINNED)

        async def generate() -> Turn:
            return await self.session.generate(
                new, continues=continues, agent=agent, tools=asked.tools, sampling=sampling
            )

        try:
            turn = await generate()
        except ReplayDiffers:
            # An agent outside of this process cannot be started again; it is answered with new samples from here on.
            if self._on_replay_differs is None:
                raise
            await self._on_replay_differs()
            turn = await generate()
        said, stop = self._message_of(turn, asked.wishes.stop)
        said = api.present(said)
        self._conversations.add(messages, asked.tools, said, turn.id)
        self._instructed[turn.id] = bool(asked.instructions)
        return ModelReply(
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

    def _full_conversation(self, asked: ModelRequest) -> tuple[Message, ...]:
        """The whole conversation, also if the client sent only the messages after an earlier reply."""
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

    def _find_turn(
        self, messages: tuple[Message, ...], asked: ModelRequest
    ) -> tuple[Turn | None, tuple[Message, ...]]:
        """Finds the turn that the conversation continues, and the new messages after it."""
        found = self._conversations.find(messages, asked.tools)
        if found is None:
            if len(self._conversations) and answered(messages):
                self._count(REWRITTEN)
            return None, messages
        turn_id, covered = found
        # The client quotes the answer, so it has it, whatever became of the connection that carried it.
        self._calls.note_heard(turn_id)
        return self.session.trajectory.turns[turn_id], messages[covered:]

    def _message_of(self, turn: Turn, stops: Sequence[str]) -> tuple[Message, str | None]:
        """The turn as an assistant message, and the client's stop text that ended it. A tool call that cannot be parsed
        stays in as text; a stop text is not part of the message, though the sampled ids have it."""
        parsed = self.session.parse(turn)
        content = "\n".join(part for part in (parsed.content, *parsed.malformed) if part)
        stop = None
        if turn.finish is FinishReason.STOP:
            content, stop = _cut_at_stop(content, stops)
            stop = stop or self._find_stop_text(turn, stops)
        calls = parsed.tool_calls
        if not turn.tool_calls:  # an API's own ids stand in the conversation that it is sent
            calls = tuple(
                msgspec.structs.replace(call, id=f"call_{turn.id}_{place}")
                for place, call in enumerate(calls)
            )
        return Message("assistant", content, parsed.reasoning, calls), stop

    def _find_stop_text(self, turn: Turn, stops: Sequence[str]) -> str | None:
        """Finds the stop text that the ids have and the message does not, because the engine or the parser cut it off."""
        renderer = self.session.policy_of(turn.agent).renderer
        return (
            None
            if renderer is None or not stops
            else _cut_at_stop(renderer.decode(turn.sampled_ids), stops)[1]
        )

    def _note_end(self, name: bytes, task: "asyncio.Task[ModelReply]") -> None:
        """Keeps the result of a call: an answer to be sent again, or the failure."""
        self._last_seen = time.monotonic()
        error = error_of(task)
        if error is None:
            self._calls.note_answer(name, task)
            self._failures.pop(name, None)
            self.out_of_room = False
            return
        # A failed call is forgotten, so that the SDK's own retry of it is a new try, which makes the failure good.
        self._calls.forget(name, task)
        if isinstance(error, AttemptInterrupted):
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


def _cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that stop string."""
    places = [(place, each) for each in stops if each and (place := text.find(each)) >= 0]
    if not places:
        return text, None
    place, found = min(places)
    return text[:place], found


def error_of(task: "asyncio.Task[ModelReply]") -> BaseException | None:
    """The error of a call that has ended; `None`: it was answered."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def refusal_of(error: BaseException) -> HttpRefusal:
    """The HTTP refusal that a failed call is answered with."""
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, asyncio.CancelledError | AttemptInterrupted):
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
