"""What ranks cost: tokens per CPU second, bytes between ranks against the theory, and waiting, on 1, 2 and 4 processes.

    python bench/trainer_ranks.py

Prints a table and writes `bench/results/trainer_ranks.json`. The batch is that of `bench/trainer.py`. CPU time is that of all
ranks together, with one thread each; the arms are run in turn, several times, and the median step counts. Bytes are counted on
rank 0, where torch's collectives are called: what it receives when weights are gathered and sends when gradients are reduced.
In theory that is (N − 1) / N of all weights each, once for an update. TRL under accelerate is not measured.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.settings import TrainerSettings
from trainer import SIZES, _model, _rows, _scored

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = (1, 2, 4)
SIZE = "1 M parameters"
ROUNDS, STEPS = 2, 4
"""Times that every arm is run, and timed steps in each."""


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
    arms = [(count, "once") for count in PROCESSES] + [(count, "every_pass") for count in PROCESSES[1:]]
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _model(size).save_pretrained(folder)
        for number in range(ROUNDS):
            for count, gather in arms:
                with console.status(f"round {number + 1}: {count} processes, gather {gather}"):
                    rounds.setdefault(f"{count} {gather}", []).append(
                        steps(folder, count, gather, rows, counted)
                    )
    found = {
        name: {key: statistics.median(each[key] for each in own) for key in own[0]}
        for name, own in rounds.items()
    }
    return {"tokens": tokens, "parameters": parameters, "ranks": found}


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
    found = measure(console)
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
    console.print(f"written to {write_results('trainer_ranks', found).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
