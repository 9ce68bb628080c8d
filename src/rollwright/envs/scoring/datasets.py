"""One request answered with reasoning-gym. Runs in a fork of the scoring process, never anywhere else.

A question depends on its dataset, options and seed alone: the generators that look at global random state
find it seeded, and the process fixes Python's hash seed, on which the order of some of them depends.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy.random  # numpy loads it late otherwise, in every fork again
from reasoning_gym.factory import CURRICULA, DATASETS, create_dataset

from rollwright.envs.nearest import suggestion
from rollwright.envs.scoring.messages import LEVEL, Ask, Entry, Refusal, Request, Result, Score

_SET_HERE = ("seed", "size")
"""Options of every dataset that follow from the seed of the episode."""

_FULL_MARKS = 1.0


def respond(request: Request, lock_in: Callable[[], None]) -> Result:
    """`lock_in` is called when the question stands, before any code sees the answer."""
    options = _with_level(request.dataset, request.options)
    if isinstance(options, Refusal):
        return options
    if refusal := _wrong_config(request.dataset, options):
        return refusal
    if request.ask is Ask.CHECK:
        return Entry()
    random.seed(request.seed)
    numpy.random.seed(request.seed % 2**32)
    try:
        dataset = create_dataset(request.dataset, seed=request.seed, size=1, **options)
        entry = dataset[0]
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return Refusal(f"{request.dataset}: seed {request.seed} gives no question: {_line(error)}", False)
    if request.ask is Ask.ENTRY:
        answer = entry.get("answer")
        has_answer = isinstance(answer, str) and _score(dataset, answer, entry).value >= _FULL_MARKS
        return Entry(str(entry["question"]), answer if has_answer else None)
    lock_in()
    return _score(dataset, request.answer, entry)


def _score(dataset: Any, answer: str, entry: dict[str, Any]) -> Score:
    try:
        value = float(dataset.score_answer(answer, entry))
    except BaseException:  # noqa: BLE001 - an evaluated answer may also exit or interrupt
        return Score(0.0, failed=True)
    return Score(min(max(value, 0.0), _FULL_MARKS)) if math.isfinite(value) else Score(0.0, failed=True)


def _with_level(name: str, options: dict[str, Any]) -> dict[str, Any] | Refusal:
    """The options, with those that a level stands for below them."""
    if LEVEL not in options:
        return options
    level, rest = options[LEVEL], {key: value for key, value in options.items() if key != LEVEL}
    if name not in DATASETS:
        return rest
    if name not in CURRICULA:
        return Refusal(f"{name} has no levels; leave `{LEVEL}` out", True)
    curriculum = CURRICULA[name]()
    highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        return Refusal(f"{name} has no level {level!r}; accepted: 0 to {highest}", True)
    for key, each in curriculum.attributes.items():
        curriculum.set_attr_level(key, min(level, len(each.levels) - 1))
    made = curriculum.generate_configuration()
    below = {
        each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.name not in _SET_HERE
    }
    return {**below, **rest}


def _wrong_config(name: str, options: dict[str, Any]) -> Refusal | None:
    if name not in DATASETS:
        return Refusal(f"reasoning_gym has no dataset {name!r}{suggestion(name, DATASETS)}", True)
    config_class = DATASETS[name][1]
    accepted = [each.name for each in dataclasses.fields(config_class) if each.name not in _SET_HERE]
    for key in options:
        if key not in accepted:
            names = ", ".join(accepted)
            return Refusal(f"unknown setting {key!r}{suggestion(key, accepted)}; accepted: {names}", True)
    try:
        config = config_class(**options)
        if hasattr(config, "validate"):
            config.validate()
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return Refusal(f"{name} refuses {options}: {_line(error)}", True)
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
