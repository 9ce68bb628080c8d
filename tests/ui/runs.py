"""Runs for the tests of the page: small real ones, and logs of any size made from them."""

import asyncio
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from rollwright.config import build
from rollwright.run.folder import RunFolder
from rollwright.run.playing import play_run
from rollwright.run.sealed_rows import seal
from rollwright.run.trajectory_log import TRAJECTORIES
from rollwright.swarm.heartbeat import NodePhase, NodeStatus, PeerStatus, Pulse, RoundStatus, write_status
from rollwright.trajectory import (
    Message,
    Outcome,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    token_ids,
)

LAKE: dict[str, Any] = {
    "name": "lake",
    "seed": 3,
    "max_steps": 3,
    "eval_steps": 1,
    "rollout_batch_size": 16,
    "policy": {"kind": "simulated", "slots": 16, "tokens_per_second": 20000, "skill": 0.6},
    "train_env_manager": {
        "num_env_groups": 4,
        "group_size": 4,
        "tags": ["FrozenLake", "SimpleSokoban"],
        "filters": ["void_turn", {"kind": "zero_variance", "action": "count"}],
    },
    "val_env_manager": {"num_env_groups": 6, "tags": ["FrozenLake"]},
}

TREE: dict[str, Any] = {
    "name": "tree",
    "rollout_batch_size": 2,
    "policy": {"kind": "simulated", "slots": 16, "tokens_per_second": 20000, "skill": 0.5},
    "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]},
    "strategy": {"kind": "tree", "width": 2, "depth": 3},
}


TEAM: dict[str, Any] = {
    "name": "team",
    "rollout_batch_size": 8,
    "policy": {"kind": "simulated", "slots": 16, "tokens_per_second": 20000, "skill": 0.6},
    "custom_envs": {"Sums": {"env_type": "rollwright.teams.toy_envs:Sums", "max_tokens_per_step": 256}},
    "orchestras": {
        "Sums": {"kind": "math", "agents": {"solver": {"tools": ["calculator"], "max_tool_turns": 3}}}
    },
    "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["Sums"]},
}


def play(settings: dict[str, Any], runs: Path) -> Path:
    """Play a run to its end; returns its folder."""
    folder, config = RunFolder.create(runs, build(settings))
    asyncio.run(play_run(config, folder))
    return folder.path


def turn(number: int, text: str, observation: str, *, reward: float = 0.0) -> Turn:
    return Turn(
        id=number,
        after=number - 1 if number else None,
        extends=number - 1 if number else None,
        prompt_ids=token_ids([1, 2, 3]),
        sampled_ids=token_ids(list(text.encode()[:40])),
        logprobs=floats([-0.5] * len(text.encode()[:40])),
        versions=(VersionRun(0, len(text.encode()[:40])),),
        text=text,
        prompt_tokens=3,
        completion_tokens=len(text.encode()[:40]),
        outcome=Outcome(observation, reward, action="Left"),
    )


def episode(run: str, group: int, member: int, turns: list[Turn], **fields: Any) -> Trajectory:
    group_id = f"{run}.train-g{group}"
    about = {"tag": "FrozenLake", "seed": group, "stop": StopReason.TERMINATED, "success": bool(member % 2)}
    return Trajectory(
        f"{group_id}-m{member}", f"at-{group}-{member}", group_id, turns=turns, **(about | fields)
    )


def written(folder: Path, settings: dict[str, Any], trajectories: Iterator[Trajectory]) -> Path:
    """A run folder with these trajectories, as a run that was killed leaves it."""
    opened = RunFolder.begin(folder, build(settings))
    for each in trajectories:
        opened.add_trajectory(each.rollout_id, each.to_bytes())
    opened.log.close()
    return folder


def long_run(folder: Path, turns: int, *, per_episode: int = 10) -> Path:
    """A run with many turns, written fast: one encoded trajectory, with other ids, again and again."""
    RunFolder.begin(folder, build(LAKE | {"name": "long"})).log.close()
    words = "walk over the ice to the goal and do not fall into a hole, think first"
    played = [
        turn(n, f"{words} {n} <answer>Left</answer>", "P___\n_O__\n___G\n____") for n in range(per_episode)
    ]
    with (folder / TRAJECTORIES).open("ab") as log:
        for number in range(turns // per_episode):
            last = msgspec.structs.replace(played[-1], text=f"{words} needle{number} <answer>Down</answer>")
            one = episode(
                "long", number // 4, number % 4, [*played[:-1], last], episode_reward=number % 7 / 7
            )
            encoded = one.to_bytes()
            log.write(struct.pack("<II", len(encoded), crc32(encoded)) + encoded)
    return folder


PAYLOADS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=2>",
    "<svg onload=window.pwned=3></svg>",
    "[click](javascript:window.pwned=4)",
    "![x](javascript:window.pwned=5)",
    "<iframe srcdoc='<script>parent.pwned=6</script>'></iframe>",
    "</textarea><style>*{display:none}</style>",
    "```html\n<script>window.pwned=7</script>\n```",
    "| <b onclick=window.pwned=8>x</b> | y |\n|---|---|\n| `<script>` | **<i>** |",
    "![](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9IndpbmRvdy5wd25lZD05Ii8+)",
    "{{constructor.constructor('window.pwned=10')()}}",
    "\u202e<a href='javascript:window.pwned=11'>x</a>",
)


