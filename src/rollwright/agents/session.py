"""A session: one attempt's access to the policy, and the only writer of its trajectory.

Always true: a generation is in the journal before its text is returned. A prompt that continues a turn consists of exactly
that turn's full token sequence and the new ids; if the model's chat template does not allow that, a new sequence starts and
is counted. Random draws of a turn are keyed by run, group, member, agent and its node in the call tree, never by time or by
attempt. A turn with other sampling parameters than the rollout's records them. The node of a generation is fixed when
`generate` is called, so calls may run concurrently: calls without an explicit predecessor are recorded in the order in
which they were made, whatever order they finish in.

One generation: `generate` reserves a node, `_replay_or_sample` finds its turn in the journal or samples and journals a
new one, `_record` appends it to the trajectory.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from rollwright.agents.call_tree import CallNode, CallTree
from rollwright.agents.failures import bounded, failed
from rollwright.agents.journal import Journal, JournalEntry, name_of, replay
from rollwright.agents.outcomes import outcome_of
from rollwright.agents.prompts import PromptBuilder, Question, is_long
from rollwright.agents.timing import Stopwatch, Waiting
from rollwright.aio import together
from rollwright.engines.base import (
    Alternatives,
    EngineError,
    Parsed,
    Playable,
    Policy,
    Prompt,
    Sampling,
    ToolSpec,
    broken,
    longest_token,
)
from rollwright.envs.base import Step
from rollwright.errors import FormatError
from rollwright.rng import KeyPart
from rollwright.trajectory import (
    Boundary,
    Message,
    Outcome,
    OutsideCall,
    Phase,
    TokenIds,
    Trajectory,
    Turn,
    leaves,
    renumber,
    token_ids,
)

MOST_TOLD = 20
"""Likeliest tokens that are asked for: as many as vLLM tells by default. What is beyond them has little share of an entropy."""


class OutOfRoom(Exception):
    """The prompt leaves no room for a completion within `sequence_length`."""


class Session:
    """Generates turns for an agent: renders, samples, journals and records them."""

    def __init__(
        self,
        trajectory: Trajectory,
        policy: Policy,
        sampling: Sampling,
        key: tuple[KeyPart, ...],
        *,
        sequence_length: int,
        generate_timeout: float,
        attempt: int = 1,
        env: Playable | None = None,
        journal: Journal | None = None,
        on_turn: Callable[[Turn], None] | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.trajectory = trajectory
        self.stopwatch = stopwatch or Stopwatch()
        """Measures the phases that the attempt waits for; a given one has run since the claim."""
        self._policy = policy
        self._sampling = sampling
        trajectory.sampling = self._params = sampling.params()
        self.key = key
        """Key of every random draw of this rollout."""
        self._sequence_length = sequence_length
        self._generate_timeout = generate_timeout
        self._attempt = attempt
        self.alternatives: dict[int, Alternatives] = {}
        """By turn, what else might have been sampled, where a call asked for it; a replayed turn has none."""
        self._told: dict[int, Alternatives] = {}
        """The same by call, until its turn is recorded."""
        self._env = env
        self._journal = journal
        self.replayed_turns = 0
        """Turns that came from the journal instead of the engine."""
        self.outside: list[OutsideCall] = []
        """Calls beside the episode, which are no turns."""
        self._on_turn = on_turn
        self._prompts = PromptBuilder(trajectory, policy)
        self._tree = CallTree()

    @property
    def last(self) -> Turn | None:
        return self.trajectory.turns[-1] if self.trajectory.turns else None

    @property
    def phase(self) -> Phase:
        """The phase that the episode is in now."""
        return self.stopwatch.phase

    def waiting(self, phase: Phase, name: str = "", *, agent: str = "") -> Waiting:
        """`with session.waiting(Phase.TOOL, "search", agent="solver"):` attributes the time inside to that phase.

        Waits may overlap, also with generations, which are measured already. `with waiting.in_line():` inside it attributes
        a part to waiting for a lock: a resource of a pool, or a limit.
        """
        return self.stopwatch.waiting(phase, name, agent)

    @property
    def sampling(self) -> Sampling:
        """Default sampling parameters of calls."""
        return self._sampling

    @property
    def sequence_length(self) -> int:
        """Limit of the tokens of a prompt and its completion."""
        return self._sequence_length

    @property
    def attempt_number(self) -> int:
        """1 for the first attempt at its rollout."""
        return self._attempt

    @property
    def run_policy(self) -> Policy:
        """The policy of the whole attempt, which may consist of several."""
        return self._policy

    def policy_of(self, agent: str) -> Policy:
        """The policy that answers this agent's calls."""
        return self._prompts.policy_of(agent)

    def most_characters(self, agent: str) -> int:
        """Length of the longest text that could fit into a prompt for this agent; a longer one need not be tokenized."""
        return self._sequence_length * longest_token(self.policy_of(agent))

    def depth(self, turn: Turn) -> int:
        """Number of turns on the path to this one, including it."""
        return self._tree.of(turn).depth

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        continues: Turn | None = None,
        after: Turn | msgspec.UnsetType | None = msgspec.UNSET,
        agent: str = "agent",
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        policy: Policy | None = None,
        policy_name: str = "",
    ) -> Turn:
        """Samples one completion and records it as a turn.

        With `continues`, `messages` are those after that turn's completion. Without it they are a whole conversation, and a
        new token sequence starts. `after`: the preceding turn, `None` for a root of the tree; by default the previous
        call. `policy`: answers this call in place of the agent's own; its turn can only be continued by calls to it.
        `policy_name`: its name among `policies`, for the ledger of costs.
        """
        asked = (messages, continues, agent, tools, sampling or self._sampling, self._env)
        question = Question(*asked, policy, policy_name)
        node = self._tree.reserve(after)
        try:
            turn = await self._replay_or_sample(node, question)
            # Turns are numbered in the order of the tree: a call that was requested after another one, but answered
            # first, waits until the earlier call has been recorded or has failed.
            if (earlier := node.before) is not None and not earlier.settled:
                await earlier.wait()
            return self._record(node, turn, question)
        finally:  # after a failure too, or the calls behind this one would wait for it forever
            self._tree.settle(node)

    async def generate_aside(
        self,
        messages: Sequence[Message],
        number: int,
        *,
        continues: Turn | None = None,
        agent: str = "agent",
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        policy: Policy | None = None,
        policy_name: str = "",
    ) -> Turn:
        """Samples a completion outside of the episode: it is neither recorded nor journalled, and no draw of the episode
        depends on it. Its tokens are noted in `outside`. `number`: its index among such completions. `policy`,
        `policy_name`: as for `generate`."""
        asked = (messages, continues, agent, tools, sampling or self._sampling, self._env)
        question = Question(*asked, policy, policy_name)
        # A negative rank is no rank of the tree, so the call has a key of its own and takes none from the episode.
        turn = await self._sample(CallNode(None, -1 - number, number), question, is_long(question))
        self.outside.append(OutsideCall("", "", turn.usage, agent, policy_name))
        return turn

    async def generate_siblings(
        self,
        messages: Sequence[Message],
        count: int,
        *,
        continues: Turn | None = None,
        after: Turn | None = None,
        agent: str = "agent",
        env: object = None,
    ) -> list[Turn]:
        """Samples `count` answers to one prompt concurrently, so that they share the engine's prefix cache.

        Identical answers become one turn with a count. `env`: the environment of this branch.
        """
        calls = self.siblings(messages, continues=continues, after=after, agent=agent, env=env)
        return await calls.finish(count)

    def siblings(
        self,
        messages: Sequence[Message],
        *,
        continues: Turn | None = None,
        after: Turn | None = None,
        agent: str = "agent",
        env: object = None,
        notes_entropy: bool = False,
    ) -> "SiblingCalls":
        """The answers to one prompt, none of them sampled yet. With `notes_entropy` the first one asks for the likeliest
        tokens, and its turn records the question's entropy."""
        board = env if isinstance(env, Playable) else None
        question = Question(messages, continues, agent, (), self._sampling, board)
        return SiblingCalls(self, question, after, notes_entropy)

    async def _replay_or_sample(self, node: CallNode, question: Question) -> Turn:
        """Returns the turn that an earlier attempt recorded at this node, or samples and journals a new one. Its number and
        links are preliminary until `_record`."""
        journal, long = self._journal, is_long(question)
        if journal is None:
            turn = await self._sample(node, question, long)
        else:
            # The environment's last answer goes into the entry, and is compared in a replay: the prompt alone does not
            # show everything that an environment answered, a reward for example.
            before = self._last_outcome_before(node)
            if long:
                asked = await asyncio.to_thread(name_of, question.messages)
            else:
                asked = name_of(question.messages)
            if (recorded := replay(journal, node.name, asked, before, self._params)) is not None:
                self.replayed_turns += 1
                return recorded
            turn = await self._sample(node, question, long)
            with self.stopwatch.waiting(Phase.STORE, "journal", question.agent):
                drawn = self._params if turn.sampling is None else turn.sampling
                await journal.append(JournalEntry(node.name, turn, asked, before, drawn))
        if self._on_turn is not None:
            self._on_turn(turn)
        return turn

    def _last_outcome_before(self, node: CallNode) -> Outcome | None:
        """The environment's last answer on the path to this call. A concurrent call has no answer yet, so it does not
        matter which of them is recorded first."""
        turn_id = node.parent
        while turn_id is not None:
            turn = self.trajectory.turns[turn_id]
            if turn.outcome is not None:
                return turn.outcome
            turn_id = turn.after
        return None

    def _record(self, node: CallNode, turn: Turn, question: Question) -> Turn:
        """Appends the turn to the trajectory, with its number and its links."""
        turns = self.trajectory.turns
        after = node.parent
        # `extends` of a journalled turn is a number of the earlier attempt, whose turns may have come in another order.
        extends = question.continues.id if question.continues and turn.extends is not None else None
        # A copy only where a number changed: nearly every turn is recorded with the numbers it was made with.
        if (turn.id, turn.after, turn.extends) != (len(turns), after, extends):
            turn = msgspec.structs.replace(turn, id=len(turns), after=after, extends=extends)
        turns.append(turn)
        if (told := self._told.pop(node.name, None)) is not None:
            self.alternatives[turn.id] = told
        self._prompts.asked.append(question)
        self._tree.commit(node, turn)
        return turn

    async def _sample(self, node: CallNode, question: Question, long: bool) -> Turn:
        """Samples a new turn, numbered as if no other call were in progress."""
        turn_id = len(self.trajectory.turns)
        if long:  # in a thread: other episodes of this event loop would wait while it is tokenized
            added, prompt_ids, extends = await asyncio.to_thread(self._prompts.render, question)
        else:
            added, prompt_ids, extends = self._prompts.render(question)
        prompt = Prompt(
            episode=self.trajectory.rollout_id,
            key=(*self.key, question.agent, node.name),
            messages=self._prompts.conversation(question) if prompt_ids is None else (),
            ids=prompt_ids,
            env=question.env,
            tools=tuple(question.tools) if prompt_ids is None else (),
            attempt=self._attempt,
        )
        fitted = self._fit_max_tokens(question, prompt_ids)
        policy = self._prompts.policy_for(question)
        with self.stopwatch.waiting(Phase.ENGINE, "", question.agent) as waiting:
            made = await bounded(
                policy.generate(prompt, fitted),
                self._generate_timeout + getattr(policy, "rate_limit_patience", 0.0),
                Boundary.ENGINE,
                turn_id,
            )
            waiting.tokens, waiting.served = made.completion_tokens, made.served
        if made.alternatives:
            self._told[node.name] = made.alternatives
        if not made.checked and (wrong := broken(made)) is not None:
            raise failed(Boundary.ENGINE, EngineError(f"{type(policy).__name__}: {wrong}"), turn_id)
        # How tokens were drawn is recorded only where it differs from the rollout's: most turns then store nothing.
        drawn = made.sampling
        if drawn is None and question.sampling is not self._sampling:
            drawn = question.sampling.params()
        return Turn(
            id=turn_id,
            after=node.parent,
            extends=extends,
            prompt_ids=token_ids() if added is None else added,
            sampled_ids=made.sampled_ids,
            logprobs=made.logprobs,
            versions=made.versions,
            text=made.text,
            agent=question.agent,
            finish=made.finish,
            exact=made.exact,
            prompt_tokens=made.prompt_tokens if prompt_ids is None else len(prompt_ids),
            completion_tokens=made.completion_tokens,
            cached_tokens=made.cached_tokens,
            reasoning_tokens=made.reasoning_tokens,
            sampling=None if drawn == self._params else drawn,
            tool_calls=made.tool_calls,
            reasoning=made.reasoning,
            policy=question.policy_name,
            entropy=made.question_entropy if question.notes_entropy else None,
        )

    def parse(self, turn: Turn) -> Parsed:
        """Parses a turn's completion into content, reasoning and tool calls, by the model's own format."""
        return self._prompts.parse(turn)

    def answered_by(self, turn: Turn) -> Policy:
        """The policy that made a turn."""
        return self._prompts.policy_for(self._prompts.asked[turn.id])

    def count_prompt_tokens(
        self,
        messages: Sequence[Message],
        *,
        continues: Turn | None = None,
        agent: str = "agent",
        tools: Sequence[ToolSpec] = (),
    ) -> int:
        """Tokens of the prompt that `generate` would send, without sampling or recording anything. A policy that speaks text
        only does not tell its tokens; for it the count is an estimate of `CHARACTERS_PER_TOKEN`."""
        return self._prompts.count_tokens(
            Question(messages, continues, agent, tools, self._sampling, self._env)
        )

    def conversation_of(self, turn: Turn) -> tuple[Message, ...]:
        """All messages of the conversation that the turn ends, its own included."""
        return self._prompts.conversation_of(turn)

    def recorded_outcome(self, turn: Turn) -> Outcome | None:
        """The journalled outcome of a turn in an earlier attempt; `None`: no attempt reached the next call."""
        if self._journal is None:
            return None
        # The entry of the next call holds the outcome of this turn; its node's name follows from this one's.
        node = self._tree.of(turn)
        behind = self._journal.recorded.get(CallNode(node, node.children, 0).name)
        return None if behind is None else behind.before

    def observe(self, turn: Turn, step: Step) -> Turn:
        """Records the environment's answer to a turn; a value of a wrong type is a failure of the environment."""
        outcome = self.read_step(turn, step)
        metrics = self.trajectory.metrics
        for name, value in step.info.get("metrics", {}).items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
        if outcome.success is not None:
            self.trajectory.success = outcome.success
        observed = msgspec.structs.replace(turn, outcome=outcome)
        self.trajectory.turns[turn.id] = observed
        return observed

    def read_step(self, turn: Turn, step: Step) -> Outcome:
        """Converts an environment's answer to plain data; a value of a wrong type is a failure of the environment."""
        try:
            outcome = outcome_of(step)
            if metrics := step.info.get("metrics"):
                for value in metrics.values():
                    float(value)  # metrics of the environment need not be finite
            return outcome
        except Exception as error:
            told = FormatError(f"environment {self.trajectory.tag}: {error}")
            raise failed(Boundary.ENVIRONMENT, told, turn.id + 1) from error

    def seal(self) -> Trajectory:
        """Returns the trajectory, with its turns in tree order instead of order of arrival."""
        trajectory = self.trajectory
        order = self._tree.order()
        if order is not None:
            trajectory.turns = renumber(trajectory.turns, order)
            ends = {_solved(trajectory.turns[leaf]) for leaf in leaves(trajectory.turns)}
            trajectory.success = ends.pop() if len(ends) == 1 else None
        trajectory.timing = self.stopwatch.read()
        return trajectory

    def _fit_max_tokens(self, question: Question, prompt_ids: TokenIds | None) -> Sampling:
        """Cuts `max_tokens` to the room that is left in the sequence; raises `OutOfRoom` if there is none."""
        sampling, continues = question.sampling, question.continues
        if prompt_ids is not None:
            used = len(prompt_ids)
        else:
            used = continues.prompt_tokens + continues.completion_tokens if continues is not None else 0
        room = self._sequence_length - used
        if room < 1:
            raise OutOfRoom(f"the prompt has {used} tokens, sequence_length is {self._sequence_length}")
        if room >= sampling.max_tokens:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=room)


