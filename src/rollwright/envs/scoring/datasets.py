"""Questions of reasoning-gym and what answers to them are worth. Runs in a judge's process, never anywhere else.

A question depends on its dataset, options and seed alone: the generators that look at global random state find it
seeded, and the process fixes Python's hash seed, on which the order of some of them depends. What an answer is worth
depends on the question and the answer alone: each is judged with a fresh copy of the question, the same random state and
the same decimal context, and with sympy's caches empty.
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
from rollwright.envs.scoring.protocol import LEVEL, NoQuestion, Score
from rollwright.envs.scoring.readers import ALGEBRAIC, READING
from rollwright.registry import suggestion

_SET_HERE = ("seed", "size")
"""Options of every dataset that follow from the seed of the episode."""

_FULL_MARKS = 1.0

_PROBES = ("[1]", "1 + 1", "x")
"""Answers that an evaluating scorer would evaluate."""

_MAX_IMPORTS = 50
"""Modules that a scorer may load late over one answer: sympy loads about twenty."""


@dataclasses.dataclass(frozen=True)
class PosedQuestion:
    """A question that stands."""

    name: str
    seed: int
    dataset: Any
    entry: dict[str, Any]
    context: decimal.Context
    """As making it left it: decimal_arithmetic sets the precision of its answers there."""

    @property
    def text(self) -> str:
        return str(self.entry["question"])

    def known_answer(self) -> str | None:
        """The dataset's own answer, if its scorer gives it full marks."""
        answer = self.entry.get("answer")
        if not isinstance(answer, str):
            return None
        return answer if judge(self, answer).score.value >= _FULL_MARKS else None


@dataclasses.dataclass(frozen=True)
class AnswerVerdict:
    score: Score
    was_stopped: bool = False
    """Whether the scorer tried to evaluate something."""


def make(name: str, options: dict[str, Any], seed: int) -> PosedQuestion | NoQuestion:
    """The question of a seed."""
    complete = _with_level(name, options)
    if isinstance(complete, NoQuestion):
        return complete
    if refusal := _wrong_config(name, complete):
        return refusal
    _begin(seed, decimal.Context())
    try:
        dataset = create_dataset(name, seed=seed, size=1, **complete)
        entry = dataset[0]
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return NoQuestion(f"{name}: seed {seed} gives no question: {_line(error)}", False)
    return PosedQuestion(name, seed, dataset, entry, decimal.getcontext().copy())


def check(name: str, options: dict[str, Any]) -> NoQuestion | None:
    """Whether questions can be made and answers judged without evaluating them."""
    question = make(name, options, 0)
    if isinstance(question, NoQuestion):
        return question if question.is_config else None
    answers = [answer] if isinstance(answer := question.entry.get("answer"), str) else []
    for each in (*answers, *_PROBES):
        _, event = _scored(question, each)
        if event is not None:
            return NoQuestion(
                f"{name} cannot be judged: its scorer evaluates answers as code ({event}); use another dataset",
                True,
            )
    return None


def judge(question: PosedQuestion, answer: str) -> AnswerVerdict:
    """What an answer is worth. `MemoryError` is the caller's: the process is not what it was."""
    value, event = _scored(question, answer)
    if event is not None or READING.refused is not None:
        return AnswerVerdict(Score(0.0, refused=True), event is not None)
    if value is None or not math.isfinite(value):
        return AnswerVerdict(Score(0.0, failed=True))
    return AnswerVerdict(Score(min(max(value, 0.0), _FULL_MARKS)))


def _scored(question: PosedQuestion, answer: str) -> tuple[float | None, str | None]:
    """What the scorer says, `None` if it raises; and what it was stopped from doing."""
    for _ in range(_MAX_IMPORTS):
        _begin(question.seed, question.context)
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
        if watched.event != guard.IMPORT or not _load(watched.detail):
            return value, watched.event
    return None, guard.IMPORT


def _load(module: str) -> bool:
    """Whether a module could be loaded that the scorer wanted late: one of a package that is in use already."""
    if module.partition(".")[0] not in sys.modules or module in sys.modules:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _begin(seed: int, context: decimal.Context) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    decimal.setcontext(context.copy())


def _with_level(name: str, options: dict[str, Any]) -> dict[str, Any] | NoQuestion:
    """The options, with those that a level stands for below them."""
    if LEVEL not in options:
        return options
    level, rest = options[LEVEL], {key: value for key, value in options.items() if key != LEVEL}
    if name not in DATASETS:
        return rest
    if name not in CURRICULA:
        return NoQuestion(f"{name} has no levels; leave `{LEVEL}` out", True)
    curriculum = CURRICULA[name]()
    highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        return NoQuestion(f"{name} has no level {level!r}; accepted: 0 to {highest}", True)
    for key, each in curriculum.attributes.items():
        curriculum.set_attr_level(key, min(level, len(each.levels) - 1))
    made = curriculum.generate_configuration()
    below = {
        each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.name not in _SET_HERE
    }
    return {**below, **rest}


def _wrong_config(name: str, options: dict[str, Any]) -> NoQuestion | None:
    if name not in DATASETS:
        return NoQuestion(f"reasoning_gym has no dataset {name!r}{suggestion(name, DATASETS)}", True)
    config_class = DATASETS[name][1]
    accepted = [each.name for each in dataclasses.fields(config_class) if each.name not in _SET_HERE]
    for key in options:
        if key not in accepted:
            names = ", ".join(accepted)
            return NoQuestion(f"unknown setting {key!r}{suggestion(key, accepted)}; accepted: {names}", True)
    try:
        config = config_class(**options)
        if hasattr(config, "validate"):
            config.validate()
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return NoQuestion(f"{name} refuses {options}: {_line(error)}", True)
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
