"""Makes the files of this folder with the release that is installed: `python tests/data/0_1_0/make.py FOLDER`.

They were made with 0.1.0 and are not made again; see README.md.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests" / "compatibility"))

from counting_engine import counting_engine  # noqa: E402

SIMULATED = {"kind": "simulated", "slots": 4, "tokens_per_second": 300, "skill": 0.6}
FAST = {**SIMULATED, "slots": 16, "tokens_per_second": 4000}
LIMITS = {"lease_seconds": 2.0, "heartbeat_interval": 0.4, "max_attempts": 20}
LAKES = {"custom_envs": {"FrozenLake": {"max_steps": 6}}}
LAKE = {
    "env_type": "FrozenLake",
    "env_config": {"part": "train", "p": 0.75, "action_pattern": "(.+)", "answer_template": "{action}"},
    "max_steps": 6,
    "max_tokens_per_step": 1,
    "agent_system_template": "",
    "agent_opening_template": "{observation}",
}
LEARNER: dict[str, Any] = {
    "policy": {"kind": "torch", "model": "model", "device": "cpu", "threads": 1},
    "agent": {"history": {"mode": "current"}},
    "custom_envs": {"Lake": LAKE},
    "limits": LIMITS,
}
AGENT = '''"""An agent of a user: doubles a number, refuses two, and never comes back from nine."""

import asyncio


async def agent(task, session):
    if task["n"] == 2:
        raise ValueError("two is wrong")
    if task["n"] == 9:
        await asyncio.sleep(3600)
    return float(2 * task["n"])
'''


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(
        [sys.executable, "-m", "rollwright", *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL
    )


def do(folder: Path, *words: str) -> None:
    assert start(folder, *words).wait() == 0


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def settings(folder: Path, name: str, **content: Any) -> str:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **content}, sort_keys=False))
    return f"{name}.yaml"


def rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def count(store: Path, question: str) -> int:
    if not store.is_file():
        return 0
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute(question).fetchone()[0])
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return 0


VALIDATING = "SELECT count(*) FROM rollouts WHERE mode = 'val' AND end_time IS NULL"
VALIDATED = "SELECT count(*) FROM rollouts WHERE mode = 'val' AND end_time IS NOT NULL"
RECORDED = "SELECT count(*) FROM journal JOIN rollouts USING (place) WHERE mode = 'val' AND rollouts.end_time IS NULL"


def interrupted(folder: Path, name: str, policy: dict[str, Any]) -> None:
    """A run that was killed while a validation was half played."""
    file = settings(
        folder,
        name,
        max_steps=4,
        eval_steps=2,
        max_inflight=6,
        limits=LIMITS,
        policy=policy,
        train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
        val_env_manager={"num_env_groups": 8, "tags": ["FrozenLake"]},
        **LAKES,
    )
    run = start(folder, "run", file, "--no-live")
    home = folder / "runs" / name
    until(
        lambda: (
            len(rows(home / "metrics.jsonl")) >= 2
            and count(home / "store.db", VALIDATED) > 0
            and count(home / "store.db", RECORDED) > 0
        )
    )
    run.kill()
    run.wait()
    assert count(home / "store.db", VALIDATING) > 0
    assert all(row["mode"] == "train" for row in rows(home / "metrics.jsonl"))


def finished(folder: Path) -> None:
    file = settings(
        folder,
        "finished",
        max_steps=2,
        eval_steps=1,
        limits={**LIMITS, "max_attempts": 1},
        policy={**FAST, "failure_rate": 0.1},
        train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake", "SimpleSokoban"]},
        val_env_manager={"num_env_groups": 3, "tags": ["FrozenLake"]},
        custom_envs={"FrozenLake": {"max_steps": 4}, "SimpleSokoban": {"max_steps": 4}},
    )
    do(folder, "run", file, "--no-live")
    assert (folder / "runs" / "finished" / "failures.jsonl").is_file()


def tree(folder: Path) -> None:
    file = settings(
        folder,
        "tree",
        max_steps=1,
        policy=FAST,
        strategy={"kind": "tree", "width": 2, "depth": 2},
        train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
        custom_envs={"FrozenLake": {"max_steps": 3}},
    )
    do(folder, "run", file, "--no-live")


def team(folder: Path) -> None:
    file = settings(
        folder,
        "team",
        max_steps=1,
        policy=FAST,
        train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": ["Sums"]},
        custom_envs={"Sums": {"env_type": "rollwright.orchestra.practice:Sums", "max_tokens_per_step": 200}},
        orchestras={
            "Sums": {
                "kind": "math",
                "agents": {"solver": {"tools": ["calculator"], "max_tool_turns": 2}},
            }
        },
    )
    do(folder, "run", file, "--no-live")


def model(folder: Path) -> None:
    """Random weights behind the tokenizer of the shipped model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shipped = json.loads((ROOT / "models" / "frozen_lake" / "config.json").read_text())
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(**{**shipped, **small, **heads})
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "frozen_lake" / name, folder / "model" / name)


