"""The report of an evaluation as plain data, from its samples. Pure.

Always true:
- Equal samples give an equal report, whatever order they came in: nothing in it depends on the clock, the machine, the name
  of the run or the order in which episodes ended.
- An episode that failed is counted as failed and is in no figure; a task without any result is named.
- Every estimate is a mean over tasks and says over how many; see `intervals`. Where tasks of a known difficulty were played
  first, each stands for as many as its stratum has among those that the figure is of.

`docs/evaluation.md` describes the fields; `SCHEMA` changes with their meaning.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rollwright.evaluation.intervals import TaskValues, mean, task_values
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.statistics import majority_at_k, pass_at_k
from rollwright.evaluation.strata import TaskOrder

SCHEMA = "rollwright.evaluation/1"

MOST_VALUES = 20
"""Distinct values that a field may have to be broken down by without being asked for."""

SHOWN_ANSWER = 200
"""Characters of an answer in the report; votes are counted on the whole answer."""


@dataclass(frozen=True)
class PlayedSample:
    """One episode with a result."""

    tag: str
    task: str
    """Identifies the task among those of its tag, in any evaluation."""
    place: int
    """Place of the task in the evaluation's order."""
    member: int
    reward: float
    success: float | None
    answer: str | None
    """What is voted on; `None`: the episode is no single answer."""
    turns: int
    tokens: int
    stop: str
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FailedSample:
    """One episode without a result."""

    tag: str
    task: str
    place: int
    member: int
    cause: str