def hostile(folder: Path) -> Path:
    """A run whose texts, tags, tool results, ids and settings are attacks."""
    settings = LAKE | {
        "name": "hostile",
        "custom_envs": {"<img src=x onerror=window.pwned=20>": {"env_type": "FrozenLake"}},
        "val_env_manager": {"num_env_groups": 1, "tags": ["<img src=x onerror=window.pwned=20>"]},
    }
    everything = "\n\n".join(PAYLOADS)
    call = ToolCall(
        "<b onmouseover=window.pwned=21>",
        "<script>window.pwned=22</script>",
        '{"x": "<script>window.pwned=23</script>"}',
    )
    turns = [
        msgspec.structs.replace(
            turn(0, everything, everything), tool_calls=(call,), agent="<script>window.pwned=24</script>"
        ),
        *(turn(number, payload, payload) for number, payload in enumerate(PAYLOADS, 1)),
    ]
    one = episode(
        "hostile",
        0,
        0,
        turns,
        tag="<img src=x onerror=window.pwned=25>",
        opening=(
            Message("system", everything),
            Message("tool", everything, name="<script>window.pwned=26</script>"),
        ),
        observation=everything,
        components={"<script>window.pwned=27</script>": 1.0},
        metrics={"<img src=x onerror=window.pwned=28>": 1.0},
        returned=everything,
    )
    other = msgspec.structs.replace(one, rollout_id="hostile.train-g0-m<script>window.pwned=29</script>")
    written(folder, settings, iter([one, other]))
    (folder / "failures.jsonl").write_text(
        seal({"rollout_id": "<script>window.pwned=30</script>", "reason": everything}) + "\n"
    )
    return folder


def damaged(folder: Path) -> Path:
    """A run with unreadable settings, a log with a hole in it, and metrics with a torn line."""
    written(
        folder,
        LAKE | {"name": "damaged"},
        (
            episode("damaged", number // 4, number % 4, [turn(0, f"move {number}", "P_\n_G")])
            for number in range(8)
        ),
    )
    log = bytearray((folder / TRAJECTORIES).read_bytes())
    middle = len(log) // 2
    log[middle : middle + 40] = b"\xff" * 40
    (folder / TRAJECTORIES).write_bytes(log)
    (folder / "metrics.jsonl").write_bytes(
        b'{"mode": "train", "step": 0, "groups": []' + b"\x00" * 9 + b"}\n" + b'{"half'
    )
    (folder / "config.yaml").write_text("name: [damaged\n", encoding="utf-8")
    (folder / "summary.json").write_text("{", encoding="utf-8")
    return folder


def swarm_node(home: Path) -> Path:
    """The home of a swarm node, as `rollwright swarm status` reads it."""
    written(home, LAKE | {"name": "node"}, iter(()))
    Pulse(home).enter(NodePhase.SAMPLE, 7, 6)
    rounds = [
        RoundStatus(number, 0.1 * number, 3, number % 3, 0.08 * number if number % 2 else None)
        for number in range(7)
    ]
    peers = [
        PeerStatus("amber-fox", "a" * 64, True, 6),
        PeerStatus("blue-hen", "b" * 64, False, 2),
        PeerStatus("calm-elk", "c" * 64, True, 7),
    ]
    status = NodeStatus(
        "dry-owl",
        "d" * 64,
        "lakes",
        time.time(),
        6,
        6,
        rounds,
        peers,
        9,
        14,
        {"bad signature": 2, "too old": 5},
        ["blue-hen"],
        1,
    )
    write_status(home, status)
    return home


def estimate(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "tasks": 20, "short": 0, "error": 0.05}


def evaluation(folder: Path) -> Path:
    """An evaluation with its report."""
    written(folder, LAKE | {"name": folder.name}, iter([episode(folder.name, 0, 0, [turn(0, "Left", "P_")])]))
    result = {
        "tasks": 20,
        "episodes": 80,
        "failed": 1,
        "score": estimate(0.62),
        "success": estimate(0.62),
        "reward": estimate(0.7),
        "pass@k": {"1": estimate(0.62), "4": estimate(0.85)},
        "majority@k": None,
        "turns": 4.5,
        "tokens": 120.0,
    }
    report = {
        "schema": "rollwright.evaluation/1",
        "model": "models/frozen_lake",
        "state": "complete",
        "metric": "success",
        "plan": {"tasks": 20, "samples": 4, "k": [1, 4], "confidence": 0.95},
        "episodes": {"finished": 80, "failed": 1, "not_played": 0},
        "overall": result,
        "tags": {"FrozenLake": result},
        "by": {"level": {"<script>window.pwned=50</script>": result}},
        "cost": {"total": {"usd": 0.0123, "prompt": 1000, "completion": 500}},
        "results": [
            {"tag": "FrozenLake", "task": str(n), "score": 0.5, "reward": 1.0, "failed": 0, "samples": []}
            for n in range(20)
        ],
    }
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return folder
