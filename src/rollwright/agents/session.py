"""A session: one attempt's access to the policy, and the only writer of its trajectory.

Always true: a generation is recorded as a turn, and is in the journal, before its text is handed to anybody; a prompt that continues
a turn consists of exactly that turn's full token sequence and what is new; a turn's draws are keyed by run,
group, member, agent and its place in the tree, never by time or by attempt.
"""

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from rollwright.agents.boundary import bounded
from rollwright.agents.journal import Journal, JournalEntry, question, replay
from rollwright.draws import KeyPart, digest
from rollwright.envs.base import Step
from rollwright.policies.base import Playable, Policy, Prompt, Renderer, Sampling
from rollwright.trajectory import (
    Boundary,
    Message,
    Outcome,
    TokenIds,
    Trajectory,
    Turn,
    full_prompt,
    token_ids,
)


class Phase(StrEnum):
    """What an episode is waiting for at this moment."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    STORE = "store"


class OutOfRoom(Exception):
    """The prompt leaves no room for a completion within `sequence_length`."""


class Session:
    """What an agent sees of the machinery: it asks for generations and gets turns."""

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
    ) -> None:
        self.trajectory = trajectory
        self.phase = Phase.ENVIRONMENT
        self._policy = policy
        self._sampling = sampling
        self._key = key
        self._sequence_length = sequence_length
        self._generate_timeout = generate_timeout
        self._attempt = attempt
        self._env = env
        self._journal = journal
        self.replayed_turns = 0
        """Turns that came from the journal instead of the engine."""
        self._on_turn = on_turn
        self._asked: list[tuple[int | None, Sequence[Message]]] = []
        """For each turn, the turn it continued and the messages it added."""
        self._one_at_a_time = asyncio.Lock()
        self._paths: list[int] = []
        """For each turn, the name of its place in the tree."""
        self._children: dict[int | None, int] = {}
        """For each turn, how many were asked for after it."""

    @property
    def last(self) -> Turn | None:
        return self.trajectory.turns[-1] if self.trajectory.turns else None

    async def generate(
        self, messages: Sequence[Message], *, continues: Turn | None = None, agent: str = "agent"
    ) -> Turn:
        """Samples one completion and records it as a turn. Calls of one session are served one after the other.

        With `continues`, `messages` are what is new behind that turn's completion. Without it they are a whole
        conversation, and a new token sequence starts.
        """
        async with self._one_at_a_time:
            return await self._generate(messages, continues, agent)

    async def _generate(self, messages: Sequence[Message], continues: Turn | None, agent: str) -> Turn:
        turns = self.trajectory.turns
        before = turns[-1] if turns else None
        path = self._path(None if before is None else before.id)
        asked = question(messages) if self._journal is not None else 0
        turn = self._replayed(asked, before)
        if turn is None:
            turn = await self._sampled(messages, continues, before, agent, path)
            if self._journal is not None:
                self.phase = Phase.STORE
                await self._journal.append(
                    JournalEntry(turn, asked, None if before is None else before.outcome)
                )
            if self._on_turn is not None:
                self._on_turn(turn)
        self.phase = Phase.ENVIRONMENT
        turns.append(turn)
        self._paths.append(path)
        self._asked.append((None if continues is None else continues.id, messages))
        return turn

    def _replayed(self, asked: int, before: Turn | None) -> Turn | None:
        """The turn as an earlier attempt recorded it, if one did."""
        if self._journal is None or not self._journal.recorded:
            return None
        expected = len(self.trajectory.turns)
        turn = replay(self._journal, asked, None if before is None else before.outcome, expected)
        self.replayed_turns += turn is not None
        return turn

    async def _sampled(
        self, messages: Sequence[Message], continues: Turn | None, before: Turn | None, agent: str, path: int
    ) -> Turn:
        """A new turn from the engine."""
        turn_id = len(self.trajectory.turns)
        added, prompt_ids = self._render(messages, continues)
        prompt = Prompt(
            episode=self.trajectory.rollout_id,
            key=(*self._key, agent, path),
            messages=self._conversation(messages, continues) if prompt_ids is None else (),
            ids=prompt_ids,
            env=self._env,
            attempt=self._attempt,
        )
        sampling = self._fit(prompt_ids, continues)
        self.phase = Phase.ENGINE
        made = await bounded(
            self._policy.generate(prompt, sampling), self._generate_timeout, Boundary.ENGINE, turn_id
        )
        return Turn(
            id=turn_id,
            after=None if before is None else before.id,
            extends=continues.id if continues is not None and added is not None else None,
            prompt_ids=token_ids() if added is None else added,
            sampled_ids=made.sampled_ids,
            logprobs=made.logprobs,
            versions=made.versions,
            text=made.text,
            agent=agent,
            finish=made.finish,
            exact=made.exact,
            prompt_tokens=made.prompt_tokens if prompt_ids is None else len(prompt_ids),
            completion_tokens=made.completion_tokens,
        )

    def observe(self, turn: Turn, step: Step) -> Turn:
        """Records what the environment answered to a turn."""
        info = step.info
        outcome = Outcome(
            observation=step.observation,
            reward=float(step.reward),
            penalty=float(info.get("penalty", 0.0)),
            terminated=bool(step.terminated),
            truncated=bool(step.truncated),
            action=info.get("action"),
            valid=bool(info.get("valid", True)),
        )
        if "success" in info:
            self.trajectory.success = bool(info["success"])
        metrics = self.trajectory.metrics
        for name, value in info.get("metrics", {}).items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
        observed = msgspec.structs.replace(turn, outcome=outcome)
        self.trajectory.turns[turn.id] = observed
        return observed

    def _render(
        self, messages: Sequence[Message], continues: Turn | None
    ) -> tuple[TokenIds, TokenIds] | tuple[None, None]:
        """The ids that this prompt adds, and the whole prompt; nothing for a policy that speaks text."""
        renderer: Renderer | None = self._policy.renderer
        if renderer is None:
            return None, None
        if continues is None:
            whole = renderer.open(messages)
            return whole, whole
        added = renderer.extend(continues.finish, messages)
        return added, full_prompt(self.trajectory.turns, continues.id) + continues.sampled_ids + added

    def _conversation(self, messages: Sequence[Message], continues: Turn | None) -> list[Message]:
        """All messages up to here, for a policy that speaks text."""
        parts = [messages]
        place = None if continues is None else continues.id
        while place is not None:
            earlier, asked = self._asked[place]
            parts.append((*asked, Message("assistant", self.trajectory.turns[place].text)))
            place = earlier
        return [message for part in reversed(parts) for message in part]

    def _fit(self, prompt_ids: TokenIds | None, continues: Turn | None) -> Sampling:
        """The sampling settings, with `max_tokens` cut to the room that is left."""
        if prompt_ids is not None:
            used = len(prompt_ids)
        else:
            used = continues.prompt_tokens + continues.completion_tokens if continues is not None else 0
        room = self._sequence_length - used
        if room < 1:
            raise OutOfRoom(f"the prompt has {used} tokens, sequence_length is {self._sequence_length}")
        if room >= self._sampling.max_tokens:
            return self._sampling
        return msgspec.structs.replace(self._sampling, max_tokens=room)

    def _path(self, after: int | None) -> int:
        """Names the next turn's place in the tree: its parent's place, and its rank among the siblings."""
        rank = self._children.get(after, 0)
        self._children[after] = rank + 1
        return digest(0 if after is None else self._paths[after], rank)
