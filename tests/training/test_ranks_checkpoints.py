"""Checkpoints in shards: every rank writes and reads its own rows, on any number of ranks, and a crash costs nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwright.errors import FormatError
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.training import trained_state
from rollwright.training.checkpoints import read_checkpoint, read_manifest
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer

torch.set_num_threads(1)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_ranks

    yield test_ranks.batch
    sys.modules.pop("test_ranks")


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=3).save_pretrained(
        tmp_path / "model"
    )
    return str(tmp_path / "model")


@pytest.fixture
def trainer(model: str) -> Iterator[Any]:
    """Makes trainers, whose checkpoints are in shards, and closes them."""
    made: list[Any] = []

    def make(processes: int = 1, **more: Any) -> Any:
        given = {"learning_rate": 1e-3, "device": "cpu", "max_logprob_gap": 50.0, "rank_timeout": 30.0}
        settings = TrainerSettings(
            **{**given, "processes": processes, "checkpoint_layout": "sharded", **more}
        )
        made.append(
            Trainer(load_model(model), settings, total_updates=10, seed=5)
            if processes == 1
            else LeadingTrainer(Setup(model, settings, 10, seed=5))
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def apart(one: Any, other: Any) -> float:
    first, second = one.weights().tensors, other.weights().tensors
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments of a checkpoint, whole."""
    tensors = read_checkpoint(folder).tensors
    return {
        f"{group}/{name}": each for group in ("model", "optimizer") for name, each in tensors[group].items()
    }


def same(one: Path, other: Path) -> bool:
    first, second = state_of(one), state_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("*.safetensors"))


def test_shards_are_read_on_another_number_of_ranks_and_go_into_whole_tensors_and_back(
    trainer: Any, batch: Any, tmp_path: Path
) -> None:
    two, places = trainer(2), [tmp_path / f"{number}" for number in range(4)]
    two.step(batch(0))
    two.save(places[0], {"step": 1})
    assert files(places[0]) == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
    sizes = [each.stat().st_size for each in places[0].glob("*.safetensors")]
    assert max(sizes) < 0.75 * sum(sizes), "one rank wrote nearly everything"
    one = trainer(1, checkpoint_layout="whole")
    assert one.restore(places[0]) == {"step": 1}
    assert apart(one, two) == 0
    one.save(places[1], {})
    two.restore(places[1])  # every rank reads its rows of the whole tensors
    two.save(places[2], {})
    assert same(places[0], places[1])
    assert same(places[1], places[2])
    for each in (one, two):
        each.step(batch(1))
    assert apart(one, two) < 1e-4
    assert (two.version, two.updates) == (one.version, one.updates) == (2, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lora": {"rank": 3}},
        {"sharding": "hybrid", "shard_ranks": 2},
        {"sharding": "replicate"},
        {"critic": {}},
    ],
    ids=["full", "lora", "hybrid", "replicate", "critic"],
)
def test_four_ranks_two_one_and_four_again_have_the_same_state(
    trainer: Any, batch: Any, tmp_path: Path, more: dict[str, Any]
) -> None:
    last: Path | None = None
    for number, processes in enumerate((4, 2, 1, 4)):
        each, place = trainer(processes, **more), tmp_path / f"{number}"
        steps = (
            [] if "critic" in more else [batch(0), batch(1)]
        )  # rows of a critic have values; its head is saved anyway
        if last is None:
            for rows in steps:
                each.step(rows)
        else:
            each.restore(last)
        each.save(place, {})
        assert each.version == len(steps)
        assert last is None or same(last, place)
        last = place
        each.close()
    copies = {"hybrid": 2, "replicate": 1}
    assert len(files(tmp_path / "0")) == copies.get(more.get("sharding", ""), 4)


