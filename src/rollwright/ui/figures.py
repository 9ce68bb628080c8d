"""Figures of a run for the page, from its metrics, its summary and its live snapshot. Pure.

Values that are unknown are `None` and never 0. Curves have at most `MOST_POINTS` points; longer ones are averaged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

MOST_POINTS = 1000
"""Points of a curve: more than a screen has columns."""

SPARKS = 40
"""Points of a sparkline."""

QUIET_SECONDS = 15.0
"""Age of a snapshot from which a run counts as stuck: snapshots come twice a second, a blocked process sends none."""

ETA_STEPS = 20
"""Last steps whose pace gives the estimate of the end."""

Row = Mapping[str, Any]


class RunState(StrEnum):
    """Activity of a run, derived from its folder."""

    RUNNING = "running"
    SILENT = "silent"
    """Its process lives and says nothing."""
    ENDED = "ended"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """An error has ended it."""
    KILLED = "killed"
    """Its process is gone, and it left no summary."""
    UNKNOWN = "unknown"
    """Neither a summary nor a snapshot; written by an older release, or not started."""


def state_of(summary: Row | None, live: Row | None, *, now: float, alive: bool | None) -> RunState:
    """`alive`: whether the process of the snapshot lives; `None` if that cannot be known, because it is elsewhere."""
    if live is not None:
        age = now - float(live["time"])
        if age <= QUIET_SECONDS and alive is not False:
            return RunState.RUNNING
        if alive:
            return RunState.SILENT
        if summary is None or alive is False:
            return RunState.KILLED
    if summary is None:
        return RunState.UNKNOWN
    if summary.get("error"):
        return RunState.FAILED
    return RunState.INTERRUPTED if summary.get("interrupted") else RunState.ENDED


def number(value: Any) -> float | None:
    """A finite number, or `None`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def success_of(row: Row) -> float | None:
    """Share of solved episodes in a line of the metrics, over all tags."""
    if (told := number(row.get("success"))) is not None:
        return told
    judged = [
        (int(each.get("episodes") or 0), share)
        for each in _tags(row).values()
        if (share := number(each.get("success"))) is not None
    ]
    episodes = sum(count for count, _ in judged)
    return sum(count * share for count, share in judged) / episodes if episodes else None


def tokens_of(row: Row) -> float:
    """Sampled tokens of a batch."""
    if (told := number(row.get("tokens"))) is not None:
        return told
    return sum(
        (number(each.get("tokens")) or 0.0) * (number(each.get("episodes")) or 0.0)
        for each in _tags(row).values()
    )


def _tags(row: Row) -> Mapping[str, Row]:
    tags = row.get("tags")
    return tags if isinstance(tags, dict) else {}


def batch_curves(rows: Sequence[Row]) -> dict[str, Any]:
    """Columns of the training batches, by step, and of the validations."""
    train = [row for row in rows if row.get("mode") == "train"]
    seconds = _running(number(row.get("seconds")) or 0.0 for row in train)
    tokens = _running(tokens_of(row) for row in train)
    columns: dict[str, list[float | None]] = {
        "step": [float(row["step"]) for row in train],
        "seconds": seconds,
        "tokens": tokens,
        "reward": [number(row.get("reward")) for row in train],
        "success": [success_of(row) for row in train],
        "trajectories": [number(row.get("trajectories")) for row in train],
        "turns": [_mean_of(row, "turns") for row in train],
        "length": [_mean_of(row, "tokens") for row in train],
        "staleness": [mean_staleness(row.get("staleness") or {}) for row in train],
    }
    for tag in dict.fromkeys(tag for row in train for tag in _tags(row)):
        columns[f"reward {tag}"] = [number(_tags(row).get(tag, {}).get("reward")) for row in train]
        columns[f"success {tag}"] = [number(_tags(row).get(tag, {}).get("success")) for row in train]
    return {"train": thinned(columns), "validation": validations(rows)}


def _mean_of(row: Row, name: str) -> float | None:
    parts = [
        (number(each.get("episodes")) or 0.0, value)
        for each in _tags(row).values()
        if (value := number(each.get(name))) is not None
    ]
    count = sum(episodes for episodes, _ in parts)
    return sum(episodes * value for episodes, value in parts) / count if count else None


