"""A trainer that was saved and restored goes on as if nothing had happened, and a crash while saving costs nothing."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwright.errors import ConfigError, FormatError
from rollwright.models.tiny import tiny_llama
from rollwright.training import checkpoints
from rollwright.training.advantages import GRPO
from rollwright.training.checkpoints import Checkpoint, read_checkpoint, write_checkpoint, write_folder
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import LoraSettings, LossSettings, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Trajectory

KINDS = {
    "all weights": TrainerSettings(weight_decay=0.1),
    "lora": TrainerSettings(lora=LoraSettings(rank=2)),
    "many updates": TrainerSettings(epochs=2, mini_batches=2, loss=LossSettings(kl_coefficient=0.1)),
}


@pytest.fixture
def batches(chain: Callable[..., Trajectory]) -> list[list[Row]]:
    return [
        build_rows([[chain(f"{step}{member}", [0.0, float(member % 2)]) for member in range(4)]], GRPO())
        for step in range(4)
    ]


def fresh(settings: TrainerSettings) -> Trainer:
    model = tiny_llama(24, hidden_size=32, layers=2, seed=3)
    values = {
        **vars(settings),
        "learning_rate": 1e-2,
        "warmup_updates": 3,
        "max_logprob_gap": 100.0,
        "device": "cpu",
    }
    return Trainer(model, TrainerSettings(**values))


def state(trainer: Trainer) -> dict[str, Any]:
    tensors = trainer.weights().tensors
    assert tensors is not None
    return dict(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_gives_the_same_numbers_bit_for_bit(
    kind: str, batches: list[list[Row]], tmp_path: Path
) -> None:
    straight = fresh(KINDS[kind])
    expected = [straight.step(batch) for batch in batches]

    first = fresh(KINDS[kind])
    for batch in batches[:2]:
        first.step(batch)
    first.save(tmp_path / "c", {"position": 17})
    second = fresh(KINDS[kind])
    assert second.restore(tmp_path / "c") == {"position": 17}
    found = [second.step(batch) for batch in batches[2:]]

    assert [report.loss for report in found] == [report.loss for report in expected[2:]]
    assert [report.grad_norm for report in found] == [report.grad_norm for report in expected[2:]]
    assert [report.version for report in found] == [3, 4]
    one, two = state(straight), state(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_counts_and_random_states_come_back(batches: list[list[Row]], tmp_path: Path) -> None:
    trainer = fresh(KINDS["all weights"])
    trainer.step(batches[0])
    trainer.step([])
    torch.manual_seed(5)
    trainer.save(tmp_path / "c", {})
    expected = torch.rand(3)
    again = fresh(KINDS["all weights"])
    again.restore(tmp_path / "c")
    assert torch.equal(torch.rand(3), expected)
    assert (again.version, again.updates, again.skipped) == (1, 1, {"empty batch": 1})


def test_a_checkpoint_holds_nothing_that_is_unpickled(batches: list[list[Row]], tmp_path: Path) -> None:
    trainer = fresh(KINDS["all weights"])
    trainer.step(batches[0])
    trainer.save(tmp_path / "c", {})
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".safetensors", ".json"}


def test_a_crash_while_saving_leaves_the_checkpoint_before(
    batches: list[list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call that touches the disk, in turn."""
    trainer = fresh(KINDS["all weights"])
    trainer.step(batches[0])
    died = 0
    while True:
        trainer.save(tmp_path / "c", {"step": 0})
        calls = [0]

        class Died(BaseException):
            pass

        def dying(real: Any, calls: list[int] = calls, limit: int = died, death: type = Died) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                if calls[0] == limit:
                    raise death
                calls[0] += 1
                return real(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "save_tensors", dying(checkpoints.save_tensors))
            patch.setattr(os, "fsync", dying(os.fsync))
            patch.setattr(Path, "rename", dying(Path.rename))
            patch.setattr(checkpoints.shutil, "rmtree", dying(checkpoints.shutil.rmtree))
            try:
                trainer.save(tmp_path / "c", {"step": 1})
                break
            except Died:
                died += 1
        assert fresh(KINDS["all weights"]).restore(tmp_path / "c")["step"] in (0, 1)
    assert died > 8
    assert fresh(KINDS["all weights"]).restore(tmp_path / "c") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    write_folder(tmp_path / "f", lambda place: (place / "old").write_text("1") and None)
    write_folder(tmp_path / "f", lambda place: (place / "new").write_text("2") and None)
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["new"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fresh(KINDS["lora"]).save(tmp_path / "c", {})
    with pytest.raises(FormatError, match="of another model or other adapters"):
        fresh(KINDS["all weights"]).restore(tmp_path / "c")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    one = Checkpoint({"model": {"w": torch.ones(4)}}, {}, {})
    write_checkpoint(tmp_path / "c", one)
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(FormatError, match=r"model\.safetensors is missing or not as it was written"):
        read_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", json.dumps({"format": 9, "state": {}, "extra": {}, "sha256": {}})]
)
def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path / "c", lambda place: (place / "state.json").write_text(content) and None)
    with pytest.raises(FormatError, match=r"no readable state\.json|has format 9; accepted: 1"):
        read_checkpoint(tmp_path / "c")


def test_a_missing_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no readable state\.json"):
        read_checkpoint(tmp_path / "nowhere")


def test_extra_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`extra` must be JSON"):
        write_checkpoint(tmp_path / "c", Checkpoint({}, {}, {"set": {1}}))


def test_a_large_model_is_exported_in_several_files_that_transformers_and_the_policy_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollwright.engines.base import UpdateMode
    from rollwright.engines.rendering.bytes import BytesRenderer
    from rollwright.engines.torch import TorchPolicy
    from rollwright.models import load_model

    monkeypatch.setattr(checkpoints, "MODEL_FILE_BYTES", 5000)
    trainer = fresh(KINDS["all weights"])
    weights = trainer.export(tmp_path / "large")
    files = sorted(each.name for each in (tmp_path / "large").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = load_model(tmp_path / "large").state_dict()
    for name, each in trainer.weights().tensors.items():
        assert torch.equal(loaded[name], each)
    policy = TorchPolicy(tiny_llama(24, hidden_size=32, layers=2, seed=9), BytesRenderer())
    asyncio.run(policy.update_weights(weights, UpdateMode.DRAIN))