@dataclass(frozen=True)
class EvaluationPlan:
    """What was to be played."""

    samples: int
    ks: Sequence[int]
    plan: StoppingPlan
    seed: int
    tasks: Sequence[tuple[str, str]]
    """Tag and task of all tasks that were to be played, in their order."""
    meta: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Fields of the rows, by tag and task."""
    by: Sequence[str] | None = None
    order: TaskOrder | None = None
    """By known difficulty; `None`: shuffled."""


def build_report(
    about: Mapping[str, Any],
    plan: EvaluationPlan,
    samples: Iterable[PlayedSample],
    failed: Iterable[FailedSample],
    *,
    stopped_early: bool = False,
) -> dict[str, Any]:
    """`about`: what was evaluated (model, sampling), which comes first in the report."""
    ordered = sorted(samples, key=lambda each: (each.place, each.member))
    missing = sorted(failed, key=lambda each: (each.place, each.member))
    table = _Table(plan, ordered, missing)
    everything = range(len(plan.tasks))
    touched = {each.place for each in ordered} | {each.place for each in missing}
    wanted = len(touched) if stopped_early else len(plan.tasks)
    left = wanted * plan.samples - len(ordered) - len(missing)
    return {
        "schema": SCHEMA,
        **about,
        "plan": {
            "tasks": len(plan.tasks),
            "samples": plan.samples,
            "k": list(plan.ks),
            "confidence": plan.plan.confidence,
            "half_width": plan.plan.half_width,
            "looks": list(plan.plan.looks),
            "order": "shuffled" if plan.order is None else "known difficulty",
            "strata": _strata(plan, touched),
        },
        "state": "incomplete" if left > 0 else "stopped early" if stopped_early else "complete",
        "tasks": {
            "played": len(touched),
            "with_result": len({each.place for each in ordered}),
            "without_result": len(touched) - len({each.place for each in ordered}),
        },
        "episodes": {"finished": len(ordered), "failed": len(missing), "not_played": max(0, left)},
        "metric": "success" if table.judged else "reward",
        "overall": table.result(everything, "overall"),
        "tags": {
            tag: table.result([p for p in everything if plan.tasks[p][0] == tag], f"tag {tag}")
            for tag in dict.fromkeys(tag for tag, _ in plan.tasks)
        },
        "by": _breakdown(plan, table),
        "failures": _causes(missing),
        "results": [table.task_row(place) for place in everything if place in touched],
    }


class _Table:
    """Samples by task, and the figures of any set of tasks."""

    def __init__(
        self, plan: EvaluationPlan, samples: Sequence[PlayedSample], failed: Sequence[FailedSample]
    ) -> None:
        self._plan = plan
        self._samples: dict[int, list[PlayedSample]] = {}
        self._failed: dict[int, list[FailedSample]] = {}
        for each in samples:
            self._samples.setdefault(each.place, []).append(each)
        for gone in failed:
            self._failed.setdefault(gone.place, []).append(gone)
        self.judged = bool(samples) and all(each.success is not None for each in samples)
        """Whether every episode says whether it solved its task."""

    def result(self, places: Sequence[int], name: str) -> dict[str, Any]:
        """Figures of these tasks. `name`: seeds the bootstrap."""
        groups = [self._samples[each] for each in places if each in self._samples]
        flat = [each for group in groups for each in group]
        known = self.judged and bool(groups)
        order = self._plan.order
        totals = None if order is None else order.totals(places)
        strata = [0 if order is None else order.strata[group[0].place] for group in groups]

        def estimate(value: Callable[[list[PlayedSample]], float | None], figure: str) -> Any:
            """Of a share that is no mean over the samples."""
            found = [
                (one, stratum)
                for group, stratum in zip(groups, strata, strict=True)
                if (one := value(group)) is not None
            ]
            tasks = TaskValues(
                [one for one, _ in found], None, None if totals is None else [s for _, s in found], totals
            )
            return self._estimate(tasks, len(groups) - len(found), f"{name}, {figure}", share=True)

        def average(scores: list[list[float]], figure: str, *, share: bool) -> Any:
            tasks = task_values(scores, strata, totals, share=share)
            return self._estimate(tasks, 0, f"{name}, {figure}", share=share)

        def passed(k: int) -> Callable[[list[PlayedSample]], float | None]:
            return lambda group: (
                pass_at_k(len(group), sum(each.success == 1 for each in group), k)
                if len(group) >= k
                else None
            )

        def voted(k: int) -> Callable[[list[PlayedSample]], float | None]:
            return lambda group: (
                majority_at_k([(each.answer, each.success or 0.0) for each in group], k)
                if len(group) >= k
                else None
            )

        binary = all(each.success in (0.0, 1.0) for each in flat)
        answers = known and all(each.answer is not None for each in flat)
        samples = self._plan.samples
        success = average(
            [[each.success or 0.0 for each in group] for group in groups], "success", share=True
        )
        reward = average([[each.reward for each in group] for group in groups], "reward", share=False)
        weights = self._weights(places)
        return {
            "tasks": sum(each in self._samples or each in self._failed for each in places),
            "episodes": len(flat),
            "failed": sum(len(self._failed.get(each, ())) for each in places),
            "score": success if self.judged else reward,
            "success": success if known else None,
            "reward": reward,
            f"avg@{samples}": success if self.judged else reward,
            "pass@k": {
                str(k): success if k == 1 and binary else estimate(passed(k), f"pass@{k}")
                for k in self._plan.ks
            }
            if known
            else None,
            "majority@k": {str(k): estimate(voted(k), f"majority@{k}") for k in self._plan.ks}
            if answers
            else None,
            "components": _mean_components(flat, weights),
            "turns": _weighted([(weights[each.place], each.turns) for each in flat]),
            "tokens": _weighted([(weights[each.place], each.tokens) for each in flat]),
            "stops": dict(sorted(Counter(each.stop for each in flat).items())),
        }

    def _weights(self, places: Sequence[int]) -> dict[int, float]:
        """How many tasks each task with a result stands for among these."""
        with_result = [each for each in places if each in self._samples]
        if (order := self._plan.order) is None:
            return dict.fromkeys(with_result, 1.0)
        totals, played = order.totals(places), order.totals(with_result)
        return {each: totals[order.strata[each]] / played[order.strata[each]] for each in with_result}

    def _estimate(self, tasks: TaskValues, short: int, name: str, *, share: bool) -> dict[str, Any] | None:
        if not tasks.values:
            return None
        plan = self._plan.plan
        found = plan.interval(tasks, share=share)
        seed = _seed(self._plan.seed, name)
        drawn = tasks.bootstrap(seed, share=share, confidence=plan.look_confidence)
        return {
            "value": tasks.mean,
            "error": tasks.error,
            "low": None if found is None else found.low,
            "high": None if found is None else found.high,
            "bootstrap": None if drawn is None else [drawn.low, drawn.high],
            "tasks": len(tasks.values),
            "short": short,
        }

    def task_row(self, place: int) -> dict[str, Any]:
        (tag, task), order = self._plan.tasks[place], self._plan.order
        played = self._samples.get(place, [])
        scores = [each.reward if each.success is None else each.success for each in played]
        return {
            "tag": tag,
            "task": task,
            "score": mean(scores) if scores else None,
            "reward": mean([each.reward for each in played]) if played else None,
            "failed": len(self._failed.get(place, ())),
            "stratum": None if order is None else order.strata[place],
            "meta": {
                name: value
                for name, value in self._plan.meta.get((tag, task), {}).items()
                if isinstance(value, str | int | float | bool) and len(str(value)) <= SHOWN_ANSWER
            },
            "samples": [
                {
                    "member": each.member,
                    "reward": each.reward,
                    "success": each.success,
                    "answer": None if each.answer is None else each.answer[:SHOWN_ANSWER],
                    "turns": each.turns,
                    "tokens": each.tokens,
                    "stop": each.stop,
                }
                for each in played
            ],
        }


def _strata(plan: EvaluationPlan, touched: Collection[int]) -> list[dict[str, Any]] | None:
    """Expected scores, tasks and played tasks of each stratum."""
    if plan.order is None:
        return None
    totals, played = plan.order.totals(), plan.order.totals(sorted(touched))
    return [
        {"expected": label, "tasks": totals[stratum], "played": played[stratum]}
        for stratum, label in enumerate(plan.order.labels)
    ]


def _weighted(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Mean of (weight, value)."""
    if not pairs:
        return None
    return math.fsum(weight * value for weight, value in pairs) / math.fsum(weight for weight, _ in pairs)


