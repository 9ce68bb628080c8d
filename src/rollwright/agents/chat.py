"""The chat agent: converts observations into messages.

With the whole history, each prompt continues the previous turn, so the episode is one token sequence. Any other history
is truncated here, before generation: each prompt then starts a new sequence, so that training uses exactly the prompts
that the model saw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollwright.agents.session import Session
from rollwright.agents.settings import History, HistoryMode
from rollwright.engines.base import Playable
from rollwright.envs.base import Env, PromptTemplates
from rollwright.errors import ConfigError
from rollwright.trajectory import Message, Turn, path

PLACEHOLDERS = ("instruction", "observation", "turn_idx", "actions_left", "max_response_length")
"""Placeholders of a template."""


@dataclass(frozen=True)
class ChatAgent:
    """Plays an environment with one prompt format; holds no state of an episode."""

    prompts: PromptTemplates
    history: History = field(default_factory=History)
    max_steps: int = 10
    max_response_length: int = 128

    def check_templates(self, where: str) -> None:
        """Raises a `ConfigError` that names a template with an unknown placeholder."""
        for name, template in (
            ("agent_opening_template", self.prompts.opening),
            ("agent_template", self.prompts.turn),
        ):
            try:
                template.format_map(dict.fromkeys(PLACEHOLDERS, ""))
            except (KeyError, IndexError, ValueError) as error:
                known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
                raise ConfigError(
                    f"{where}.{name}: {error} cannot be filled in; known placeholders: {known}; "
                    "{{ and }} stand for plain braces"
                ) from error

    def opening(self, env: Env, observation: str) -> tuple[Message, ...]:
        """The messages before the first turn."""
        first = self._fill(self.prompts.opening, env, observation, 0)
        return (Message("system", self.prompts.system), Message("user", first))

    async def act(self, session: Session, env: Env, last: Turn | None) -> Turn:
        """Generates the next answer after the turn `last`; `None`: the first answer."""
        messages, continues = self.ask(session, env, last)
        return await session.generate(messages, continues=continues, after=last)

    def ask(self, session: Session, env: Env, last: Turn | None) -> tuple[Sequence[Message], Turn | None]:
        """The next messages, and the turn whose token sequence they continue."""
        if last is None:
            return session.trajectory.opening, None
        if self.history.mode is HistoryMode.WHOLE:
            return [self._question(env, last, session.depth(last))], last
        if self.history.mode is HistoryMode.CURRENT:
            depth, observation = session.depth(last), last.outcome.observation if last.outcome else ""
            question = self._fill(self.prompts.opening, env, observation, depth)
            return (session.trajectory.opening[0], Message("user", question)), None
        return self._cut(session, env, last), None

    def _cut(self, session: Session, env: Env, last: Turn) -> list[Message]:
        """A new conversation: system prompt and first question, then the earlier turns that are kept.

        The first question is always kept, because it contains the rules.
        """
        trajectory = session.trajectory
        turns = list(enumerate(path(trajectory.turns, last.id), start=1))
        kept = turns if self.history.length is None else turns[-self.history.length :]
        messages = list(trajectory.opening)
        if (first := kept[0][0]) > 1:
            before = turns[first - 2]
            messages.append(self._question(env, before[1], before[0]))
        for depth, turn in kept:
            messages.append(Message("assistant", self._recall(env, turn)))
            messages.append(self._question(env, turn, depth))
        return _merge(messages)

    def _recall(self, env: Env, turn: Turn) -> str:
        if self.history.mode is not HistoryMode.ACTIONS or turn.outcome is None:
            return turn.text
        action = turn.outcome.action or ""
        return env.answer(action) if isinstance(env, Playable) else action

    def _question(self, env: Env, turn: Turn, done: int) -> Message:
        """The user message after a turn; `done`: number of turns so far."""
        observation = turn.outcome.observation if turn.outcome is not None else ""
        return Message("user", self._fill(self.prompts.turn, env, observation, done))

    def _fill(self, template: str, env: Env, observation: str, done: int) -> str:
        values: Mapping[str, object] = {
            "instruction": env.instruction,
            "observation": observation,
            "turn_idx": done + 1,
            "actions_left": self.max_steps - done,
            "max_response_length": self.max_response_length,
        }
        return template.format_map(values)


def _merge(messages: list[Message]) -> list[Message]:
    """Merges adjacent messages of the same role, because chat templates require alternating roles."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged
