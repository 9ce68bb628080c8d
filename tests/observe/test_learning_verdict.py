"""The verdict on learning names what the figures show, and nothing where nothing is in the way."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import RunConfig, build
from rollwright.observe.learning_verdict import judge_learning, recent_signal
from rollwright.run.training_record import read_steps
from rollwright.training.report import silent_share
from rollwright.training.rows import Row
from rollwright.trajectory import floats, token_ids


def config(**more: Any) -> RunConfig:
    return build(
        {
            "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["FrozenLake"]},
            "training": {"model": "m"},
            **more,
        }
    )


def steps(count: int = 12, **figures: Any) -> list[dict[str, Any]]:
    row = {"silent_groups": 0.2, "success": 0.4, "entropy": 1.0, "clip_share": 0.02, "gap": 0.01}
    return [{**row, **figures} for _ in range(count)]


def named(rows: list[dict[str, Any]], settings: RunConfig | None = None) -> list[str]:
    return [each.what for each in judge_learning(rows, settings or config())]


def test_batches_that_teach_get_no_finding() -> None:
    assert named(steps()) == []
    assert named([]) == []


def test_groups_are_too_easy_or_too_hard_by_what_they_solve() -> None:
    [easy] = judge_learning(steps(silent_groups=0.8, success=0.9), config())
    assert easy.what == "groups too easy"
    assert "80% of the groups" in easy.because
    assert "90% solved" in easy.because
    assert "kappa" in easy.advice
    assert named(steps(silent_groups=0.8, success=0.1)) == ["groups too hard"]
    known = config(training={"model": "m", "advantage": {"name": "rloo", "options": {"kappa": 2}}})
    assert "kappa" not in judge_learning(steps(silent_groups=0.8), known)[0].advice


def test_a_policy_that_no_longer_tries_anything_is_collapsing_unless_it_solves_the_task() -> None:
    collapsed = [*steps(4, entropy=2.0), *steps(12, entropy=0.01)]
    [found] = judge_learning(collapsed, config())
    assert found.what == "entropy collapsing"
    assert found.because.startswith("2 nats in the first steps, 0.01 now")
    assert named([{**row, "success": 0.97} for row in collapsed]) == []


def test_a_policy_that_was_better_before_is_not_blamed_on_its_levels() -> None:
    worse = [*steps(3, success=0.4), *steps(12, success=0.02, silent_groups=0.95)]
    [found] = judge_learning(worse, config())
    assert found.what == "success falling"
    assert found.because == "40% solved in earlier steps, 2% in the last"
    later = [*steps(3, success=0.0), *steps(40, success=0.6), *steps(20, success=0.1, silent_groups=0.9)]
    assert named(later) == ["success falling"]
    assert named([*steps(3, success=0.05), *steps(12, success=0.01)]) == ["success is rare"]
    assert named([*steps(3, success=0.4), *steps(12, success=0.3)]) == []
    draws = {"num_env_groups": 2, "group_size": 4, "tags": ["FrozenLake"], "task_sampler": {}}
    assert named(worse, config(train_env_manager=draws)) == ["groups too hard"]


def test_trees_are_advised_where_success_is_rare_and_chains_elsewhere() -> None:
    trees = config(strategy={"kind": "tree"})
    assert named(steps(success=0.01)) == ["success is rare"]
    assert named(steps(success=0.01), trees) == []
    assert named(steps(success=0.3), trees) == ["chains would do"]


def test_a_step_that_clips_much_goes_too_far() -> None:
    assert named(steps(clip_share=0.5)) == ["learning rate too high for the gap"]


def test_steps_that_made_no_update_say_nothing_about_the_rate() -> None:
    skipped = steps(10, clip_share=0.0, updates=0)
    assert named([*steps(2, clip_share=0.5, updates=1), *skipped]) == ["learning rate too high for the gap"]
    assert named(skipped) == []


def test_a_gradient_is_judged_by_the_sums_of_many_measurements() -> None:
    def measured(signal: float, noise: float, count: int = 6) -> list[dict[str, Any]]:
        return steps(count, gradient_signal=signal, gradient_noise=noise, tokens=1000)

    assert named(measured(20.0, 1.0)) == ["groups too many or too large"]
    assert named(measured(20.0, 1.0, count=4)) == []
    assert named(measured(1.0, 1.0)) == []
    assert named(measured(0.001, 1.0)) == ["gradient mostly noise"]
    assert named(measured(-0.5, 1.0)) == ["gradient mostly noise"]
    # A few lucky batches with hardly any noise do not outweigh the others.
    assert named([*measured(0.001, 0.00001, count=3), *measured(0.5, 1.0, count=6)]) == []
    found = recent_signal([*steps(5), *measured(0.5, 1.0)])
    assert found is not None
    assert (found.measured, found.ratio, found.error, found.tokens_needed) == (6, 0.5, 0.0, 2000)
    nothing = recent_signal(measured(-0.5, 1.0))
    assert nothing is not None
    assert nothing.tokens_needed is None
    assert recent_signal(steps()) is None


def test_measurements_that_differ_too_much_for_the_threshold_are_no_finding() -> None:
    """Signals of one step are mostly chance: with as few as these, a healthy training often has a mean near 0."""

    def scattered(count: int) -> list[dict[str, Any]]:
        signals = [0.6 if number % 2 else -0.6 for number in range(count)]
        return [
            row for each in signals for row in steps(1, gradient_signal=each, gradient_noise=1.0, tokens=9)
        ]

    found = recent_signal(scattered(10))
    assert found is not None
    assert found.ratio == pytest.approx(0.0)
    assert found.error == pytest.approx(0.2, rel=0.01)
    assert named(scattered(10)) == []
    close = [{**row, "gradient_signal": row["gradient_signal"] / 10} for row in scattered(10)]
    assert named(close) == ["gradient mostly noise"]
    assert (
        named([{**row, "gradient_signal": 12 + 10 * row["gradient_signal"]} for row in scattered(10)]) == []
    )


@pytest.mark.parametrize(("advantages", "share"), [((0.0, 0.0), 1.0), ((0.0, 0.5), 0.5), ((1.0, 0.5), 0.0)])
def test_a_group_is_silent_where_all_its_advantages_are_0(
    advantages: tuple[float, ...], share: float
) -> None:
    rows = []
    for group, value in enumerate(advantages):
        for own in (0.0, value):
            ids, marks = token_ids([1, 2]), floats([0.0, own])
            rows.append(Row(f"r{len(rows)}", f"g{group}", ids, b"\0\1", marks, ids, marks, marks))
    assert silent_share(rows) == share
    assert silent_share([]) == 0.0


def test_figures_are_read_up_to_a_partial_line(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    lines = [{"step": 0, "val/success": 0.1}, {"step": 0, "tokens": 9, "silent_groups": 0.5}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 1, "tok'
    (tmp_path / "training" / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert read_steps(tmp_path) == [lines[1]]
    assert read_steps(tmp_path / "nothing") == []
