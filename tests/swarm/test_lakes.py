"""The swarm that is shipped to be tried out, `configs/swarm_frozen_lake.yaml`: its nodes know how to play, and learn
from each other."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.config import load
from rollwright.run.swarm_node import SwarmNode
from rollwright.swarm.heartbeat import NodePhase, read_heartbeat, read_status
from rollwright.swarm.identity import IDENTITY_FILE, load_identity
from rollwright.swarm.transports.memory import MemorySwarm

ROOT = Path(__file__).parents[2]
SMALL = [
    "max_steps=2",
    "eval_steps=2",
    "swarm.local_groups=4",
    "train_env_manager.num_env_groups=4",
    "val_env_manager.num_env_groups=16",
]


async def test_its_nodes_get_rewards_take_groups_and_leave_a_home_that_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the model's folder is named from here
    config = load(ROOT / "configs" / "swarm_frozen_lake.yaml", SMALL)
    network = MemorySwarm()
    homes = [tmp_path / name for name in ("ann", "ben")]
    for number, home in enumerate(homes, start=1):  # the same tasks in every run
        home.mkdir()
        (home / IDENTITY_FILE).write_text(f"{number:02x}" * 32)
        (home / IDENTITY_FILE).chmod(0o600)
    nodes = [
        SwarmNode(config, home, transport=network.join(load_identity(home / IDENTITY_FILE).peer))
        for home in homes
    ]
    first = asyncio.create_task(nodes[0].run())
    while not first.done() and ((beat := read_heartbeat(homes[0])) is None or beat.phase is NodePhase.START):
        await asyncio.sleep(0.05)
    await asyncio.gather(first, nodes[1].run())
    for home in homes:
        status = read_status(home)
        assert status is not None
        assert [each.own_groups for each in status.rounds] == [4, 4]
        assert sum(each.reward or 0.0 for each in status.rounds) > 0
        assert (status.rounds[-1].evaluation or 0.0) > 0
        assert not status.quarantined
    assert sum(each.exchange.counts["accepted"] for each in nodes if each.exchange is not None) > 0

    shown = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "rollwright", "show", str(homes[0])],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert shown.returncode == 0, shown.stderr
    assert "training of swarm_frozen_lake" in shown.stdout
    assert "Lake" in shown.stdout
