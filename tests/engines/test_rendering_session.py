"""Through a session: what the engine saw is what is recorded and trained, and a broken sequence is counted."""

from typing import Any

import pytest

from rollwright import rng
from rollwright.agents import Session
from rollwright.engines.base import Generation, Prompt, Renderer, Sampling, ToolSpec
from rollwright.engines.rendering import make_renderer
from rollwright.models.tiny import tiny_tokenizer
from rollwright.trajectory import (
    FinishReason,
    Message,
    TokenIds,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    full_prompt,
    samples,
    token_ids,
)

TURNS = 8
ORDINARY = 280
"""Ids below this are no special tokens, whatever the family."""
TOOL = ToolSpec("look", "Looks.")
SPECIAL = {
    "template": [],
    "qwen3": [
        "<|endoftext|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ],
    "llama-3": [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    ],
}
REWRITES = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.last %}(earlier){% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Marks every question but the last: the past changes with each turn."""


class Babbler:
    """Samples ids that no tokenizer would make of their text; ends its turn, or is cut, or calls a tool."""

    version = 3
    pressure = 0

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.saw: list[tuple[TokenIds, TokenIds]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        assert prompt.ids is not None
        luck = rng.generator(*prompt.key)
        ids = token_ids(luck.randrange(2, ORDINARY) for _ in range(luck.randrange(1, 20)))
        ended = luck.random() < 0.5
        sampled = ids + token_ids(self.renderer.stop_ids[:1]) if ended else ids
        self.saw.append((prompt.ids, sampled))
        return Generation(
            self.renderer.decode(sampled),
            sampled,
            floats([-1.0]) * len(sampled),
            (VersionRun(3, len(sampled)),),
            FinishReason.STOP if ended else FinishReason.LENGTH,
        )

    async def close(self) -> None:
        """Holds nothing."""


def renderer_of(name: str) -> Renderer:
    made: Any = tiny_tokenizer(["user assistant system tool look"], 300)
    made.add_tokens(SPECIAL[name], special_tokens=True)
    return make_renderer(made, name)


async def play(policy: Babbler, tools: list[ToolSpec]) -> Session:
    trajectory = Trajectory("r", "a", "g", "Lab", seed=1)
    session = Session(trajectory, policy, Sampling(), (1,), sequence_length=8192, generate_timeout=5)
    turn: Turn | None = None
    for step in range(TURNS):
        reply = Message("user", f"step {step}")
        if tools and step % 2:
            reply = Message("tool", f"result {step}", tool_call_id=f"call{step:05}", name="look")
        turn = await session.generate([reply], continues=turn, tools=tools)
    return session


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
async def test_eight_turns_are_one_sequence_of_exactly_the_ids_that_the_engine_saw(
    name: str, tools: list[ToolSpec]
) -> None:
    policy = Babbler(renderer_of(name))
    session = await play(policy, tools)
    turns = session.trajectory.turns
    assert "sequences_restarted" not in session.trajectory.metrics
    for turn, (prompt, sampled) in zip(turns, policy.saw, strict=True):
        assert full_prompt(turns, turn.id) == prompt
        assert turn.sampled_ids == sampled
    for (prompt, sampled), (longer, _), turn in zip(policy.saw, policy.saw[1:], turns[1:], strict=False):
        assert longer == prompt + sampled + turn.prompt_ids
    (sample,) = samples(session.trajectory)
    assert sample.token_ids == policy.saw[-1][0] + policy.saw[-1][1]
    trained = [each for each, counts in zip(sample.token_ids, sample.mask, strict=True) if counts]
    assert trained == [each for _, sampled in policy.saw for each in sampled]


async def test_a_template_that_rewrites_the_past_starts_a_sequence_each_turn_and_counts_it() -> None:
    made: Any = tiny_tokenizer(["user assistant system tool look"], 300)
    made.chat_template = REWRITES
    policy = Babbler(make_renderer(made))
    session = await play(policy, [])
    trajectory = session.trajectory
    assert trajectory.metrics["sequences_restarted"] == TURNS - 1
    assert [turn.extends for turn in trajectory.turns] == [None] * TURNS
    assert [turn.after for turn in trajectory.turns] == [None, *range(TURNS - 1)]
    rows = samples(trajectory)
    assert [row.token_ids for row in rows] == [prompt + sampled for prompt, sampled in policy.saw]
