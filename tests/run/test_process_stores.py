"""How worker processes reach the store of their run."""

from pathlib import Path

import pytest

from rollwright.config import build
from rollwright.run.process_fleet import ADDRESS_VARIABLE, ProcessFleet
from rollwright.run.run import Run

CONFIG = {
    "name": "run",
    "rollout_batch_size": 4,
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
}


@pytest.mark.parametrize("kept", ["in a file", "in memory"])
async def test_worker_processes_open_a_file_themselves_and_reach_a_store_in_memory_through_the_run(
    tmp_path: Path, kept: str
) -> None:
    """Through the run, each of their calls would cost its process as much as theirs."""
    file = tmp_path / "store.db"
    given = str(file) if kept == "in a file" else None
    async with Run(build(CONFIG), store=given, processes=1) as run:
        batch = await run.get_batch()
        assert isinstance(run.workers.fleet, ProcessFleet)
        address = run.workers.fleet._environment[ADDRESS_VARIABLE]
    assert len(batch.trajectories) == 4
    assert address == str(file) if given else address.startswith("http+unix://")
