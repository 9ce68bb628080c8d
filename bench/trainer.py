"""How fast a training step is, beside a plain padded loop and beside TRL's GRPOTrainer, on the same rows and model.

    python bench/trainer.py

Prints a table and writes `bench/results/trainer.json`. A batch is 64 episodes of a grid game: 8 groups with a prompt
each, 1 to 10 turns, sampled tokens between the environment's. Tokens are those of the episodes, without padding; the
time is CPU time of one thread, from the rows to the changed weights, the median of several steps. Of TRL, only loss,
backward pass and optimiser are timed, not its generation. The limit is the model's own forward and backward pass over
as many tokens in rows of one length, with the head at as many places and nothing else.
"""

import contextlib
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # two threads on two busy cores wait for each other

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.rng import generator
from rollwright.training.advantages import GRPO
from rollwright.training.micro_batches import pack
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Outcome, Trajectory, Turn, VersionRun, floats, token_ids

ROOT = Path(__file__).resolve().parent.parent
GROUPS, GROUP_SIZE = 8, 8
ROWS_PER_MICRO_BATCH = 16
"""Of the plain loop and of TRL: about as many tokens as ours has."""
STEPS = 9
"""Timed steps of each; one before them is not."""
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Size:
    """One model."""

    hidden: int
    layers: int
    vocabulary: int


SIZES = {"0.1 M parameters": Size(64, 2, 300), "1 M parameters": Size(128, 4, 2048)}
"""300 and 2,048 ids: a game's own tokens, and a small tokenizer's."""


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    console = Console()
    found = {}
    for name, size in SIZES.items():
        with console.status(f"training steps, {name}"):
            found[name] = measure(size)
    _print(console, found)
    console.print(f"written to {write_results('trainer', {'models': found}).relative_to(ROOT)}")


def measure(size: Size) -> dict[str, float]:
    model = _model(size)
    rows = _scored(_rows(size.vocabulary), model)
    tokens = sum(len(row.token_ids) for row in rows)
    ours = Trainer(_model(size), TrainerSettings(learning_rate=LEARNING_RATE, device="cpu"))
    plain = PlainLoop(_model(size))
    seconds = _medians(
        {
            "rollwright": lambda: ours.step(rows),
            "plain": lambda: plain.step(rows),
            "limit": _limit(_model(size), rows),
        }
    )
    seconds["trl"] = _trl(size, rows)
    report = ours.step(rows)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "rows": len(rows),
        "tokens": tokens,
        "trained_tokens": report.tokens,
        "padding_share": report.padding_share,
        "plain_padding_share": plain.padding_share,
        **{f"{name}_tokens_per_second": tokens / each for name, each in seconds.items()},
        "over_plain": seconds["plain"] / seconds["rollwright"],
        "over_trl": seconds["trl"] / seconds["rollwright"],
        "of_limit": seconds["limit"] / seconds["rollwright"],
    }


def _model(size: Size) -> Any:
    return tiny_llama(size.vocabulary, hidden_size=size.hidden, layers=size.layers, seed=1)


def _rows(vocabulary: int) -> list[Row]:
    groups = [
        [_episode(group, member, vocabulary) for member in range(GROUP_SIZE)] for group in range(GROUPS)
    ]
    return build_rows(groups, GRPO())


def _episode(group: int, member: int, vocabulary: int) -> Trajectory:
    shared, own = generator("prompt", group), generator("episode", group, member)
    prompt = [shared.randrange(vocabulary) for _ in range(shared.randint(30, 50))]
    turns = []
    for number in range(own.randint(1, 10)):
        added = prompt if number == 0 else [own.randrange(vocabulary) for _ in range(own.randint(8, 12))]
        sampled = token_ids(own.randrange(vocabulary) for _ in range(own.randint(3, 8)))
        turns.append(
            Turn(
                id=number,
                after=number - 1 if number else None,
                extends=number - 1 if number else None,
                prompt_ids=token_ids(added),
                sampled_ids=sampled,
                logprobs=floats([0.0]) * len(sampled),
                versions=(VersionRun(0, len(sampled)),),
                outcome=Outcome(observation="", reward=own.random()),
            )
        )
    return Trajectory(f"{group}-{member}", "a", str(group), "bench", seed=group, turns=turns)


def _scored(rows: Sequence[Row], model: Any) -> list[Row]:
    """With the log-probabilities of the model, as an engine that has its weights would give them."""
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([list(row.token_ids)])
            every = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
            own = every.gather(1, ids[0, 1:, None]).squeeze(1) * torch.tensor(list(row.mask[1:]))
            found.append(msgspec.structs.replace(row, logprobs=floats([0.0, *own.tolist()])))
    return found


