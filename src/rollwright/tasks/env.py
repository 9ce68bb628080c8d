"""A row of a task file as an environment: the row is the level, the template makes it a question.

The level given to `reset` is the row's number. The environment judges nothing: an answer ends the episode, and the
tag's rewards judge the whole trajectory against the row. It holds nothing but the row's number, so a fork is a copy.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Self

from rollwright.envs.base import EnvironmentFailure, PromptTemplates, Reset, Step
from rollwright.tasks.index import Row, TaskError
from rollwright.tasks.sources import TaskSource

DEFAULT_FIELDS = ("question", "prompt", "problem", "instruction", "input")
"""The field that is asked when no template is given: the first of these that the rows have."""

ANSWER_FIELD = "answer"
"""The field with the right answer, as the rewards `exact_match` and `math_verify` read it."""


class TaskEnv:
    """Asks one row, and takes one answer."""

    instruction = ""
    stateless = True

    def __init__(self, source: TaskSource, template: str, system: str = "") -> None:
        self._source = source
        self._template = template
        self._system = system
        self.task: Row = {}
        """The row that is played."""

    @property
    def prompts(self) -> PromptTemplates:
        return PromptTemplates(system=self._system, opening="{observation}", turn="{observation}")

    async def reset(self, seed: int) -> Reset:
        if not 0 <= seed < len(self._source):
            raise EnvironmentFailure(f"row {seed}: there are {len(self._source)}")
        self.task = self._source.row(seed)
        try:
            return Reset(fill(self._template, self.task), {})
        except TaskError as error:
            raise EnvironmentFailure(f"row {seed}: {error}") from error

    async def step(self, answer: str) -> Step:
        return Step("", 0.0, True, False, {})

    def actions(self) -> list[str]:
        """No finite list of answers exists."""
        return []

    def best_action(self) -> str | None:
        """The row's right answer, where it is plain: so a run can be tried out with the simulated engine and the oracle."""
        right = self.task.get(ANSWER_FIELD)
        if isinstance(right, list) and right:
            right = right[0]
        return str(right) if isinstance(right, str | int | float) else None

    def answer(self, action: str) -> str:
        """On a line of its own, behind whatever a simulated engine has said before it."""
        return f"\n{action}"

    def fork(self) -> Self:
        copy = type(self)(self._source, self._template, self._system)
        copy.task = self.task
        return copy

    async def close(self) -> None:
        pass


def default_template(row: Row, name: str) -> str:
    """Asks the first field of `DEFAULT_FIELDS` that the row has."""
    for field in DEFAULT_FIELDS:
        if field in row:
            return f"{{{field}}}"
    raise TaskError(
        f"{name}: has the fields {', '.join(row)}; say by `template` how a row is asked, for example {{{next(iter(row), 'x')}}}"
    )


def check_template(template: str, row: Row, name: str) -> None:
    """Raises a `TaskError` unless the template can be filled from this row."""
    try:
        fill(template, row)
    except TaskError as error:
        raise TaskError(f"{name}: {error}") from error


def fill(template: str, row: Mapping[str, object]) -> str:
    """The template with the row's fields in it. Only whole fields and their items are reached (`{a}`, `{a[b]}`): what a
    row holds is data, so no attribute of it is looked up."""
    try:
        for _, field, _, _ in Formatter().parse(template):
            if field is not None and "." in re.sub(r"\[[^]]*\]", "", field):
                raise TaskError(f"template: `{{{field}}}` is no field; accepted: {_known(row)}")
        return template.format_map(row)
    except KeyError as error:
        raise TaskError(f"template: `{{{error.args[0]}}}` is no field; accepted: {_known(row)}") from error
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise TaskError(f"template: cannot be filled: {error}") from error


def _known(row: Mapping[str, object]) -> str:
    return ", ".join(f"{{{field}}}" for field in row)
