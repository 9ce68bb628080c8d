"""What ranks cost: tokens per CPU second, bytes between ranks against the theory, and waiting, on 1, 2 and 4 processes.

    python bench/trainer_ranks.py [ranks] [checkpoints]

Prints tables and writes `bench/results/trainer_ranks.json`. The batch is that of `bench/trainer.py`. CPU time is that of all
ranks together, with one thread each. All arms, TRL's too, are run in turn, several times, every second time in the opposite
order, so that a busy machine is as busy for each; the median step counts. Bytes are counted on
rank 0, where torch's collectives are called: what it receives when weights are gathered and sends when gradients are reduced.
In theory that is (N − 1) / N of all weights each, once for an update. Waiting is counted where ranks agree on the outcome of
their passes; with `every_pass` they wait inside of torch's collectives, which is not counted.

Beside it: TRL's `GRPOTrainer` under accelerate, with as many processes, which hold the whole model each (DDP over gloo) and
reduce gradients once in a step. It gets the same rows through its rollout hook, an equal number of them on each process, in
micro-batches of 16 rows. Compared are loss, backward pass, communication and optimiser, from the rows to the changed weights;
TRL's generation and scoring are not timed. TRL pads rows and computes shared prefixes in each of them, ours packs and joins.

Last, the memory of rank 0 while a checkpoint is written: what its resident memory rises by, as whole tensors and in shards.
With arguments, only these parts are measured, and the other figures stay.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.models.tiny import tiny_llama
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import TrainerSettings
from trainer import SIZES, _model, _rows, _scored

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = (1, 2, 4)
SIZE = "1 M parameters"
ROUNDS, STEPS = 3, 4
"""Times that every arm is run, and timed steps in each."""
SAVED = {"vocabulary_size": 2048, "hidden_size": 512, "layers": 8, "seed": 1}
"""Model whose checkpoints are written: its state is large beside what a process of torch has anyway."""


class Bytes:
    """Bytes that this rank receives by gathering and sends by reducing."""

    def __init__(self) -> None:
        self.gathered = self.reduced = 0
        for name in ("all_gather_single", "all_gather_into_tensor"):
            self._count(name, "gathered")
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            self._count(name, "reduced")

    def _count(self, name: str, total: str) -> None:
        """Counts the larger tensor without this rank's own part; which name FSDP calls depends on torch's version."""
        plain = getattr(dist, name, None)
        if plain is None:
            return

        def counted(*given: Any, **named: Any) -> Any:
            tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)][:2]
            sizes = [each.numel() * each.element_size() for each in tensors]
            setattr(self, total, getattr(self, total) + max(sizes) - min(sizes))
            return plain(*given, **named)

        setattr(dist, name, counted)


def cpu_seconds(trainer: Any) -> float:
    """CPU time of all ranks so far."""
    pids = [os.getpid(), *(trainer.others.pids.values() if isinstance(trainer, LeadingTrainer) else ())]
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def measure(console: Console) -> dict[str, Any]:
    size = SIZES[SIZE]
    rows = _scored(_rows(size.vocabulary), _model(size))
    tokens = sum(len(row.token_ids) for row in rows)
    parameters = sum(each.numel() for each in _model(size).parameters())
    counted = Bytes()
    arms = [
        (count, way)
        for count in PROCESSES
        for way in ("once", "trl", "every_pass")
        if count > 1 or way != "every_pass"
    ]
    rounds: dict[tuple[int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _model(size).save_pretrained(folder)
        for number in range(ROUNDS):
            for count, way in arms if number % 2 == 0 else reversed(arms):
                with console.status(f"round {number + 1}: {count} processes, {way}"):
                    found = trl_step(count) if way == "trl" else steps(folder, count, way, rows, counted)
                rounds.setdefault((count, way), []).append(found)
    medians = {
        arm: {key: statistics.median(each[key] for each in own) for key in own[0]}
        for arm, own in rounds.items()
    }
    return {
        "tokens": tokens,
        "parameters": parameters,
        "rounds": ROUNDS,
        "ranks": {f"{count} {way}": each for (count, way), each in medians.items() if way != "trl"},
        "trl": {
            str(count): {**each, "over_trl": over_trl(rounds[count, "once"], rounds[count, "trl"])}
            for (count, way), each in medians.items()
            if way == "trl"
        },
    }


def over_trl(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> list[float]:
    """How many times TRL's CPU seconds are ours, in each round, the smallest first."""
    return sorted(other["cpu_seconds"] / own["cpu_seconds"] for own, other in zip(ours, theirs, strict=True))


def measure_checkpoints(console: Console) -> dict[str, Any]:
    with console.status("checkpoints"):
        return {"checkpoints": {layout: saving_memory(layout) for layout in ("whole", "sharded")}}