def test_a_damaged_shard_is_one_line_and_the_ranks_go_on_with_an_earlier_checkpoint(
    trainer: Any, batch: Any, tmp_path: Path
) -> None:
    two = trainer(2)
    two.step(batch(0))
    two.save(tmp_path / "1", {"step": 1})
    two.step(batch(1))
    two.save(tmp_path / "2", {"step": 2})
    pids = two.others.pids
    for rank in (0, 1):  # each is looked at by another rank
        file = tmp_path / "2" / f"shard-0000{rank}-of-00002.safetensors"
        good = file.read_bytes()
        file.write_bytes(good[:-4] + bytes(byte ^ 1 for byte in good[-4:]))
        with pytest.raises(FormatError) as caught:
            two.restore(tmp_path / "2")
        assert str(caught.value).endswith(f"2: {file.name} is missing or not as it was written")
        file.write_bytes(good)
    assert two.restore(tmp_path / "1") == {"step": 1}
    assert two.version == 1
    assert two.others.pids == pids, "a rank was replaced"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["begin_folder", "save_shard", "write_manifest", "complete_folder"])
def test_a_rank_lost_while_a_checkpoint_is_written_leaves_the_one_before_and_the_next_is_written(
    trainer: Any,
    batch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    sent: signal.Signals,
) -> None:
    if sent is signal.SIGSTOP and moment != "save_shard":
        pytest.skip("a stopped rank is noticed in the same place")
    place, two = tmp_path / "saved", trainer(2, rank_timeout=10.0)
    two.step(batch(0))
    two.save(place, {"step": 1})
    two.step(batch(1))
    plain, seen = getattr(trained_state, moment), []

    def deadly(*given: Any, **more: Any) -> Any:
        if not seen:
            seen.append(two.others.pids[1])
            os.kill(seen[0], sent)
            assert read_manifest(place).extra == {"step": 1}
        return plain(*given, **more)

    monkeypatch.setattr(trained_state, moment, deadly)  # on rank 0, at the same moment of its own writing
    two.save(place, {"step": 2})
    assert two.version == 2
    two.step(batch(2))
    assert two.others.pids[1] != seen[0]
    assert read_manifest(place).extra == {"step": 2}
    one = trainer(1, checkpoint_layout="whole")
    for step in range(3):
        one.step(batch(step))
    assert apart(one, two) < 1e-4
    two.restore(place)
    assert [
        each.name for each in tmp_path.iterdir() if "partial" in each.name or "replaced" in each.name
    ] == []


RANK_0 = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_ranks
from rollwright.training import trained_state
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import TrainerSettings
settings = TrainerSettings(learning_rate=1e-3, device="cpu", max_logprob_gap=50.0, processes=2, checkpoint_layout="sharded")
two = LeadingTrainer(Setup({model!r}, settings, 10, seed=5))
print(two.others.pids[1], flush=True)
two.step(test_ranks.batch(0))
two.save(Path({place!r}), {{"step": 1}})
two.step(test_ranks.batch(1))
setattr(trained_state, {moment!r}, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
two.save(Path({place!r}), {{"step": 2}})
"""


@pytest.mark.parametrize("moment", ["save_shard", "complete_folder"])
def test_rank_0_killed_while_a_checkpoint_is_written_leaves_the_one_before(
    trainer: Any, batch: Any, model: str, tmp_path: Path, moment: str
) -> None:
    place = tmp_path / "saved"
    code = RANK_0.format(tests=str(Path(__file__).parent), model=model, place=str(place), moment=moment)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    one = trainer(1)
    assert one.restore(place) == {"step": 1}
    fresh = trainer(1)
    fresh.step(batch(0))
    assert apart(one, fresh) < 1e-4
    one.save(place, {"step": 2})  # what the killed rank left is taken away
    assert [each.name for each in tmp_path.iterdir() if "partial" in each.name] == []


def test_another_model_and_a_format_of_a_later_version_are_refused(
    trainer: Any, batch: Any, tmp_path: Path
) -> None:
    one, other = trainer(1), trainer(1, lora={"rank": 2})
    one.step(batch(0))
    one.save(tmp_path / "saved", {})
    with pytest.raises(FormatError, match="is of another model or other adapters"):
        other.restore(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    state.write_text('{"format": 3, "state": {}, "extra": {}, "sha256": {}}')
    with pytest.raises(FormatError, match="has format 3; accepted: 1, 2"):
        one.restore(tmp_path / "saved")
