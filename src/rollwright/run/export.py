"""Parquet export of trajectories: one row per turn, so that token ids stay exact and trees keep their links."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from rollwright.errors import RollwrightError, naming
from rollwright.trajectory import Trajectory, Turn, expand_versions

TRAJECTORIES_IN_A_ROW_GROUP = 1000
"""Trajectories per row group; bounds the memory of an export."""


def write_parquet(trajectories: Iterable[Trajectory], file: Path, *, simulated: bool = False) -> int:
    """Write the file atomically, with `simulated` in its metadata; returns the number of rows."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise RollwrightError("export needs pyarrow: install rollwright[export]") from error
    ints, reals = pa.list_(pa.int32()), pa.list_(pa.float32())
    schema = pa.schema(
        {
            "rollout_id": pa.string(),
            "group_id": pa.string(),
            "tag": pa.string(),
            "seed": pa.int64(),
            "episode_reward": pa.float64(),
            "episode_penalty": pa.float64(),
            "success": pa.bool_(),
            "stop": pa.string(),
            "turn": pa.int32(),
            "after": pa.int32(),
            "extends": pa.int32(),
            "agent": pa.string(),
            "text": pa.string(),
            "action": pa.string(),
            "observation": pa.string(),
            "reward": pa.float64(),
            "penalty": pa.float64(),
            "exact": pa.bool_(),
            "temperature": pa.float64(),
            "untrained": pa.string(),
            "finish": pa.string(),
            "prompt_ids": ints,
            "sampled_ids": ints,
            "logprobs": reals,
            "versions": ints,
        },
        metadata={"simulated": "true" if simulated else "false"},
    )
    rows = 0
    partial = file.with_name(file.name + ".partial")
    left = iter(trajectories)
    with naming(partial), pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        while some := list(islice(left, TRAJECTORIES_IN_A_ROW_GROUP)):
            table = pa.Table.from_pylist([_row(each, turn) for each in some for turn in each.turns], schema)
            writer.write_table(table)
            rows += table.num_rows
    partial.replace(file)
    return rows


def _row(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    outcome = turn.outcome
    return {
        "rollout_id": trajectory.rollout_id,
        "group_id": trajectory.group_id,
        "tag": trajectory.tag,
        "seed": trajectory.seed,
        "episode_reward": trajectory.reward,
        "episode_penalty": trajectory.penalty,
        "success": trajectory.success,
        "stop": str(trajectory.stop),
        "turn": turn.id,
        "after": turn.after,
        "extends": turn.extends,
        "agent": turn.agent,
        "text": turn.text,
        "action": outcome.action if outcome else None,
        "observation": outcome.observation if outcome else None,
        "reward": outcome.reward if outcome else None,
        "penalty": outcome.penalty if outcome else None,
        "exact": turn.exact,
        "temperature": None if (sampling := trajectory.sampling_of(turn)) is None else sampling.temperature,
        "untrained": trajectory.untrained(turn),
        "finish": str(turn.finish),
        "prompt_ids": turn.prompt_ids.tolist(),
        "sampled_ids": turn.sampled_ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "versions": expand_versions(turn.versions),
    }
