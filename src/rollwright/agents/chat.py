"""The chat agent: turns observations into messages, and nothing else.

With a whole history each prompt continues the turn before it, so the episode is one token sequence. Any other
history is cut here, before the model is asked: each prompt then starts a sequence of its own, and what is
trained is what the model saw.
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
"""What a template may refer to."""


@dataclass(frozen=True)
class ChatAgent:
    """Plays one environment with one prompt format; holds no state of an episode."""

    prompts: PromptTemplates
    history: History = field(default_factory=History)
    max_steps: int = 10
    max_response_length: int = 128

    def check_templates(self, where: str) -> None:
        """Raises a `ConfigError` that names the template which refers to something unknown."""
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
        """Asks for the next answer behind the turn `last`; `None`: for the first."""
        messages, continues = self.ask(session, env, last)
        return await session.generate(messages, continues=continues, after=last)

    def ask(self, session: Session, env: Env, last: Turn | None) -> tuple[Sequence[Message], Turn | None]:
        """The next question, and the turn whose token sequence it continues."""
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
        """A fresh conversation: system prompt and first question, then the earlier turns that are kept.

        Of a turn that is left out the question stays only when it is the first, because it carries the rules.
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
        """The user message that follows a turn, the episode's `done`-th."""
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
    """Neighbours of the same role as one message, because chat templates want roles to alternate."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged
