"""The order of an evaluation's tasks in its run folder: made from earlier evaluations before the first task is played.

Always true: the order is written once, before anything is opened, and read from then on, so that a resumed evaluation and its
report have the same one whatever happens to the earlier evaluations.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.config import RunConfig
from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.evaluation.strata import EarlierResult, TaskOrder, make_order
from rollwright.rollout.groups import LevelFunction
from rollwright.run.retention import replace_durably

ORDER = "task_order.json"
"""File of an evaluation's folder."""

AUTO = "auto"
"""Stands for all other evaluations of the runs folder."""

SUCCESS = "success"
"""`metric` of a report whose scores are solved shares."""


@dataclass(frozen=True)
class PlayedOrder:
    """The tasks of an evaluation in the order in which they are played."""

    slot_tags: Sequence[str]
    """The tag of each task."""
    level_of: LevelFunction
    """The level of each task, by its tag and its place."""
    order: TaskOrder | None
    """`None`: the shuffled order."""

    @property
    def levels(self) -> list[tuple[str, int]]:
        return [(tag, self.level_of(tag, place)) for place, tag in enumerate(self.slot_tags)]


def apply_order(slot_tags: Sequence[str], level_of: LevelFunction, folder: Path | None) -> PlayedOrder:
    """The order that the folder has. `slot_tags`, `level_of`: of the order without earlier results."""
    order = None if folder is None else read_order(folder)
    if order is None:
        return PlayedOrder(slot_tags, level_of, None)
    places = order.places
    return PlayedOrder(
        [slot_tags[place] for place in places], lambda tag, index: level_of(tag, places[index]), order
    )


def read_order(folder: Path) -> TaskOrder | None:
    """The order of an evaluation; `None`: it has none of its own."""
    file = folder / ORDER
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(f"{file}: is damaged: {error}") from error
    if content["places"] is None:
        return None
    return TaskOrder(tuple(content["places"]), tuple(content["strata"]), tuple(content["labels"]))


def check_difficulty(named: Sequence[str], tasks: Sequence[tuple[str, str]]) -> None:
    """Raise a `ConfigError` for an earlier evaluation that cannot be read, or shares no task with these."""
    for each in named:
        if each != AUTO and not _results([_load(_report_of(Path(each)))], tasks)[0]:
            raise ConfigError(
                f"evaluation.difficulty: {each}: shares no task with this evaluation; tasks are known by their content, and "
                "levels of a game by the seed"
            )


def write_order(config: RunConfig, folder: Path, tasks: Sequence[tuple[str, str]]) -> None:
    """Make the order, unless there is one. `tasks`: tag and name of each task in the order without earlier results."""
    settings = config.evaluation
    if settings is None or not settings.difficulty or (folder / ORDER).exists():
        return
    reports = [(path, _load(path)) for path in _sources(settings.difficulty, folder)]
    shares = [each for each in reports if each[1].get("metric") == SUCCESS]
    used = shares or reports
    earlier, told = _results([report for _, report in used], tasks)
    order = make_order(len(tasks), earlier, config.seed, share=bool(shares))
    content = {
        "known": len(earlier),
        "reports": [str(path) for (path, _), used_one in zip(used, told, strict=True) if used_one],
        "places": None if order is None else list(order.places),
        "strata": None if order is None else list(order.strata),
        "labels": None if order is None else list(order.labels),
    }
    replace_durably(folder / ORDER, json.dumps(content) + "\n")


def _results(
    reports: Sequence[dict[str, Any]], tasks: Sequence[tuple[str, str]]
) -> tuple[dict[int, EarlierResult], list[bool]]:
    """Earlier results by the task's place, and whether each report has any."""
    places = {task: place for place, task in enumerate(tasks)}
    sums: dict[int, tuple[float, int]] = {}
    told = []
    for report in reports:
        found = False
        for row in report.get("results", ()):
            place = places.get((row["tag"], row["task"]))
            if place is None or row["score"] is None:
                continue
            found, count = True, len(row["samples"])
            total, samples = sums.get(place, (0.0, 0))
            sums[place] = total + row["score"] * count, samples + count
        told.append(found)
    return {place: EarlierResult(total / count, count) for place, (total, count) in sums.items()}, told


def _sources(named: Sequence[str], folder: Path) -> list[Path]:
    """Reports that the settings name, in a fixed order, each once."""
    found: list[Path] = []
    for each in named:
        if each == AUTO:
            others = sorted(folder.parent.glob("*/report.json"))
            found += [path for path in others if path.parent.name != folder.name]
        else:
            found.append(_report_of(Path(each)))
    return list(dict.fromkeys(path.absolute() for path in found))


def _report_of(path: Path) -> Path:
    return path / "report.json" if path.is_dir() else path


def _load(path: Path) -> dict[str, Any]:
    from rollwright.run.evaluating import load_report  # which imports this module

    try:
        return load_report(path)
    except RollwrightError as error:
        raise ConfigError(f"evaluation.difficulty: {error}") from error