def validations(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each validation: step, success and reward, in all and by tag."""
    return [
        {
            "step": row["step"],
            "reward": number(row.get("reward")),
            "success": success_of(row),
            "episodes": row.get("trajectories"),
            "tags": {
                tag: {
                    "episodes": each.get("episodes"),
                    "success": number(each.get("success")),
                    "reward": number(each.get("reward")),
                    "interval": wilson(number(each.get("success")), each.get("episodes")),
                }
                for tag, each in _tags(row).items()
            },
        }
        for row in rows
        if row.get("mode") == "val"
    ]


def wilson(share: float | None, count: Any, z: float = 1.96) -> tuple[float, float] | None:
    """95 % confidence interval of a share of `count` episodes, by Wilson's score."""
    if share is None or not isinstance(count, int) or count < 1:
        return None
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def trainer_curves(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """All numeric columns of the trainer's figures; rows of one step are one point, later values win."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int):
            found = {name: value for name, each in row.items() if (value := number(each)) is not None}
            steps.setdefault(step, {}).update(found)
    names = dict.fromkeys(name for row in steps.values() for name in row)
    return thinned({name: [row.get(name) for row in steps.values()] for name in names})


def thinned(columns: Mapping[str, Sequence[float | None]], most: int = MOST_POINTS) -> dict[str, list[Any]]:
    """Columns of equal length with at most so many points: means of equal stretches."""
    length = max((len(column) for column in columns.values()), default=0)
    if length <= most:
        return {name: list(column) for name, column in columns.items()}
    edges = [length * place // most for place in range(most + 1)]
    return {
        name: [_mean(column[start:stop]) for start, stop in pairwise(edges)]
        for name, column in columns.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _running(values: Iterable[float]) -> list[float | None]:
    total, sums = 0.0, []
    for each in values:
        total += each
        sums.append(round(total, 3))
    return list(sums)


def mean_staleness(ages: Mapping[str, Any]) -> float | None:
    """Mean age of the tokens, in policy versions."""
    counts = {int(age): int(count) for age, count in ages.items()}
    total = sum(counts.values())
    return sum(age * count for age, count in counts.items()) / total if total else None


def staleness_sums(rows: Sequence[Row]) -> dict[str, int]:
    """Tokens by age, over all training batches."""
    ages: Counter[int] = Counter()
    for row in rows:
        if row.get("mode") == "train" and isinstance(row.get("staleness"), dict):
            ages.update({int(age): int(count) for age, count in row["staleness"].items()})
    return {str(age): ages[age] for age in sorted(ages)}


def progress_of(rows: Sequence[Row], live: Row | None, most_steps: int | None, now: float) -> dict[str, Any]:
    """Steps done, the share of all, and the estimated seconds until the end of a run that is playing."""
    done = sum(row.get("mode") == "train" for row in rows)
    last = max((row["step"] + 1 for row in rows if row.get("mode") == "train"), default=0)
    done, left = max(done, last), None
    if live is not None and isinstance(live.get("steps"), int):
        done = live["steps"]
        gained = done - int(live.get("steps_at_start") or 0)
        began = number(live.get("began"))
        passed = 0.0 if began is None else now - began
        if gained > 0 and most_steps:
            left = passed / gained * max(0, most_steps - done)
    share = min(1.0, done / most_steps) if most_steps else None
    return {"steps": done, "most_steps": most_steps, "share": share, "seconds_left": left}


def sparkline(rows: Sequence[Row]) -> list[float | None]:
    """Mean reward of the batches; of a run without training batches, of its validations."""
    train = [number(row.get("reward")) for row in rows if row.get("mode") == "train"]
    shown = train or [number(row.get("reward")) for row in rows]
    return [each if each is None else round(each, 4) for each in thinned({"reward": shown}, SPARKS)["reward"]]


def flow_of(ledger: Mapping[str, Any], reasons: Mapping[str, Any], trained: int | None) -> dict[str, Any]:
    """The ledger as a flow from opened to trained; the parts of each stage sum to the stage before it."""
    counts = {name: int(value) for name, value in ledger.items() if number(value) is not None}
    opened = counts.get("opened", sum(counts.values()))
    lost = {name: counts.get(name, 0) for name in ("failed", "cancelled", "stale", "filtered")}
    return {
        "opened": opened,
        "running": counts.get("running", 0),
        "waiting": counts.get("waiting", 0),
        "delivered": counts.get("delivered", 0),
        "trained": trained,
        **lost,
        "reasons": dict(sorted(reasons.items(), key=lambda each: -int(each[1]))[:MOST_REASONS]),
    }


MOST_REASONS = 30
"""Reasons that are shown one by one."""


def cost_of(
    prompt_tokens: float | None, tokens: float | None, prices: tuple[float, float] | None
) -> float | None:
    """`prices`: of a million prompt tokens, and of a million sampled ones."""
    if prices is None or tokens is None:
        return None
    return ((prompt_tokens or 0.0) * prices[0] + tokens * prices[1]) / 1e6


def budget_of(told: Row | None) -> dict[str, dict[str, float]] | None:
    """Spending and limit of each part of a budget, in a snapshot or a summary; `None` without a budget."""
    costs: Any = (told or {}).get("costs")
    if not isinstance(costs, dict) or not isinstance(costs.get("budget"), dict):
        return None
    total = costs.get("total") or {}
    spent = {
        "usd": number(total.get("usd")),
        "tokens": (number(total.get("prompt")) or 0.0) + (number(total.get("completion")) or 0.0),
        "hours": number(costs.get("hours")),
    }
    limits = {name: number(limit) for name, limit in costs["budget"].items()}
    return {
        name: {"spent": spent.get(name) or 0.0, "limit": limit}
        for name, limit in limits.items()
        if limit is not None
    }


def told_cost(told: Row | None) -> float | None:
    """Cost in dollars in a summary or a report; `None` if it has none."""
    found: Any = None if told is None else told.get("cost") or told.get("costs")
    for name in ("total", "usd"):
        found = found.get(name) if isinstance(found, dict) else None
    return number(found)
