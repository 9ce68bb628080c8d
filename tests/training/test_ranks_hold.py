"""What must hold of ranks, at length: gradients, weights, skips, killed and stopped ranks, other numbers of ranks.

`make test-ranks` runs these.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.rng import generator
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.training import TrainingRun
from rollwright.training.checkpoints import read_checkpoint
from rollwright.training.ranks.collective import Ranks
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer

pytestmark = pytest.mark.ranks

LEARNING_RATE = 1e-3
FULL: dict[str, Any] = {"loss": {"kl_coefficient": 0.1}}
LORA: dict[str, Any] = {"lora": {"rank": 4}, "loss": {"name": "gspo"}}
torch.set_num_threads(1)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules beside this one can be imported, here and in ranks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    for name in ("test_ranks", "tiny_training"):
        sys.modules.pop(name, None)


@pytest.fixture
def batch(beside: None) -> Any:
    import test_ranks

    return test_ranks.batch


def settings(**more: Any) -> TrainerSettings:
    given = {
        "learning_rate": LEARNING_RATE,
        "device": "cpu",
        "max_logprob_gap": 50.0,
        "rank_timeout": 120.0,
        "max_grad_norm": 1e9,  # so that the first moment is the gradient
    }
    return TrainerSettings(**{**given, **more})


def trainer(model: str, **more: Any) -> Any:
    made = settings(**more)
    if made.processes > 1:
        return LeadingTrainer(Setup(model, made, 10, seed=5))
    return Trainer(load_model(model), made, total_updates=10, seed=5)


def gradients(trained: Any, place: Path) -> dict[str, torch.Tensor]:
    """The gradient of a trainer's only step, from Adam's first moment."""
    trained.save(place, {})
    share = 1 - trained.settings.beta1
    moments = read_checkpoint(place).tensors["optimizer"]
    return {name: each / share for name, each in moments.items() if name.startswith("exp_avg.")}


def difference(one: Any, other: Any) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def tiny(place: Path) -> str:
    tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=3).save_pretrained(place / "model")
    return str(place / "model")


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("more", [FULL, LORA], ids=["full", "lora"])
def test_gradients_are_within_1e_6_and_weights_within_a_tenth_of_the_learning_rate_after_10_steps(
    tmp_path: Path, batch: Any, processes: int, more: dict[str, Any]
) -> None:
    model = tiny(tmp_path)
    one, many = trainer(model, **more), trainer(model, processes=processes, **more)
    try:
        for step in range(10):
            rows = batch(step) if step != 4 else []
            expected, found = one.step(rows), many.step(rows)
            assert found.skipped == expected.skipped
            if step == 0:
                apart = difference(gradients(one, tmp_path / "one"), gradients(many, tmp_path / "many"))
                assert apart < 1e-6
        assert many.skipped == one.skipped != {}
        assert (many.version, many.updates) == (one.version, one.updates)
        assert difference(one.weights().tensors, many.weights().tensors) < LEARNING_RATE / 10
    finally:
        many.close()


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 8}}], ids=["full", "lora"])
def test_smollm2_has_the_same_gradients_and_weights(
    tmp_path: Path, batch: Any, processes: int, more: dict[str, Any]
) -> None:
    from rollwright.models.catalogue import is_fetched

    if not is_fetched("smollm2"):
        pytest.skip("needs `rollwright model fetch smollm2`")
    given = {"learning_rate": 1e-5, **more}
    one = trainer("smollm2", **given)
    expected = one.step(batch(0, 1, 4))
    first = gradients(one, tmp_path / "one")
    many = trainer("smollm2", processes=processes, **given)
    try:
        found = many.step(batch(0, 1, 4))
        assert difference(first, gradients(many, tmp_path / "many")) < 1e-6
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        one.step(batch(1, 1, 4)), many.step(batch(1, 1, 4))
        assert difference(one.weights().tensors, many.weights().tensors) < 1e-5 / 2
    finally:
        many.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("moment", ["agree", "gradient_norm", "sums"])
def test_a_rank_lost_in_the_middle_of_a_collective_is_replaced(
    tmp_path: Path,
    batch: Any,
    monkeypatch: pytest.MonkeyPatch,
    sent: signal.Signals,
    rank: int,
    moment: str,
) -> None:
    model = tiny(tmp_path)
    one, many = trainer(model), trainer(model, processes=4, rank_timeout=8.0)
    try:
        for each in (one, many):
            each.step(batch(0))
        many.save(tmp_path / "saved", {})
        for each in (one, many):
            each.step(batch(1))
        victim, plain, calls = many.others.pids[rank], getattr(Ranks, moment), iter([True])

        def deadly(self: Ranks, *given: Any) -> Any:
            if self.size > 1 and next(calls, False):
                time.sleep(0.3)  # the others are waiting in the collective
                os.kill(victim, sent)
            return plain(self, *given)

        monkeypatch.setattr(Ranks, moment, deadly)
        for each in (one, many):
            each.step(batch(2))
        assert many.others.pids[rank] != victim
        assert (many.version, many.updates) == (one.version, one.updates) == (3, 3)
        assert difference(one.weights().tensors, many.weights().tensors) < LEARNING_RATE / 10
    finally:
        many.close()


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_a_rank_killed_at_any_moment_costs_no_step_and_trains_none_twice(
    tmp_path: Path, batch: Any, delay: float
) -> None:
    model = tiny(tmp_path)
    one, many = trainer(model), trainer(model, processes=2, rank_timeout=20.0)
    try:
        victim = many.others.pids[1]
        killer = threading.Timer(delay, lambda: os.kill(victim, signal.SIGKILL))
        killer.start()
        for step in range(6):
            one.step(batch(step)), many.step(batch(step))
            if step == 2:
                many.save(tmp_path / "saved", {})
        killer.join()
        many.step(batch(6)), one.step(batch(6))
        assert (many.version, many.updates) == (one.version, one.updates) == (7, 7)
        assert difference(one.weights().tensors, many.weights().tensors) < LEARNING_RATE / 10
    finally:
        many.close()


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (4, {"lora": {"rank": 4}, "checkpoint_layout": "sharded"}),
        (4, {"sharding": "hybrid", "shard_ranks": 2, "checkpoint_layout": "sharded"}),
        (2, {"sharding": "replicate"}),
    ],
    ids=["lora", "hybrid", "replicate"],
)
def test_ranks_killed_and_stopped_at_random_moments_train_every_batch_once(
    tmp_path: Path, batch: Any, processes: int, more: dict[str, Any]
) -> None:
    dice, model = generator("attack", processes, str(more)), tiny(tmp_path)
    one, many = trainer(model, **more), trainer(model, processes=processes, rank_timeout=8.0, **more)
    try:
        for step in range(6):
            victim = many.others.pids[dice.randrange(1, processes)]
            sent = dice.choice([signal.SIGKILL, signal.SIGSTOP])
            attack = threading.Timer(dice.random() / 5, os.kill, (victim, sent))
            if step % 2:
                attack.start()
            one.step(batch(step)), many.step(batch(step))
            many.save(tmp_path / f"{step}", {"step": step})
            if step % 2:
                attack.join()
        assert (many.version, many.updates) == (one.version, one.updates) == (6, 6)
        assert difference(one.weights().tensors, many.weights().tensors) < LEARNING_RATE / 10
        assert many.restore(tmp_path / "5") == {"step": 5}
    finally:
        many.close()


RUN = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import tiny_training
model = Path({model!r})
config = tiny_training.configuration(model, "training.processes={processes}", "training.checkpoint_steps=2", max_steps=8)
async def go():
    runs = Path({runs!r})
    there = runs / config.name
    if not (there / "config.yaml").is_file():
        return await tiny_training.train(runs, config, model)
    from rollwright.run.folder import RunFolder
    from rollwright.run.training import TrainingRun
    folder = RunFolder.reopen(there)
    run = TrainingRun(config.model_copy(update={{"name": config.name}}), folder, resume=True,
                      policy=tiny_training.policy(model), store=folder.store_address(None))
    try:
        await run.run()
    finally:
        folder.finish(run.summary())
asyncio.run(go())
"""