def training(folder: Path) -> None:
    """Killed between two checkpoints: one step stands in the record that the last checkpoint does not have."""
    file = settings(
        folder,
        "training",
        max_steps=6,
        eval_steps=2,
        training={"learning_rate": 1e-3, "checkpoint_steps": 2, "writers": ["jsonl"], "advantage": "grpo"},
        train_env_manager={"num_env_groups": 2, "group_size": 4, "tags": ["Lake"]},
        val_env_manager={"num_env_groups": 4, "tags": ["Lake"]},
        **LEARNER,
    )
    run = start(folder, "train", file, "--no-live")
    home = folder / "runs" / "training"
    until(lambda: sum(row["mode"] == "train" for row in rows(home / "metrics.jsonl")) >= 3)
    run.kill()
    run.wait()


def node(folder: Path) -> None:
    """The home of one of two nodes that shared a folder, killed in the middle."""
    file = settings(
        folder,
        "node",
        max_steps=1000,
        training={
            "learning_rate": 1e-3,
            "checkpoint_steps": 2,
            "keep_checkpoints": 1,
            "keep_steps": 4,
            "device": "cpu",
        },
        swarm={
            "name": "tiny",
            "local_groups": 2,
            "external_groups": 2,
            "communication": {"transport": "directory", "folder": "exchange"},
        },
        train_env_manager={"num_env_groups": 2, "group_size": 4, "tags": ["Lake"]},
        **LEARNER,
    )
    other = start(folder, "swarm", "join", file, "--home", "runs/other", "training.keep_steps=1000")
    until(lambda: len(rows(folder / "runs" / "other" / "metrics.jsonl")) >= 3)
    own = start(folder, "swarm", "join", file, "--home", "runs/node")
    record = folder / "runs" / "node" / "metrics.jsonl"
    until(lambda: any(row.get("foreign_groups") for row in rows(record)) and len(rows(record)) >= 3)
    for each in (own, other):
        each.kill()
        each.wait()


def store(folder: Path) -> None:
    """Rollouts in every state: ended in three ways, failed once, half played by a worker that was killed, and waiting."""
    (folder / "own_agent.py").write_text(AGENT)
    (folder / "first.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (folder / "second.jsonl").write_text('{"n": 2}\n{"n": 3}\n{"n": 4}\n')
    (folder / "third.jsonl").write_text('{"n": 9}\n')
    (folder / "fourth.jsonl").write_text('{"n": 5}\n{"n": 6}\n')
    where = ("--store", "store.db")
    worker = ("worker", *where, "--agent", "own_agent:agent", "--id")
    do(folder, "enqueue", "first.jsonl", *where, "--max-attempts", "1")
    do(folder, *worker, "first", "--max-rollouts", "2")
    do(folder, "enqueue", "second.jsonl", *where)
    with closing(sqlite3.connect(folder / "store.db")) as connection:
        waiting = connection.execute("SELECT rollout_id FROM rollouts WHERE end_time IS NULL ORDER BY place")
        names = [each for (each,) in waiting]
    do(folder, "cancel", names[2], *where)
    do(folder, *worker, "second", "--max-rollouts", "2", "--envs", "2")
    do(folder, "enqueue", "third.jsonl", *where, "--priority", "1")
    killed = start(folder, *worker, "killed", "--envs", "1")
    until(lambda: count(folder / "store.db", "SELECT count(*) FROM rollouts WHERE status = 'preparing'") > 0)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    do(folder, "enqueue", "fourth.jsonl", *where)


def pack(folder: Path, name: str, *members: str) -> None:
    """A small archive with nothing of the machine in it. Space that a store's log has set aside and not used is left out."""
    for log in folder.rglob("*.db-wal"):
        content = log.read_bytes()
        frame = 24 + int.from_bytes(content[8:12], "big")
        frames = -(-(len(content.rstrip(b"\0")) - 32) // frame)
        os.truncate(log, 32 + frames * frame)

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return None if info.name.endswith(("-shm", ".lock")) else info

    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for member in members:
            archive.add(folder / member, member, filter=plain)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    interrupted(folder, "interrupted", SIMULATED)
    with counting_engine(latency=0.05) as engine:
        interrupted(
            folder, "interrupted_http", {"kind": "openai", "base_url": engine.base_url, "model": "counting"}
        )
    finished(folder)
    tree(folder)
    team(folder)
    model(folder)
    training(folder)
    node(folder)
    store(folder)
    pack(folder, "model", "model")
    for name in ("interrupted", "interrupted_http", "finished", "tree", "team"):
        pack(folder, name, f"runs/{name}")
    pack(folder, "training", "runs/training")
    pack(folder, "node", "node.yaml", "runs/node")
    pack(
        folder,
        "store",
        "own_agent.py",
        *(each.name for each in folder.glob("store.db*") if each.suffix != ".db-shm"),
    )


if __name__ == "__main__":
    main()
