"""Ranks that torchrun or Ray has started: the result of one process, and lost ranks are replaced."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rollwright.errors import RollwrightError
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
LEARNING_RATE = 1e-3


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_ranks

    yield test_ranks.batch
    sys.modules.pop("test_ranks")


def settings(**more: Any) -> TrainerSettings:
    given = {"learning_rate": LEARNING_RATE, "device": "cpu", "max_logprob_gap": 50.0, "rank_timeout": 60.0}
    return TrainerSettings(**{**given, **more})


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=3).save_pretrained(
        tmp_path / "model"
    )
    return str(tmp_path / "model")


def difference(one: Any, other: Any) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def configuration(place: Path) -> Path:
    """The demo, small, and for one step: which tokens are sampled does not depend on the ranks yet."""
    content = yaml.safe_load((ROOT / "configs" / "frozen_lake_train.yaml").read_text(encoding="utf-8"))
    content |= {"name": "lake", "max_steps": 1, "rollout_batch_size": 16, "max_inflight": 16}
    content["policy"]["model"] = str(ROOT / "models" / "frozen_lake")
    content["train_env_manager"] |= {"num_env_groups": 4, "group_size": 4}
    content["training"] |= {"warmup_updates": 0, "final_learning_rate": None, "device": "cpu"}
    del content["val_env_manager"], content["eval_steps"]
    file = place / "lake.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def run(*command: str, place: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torchrun_starts_the_ranks_and_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    plain = ("train", str(config), "--no-live", "--runs")
    run("rollwright", *plain, str(tmp_path / "one"), place=tmp_path)
    run(
        *("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rollwright"),
        *plain,
        str(tmp_path / "two"),
        place=tmp_path,
    )
    one, two = (load_model(tmp_path / each / "lake" / "model").state_dict() for each in ("one", "two"))
    base = load_model(ROOT / "models" / "frozen_lake").state_dict()
    assert difference(one, base) > 1e-4
    assert difference(one, two) < 1.2e-3 / 10
    figures = (tmp_path / "two" / "lake" / "training" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"ranks": 2' in figures


ray = pytest.importorskip("ray", reason="needs rollwright[ray]")


@pytest.fixture
def on_ray() -> Iterator[Any]:
    from rollwright.run.ray_ranks import ray_ranks

    yield ray_ranks("local")
    ray.shutdown()


def test_ranks_are_actors_of_ray_and_a_lost_one_is_replaced(
    on_ray: Any, model: str, batch: Any, tmp_path: Path
) -> None:
    start, host = on_ray
    one = Trainer(load_model(model), settings(), total_updates=10, seed=5)
    two = LeadingTrainer(Setup(model, settings(processes=2), 10, seed=5), start, host)
    try:
        for each in (one, two):
            each.step(batch(0))
        two.save(tmp_path / "saved", {})
        for each in (one, two):
            each.step(batch(1))
        lost = two.others.pids[1]  # type: ignore[attr-defined]
        os.kill(lost, signal.SIGKILL)
        for each in (one, two):
            each.step(batch(2))
        assert two.others.pids[1] != lost  # type: ignore[attr-defined]
        assert (two.version, two.updates) == (one.version, one.updates) == (3, 3)
        assert difference(one.weights().tensors, two.weights().tensors) < LEARNING_RATE / 10
    finally:
        two.close()


def test_a_cluster_without_room_for_the_ranks_is_one_line(
    on_ray: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollwright.run import ray_ranks

    monkeypatch.setattr(ray_ranks, "PLACE_SECONDS", 1.0)
    start, host = on_ray
    with pytest.raises(RollwrightError, match=r"ray: no room for 998 ranks with CPU 1 each"):
        LeadingTrainer(Setup(model, settings(processes=999), 10, seed=5), start, host)


torch.set_num_threads(1)
