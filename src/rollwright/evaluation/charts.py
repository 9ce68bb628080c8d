"""Charts of the pages of evaluations, as SVG. Pure: equal reports give equal bytes, and names are escaped."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

LONGEST_NAME = 26
"""Characters of a name beside a chart."""

COLUMNS = 10
"""Of a histogram: tasks by tenths of their score, and those that are always solved in a column of their own."""


def interval_chart(report: Mapping[str, Any]) -> str:
    """Score and interval of every tag on one axis from 0 to 100 %."""
    rows = [(tag, each["score"]) for tag, each in report["tags"].items() if each["score"] is not None]
    if len(report["tags"]) > 1:
        rows.insert(0, ("all", report["overall"]["score"]))
    left, width, step = 190, 560, 26
    height = step * len(rows) + 24
    marks = [
        f'<line class="axis" x1="{left + width * tick / 4:g}" x2="{left + width * tick / 4:g}" y1="4" y2="{height - 20}"/>'
        f'<text x="{left + width * tick / 4:g}" y="{height - 4}" text-anchor="middle">{25 * tick} %</text>'
        for tick in range(5)
    ]
    for place, (name, each) in enumerate(rows):
        y = 18 + place * step
        marks.append(_name(name, left, y))
        if each["low"] is not None:
            low, high = left + width * each["low"], left + width * each["high"]
            marks.append(f'<line class="bar" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>')
        marks.append(f'<circle class="dot" cx="{left + width * each["value"]:.1f}" cy="{y}" r="4"/>')
    return _svg(left + width + 30, height, marks, "score and interval by tag")


def pass_curve(report: Mapping[str, Any]) -> str:
    """pass@k over k, each with its interval; k grows by position."""
    found = [(k, each) for k, each in report["overall"]["pass@k"].items() if each is not None]
    left, height, step = 50, 190, 80
    marks = [
        f'<line class="axis" x1="{left}" x2="{left + step * len(found)}" y1="{10 + 150 * tick / 4:g}" y2="{10 + 150 * tick / 4:g}"/>'
        f'<text x="{left - 8}" y="{14 + 150 * tick / 4:g}" text-anchor="end">{100 - 25 * tick} %</text>'
        for tick in range(5)
    ]
    for place, (k, each) in enumerate(found):
        x, y = left + step * place + step / 2, 160 - 150 * each["value"]
        if each["low"] is not None:
            marks.append(
                f'<line class="bar" x1="{x:g}" x2="{x:g}" y1="{160 - 150 * each["high"]:.1f}" '
                f'y2="{160 - 150 * each["low"]:.1f}"/>'
            )
        marks.append(f'<circle class="dot" cx="{x:g}" cy="{y:.1f}" r="4"/>')
        marks.append(f'<text x="{x:g}" y="{height - 10}" text-anchor="middle">pass@{k}</text>')
    return _svg(left + step * len(found) + 20, height, marks, "pass@k")


def task_histogram(report: Mapping[str, Any]) -> str:
    """How many tasks are solved how often: never, in tenths between, always."""
    counts = [0] * (COLUMNS + 2)
    for each in report["results"]:
        if each["score"] is not None:
            counts[_column(each["score"])] += 1
    labels = ["never", *(f"{10 * place} – {10 * place + 10} %" for place in range(COLUMNS)), "always"]
    most, left, step = max(counts) or 1, 10, 72
    marks = []
    for place, count in enumerate(counts):
        x, tall = left + place * step, 120 * count / most
        marks.append(
            f'<rect class="column" x="{x}" y="{140 - tall:.1f}" width="{step - 8}" height="{tall:.1f}" rx="2"/>'
            f'<text x="{x + step / 2 - 4:g}" y="{134 - tall:.1f}" text-anchor="middle">{count or ""}</text>'
            f'<text x="{x + step / 2 - 4:g}" y="158" text-anchor="middle">{labels[place]}</text>'
        )
    return _svg(left + step * len(counts), 164, marks, "tasks by the share of their samples that is solved")


def _column(score: float) -> int:
    if score <= 0:
        return 0
    return COLUMNS + 1 if score >= 1 else min(COLUMNS, 1 + int(score * COLUMNS))


def difference_chart(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Difference and interval of each row of a comparison, around 0."""
    found = list(rows)
    reach: float = max(
        [0.01]
        + [
            abs(each[end])
            for _, each in found
            for end in ("low", "high", "difference")
            if each[end] is not None
        ]
    )
    left, width, step = 190, 560, 26
    height = step * len(found) + 24
    middle = left + width / 2

    def at(value: float) -> float:
        return middle + width / 2 * value / reach

    marks = [
        f'<line class="zero" x1="{middle:g}" x2="{middle:g}" y1="4" y2="{height - 20}"/>'
        f'<text x="{middle:g}" y="{height - 4}" text-anchor="middle">equal</text>'
        f'<text x="{left}" y="{height - 4}">first is better</text>'
        f'<text x="{left + width}" y="{height - 4}" text-anchor="end">second is better</text>'
    ]
    for place, (name, each) in enumerate(found):
        y = 18 + place * step
        marks.append(_name(name, left, y))
        if each["low"] is not None:
            marks.append(
                f'<line class="bar" x1="{at(each["low"]):.1f}" x2="{at(each["high"]):.1f}" y1="{y}" y2="{y}"/>'
            )
        marks.append(f'<circle class="dot" cx="{at(each["difference"]):.1f}" cy="{y}" r="4"/>')
    return _svg(left + width + 30, height, marks, "difference and interval by tag")


def _name(name: str, left: float, y: float) -> str:
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return f'<text class="name" x="{left - 10:g}" y="{y + 4:g}" text-anchor="end">{escape(shown)}</text>'


def _svg(width: float, height: float, marks: Iterable[str], label: str) -> str:
    return (
        f'<div class="scroll"><svg role="img" aria-label="{escape(label)}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">{"".join(marks)}</svg></div>'
    )
