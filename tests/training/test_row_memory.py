"""A row that cannot fit the memory of a rank is refused before anything is computed, with what would fit."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from rollwright.models.tiny import tiny_llama
from rollwright.training import trainer as trainer_module
from rollwright.training.advantages import GRPO
from rollwright.training.row_memory import LENGTHS, RowMemory
from rollwright.training.rows import build_rows
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer, TrainingStopped
from rollwright.trajectory import Trajectory


def trainer(**more: Any) -> Trainer:
    given = {"learning_rate": 1e-2, "device": "cpu", "max_logprob_gap": 100.0, "tokens_per_micro_batch": 2}
    model = tiny_llama(24, hidden_size=32, layers=2, seed=3)
    return Trainer(model, TrainerSettings(**{**given, **more}))


def test_the_parabola_goes_through_the_sizes_that_were_measured() -> None:
    def size(tokens: int) -> float:
        return 1000.0 + 30 * tokens + 2 * tokens**2

    found = RowMemory.of((size(LENGTHS[0]), size(LENGTHS[1]), size(LENGTHS[2])))
    assert (found.per_token, found.per_pair) == (pytest.approx(30), pytest.approx(2))
    assert found.longest(found.size(777)) == pytest.approx(777, abs=1)
    assert RowMemory(4.0, 0.0).longest(400) == 100


def test_activations_are_counted_and_fewer_are_kept_when_they_are_computed_again() -> None:
    kept, again = trainer()._model.row_memory, trainer(activation_checkpointing=True)._model.row_memory
    layers, hidden = 2, 32
    assert kept.per_token > layers * hidden * 4 * 4  # more than four inputs of matrix products in each layer
    assert again.size(1000) < kept.size(1000) / 2


def test_a_row_that_no_rank_can_compute_is_one_line_with_its_length_and_what_fits(
    chain: Callable[..., Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = build_rows([[chain(f"r{member}", [0.0, float(member % 2)]) for member in range(4)]], GRPO())
    made = trainer()
    length = max(len(row.token_ids) for row in rows) - 1
    enough = int(made._model.row_memory.size(length)) + 1
    monkeypatch.setattr(trainer_module, "memory_for_rows", lambda device: enough // 2)
    with pytest.raises(TrainingStopped) as caught:
        made.step(rows)
    said = str(caught.value)
    assert re.match(
        rf"rollout r\d: its row of {length} tokens needs more than [\d.]+ GiB for its activations", said
    )
    fits = int(re.search(r"at most (\d+) tokens fit", said)[1])  # type: ignore[index]
    assert 0 < fits < length
    assert "\n" not in said
    assert made.version == 0
    monkeypatch.setattr(trainer_module, "memory_for_rows", lambda device: enough)
    assert made.step(rows).skipped is None
