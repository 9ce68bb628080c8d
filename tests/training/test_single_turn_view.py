"""One row for each turn: the same loss, the prompt as the model saw it, and a price that the user is told."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.observe.sample_views import ViewSizes
from rollwright.run.build_training import check
from rollwright.run.folder import RunFolder
from rollwright.run.run import Run
from rollwright.simulation.players import RandomPlayer
from rollwright.training.advantages import ADVANTAGES, make_advantage
from rollwright.training.losses import token_coefficients
from rollwright.training.micro_batches import pack
from rollwright.training.rows import View, build_rows
from rollwright.training.settings import Aggregation, LossSettings
from rollwright.trajectory import (
    Trajectory,
    Turn,
    VersionRun,
    floats,
    full_prompt,
    samples,
    token_ids,
    turn_samples,
)

Make = Callable[..., Trajectory]

PLAYING = {"train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]}}
HISTORIES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "window": {"mode": "window", "length": 2},
    "actions": {"mode": "actions"},
}


def played(history: dict[str, Any]) -> list[list[Trajectory]]:
    config = build({**PLAYING, "agent": {"history": history}})

    async def run() -> list[list[Trajectory]]:
        async with Run(config, policy=RandomPlayer()) as run:
            return [group.trajectories for group in (await run.get_batch()).groups]

    return run_virtual(run())


@pytest.mark.parametrize("history", HISTORIES)
def test_a_turns_row_is_the_prompt_that_the_model_saw_and_what_it_sampled(history: str) -> None:
    groups = played(HISTORIES[history])
    assert any(trajectory.turns for group in groups for trajectory in group)
    for group in groups:
        for trajectory in group:
            for turn, row in zip(trajectory.turns, turn_samples(trajectory), strict=True):
                assert row.token_ids == full_prompt(trajectory.turns, turn.id) + turn.sampled_ids
                assert turn.prompt_tokens == len(row.token_ids) - len(turn.sampled_ids)
                assert sum(row.mask) == len(turn.sampled_ids)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("name", ADVANTAGES.kinds)
def test_a_turn_weighs_the_same_in_the_loss_of_either_view(
    name: str, aggregation: Aggregation, forest: Make, chain: Make
) -> None:
    """So a long trajectory has no more weight for having more rows, and its advantage is worked out once."""
    group = [
        forest("a", [(None, 0.0), (0, 1.0), (0, 0.0), (2, 0.5)]),
        chain("b", [0.0]),
        chain("c", [1.0] * 5),
    ]

    def pulls(view: View) -> Counter[tuple[str, int]]:
        """Coefficient times advantage, summed over the tokens of each rollout and value."""
        rows = build_rows([group], make_advantage(name), view=view)
        coefficients = token_coefficients([pack(row) for row in rows], LossSettings(aggregation=aggregation))
        found: Counter[tuple[str, int]] = Counter()
        for row, own in zip(rows, coefficients, strict=True):
            values = [value for value, counts in zip(row.advantages, row.mask, strict=True) if counts]
            for value, coefficient in zip(values, own.tolist(), strict=True):
                found[row.rollout_id, round(value * 1e4)] += coefficient  # type: ignore[assignment]
        return found

    paths, turns = pulls("paths"), pulls("turns")
    assert paths.keys() == turns.keys()
    assert dict(turns) == pytest.approx(dict(paths), abs=1e-6)


def long_chain(turns: int, *, prompt: int = 500, action: int = 200, observation: int = 300) -> Trajectory:
    made = [
        Turn(
            number,
            number - 1 if number else None,
            number - 1 if number else None,
            prompt_ids=token_ids([1] * (observation if number else prompt)),
            sampled_ids=token_ids([2] * action),
            logprobs=floats([-1.0] * action),
            versions=(VersionRun(0, action),),
        )
        for number in range(turns)
    ]
    return Trajectory("r", "a", "g", "T", 1, turns=made)


@pytest.mark.parametrize(("turns", "paths", "by_turn"), [(5, 2_700, 8_500), (20, 10_200, 109_000)])
def test_the_price_of_rows_by_turn_is_what_the_arithmetic_says(turns: int, paths: int, by_turn: int) -> None:
    """About 3 times the tokens at 5 turns, 10 times at 20."""
    sizes = ViewSizes()
    sizes.add(long_chain(turns))
    assert sizes.row() == {
        "paths": {"rows": 1, "tokens": paths, "longest": paths},
        "turns": {"rows": turns, "tokens": by_turn, "longest": paths},
    }


@pytest.mark.parametrize("history", HISTORIES)
def test_the_sizes_are_those_of_the_samples(history: str) -> None:
    sizes = ViewSizes()
    rows: dict[str, list[int]] = {"paths": [], "turns": []}
    groups = played(HISTORIES[history])
    assert any(trajectory.turns for group in groups for trajectory in group)
    for group in groups:
        for trajectory in group:
            sizes.add(trajectory)
            rows["paths"] += [len(row.token_ids) for row in samples(trajectory)]
            rows["turns"] += [len(row.token_ids) for row in turn_samples(trajectory)]
    for view, lengths in rows.items():
        assert sizes.row()[view] == {"rows": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
    if history != "whole":  # what was cut while playing starts a row at every turn in either view
        assert rows["paths"] == rows["turns"]


@pytest.mark.parametrize("key", ["history", "window", "max_prompt_length"])
def test_a_history_that_training_alone_would_cut_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.{key}: .*off-policy.*agent\.history") as refused:
        build({**PLAYING, "training": {key: 2}})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("had", "wanted"), [("whole", "window"), ("window", "whole"), ("actions", "window")])
def test_a_recorded_run_is_not_trained_on_with_another_history(had: str, wanted: str, tmp_path: Path) -> None:
    recorded, _ = RunFolder.create(tmp_path, build({**PLAYING, "agent": {"history": HISTORIES[had]}}))
    recorded.finish({})
    training = {"model": "m", "from_run": str(recorded.path)}
    content = {**PLAYING, "training": training}
    check(build({**content, "agent": {"history": HISTORIES[had]}}))
    with pytest.raises(ConfigError, match=r"agent\.history: .*off-policy"):
        check(build({**content, "agent": {"history": HISTORIES[wanted]}}))
