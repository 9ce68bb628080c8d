"""Reports about a run for the page: the verdict of its profile, and the report of an evaluation."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollwright.config import RunConfig
from rollwright.observe.played_setup import setup_of, slots_of, store_of
from rollwright.observe.profile import Profile
from rollwright.observe.verdict import Figures, judge
from rollwright.trajectory import Phase, Trajectory

EVALUATION, SCHEMA = "report.json", b"rollwright.evaluation/"
"""Report of an evaluation in a run folder, and how the name of its schema begins."""

TASKS_SHOWN = 500
"""Tasks of an evaluation that are sent one by one."""


def verdict_of(episodes: Iterable[Trajectory], config: RunConfig, run: Path) -> dict[str, Any] | None:
    """The bottleneck by the timings of these episodes, with its figures; `None` without timings."""
    found = Profile.of(episodes)
    if not found.rollouts:
        return None
    numbers = Figures.of(found, slots_of(config, found))
    verdict = judge(numbers, setup_of(config, found, store_of(run)))
    return {
        "verdict": str(verdict),
        "findings": [
            {"cause": each.cause, "because": each.because, "advice": each.advice} for each in verdict.findings
        ],
        "rollouts": found.rollouts,
        "shares": {str(phase): found.share(phase) for phase in Phase if found.share(phase) > 0},
        "figures": {
            "rollouts at once": numbers.rollouts,
            "most rollouts at once": numbers.most_rollouts,
            "engine calls at once": numbers.calls,
            "slots": numbers.slots,
            "slots busy": numbers.occupancy,
            "waiting in line": numbers.in_line,
        },
    }


def has_report(run: Path) -> bool:
    """Whether a run folder has the report of an evaluation."""
    try:
        with (run / EVALUATION).open("rb") as report:
            return SCHEMA in report.read(200)
    except OSError:
        return False


def read_report(run: Path) -> dict[str, Any]:
    """The report as it was written; one that cannot be read is a `problem`."""
    file = run / EVALUATION
    try:
        content = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        return {"problem": f"{file}: there is no report of an evaluation"}
    except (OSError, msgspec.MsgspecError) as error:
        return {"problem": f"{file}: cannot be read: {error}"}
    return content if isinstance(content, dict) else {"problem": f"{file}: is not a report"}


def shown_report(run: Path) -> dict[str, Any]:
    """The report with the first of its tasks and without their single samples."""
    report = read_report(run)
    results = report.get("results")
    if isinstance(results, list):
        rows = [each for each in results if isinstance(each, dict)]
        report["results"] = [
            {name: value for name, value in each.items() if name != "samples"} for each in rows[:TASKS_SHOWN]
        ]
        report["result_count"] = len(rows)
    return report