class PlainLoop:
    """GRPO as one writes it first: rows as they come, padded, logits everywhere, a mask on the loss."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.padding_share = 0.0

    def step(self, rows: Sequence[Row]) -> None:
        total = sum(sum(row.mask) for row in rows)
        padded = 0
        for start in range(0, len(rows), ROWS_PER_MICRO_BATCH):
            part = rows[start : start + ROWS_PER_MICRO_BATCH]
            ids = _padded([row.token_ids for row in part], torch.long)
            mask = _padded([row.mask for row in part], torch.float32)
            old = _padded([row.logprobs for row in part], torch.float32)
            advantages = _padded([row.advantages for row in part], torch.float32)
            attention = _padded([[1] * len(row.mask) for row in part], torch.long)
            logits = self._model(input_ids=ids, attention_mask=attention).logits[:, :-1]
            new = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = torch.exp((new - old[:, 1:]) * mask[:, 1:])
            gain = torch.minimum(ratio * advantages[:, 1:], ratio.clamp(0.8, 1.2) * advantages[:, 1:])
            loss = -(gain * mask[:, 1:]).sum() / total
            loss.backward()
            padded += ids.numel()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.padding_share = 1 - sum(len(row.mask) for row in rows) / padded


def _padded(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(list(each), dtype=dtype) for each in values], batch_first=True
    )


def _limit(model: Any, rows: Sequence[Row]) -> Callable[[], None]:
    """Forward and backward pass alone, in micro-batches of the same size as ours."""
    packed = [pack(row) for row in rows]
    length = sum(row.length for row in packed) // len(packed)
    count = TrainerSettings().tokens_per_micro_batch // length
    trained = sum(len(row.targets) for row in packed)
    batches = [
        torch.zeros(min(count, len(packed) - start), length, dtype=torch.long)
        for start in range(0, len(packed), count)
    ]

    def step() -> None:
        for ids in batches:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            chosen = hidden[: trained * ids.numel() // (length * len(packed))]
            torch.logsumexp(model.lm_head(chosen), dim=-1).sum().backward()
        model.zero_grad()

    return step


def _medians(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """CPU seconds of each, taken in turns so that a busy moment does not hit one alone."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            taken[name].append(time.process_time() - began)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def _trl(size: Size, batch: Sequence[Row], rank: int = 0, ranks: int = 1) -> float:
    """CPU seconds of a step of TRL's trainer, fed with the same rows through its rollout hook.

    `ranks`: processes that share the batch, each with as many rows, in their order; the seconds are those of this one.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = batch[rank * len(batch) // ranks : (rank + 1) * len(batch) // ranks]
    taken: list[float] = []
    clock = {"began": 0.0, "generating": 0.0}

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        starts = [row.mask.index(1) for row in rows]
        return {
            "prompt_ids": [list(row.token_ids[:start]) for row, start in zip(rows, starts, strict=True)],
            "completion_ids": [list(row.token_ids[start:]) for row, start in zip(rows, starts, strict=True)],
            "env_mask": [list(row.mask[start:]) for row, start in zip(rows, starts, strict=True)],
            "logprobs": [list(row.logprobs[start:]) for row, start in zip(rows, starts, strict=True)],
        }

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.process_time()
            made = super()._generate_and_score_completions(inputs)
            clock["generating"] += time.process_time() - began
            return made

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.update(began=time.process_time(), generating=0.0)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            taken.append(time.process_time() - clock["began"] - clock["generating"])

    rewards = iter(range(10**9))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_steps=STEPS + 1,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=ROWS_PER_MICRO_BATCH,
            gradient_accumulation_steps=len(rows) // ROWS_PER_MICRO_BATCH,
            learning_rate=LEARNING_RATE,
            gradient_checkpointing=False,
            bf16=False,
            beta=0.0,
            ddp_find_unused_parameters=False,  # none is unused, and looking for them costs a pass over the graph
        )
        trainer = Timed(
            model=_model(size),
            processing_class=tiny_tokenizer(["a grid game"], size.vocabulary),
            reward_funcs=lambda completions, **_: [float(next(rewards) % 7) for _ in completions],
            rollout_func=rollouts,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * (GROUPS * (STEPS + 2))}),
            args=config,
            callbacks=[Clock()],
        )
        with contextlib.redirect_stdout(None):  # it prints its figures
            trainer.train()
    return statistics.median(taken[1:])


def _print(console: Console, found: dict[str, dict[str, float]]) -> None:
    table = Table(title="training step, tokens/s", title_justify="left")
    for column in ("model", "rollwright", "plain loop", "TRL", "limit", "padding"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, each in found.items():
        rates = [
            f"{each[f'{kind}_tokens_per_second']:,.0f}" for kind in ("rollwright", "plain", "trl", "limit")
        ]
        table.add_row(name.removesuffix(" parameters"), *rates, f"{each['padding_share']:.1%}")
    console.print(table)
    for name, each in found.items():
        console.print(
            f"{name}: {each['over_plain']:.2f} times as fast as the plain loop ({each['plain_padding_share']:.0%} "
            f"padding), {each['over_trl']:.2f} times TRL's step, {each['of_limit']:.0%} of the limit"
        )


if __name__ == "__main__":
    main()
