"""What it costs to build the next prompt late in a long episode, and what re-rendering the history would.

    python bench/rendering.py

Prints a table and writes `bench/results/rendering.json`. The episode has 128 turns and 60,000 tokens. Times are CPU
time of this process, on one thread, the median of the repeats. *rollwright* is what a session does: join the ids of
the turns and add those of the new message. The limit is that without the new message: one pass over the ids. The
texts are pages of Python's language reference, on which the tokenizer is trained here, too: the same ones whatever becomes
of this project's own pages. Takes about half a minute.
"""

import os
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import median
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.engines.rendering import PackageRenderer, TemplateRenderer
from rollwright.models.tiny import tiny_tokenizer
from rollwright.trajectory import FinishReason, Message, Turn, full_prompt, token_ids

PAGES = 40
"""Pages of the language reference, which Python brings along for `help()`."""
VOCABULARY = 8192
"""About four characters a token, as in a real one."""

TURNS = 128
TOKENS = 60_000
EARLY = 8
"""The turn that a late one is compared with."""

REPEATS = 15
SECONDS = 0.05
"""At least this long each repeat goes on, so that the clock is fine enough."""

WANTED_RATIO = 20.0
"""Times faster than re-rendering the history the next prompt is meant to be."""

MOST_GROWTH = 1.3
"""What still counts as flat, from an early turn to the last."""

QWEN3 = [
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2-135M-Instruct has it (Apache-2.0)."""

Renderer = TemplateRenderer | PackageRenderer


def main() -> None:
    console = Console()
    pages = [topics[name] for name in sorted(topics)[:PAGES]]
    tokenizer: Any = tiny_tokenizer(pages, VOCABULARY)
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.add_tokens(QWEN3, special_tokens=True)
    figures = {
        "SmolLM2's template": measure(
            tokenizer, TemplateRenderer(tokenizer), Prose(tokenizer, pages), "user"
        ),
        "qwen3 with tools": measure(
            tokenizer, PackageRenderer(tokenizer, "qwen3"), Prose(tokenizer, pages), "tool"
        ),
    }
    _print(console, figures)
    file = write_results("rendering", {"turns": TURNS, "wanted_ratio": WANTED_RATIO, "formats": figures})
    console.print(f"figures: {file}")


class Prose:
    """Pieces of text of a known number of tokens."""

    def __init__(self, tokenizer: Any, pages: list[str]) -> None:
        self._tokenizer = tokenizer
        text = " ".join(" ".join(pages).replace("<", "").split())  # nothing that would be a mark
        self._ids = tokenizer.encode(text, add_special_tokens=False)

    def piece(self, place: int) -> str:
        """Another one at each place; what stands around it in a prompt is two per cent more."""
        count = TOKENS // TURNS // 2
        start = place * count % (len(self._ids) - count)
        text: str = self._tokenizer.decode(self._ids[start : start + count])
        return text.strip()


def measure(tokenizer: Any, renderer: Renderer, prose: Prose, role: str) -> dict[str, Any]:
    turns, history = episode(tokenizer, renderer, prose, role)
    new = [reply(role, prose.piece(2 * TURNS))]
    whole = [*history, *new]
    chat = [{"role": each.role, "content": each.content} for each in whole]

    def joined(end: int) -> Any:
        return full_prompt(turns, end) + turns[end].sampled_ids

    def next_prompt(end: int) -> Any:
        prompt, sampled = full_prompt(turns, end), turns[end].sampled_ids
        return prompt + sampled + renderer.extend(prompt, sampled, FinishReason.STOP, new)

    def added(end: int) -> Callable[[], Any]:
        prompt, sampled = full_prompt(turns, end), turns[end].sampled_ids
        return lambda: renderer.extend(prompt, sampled, FinishReason.STOP, new)

    last = len(turns) - 1
    arms: dict[str, Callable[[], Any]] = {
        "one pass over the ids (limit)": lambda: joined(last),
        "rollwright": lambda: next_prompt(last),
        "apply_chat_template, whole history": lambda: tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        ),
    }
    if isinstance(renderer, PackageRenderer):
        arms["renderers, bridge over the whole prompt"] = lambda: bridged(
            renderer, joined(last), turns[last], new
        )
        arms["renderers, whole history"] = lambda: renderer.open(whole)
    assert next_prompt(last) == renderer.open(whole), "the two ways must give the same ids"
    found = {name: cpu_ms(arm) for name, arm in arms.items()}
    early, late = cpu_ms(added(EARLY)), cpu_ms(added(last))
    return {
        "tokens": len(next_prompt(last)),
        "cpu_ms": found,
        "times_faster": found["apply_chat_template, whole history"] / found["rollwright"],
        "added_ms": {"early": early, "late": late},
        "growth": late / early,
    }


def episode(tokenizer: Any, renderer: Renderer, prose: Prose, role: str) -> tuple[list[Turn], list[Message]]:
    """An episode whose sampled ids are those the tokenizer would make, so that a whole render can be compared."""
    history = [Message("user", "Begin.")]
    turns: list[Turn] = []
    prompt = added = renderer.open(history)
    for number in range(TURNS):
        said = prose.piece(2 * number)
        sampled = token_ids(tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False))
        before = number - 1 if number else None
        turns.append(Turn(number, before, before, prompt_ids=added, sampled_ids=sampled))
        history.append(Message("assistant", said))
        if number + 1 < TURNS:
            history.append(reply(role, prose.piece(2 * number + 1)))
            extended = renderer.extend(prompt, sampled, FinishReason.STOP, history[-1:])
            assert extended is not None
            prompt, added = prompt + sampled + extended, extended
    return turns, history


def reply(role: str, content: str) -> Message:
    return (
        Message(role, content, tool_call_id="call00000", name="look")
        if role == "tool"
        else Message(role, content)
    )


def bridged(renderer: PackageRenderer, ids: Any, turn: Turn, new: list[Message]) -> Any:
    prompt = ids[: len(ids) - len(turn.sampled_ids)].tolist()
    chat = [{"role": each.role, "content": each.content} for each in new]
    return renderer._renderer.bridge_to_next_turn(prompt, turn.sampled_ids.tolist(), chat)


def cpu_ms(arm: Callable[[], Any]) -> float:
    """CPU milliseconds of one call."""
    times = []
    for _ in range(REPEATS):
        calls, began = 0, time.process_time()
        while time.process_time() - began < SECONDS:
            arm()
            calls += 1
        times.append((time.process_time() - began) / calls * 1000)
    return median(times)


def _print(console: Console, figures: dict[str, dict[str, Any]]) -> None:
    for name, found in figures.items():
        table = Table(title=f"{name}: {TURNS} turns, {found['tokens']:,} tokens", title_justify="left")
        table.add_column("the next prompt by")
        table.add_column("CPU ms", justify="right")
        table.add_column("times rollwright's", justify="right")
        ours = found["cpu_ms"]["rollwright"]
        for arm, spent in found["cpu_ms"].items():
            table.add_row(arm, f"{spent:.2f}", f"{spent / ours:.2f}")
        console.print(table)
        verdict = "reached" if found["times_faster"] >= WANTED_RATIO else "MISSED"
        flat = "flat" if found["growth"] <= MOST_GROWTH else "NOT FLAT"
        console.print(
            f"{found['times_faster']:.0f} times as fast as the whole history (wanted: {WANTED_RATIO:.0f}, {verdict}); "
            f"what is added costs {found['growth']:.2f} times that of turn {EARLY} ({flat})"
        )


if __name__ == "__main__":
    main()
