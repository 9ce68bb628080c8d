"""Adapter for reasoning-gym: an episode is one question of a dataset and one answer.

The question depends on the dataset, its options and the seed alone. Judges in sandboxes create questions and score
answers, so this module does not import reasoning-gym, and no answer is evaluated as code. An answer that kills its judge
or violates the dataset's grammar scores 0 and is counted in the metrics; a judge that cannot be started is a failure and
never a reward.
"""

import copy
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Self

from rollwright.envs import scoring
from rollwright.envs.base import Info, PromptTemplates, Reset, Step
from rollwright.envs.parsing import ANSWER_PATTERN, AnswerFormat
from rollwright.envs.scoring.protocol import LEVEL
from rollwright.envs.scoring.service import SCORE_SECONDS
from rollwright.errors import ConfigError, RollwrightError

PROMPTS = PromptTemplates(
    system="You solve puzzles. Think as long as you need, then commit to one answer.",
    opening="{instruction}\n\n{observation}",
    turn="{observation}",
)


class ReasoningGym:
    """One question of a reasoning-gym dataset per episode."""

    def __init__(
        self,
        dataset: str,
        *,
        level: int | None = None,
        format_penalty: float = 0.0,
        score_seconds: float = SCORE_SECONDS,
        action_pattern: str = ANSWER_PATTERN,
        answer_template: str | None = None,
        **options: Any,
    ) -> None:
        """`options` are passed to the dataset and override those of `level`, a level of its curriculum from 0 on.
        `score_seconds` is the time limit for scoring an answer."""
        if find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning-gym is not installed; install rollwright[reasoning]")
        if format_penalty > 0:
            raise ConfigError(f"format_penalty must be zero or negative, got {format_penalty}")
        if score_seconds <= 0:
            raise ConfigError(f"score_seconds must be above 0, got {score_seconds}")
        self._dataset = dataset
        self._options: Mapping[str, Any] = options if level is None else {LEVEL: level, **options}
        self._format_penalty = format_penalty
        self._score_seconds = score_seconds
        self._format = AnswerFormat(action_pattern, answer_template)
        self._seed = 0
        self._entry: scoring.Entry | None = None
        """The open question; `None`: no episode is running."""
        scoring.shared().check(dataset, self._options)

    @property
    def instruction(self) -> str:
        return f"Answer the question below. {self._format.request('your answer', 'your answer')}"

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    async def reset(self, seed: int) -> Reset:
        self._entry = await scoring.shared().entry(self._dataset, self._options, seed)
        self._seed = seed
        return Reset(self._entry.question, {"success": False})

    async def step(self, answer: str) -> Step:
        if self._entry is None:
            raise RollwrightError(f"reasoning_gym:{self._dataset}: no question is open; call reset first")
        found = self._format.find(answer) or None
        score = scoring.Score(0.0)
        if found is not None:
            score = await scoring.shared().score(
                self._dataset, self._options, self._seed, found, seconds=self._score_seconds
            )
        self._entry = None
        info: Info = {
            "action": found,
            "valid": found is not None,
            "penalty": self._format_penalty if found is None else 0.0,
            "success": score.value >= 1.0,
            "metrics": {
                "scorer_killed": float(score.killed),
                "scorer_failed": float(score.failed),
                "scorer_refused": float(score.refused),
            },
        }
        return Step("", score.value, terminated=True, truncated=False, info=info)

    async def close(self) -> None:
        self._entry = None

    def fork(self) -> Self:
        return copy.copy(self)

    def actions(self) -> Sequence[str]:
        return ()

    def best_action(self) -> str | None:
        return self._entry.answer if self._entry else None

    def answer(self, action: str) -> str:
        return self._format.write(action)
