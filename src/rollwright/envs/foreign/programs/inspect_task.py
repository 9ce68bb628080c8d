"""Plays single samples of an Inspect task by Inspect's own evaluation, with its solver, tools, limits and scorers.

Inspect allows one evaluation at a time in a process, so a process plays one episode at a time. Its log goes to a folder that
is removed after the episode.
"""

import os
import tempfile
from typing import Any

os.environ.setdefault("INSPECT_DISPLAY", "none")
os.environ["INSPECT_LOG_LEVEL"] = "error"

import inspect_ai
from inspect_ai._eval.loader import load_tasks
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float


class WrongSettings(Exception):
    is_settings = True


def _load(task: str, args: dict[str, Any]) -> Any:
    try:
        found = load_tasks([task], args)
    except BaseException as error:
        raise WrongSettings(f"task {task!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if len(found) != 1:
        names = ", ".join(each.name for each in found[:8]) or "none"
        raise WrongSettings(f"task {task!r} names {len(found)} tasks ({names}); name one, as FILE@TASK")
    return found[0]


def describe(task: str, args: dict[str, Any], scorer: str | None = None) -> dict[str, Any]:
    found = _load(task, args)
    if found.scorer is None:
        raise WrongSettings(f"task {task!r} has no scorer, so that there is no reward")
    return {"name": found.name, "samples": len(found.dataset), "sandbox": found.sandbox is not None}


class Samples:
    """The samples of one task."""

    def __init__(self, task: str, args: dict[str, Any], scorer: str | None) -> None:
        self._name, self._args, self._scorer = task, args, scorer
        self._task = _load(task, args)

    def _sample(self, seed: int) -> tuple[int, Any]:
        index = seed % len(self._task.dataset)
        return index, self._task.dataset[index]

    async def reset(self, seed: int) -> dict[str, Any]:
        index, sample = self._sample(seed)
        asked = sample.input
        if not isinstance(asked, str):
            asked = "\n\n".join(message.text for message in asked)
        target = sample.target if isinstance(sample.target, str) else list(sample.target)
        seen = {"input": asked, "target": target, "id": str(sample.id or index + 1)}
        return {"observation": asked, "task": seen}

    async def play(self, seed: int, base_url: str, api_key: str, ask: Any = None) -> dict[str, Any]:
        index, _ = self._sample(seed)
        # Retries are the run's business; a second try of the client would only hide the reason.
        model = get_model(
            "openai-api/rollwright/policy", base_url=base_url, api_key=api_key, memoize=False, max_retries=0
        )
        with tempfile.TemporaryDirectory(prefix="rollwright-inspect-") as logs:
            [log] = await inspect_ai.eval_async(
                _load(self._name, self._args),
                model=model,
                limit=(index, index + 1),
                epochs=1,
                fail_on_error=True,
                log_dir=logs,
                log_format="json",
                log_realtime=False,
                score_display=False,
                max_retries=0,
            )
            samples = log.samples or []
        if log.status != "success" or not samples:
            raise RuntimeError(log.error.message if log.error else f"the evaluation ended as {log.status}")
        [sample] = samples
        if sample.error is not None:
            raise RuntimeError(sample.error.message)
        return self._scored(sample)

    def _scored(self, sample: Any) -> dict[str, Any]:
        components: dict[str, float] = {}
        for name, score in (sample.scores or {}).items():
            components.update(_numbers(name, score.value))
        if not components:
            raise RuntimeError("no scorer gave a number")
        chosen = next(iter(components)) if self._scorer is None else self._scorer
        if chosen not in components:
            raise WrongSettings(f"scorer {chosen!r} is not one of {', '.join(components)}")
        metrics = {"messages": float(len(sample.messages))}
        if sample.limit is not None:
            metrics[f"limit_{sample.limit.type}"] = 1.0
        return {"reward": components[chosen], "components": components, "metrics": metrics}


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The numbers of a score: a grade as in Inspect's own metrics, the parts of a mapping or a list by their names."""
    if isinstance(value, dict):
        return {f"{name}.{key}": value_to_float()(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return {f"{name}.{place}": value_to_float()(each) for place, each in enumerate(value)}
    return {name: value_to_float()(value)}


async def make(task: str, args: dict[str, Any], scorer: str | None = None) -> Samples:
    return Samples(task, args, scorer)