def _mean_components(samples: Sequence[PlayedSample], weights: Mapping[int, float]) -> dict[str, float]:
    names = sorted({name for each in samples for name in each.components})
    found = {
        name: _weighted(
            [(weights[each.place], each.components[name]) for each in samples if name in each.components]
        )
        for name in names
    }
    return {name: value for name, value in found.items() if value is not None}


def _breakdown(plan: EvaluationPlan, table: _Table) -> dict[str, dict[str, Any]]:
    """Results by the values of the rows' fields."""
    found: dict[str, dict[str, Any]] = {}
    for name in _fields(plan):
        places: dict[str, list[int]] = {}
        for place, key in enumerate(plan.tasks):
            row = plan.meta.get(key, {})
            if name in row:
                places.setdefault(_text(row[name]), []).append(place)
        if places:
            found[name] = {value: table.result(places[value], f"{name} {value}") for value in sorted(places)}
    return found


def _fields(plan: EvaluationPlan) -> Sequence[str]:
    """The fields to break down by: those asked for, or those with a few values that each stand for several tasks."""
    if plan.by is not None:
        return plan.by
    values: dict[str, Counter[str]] = {}
    for row in plan.meta.values():
        for name, value in row.items():
            if isinstance(value, str | int | bool):
                values.setdefault(name, Counter())[_text(value)] += 1
    total = len(plan.meta)
    return [
        name
        for name, counts in sorted(values.items())
        if 2 <= len(counts) <= min(MOST_VALUES, total // 3) and sum(counts.values()) == total
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _causes(failed: Sequence[FailedSample]) -> list[dict[str, Any]]:
    counts = Counter(each.cause for each in failed)
    return [
        {"cause": cause, "count": count}
        for cause, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "big")