def trl_step(count: int) -> dict[str, float]:
    """CPU seconds of all processes of TRL's trainer for one step."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        script = str(Path(__file__).with_name("trainer_ranks_trl.py"))
        subprocess.run(
            [sys.executable, *launch, script, SIZE, folder],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        files = [Path(folder) / f"{rank}.json" for rank in range(count)]
        taken = [json.loads(each.read_text(encoding="utf-8"))["cpu_seconds"] for each in files]
        return {"cpu_seconds": sum(taken)}


def saving_memory(layout: str) -> dict[str, float]:
    """Rise of rank 0's memory while it saves on 4 ranks, in a process of its own."""
    code = f"import trainer_ranks; trainer_ranks.save_and_print({layout!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def save_and_print(layout: str) -> None:
    from rollwright.training.ranks.processes import ALLOCATOR

    if ALLOCATOR.items() - os.environ.items():  # read when a process starts; other ranks have it from rank 0
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ALLOCATOR})
    torch.set_num_threads(1)
    model = tiny_llama(**SAVED)
    state = 3 * 4 * sum(each.numel() for each in model.parameters())
    settings = TrainerSettings(device="cpu", processes=4, checkpoint_layout=layout, max_logprob_gap=50.0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        trainer = LeadingTrainer(Setup(folder, settings))
        try:
            trainer.step(_rows(SAVED["vocabulary_size"])[:8])
            trainer.save(Path(folder) / "first", {})  # buffers of communication are there from then on
            Path("/proc/self/clear_refs").write_text(
                "5", encoding="utf-8"
            )  # the highest memory is counted anew
            before = _memory("VmRSS")
            trainer.save(Path(folder) / "saved", {})
            rise = _memory("VmHWM") - before
        finally:
            trainer.close()
    print(json.dumps({"state_mb": state / 1e6, "rise_mb": rise / 1e6}))


def _memory(name: str) -> int:
    """A figure of this process's memory in bytes, by its name in `/proc`."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def steps(folder: str, count: int, gather: str, rows: Any, counted: Bytes) -> dict[str, float]:
    from rollwright.models import load_model
    from rollwright.training.trainer import Trainer

    settings = TrainerSettings(
        device="cpu", processes=count, gather=gather, max_logprob_gap=50.0, learning_rate=1e-5
    )
    trainer: Any = (
        LeadingTrainer(Setup(folder, settings)) if count > 1 else Trainer(load_model(folder), settings)
    )
    try:
        trainer.step(rows)
        counted.gathered = counted.reduced = 0
        began, cpu, waits = time.perf_counter(), [], []
        for _ in range(STEPS):
            before = cpu_seconds(trainer)
            report = trainer.step(rows)
            cpu.append(cpu_seconds(trainer) - before)
            waits.append(report.rank_waiting_share)
        return {
            "processes": count,
            "cpu_seconds": statistics.median(cpu),
            "seconds": (time.perf_counter() - began) / STEPS,
            "waiting_share": statistics.median(waits),
            "imbalance": report.rank_imbalance,
            "gathered_bytes": counted.gathered / STEPS,
            "reduced_bytes": counted.reduced / STEPS,
            "memory_mb": max(report.rank_memory_mb.values(), default=0.0),
        }
    finally:
        trainer.close()


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    console = Console()
    parts = {"ranks": measure, "checkpoints": measure_checkpoints}
    wanted = sys.argv[1:] or list(parts)
    kept = json.loads((RESULTS / "trainer_ranks.json").read_text(encoding="utf-8")) if sys.argv[1:] else {}
    found: dict[str, Any] = {key: each for key, each in kept.items() if isinstance(each, dict | int)}
    for name in wanted:
        found |= parts[name](console)
    found["cores"] = len(os.sched_getaffinity(0))  # those that all ranks share
    table = Table("ranks", "tokens / CPU s", "waiting", "gathered, MB", "reduced, MB", "theory, MB")
    for name, each in found["ranks"].items():
        theory = 4 * found["parameters"] * (each["processes"] - 1) / each["processes"]
        table.add_row(
            name,
            f"{found['tokens'] / each['cpu_seconds']:,.0f}",
            f"{each['waiting_share']:.0%}",
            f"{each['gathered_bytes'] / 1e6:.2f}",
            f"{each['reduced_bytes'] / 1e6:.2f}",
            f"{theory / 1e6:.2f}",
        )
    console.print(table)
    for count, each in found.get("trl", {}).items():
        console.print(
            f"TRL, {count} processes: {found['tokens'] / each['cpu_seconds']:,.0f} tokens / CPU s; "
            f"ours {statistics.median(each['over_trl']):.2f} times that"
        )
    for layout, each in found.get("checkpoints", {}).items():
        console.print(
            f"{layout} checkpoint of {each['state_mb']:.0f} MB on 4 ranks: rank 0 rises by {each['rise_mb']:.0f} MB"
        )
    console.print(f"written to {write_results('trainer_ranks', found).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
