"""Two evaluations compared on the tasks that both have played. Pure.

Always true: tasks are matched by content (the row itself, or the environment's settings and level), never by their place;
a task without a result in one of the two is left out and counted. The difference is the second minus the first.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from rollwright.errors import RollwrightError
from rollwright.evaluation.charts import difference_chart
from rollwright.evaluation.pages import Table, html_table, interval, markdown_table, page, share, title
from rollwright.evaluation.statistics import PairedComparison, compare_paired

SCHEMA = "rollwright.comparison/1"

SIGNIFICANT = 0.05
"""Level of the test that the sentence at the top refers to."""


def compare_reports(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str] = ("first", "second")
) -> dict[str, Any]:
    """Compares two reports as `report.build_report` makes them; raises an error if they share no task.

    `names`: tell the two apart where their models have the same name.
    """
    before, after = _scores(first), _scores(second)
    shared = [key for key in before if key in after]
    if not shared:
        raise RollwrightError(
            "the two evaluations share no task with a result; they are compared on the same rows, or the same levels of the "
            "same environments with the same seed"
        )
    if first["metric"] != second["metric"]:
        raise RollwrightError(
            f"one evaluation has {first['metric']} as its score, the other {second['metric']}"
        )
    confidence = first["plan"]["confidence"]

    weights = _weights(first, second)
    samples = _samples(first), _samples(second)

    def compared(keys: list[tuple[str, str]]) -> dict[str, Any]:
        found = compare_paired(
            {key: before[key] for key in keys},
            {key: after[key] for key in keys},
            samples=samples,
            weights=weights,
            confidence=confidence,
        )
        told = {"first": _mean(before, keys, weights), "second": _mean(after, keys, weights)}
        return {**_row(found), **told}

    tags = list(dict.fromkeys(tag for tag, _ in shared))
    return {
        "schema": SCHEMA,
        "first": _about(first, names[0] if title(first) == title(second) else ""),
        "second": _about(second, names[1] if title(first) == title(second) else ""),
        "metric": first["metric"],
        "confidence": confidence,
        "tasks": {
            "shared": len(shared),
            "only_first": len(before) - len(shared),
            "only_second": len(after) - len(shared),
        },
        "overall": compared(shared),
        "tags": {tag: compared([key for key in shared if key[0] == tag]) for tag in tags},
        "cost": {"first": first["cost"]["total"], "second": second["cost"]["total"]},
    }


def _scores(report: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (each["tag"], each["task"]): each["score"] for each in report["results"] if each["score"] is not None
    }


def _samples(report: Mapping[str, Any]) -> dict[Hashable, list[float]]:
    """The scores of each task's samples."""
    return {
        (task["tag"], task["task"]): [
            each["reward"] if each["success"] is None else each["success"] for each in task["samples"]
        ]
        for task in report["results"]
    }