def start(tmp_path: Path, model: Path, processes: int) -> "subprocess.Popen[bytes]":
    code = RUN.format(
        tests=str(Path(__file__).parent), model=str(model), processes=processes, runs=str(tmp_path / "runs")
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)


def steps_done(folder: Path) -> int:
    file = folder / "training" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize(("first", "then"), [(2, 1), (2, 4), (1, 2), (4, 2)])
def test_rank_0_is_killed_and_the_run_resumes_on_another_number_of_ranks_to_the_same_weights(
    tmp_path: Path, beside: None, first: int, then: int
) -> None:
    import tiny_training

    model = tiny_training.save_model(tmp_path / "model")
    folder = tmp_path / "runs" / "tiny"
    running = start(tmp_path, model, first)
    while steps_done(folder) < 3:
        assert running.poll() is None
        time.sleep(0.02)
    running.kill()
    running.wait()
    again = start(tmp_path, model, then)
    assert again.wait(timeout=300) == 0
    rows = RunReader(folder).metrics()
    groups = [group for row in rows for group in row["groups"]]
    assert len(groups) == len(set(groups))
    steps = [
        json.loads(line)["step"] for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(8))
    # The record trained anew by one process from the beginning gives the weights of the run.
    config = tiny_training.configuration(model, f"training.from_run={folder}", max_steps=8)
    fresh, config = RunFolder.create(tmp_path / "again", config)
    asyncio.run(TrainingRun(config, fresh).run())
    found, expected = (load_model(each / "model").state_dict() for each in (folder, fresh.path))
    assert difference(found, expected) < 3e-3 / 10


@pytest.mark.parametrize("processes", [2, 4])
def test_the_record_of_an_asynchronous_run_gives_the_same_weights_on_any_number_of_ranks(
    tmp_path: Path, beside: None, processes: int
) -> None:
    import tiny_training

    model = tiny_training.save_model(tmp_path / "model")
    config = tiny_training.configuration(model, max_steps=10, async_generation_ratio=1)
    run = asyncio.run(tiny_training.train(tmp_path / "runs", config, model))
    assert max(run.state.staleness) >= 1
    given = tiny_training.configuration(
        model, f"training.from_run={run.folder.path}", f"training.processes={processes}", max_steps=10
    )
    folder, given = RunFolder.create(tmp_path / "again", given)
    asyncio.run(TrainingRun(given, folder).run())
    found, expected = (load_model(each / "model").state_dict() for each in (folder.path, run.folder.path))
    assert difference(found, expected) < 3e-3 / 10
