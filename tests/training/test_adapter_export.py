"""Adapters as peft reads them: what an engine loads is what is trained, on one rank or two."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwright.errors import ConfigError
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.run.build_training import check_adapters
from rollwright.simulation.players import RandomPlayer
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import LoraSettings, TrainerSettings, TrainingConfig
from rollwright.training.trainer import Trainer


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_ranks

    yield test_ranks.batch
    sys.modules.pop("test_ranks")


@pytest.mark.parametrize("processes", [1, 2])
def test_peft_loads_the_exported_adapter_and_it_equals_the_merged_weights(
    tmp_path: Path, rows: Any, processes: int
) -> None:
    tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=3).save_pretrained(tmp_path / "base")
    settings = TrainerSettings(
        lora=LoraSettings(rank=4),
        learning_rate=1e-2,
        device="cpu",
        max_logprob_gap=50,
        processes=processes,
        rank_timeout=60,
    )
    base = str(tmp_path / "base")
    trainer: Any = (
        Trainer(load_model(base), settings) if processes == 1 else LeadingTrainer(Setup(base, settings))
    )
    try:
        trainer.step(rows(0))
        weights = trainer.export_adapter(tmp_path / "adapter")
        merged = trainer.weights().tensors
    finally:
        trainer.close()
    assert (weights.version, weights.folder, weights.adapter) == (1, None, tmp_path / "adapter")
    assert weights.adapter_name.startswith("rollwright-1-")
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(load_model(base), str(weights.adapter)).merge_and_unload()
    found = loaded.state_dict()
    assert any(not torch.equal(each, load_model(base).state_dict()[name]) for name, each in merged.items())
    for name, each in merged.items():
        assert torch.allclose(each, found[name], atol=1e-6), name


def test_adapters_are_refused_where_there_are_none_or_nobody_takes_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`adapter` needs training\.lora"):
        check_adapters(RandomPlayer(), TrainingConfig(hand_over="adapter"))
    with pytest.raises(ConfigError, match="a RandomPlayer takes no adapters"):
        check_adapters(RandomPlayer(), TrainingConfig(hand_over="adapter", lora=LoraSettings()))
    plain = Trainer(tiny_llama(24, hidden_size=16, layers=1), TrainerSettings(device="cpu"))
    with pytest.raises(ConfigError, match=r"needs training\.lora"):
        plain.export_adapter(tmp_path / "adapter")