def _weights(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[Hashable, float]:
    """How many tasks each one stands for that has a result in both.

    Where tasks of a known difficulty were played first, a task of a stratum was played with the share of the stratum that has
    results. Two evaluations have chosen independently, unless one has played all tasks of the other: then the other chose.
    """
    chances = []
    for report, other in ((first, second), (second, first)):
        mine, theirs = _scores(report), _scores(other)
        chances.append(
            {} if theirs.keys() <= mine.keys() and mine.keys() != theirs.keys() else _chances(report)
        )
    if first["plan"].get("strata") == second["plan"].get("strata") and all(chances):
        chances.pop()  # the same order, as far as it went: chosen once
    keys = _scores(first).keys() & _scores(second).keys()
    return {key: 1 / math.prod(each.get(key, 1.0) for each in chances) for key in keys}


def _chances(report: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The share of its stratum that has results, for each task; empty: all tasks were equally likely."""
    strata = report["plan"].get("strata")
    if not strata:
        return {}
    rows = [each for each in report["results"] if each["score"] is not None]
    played = Counter(each["stratum"] for each in rows)
    return {
        (each["tag"], each["task"]): played[each["stratum"]] / strata[each["stratum"]]["tasks"]
        for each in rows
    }


def _mean(
    scores: Mapping[tuple[str, str], float],
    keys: list[tuple[str, str]],
    weights: Mapping[Hashable, float],
) -> float:
    total = math.fsum(weights[key] for key in keys)
    return math.fsum(weights[key] * scores[key] for key in keys) / total


def _row(found: PairedComparison) -> dict[str, Any]:
    row = asdict(found)
    row["low"] = None if found.interval is None else found.interval.low
    row["high"] = None if found.interval is None else found.interval.high
    del row["interval"]
    return row


def _about(report: Mapping[str, Any], beside: str) -> dict[str, Any]:
    return {
        "name": f"{title(report)} ({beside})" if beside else title(report),
        "sampling": dict(report["sampling"]),
        "samples": report["plan"]["samples"],
    }


def verdict(comparison: Mapping[str, Any]) -> str:
    """The comparison in one sentence."""
    overall, metric = comparison["overall"], comparison["metric"]
    difference = _signed(overall["difference"], metric)
    names = comparison["second"]["name"], comparison["first"]["name"]
    tasks = f"{comparison['tasks']['shared']:,} shared tasks"
    if overall["p_value"] is None:
        return f"{names[0]} − {names[1]}: {difference} on {tasks}, too few for a test"
    percent = f"{100 * comparison['confidence']:g} %"
    bounds = "" if overall["low"] is None else f", {percent} interval {interval(overall, metric=metric)}"
    sure = "differ" if overall["p_value"] < SIGNIFICANT else "are not told apart"
    return (
        f"{names[0]} − {names[1]}: {difference}{bounds}; they {sure} on {tasks} "
        f"(paired {overall['test']} test, p = {overall['p_value']:.3g})"
    )


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    metric = comparison["metric"]
    heads = ["tag", "tasks", "first", "second", "difference", "interval", "p", "test", "better", "worse"]
    rows = [("all", comparison["overall"]), *comparison["tags"].items()]
    if len(comparison["tags"]) == 1:
        rows = rows[1:]
    return heads, [
        [
            name,
            f"{each['tasks']:,}",
            share(each["first"], metric=metric),
            share(each["second"], metric=metric),
            _signed(each["difference"], metric),
            interval(each, metric=metric),
            "–" if each["p_value"] is None else f"{each['p_value']:.3g}",
            each["test"],
            str(each["better"]),
            str(each["worse"]),
        ]
        for name, each in rows
    ]


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    lines = ["# Comparison", "", f"**{verdict(comparison)}**", "", *notes(comparison), ""]
    return "\n".join([*lines, *markdown_table(comparison_table(comparison))]) + "\n"


def notes(comparison: Mapping[str, Any]) -> list[str]:
    """What else a reader has to know, one line each."""
    tasks, overall = comparison["tasks"], comparison["overall"]
    found = []
    if tasks["only_first"] or tasks["only_second"]:
        found.append(
            f"- left out: {tasks['only_first']:,} tasks that only the first has a result for, "
            f"{tasks['only_second']:,} that only the second has"
        )
    if comparison["first"]["sampling"] != comparison["second"]["sampling"]:
        told = [
            f"temperature {comparison[each]['sampling']['temperature']:g}" for each in ("first", "second")
        ]
        found.append(f"- sampled differently: {told[0]} and {told[1]}")
    if overall["error"] and overall["unpaired_error"]:
        ratio = (overall["unpaired_error"] / overall["error"]) ** 2
        found.append(f"- sharing the tasks is worth {ratio:.1f} times as many tasks in separate evaluations")
    return found


def _signed(value: float, metric: str) -> str:
    return f"{100 * value:+.1f} points" if metric == "success" else f"{value:+.3f}"


def comparison_html(comparison: Mapping[str, Any]) -> str:
    lines = "".join(f"<li>{escape(each[2:])}</li>" for each in notes(comparison))
    rows = [("all", comparison["overall"]), *comparison["tags"].items()]
    chart = difference_chart(rows[1:] if len(comparison["tags"]) == 1 else rows)
    table = html_table(comparison_table(comparison))
    body = f"<h1>Comparison</h1><p>{escape(verdict(comparison))}</p><ul>{lines}</ul>{chart}{table}"
    return page("Comparison", body)
