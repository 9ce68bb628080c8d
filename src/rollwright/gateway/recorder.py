"""The recorder of one rollout: answers the model calls of an unmodified agent and records them as turns.

Always true: the session records an answer before it is sent to a client; after `seal` nothing is recorded any more, and
calls are refused; an engine failure without a later successful retry of the same request ends the rollout as that failure,
even if the agent handled it, because it must not count as a result; a client's sampling parameters are ignored unless they
are allowed; a turn whose answer reached no client, or whose call a rule leaves out, is masked out of the loss.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from rollwright.agents import AttemptInterrupted, EpisodeFailure, OutOfRoom, ReplayDiffers, Session
from rollwright.aio import together
from rollwright.engines.base import NamedPolicies, Policy, RateLimited, Sampling, constrains_output
from rollwright.errors import ConfigError, RollwrightError
from rollwright.gateway.conversations import Conversations, answered
from rollwright.gateway.retries import CallLog, ModelCall
from rollwright.gateway.settings import CaptureRules
from rollwright.gateway.types import ApiFormat, ModelReply, ModelRequest, TokenLogprob, refuse
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import (
    LEFT_OUT,
    UNDELIVERED,
    Boundary,
    ErrorRecord,
    FinishReason,
    Message,
    Turn,
    token_ids,
)

REPLAYED, REWRITTEN, UNHEARD = "gateway_replayed", "gateway_rewritten", "gateway_undelivered"
"""Metrics of a trajectory: repeated requests that received the recorded answer; conversations that the client changed, so
that a new sequence started, in all and by cause (`gateway_rewritten_CAUSE`); turns whose answer reached no client."""

PINNED, HONOURED = "gateway_sampling_ignored", "gateway_sampling_honoured"
"""Metrics of a trajectory: calls with other sampling parameters than the rollout's, ignored and honoured."""

CONSTRAINED, UNCONSTRAINED = "gateway_formats_enforced", "gateway_formats_ignored"
"""Metrics of a trajectory: calls with a forced tool choice or a JSON format, by what became of it."""

PASSED_OVER, NOT_TRAINED, REFUSED = "gateway_tools_ignored", "gateway_left_out", "gateway_refused"
"""Metrics of a trajectory: calls of which server-side tools were passed over; calls that a rule leaves out of the loss;
requests that were refused because they ask for what is not there."""

NO_CALL = "no_call"
"""`ErrorRecord.kind` of a rollout whose agent received no answer."""

PASSING = frozenset({429, 500, 503})
"""Statuses of transient errors, for which a retry may succeed; SDKs are told not to retry the others."""

USUAL_RULES = CaptureRules()

_REMEDY = "leave it out, or set gateway.client_formats: ignored"

OVER = "the rollout is over: its trajectory is sealed"

_log = logging.getLogger(__name__)


class Given(NamedTuple):
    """The reward that the agent reported over HTTP."""

    reward: float
    success: bool | None = None


class _Asking(NamedTuple):
    """One call, with all that is decided about it before it is sampled."""

    messages: tuple[Message, ...]
    asked: ModelRequest
    agent: str
    sampling: Sampling
    policy: Policy | None
    """Answers in place of the agent's policy."""
    policy_name: str
    trained: bool


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
        self._strip = re.compile("|".join(f"(?:{each})" for each in rules.strip)) if rules.strip else None
        """Matches the parts of system prompts that are taken out; `None`: there are none."""
        self._on_replay_differs = on_replay_differs
        self._conversations = Conversations()
        self._instructed: dict[int, bool] = {}
        """For each turn, whether its conversation begins with separate instructions."""
        self._calls = CallLog()
        self._noted: set[str] = set()
        """Notes that were logged already."""
        self._refusal: str | None = None
        """The last request that was refused, and why."""
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
        self._mark_unheard(self._calls.undelivered())

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
            if self._refusal is not None:
                why += f"; the last one was refused: {self._refusal}"
            raise EpisodeFailure(ErrorRecord(Boundary.AGENT, NO_CALL, why, 0))

    def note_refusal(self, refusal: HttpRefusal) -> None:
        """Remembers a request that asked for what is not there, for the reason of a rollout without an answer."""
        self._count(REFUSED)
        self._refusal = " ".join(str(refusal).split())

    def count_tokens(self, asked: ModelRequest, agent: str) -> int:
        """Tokens of the prompt that a request would have."""
        messages = self._full_conversation(asked)
        found = self._conversations.find(messages, asked.tools)
        turns = self.session.trajectory.turns
        continues, covered = (None, 0) if found is None else (turns[found[0]], found[1])
        return self.session.count_prompt_tokens(
            messages[covered:], continues=continues, agent=agent, tools=asked.tools
        )

    async def _answer(self, api: ApiFormat, asked: ModelRequest, agent: str) -> ModelReply:
        """Samples the answers to one call; several are samples of their own for the same prompt."""
        rule = self._rules.rule_for(asked.model, agent, asked.system) if self._rules.calls else None
        policy = None if rule is None or rule.policy is None else self._named_policy(rule.policy)
        self._note(asked)
        answering = policy or self.session.policy_of(agent)
        sampling = self._call_sampling(asked, answering)
        check_output = getattr(answering, "check_output", None)
        if sampling.output is not None and check_output is not None:
            await asyncio.to_thread(check_output, sampling.output)
        if sampling.output is not None:
            self._count(CONSTRAINED)
        asking = _Asking(
            messages=self._full_conversation(asked),
            asked=asked,
            agent=agent,
            sampling=sampling,
            policy=policy,
            policy_name="" if rule is None or rule.policy is None else rule.policy,
            trained=rule is None or rule.train,
        )
        if asked.choices == 1:
            return await self._answer_once(api, asking)
        return await self._answer_often(api, asking)

    async def _answer_often(self, api: ApiFormat, asking: "_Asking") -> ModelReply:
        """Samples several answers. If one fails, the client gets none, and those that were recorded are out of the loss."""
        told: list[ModelReply] = []

        async def once() -> ModelReply:
            told.append(reply := await self._answer_once(api, asking))
            return reply

        try:
            first, *others = await together(once() for _ in range(asking.asked.choices))
        except BaseException:
            self._mark_unheard(told)
            raise
        return msgspec.structs.replace(first, others=tuple(others))

    def _mark_unheard(self, replies: Sequence[ModelReply]) -> None:
        turns = self.session.trajectory.turns
        for reply in replies:
            self._count(UNHEARD)
            turns[reply.turn_id] = msgspec.structs.replace(turns[reply.turn_id], filtered=UNDELIVERED)

    async def _answer_once(self, api: ApiFormat, asking: "_Asking") -> ModelReply:
        """Samples one answer, and records the turn and the conversation that it ends."""
        asked = asking.asked
        continues, new = self._find_turn(asking)

        async def generate() -> Turn:
            return await self.session.generate(
                new,
                continues=continues,
                agent=asking.agent,
                tools=asked.tools,
                sampling=asking.sampling,
                policy=asking.policy,
                policy_name=asking.policy_name,
            )

        try:
            turn = await generate()
        except ReplayDiffers:
            # An agent outside of this process cannot be started again; it is answered with new samples from here on.
            if self._on_replay_differs is None:
                raise
            await self._on_replay_differs()
            turn = await generate()
        if not asking.trained:
            self._count(NOT_TRAINED)
            turn = msgspec.structs.replace(turn, filtered=LEFT_OUT)
            self.session.trajectory.turns[turn.id] = turn
        said, stop = self._message_of(turn, asked.wishes.stop)
        said = api.present(asked, said)
        known = None if continues is None else continues.id
        self._conversations.add(new, asked.tools, said, turn.id, continues=known)
        self._instructed[turn.id] = bool(asked.instructions)
        return ModelReply(
            name=f"{self.session.trajectory.attempt_id}-{turn.id}",
            created=int(time.time()),
            message=said,
            finish=turn.finish,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            sampling=asking.sampling,
            stop_sequence=stop,
            turn_id=turn.id,
            tokens=self._tokens_of(turn) if asked.logprobs else (),
        )

    def _call_sampling(self, asked: ModelRequest, policy: Policy) -> Sampling:
        """How the call is sampled; refuses what the policy that answers cannot do."""
        if asked.logprobs and policy.renderer is None:
            raise refuse("logprobs: this policy speaks text and tells no log-probabilities; leave it out")
        output = asked.output
        if output is not None and self._rules.client_formats == "ignored":
            self._count(UNCONSTRAINED)
            output = None
        elif output is not None and not constrains_output(policy):
            option = "tool_choice" if output.kind == "tool_call" else "response_format"
            raise refuse(f"{option}: this policy ({type(policy).__name__}) cannot enforce it; {_REMEDY}")
        honoured = self._rules.client_sampling == "honoured"
        sampling = asked.wishes.within(self._sampling, output, honoured=honoured)
        if asked.wishes.apart_from(self._sampling):
            self._count(HONOURED if honoured else PINNED)
        return sampling

    def _named_policy(self, name: str) -> Policy:
        policies = self.session.run_policy
        if not isinstance(policies, NamedPolicies):
            raise ConfigError(
                f"gateway.calls: no policy {name!r} is at hand here; accepted: names of `policies`"
            )
        return policies.named(name)

    def _note(self, asked: ModelRequest) -> None:
        """Counts what was passed over, and logs it once."""
        if not asked.notes:
            return
        self._count(PASSED_OVER)
        for note in asked.notes:
            if note not in self._noted:
                self._noted.add(note)
                _log.info("%s: %s", self.session.trajectory.rollout_id, note)

    def _tokens_of(self, turn: Turn) -> tuple[TokenLogprob, ...]:
        renderer = self.session.answered_by(turn).renderer
        if renderer is None:
            return ()
        return tuple(
            TokenLogprob(renderer.decode(token_ids([token])), logprob)
            for token, logprob in zip(turn.sampled_ids, turn.logprobs, strict=True)
            if token not in renderer.stop_ids
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
        return tuple(map(self._stripped, said)) if self._strip is not None else said

    def _stripped(self, message: Message) -> Message:
        """The message without the parts that the rules take out."""
        if self._strip is None or message.role != "system" or not self._strip.search(message.content):
            return message
        return msgspec.structs.replace(message, content=self._strip.sub("", message.content))

    def _find_turn(self, asking: "_Asking") -> tuple[Turn | None, tuple[Message, ...]]:
        """Finds the turn that the conversation continues, and the new messages after it."""
        messages, tools = asking.messages, asking.asked.tools
        found = self._conversations.find(messages, tools)
        if found is None:
            if len(self._conversations) and answered(messages):
                self._count(REWRITTEN)
                self._count(f"{REWRITTEN}_{self._conversations.explain(messages, tools)}")
            return None, messages
        turn_id, covered = found
        # The client quotes the answer, so it has it, whatever became of the connection that carried it.
        self._calls.note_heard(turn_id)
        turn = self.session.trajectory.turns[turn_id]
        if self.session.answered_by(turn) is not (asking.policy or self.session.policy_of(asking.agent)):
            return None, messages  # another policy's ids are not a prompt for this one
        return turn, messages[covered:]

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
        renderer = self.session.answered_by(turn).renderer
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
