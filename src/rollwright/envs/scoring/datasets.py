"""Creates questions of reasoning-gym and scores answers. Runs only in a judge's process.

A question depends on its dataset, options and seed alone: global random state is seeded for generators that use it, and
the process has a fixed hash seed, which determines the order in some generators. A score depends on the question and the
answer alone: each answer is scored with a fresh copy of the question, the same random state and decimal context, and
empty sympy caches.
"""

import copy
import dataclasses
import decimal
import importlib
import math
import random
import sys
from typing import Any

import numpy.random
from reasoning_gym.factory import CURRICULA, DATASETS, create_dataset
from sympy.core.cache import clear_cache

from rollwright.envs.scoring import guard
from rollwright.envs.scoring.protocol import LEVEL, QuestionError, Score
from rollwright.envs.scoring.readers import ALGEBRAIC, READING
from rollwright.registry import suggestion

_SET_HERE = ("seed", "size")
"""Options of every dataset that this module sets from the episode's seed."""

_FULL_SCORE = 1.0

_PROBES = ("[1]", "1 + 1", "x")
"""Answers that reveal whether a scorer evaluates them as code."""

_MAX_IMPORTS = 50
"""Late imports allowed per answer: sympy needs about twenty."""


@dataclasses.dataclass(frozen=True)
class PosedQuestion:
    """A created question with its dataset."""

    name: str
    seed: int
    dataset: Any
    entry: dict[str, Any]
    context: decimal.Context
    """Decimal context after creation: decimal_arithmetic sets the precision of its answers there."""

    @property
    def text(self) -> str:
        return str(self.entry["question"])

    def known_answer(self) -> str | None:
        """The dataset's own answer, if its scorer gives it the full score."""
        answer = self.entry.get("answer")
        if not isinstance(answer, str):
            return None
        return answer if judge(self, answer).score.value >= _FULL_SCORE else None


@dataclasses.dataclass(frozen=True)
class AnswerVerdict:
    """Score of an answer."""

    score: Score
    was_stopped: bool = False
    """Whether the guard stopped the scorer from evaluating something."""


def make(name: str, options: dict[str, Any], seed: int) -> PosedQuestion | QuestionError:
    """Creates the question of a seed."""
    complete = _with_level(name, options)
    if isinstance(complete, QuestionError):
        return complete
    if refusal := _check_config(name, complete):
        return refusal
    _reset_state(seed, decimal.Context())
    try:
        dataset = create_dataset(name, seed=seed, size=1, **complete)
        entry = dataset[0]
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return QuestionError(f"{name}: seed {seed} cannot create a question: {_one_line(error)}", False)
    return PosedQuestion(name, seed, dataset, entry, decimal.getcontext().copy())


def check(name: str, options: dict[str, Any]) -> QuestionError | None:
    """Checks that questions can be created and answers scored without evaluation; returns the error, if any."""
    question = make(name, options, 0)
    if isinstance(question, QuestionError):
        return question if question.is_config else None
    answers = [answer] if isinstance(answer := question.entry.get("answer"), str) else []
    for each in (*answers, *_PROBES):
        _, event = _run_scorer(question, each)
        if event is not None:
            return QuestionError(
                f"{name} cannot be judged: its scorer evaluates answers as code ({event}); use another dataset",
                True,
            )
    return None


def judge(question: PosedQuestion, answer: str) -> AnswerVerdict:
    """Scores an answer. A `MemoryError` propagates, because the process may be damaged."""
    value, event = _run_scorer(question, answer)
    if event is not None or READING.refused is not None:
        return AnswerVerdict(Score(0.0, refused=True), event is not None)
    if value is None or not math.isfinite(value):
        return AnswerVerdict(Score(0.0, failed=True))
    return AnswerVerdict(Score(min(max(value, 0.0), _FULL_SCORE)))


def _run_scorer(question: PosedQuestion, answer: str) -> tuple[float | None, str | None]:
    """The scorer's value, `None` if it raised; and the audit event at which the guard stopped it, if any."""
    # The guard also stops lazy imports; these are done here, outside the guard, and the scorer runs again.
    for _ in range(_MAX_IMPORTS):
        _reset_state(question.seed, question.context)
        entry = copy.deepcopy(question.entry)
        READING.begin(answer, entry.get("answer"))
        value: float | None = None
        with guard.watch() as watched:
            try:
                value = float(question.dataset.score_answer(answer, entry))
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - foreign code may raise anything
                value = None
        if question.name in ALGEBRAIC:
            clear_cache()
        if watched.event != guard.IMPORT or not _import_lazily(watched.detail):
            return value, watched.event
    return None, guard.IMPORT


def _import_lazily(module: str) -> bool:
    """Imports a module that a scorer loads lazily, if its package is already in use; returns whether it did."""
    if module.partition(".")[0] not in sys.modules or module in sys.modules:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _reset_state(seed: int, context: decimal.Context) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    decimal.setcontext(context.copy())


def _with_level(name: str, options: dict[str, Any]) -> dict[str, Any] | QuestionError:
    """The options merged over those of the requested curriculum level."""
    if LEVEL not in options:
        return options
    level, rest = options[LEVEL], {key: value for key, value in options.items() if key != LEVEL}
    if name not in DATASETS:
        return rest
    if name not in CURRICULA:
        return QuestionError(f"{name} has no levels; leave `{LEVEL}` out", True)
    curriculum = CURRICULA[name]()
    highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        return QuestionError(f"{name} has no level {level!r}; accepted: 0 to {highest}", True)
    for key, each in curriculum.attributes.items():
        curriculum.set_attr_level(key, min(level, len(each.levels) - 1))
    made = curriculum.generate_configuration()
    below = {
        each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.name not in _SET_HERE
    }
    return {**below, **rest}


def _check_config(name: str, options: dict[str, Any]) -> QuestionError | None:
    if name not in DATASETS:
        return QuestionError(f"reasoning_gym has no dataset {name!r}{suggestion(name, DATASETS)}", True)
    config_class = DATASETS[name][1]
    accepted = [each.name for each in dataclasses.fields(config_class) if each.name not in _SET_HERE]
    for key in options:
        if key not in accepted:
            names = ", ".join(accepted)
            return QuestionError(
                f"unknown setting {key!r}{suggestion(key, accepted)}; accepted: {names}", True
            )
    try:
        config = config_class(**options)
        if hasattr(config, "validate"):
            config.validate()
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return QuestionError(f"{name} refuses {options}: {_one_line(error)}", True)
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
