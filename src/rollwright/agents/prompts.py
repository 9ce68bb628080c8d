"""Prompts of a session: rendered to token ids by the model's own format, and completions parsed by it.

Always true: a prompt that continues a turn consists of exactly that turn's full token sequence and the new ids. If the
model's chat template does not allow that, the whole conversation is rendered as a new sequence, and counted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rollwright.engines.base import (
    Parsed,
    Playable,
    Policy,
    Sampling,
    ToolSpec,
    encoded_tools,
)
from rollwright.engines.constraints import read_output
from rollwright.trajectory import (
    Message,
    TokenIds,
    Trajectory,
    Turn,
    full_prompt,
)

RESTARTED = "sequences_restarted"
"""Metric: prompts that could not continue the sequence they belong to, and started a new one."""


LONG_TEXT, LONG_CONVERSATION = 64 * 1024, 1000
"""Characters and messages above which tokenizing a prompt takes 10 ms or more."""


CHARACTERS_PER_TOKEN = 4
"""Estimate for English text; used only with text-only engines, which have no tokenizer to count with."""


_encode = msgspec.json.Encoder().encode


class Question(NamedTuple):
    """The input of one generation call, before it is rendered."""

    messages: Sequence[Message]
    continues: Turn | None
    agent: str
    tools: Sequence[ToolSpec]
    sampling: Sampling
    env: Playable | None
    policy: Policy | None = None
    """Answers in place of the agent's policy; `None`: the agent's."""
    policy_name: str = ""
    """Name of that policy among `policies`."""
    notes_entropy: bool = False
    """Whether the turn records the question's entropy; `sampling.top_logprobs` has to ask for it."""


class PromptBuilder:
    """Renders the questions of one session, and remembers which question each turn answers."""

    __slots__ = ("_of_agent", "_policy", "_trajectory", "asked")

    def __init__(self, trajectory: Trajectory, policy: Policy) -> None:
        self.asked: list[Question] = []
        """For each turn, the input that it answers."""
        self._trajectory = trajectory
        self._policy = policy
        self._of_agent: Callable[[str], Policy] | None = getattr(policy, "of_agent", None)
        """Looks up the policy of an agent, if agents have separate policies (`PerAgent`)."""

    def policy_of(self, agent: str) -> Policy:
        """The policy that answers this agent's calls."""
        return self._policy if self._of_agent is None else self._of_agent(agent)

    def policy_for(self, question: Question) -> Policy:
        return question.policy or self.policy_of(question.agent)

    def render(self, question: Question) -> tuple[TokenIds | None, TokenIds | None, int | None]:
        """Renders the ids that this prompt adds, the whole prompt, and the turn it extends; `None` for a text-only
        policy."""
        renderer = self.policy_for(question).renderer
        if renderer is None:
            return None, None, None
        messages, continues, tools = question.messages, question.continues, question.tools
        if continues is not None:
            earlier = full_prompt(self._trajectory.turns, continues.id)
            added = renderer.extend(earlier, continues.sampled_ids, continues.finish, messages, tools)
            if added is not None:
                return added, earlier + continues.sampled_ids + added, continues.id
            # The model's format cannot continue here (it drops earlier reasoning, say): the whole conversation is
            # rendered again, as a sequence of its own, so the ids that were trained stay the ids that were sampled.
            messages = self.conversation(question)
            metrics = self._trajectory.metrics
            metrics[RESTARTED] = metrics.get(RESTARTED, 0.0) + 1
        whole = renderer.open(messages, tools)
        return whole, whole, None

    def conversation(self, question: Question) -> list[Message]:
        """All messages of the conversation, up to the new ones."""
        parts = [question.messages]
        while question.continues is not None:
            said = self._trajectory.turns[question.continues.id]
            question = self.asked[said.id]
            parts.append((*question.messages, self._assistant_message(said)))
        return [message for part in reversed(parts) for message in part]

    def _assistant_message(self, turn: Turn) -> Message:
        parsed = self.parse(turn)
        return Message("assistant", parsed.content, parsed.reasoning, parsed.tool_calls)

    def count_tokens(self, question: Question) -> int:
        """Tokens of the prompt; for a policy that speaks text only, an estimate of `CHARACTERS_PER_TOKEN`."""
        messages, continues, tools = question.messages, question.continues, question.tools
        renderer = self.policy_for(question).renderer
        if renderer is None:
            text = sum(each.length for each in self.conversation(question))
            return -(-(text + (len(encoded_tools(tools)) if tools else 0)) // CHARACTERS_PER_TOKEN)
        if continues is not None:
            earlier = full_prompt(self._trajectory.turns, continues.id)
            added = renderer.extend(earlier, continues.sampled_ids, continues.finish, messages, tools)
            if added is not None:
                return len(earlier) + len(continues.sampled_ids) + len(added)
        return len(renderer.open(self.conversation(question), tools))

    def conversation_of(self, turn: Turn) -> tuple[Message, ...]:
        """All messages of the conversation that the turn ends, its own included."""
        return (*self.conversation(self.asked[turn.id]), self._assistant_message(turn))

    def parse(self, turn: Turn) -> Parsed:
        """Parses a turn's completion into content, reasoning and tool calls, by the model's own format."""
        asked = self.asked[turn.id]
        renderer = self.policy_for(asked).renderer
        if renderer is None:
            return Parsed(turn.text, turn.reasoning, turn.tool_calls)
        if (output := asked.sampling.output) is not None:
            return read_output(renderer.decode(turn.sampled_ids), output, f"call-{turn.id}")
        prompt = full_prompt(self._trajectory.turns, turn.id)
        return renderer.parse(prompt, turn.sampled_ids, asked.tools)


def is_long(question: Question) -> bool:
    """Whether rendering it may take long enough to hold up other episodes of the event loop."""
    messages, tools = question.messages, question.tools
    if len(messages) > LONG_CONVERSATION:
        return True
    length = 0
    for each in messages:  # written out: every turn looks at every message
        length += each.length if each.reasoning or each.tool_calls else len(each.content)
    return length > LONG_TEXT or (bool(tools) and length + len(encoded_tools(tools)) > LONG_TEXT)