class SiblingCalls:
    """The answers to one prompt, sampled together or the first one before the others, and recorded together."""

    def __init__(self, session: Session, question: Question, after: Turn | None, notes_entropy: bool) -> None:
        self._session = session
        self._question = question
        self._after = after
        self._notes_entropy = notes_entropy
        self._nodes: list[CallNode] = []
        self._made: list[Turn] = []

    @property
    def entropy(self) -> float | None:
        """Entropy of the question, once the first answer is there; `None`: the engine does not tell."""
        return self._made[0].entropy if self._made else None

    async def begin(self) -> None:
        """Samples the first answer, and nothing if there is no room for it."""
        with suppress(OutOfRoom):
            await self._sample(1)

    async def finish(self, count: int) -> list[Turn]:
        """Samples until there are `count` answers, and records them; identical ones become one turn with a count."""
        try:
            await self._sample(count - len(self._made))
            # Equal answers lead to equal environments, so one of them is played and counted for all.
            kept: dict[object, tuple[CallNode, Turn]] = {}
            for node, turn in zip(self._nodes, self._made, strict=True):
                same = turn.sampled_ids.tobytes() if turn.exact else turn.text
                first = kept.get(same, (node, msgspec.structs.replace(turn, count=0, entropy=self.entropy)))
                kept[same] = (first[0], msgspec.structs.replace(first[1], count=first[1].count + 1))
            return [self._session._record(node, turn, self._question) for node, turn in kept.values()]
        finally:
            self.close()

    def close(self) -> None:
        """Settles all calls; those without a turn leave the tree."""
        for node in self._nodes:
            self._session._tree.settle(node)
        self._nodes = []

    async def _sample(self, count: int) -> None:
        session, question = self._session, self._question
        if self._notes_entropy and not self._made:
            asked = msgspec.structs.replace(question.sampling, top_logprobs=MOST_TOLD)
            question = question._replace(sampling=asked, notes_entropy=True)
        nodes = [session._tree.reserve(self._after) for _ in range(count)]
        try:
            self._made += await together(session._replay_or_sample(node, question) for node in nodes)
            self._nodes += nodes
        except BaseException:
            for node in nodes:
                session._tree.settle(node)
            raise


def _solved(turn: Turn) -> bool | None:
    return None if turn.outcome is None else turn.outcome.success
