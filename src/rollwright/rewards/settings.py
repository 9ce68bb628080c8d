"""Settings of rewards, one model for each kind, and the plug point `rewards`.

Always true: `kind` chooses the model. A string in a list of rewards stands for that kind with its default settings;
`module:name` and the name of an entry point stand for a user-defined function or class. Names in a list are unique.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from rollwright.errors import ConfigError
from rollwright.registry import Registry
from rollwright.settings import Settings, choose_kind

REWARDS: Registry[Any] = Registry(
    "rewards",
    "reward",
    {
        "exact_match": "rollwright.rewards.checks:ExactMatch",
        "regex": "rollwright.rewards.checks:RegexMatch",
        "contains": "rollwright.rewards.checks:Contains",
        "length": "rollwright.rewards.checks:LengthPenalty",
        "json_schema": "rollwright.rewards.checks:JsonSchema",
        "returned": "rollwright.rewards.checks:Returned",
        "unit_tests": "rollwright.rewards.unit_tests:UnitTests",
        "math_verify": "rollwright.rewards.math_answers:MathVerify",
        "judge": "rollwright.rewards.judge:RubricJudge",
        "group_judge": "rollwright.rewards.group_judge:GroupJudge",
    },
    protocol="rollwright.rewards.composition:RewardComponent",
    key="rewards",
)
"""A built-in reward is made with its settings below; a user-defined one with `options` as keyword arguments."""

NAME = re.compile(r"[A-Za-z0-9_\-]{1,100}")
"""Pattern of a reward's name."""

RewardName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
"""Name without a dot; a dot separates the name from the key of a returned mapping."""


class RewardSettings(Settings):
    """Settings of every kind of reward."""

    name: RewardName | None = None
    """Name of the component. Unset: the kind, or the name of the function."""


class ShippedReward(RewardSettings):
    """Settings of every built-in kind."""

    weight: float = 1.0
    """Factor of its value in the total."""
    time_limit: PositiveFloat = 30.0
    """Seconds for one evaluation; a longer one is a failure, never a 0."""


class FunctionReward(RewardSettings):
    """A user-defined function or class; `kind: module:name` does the same."""

    kind: Literal["function"]
    """Chooses this kind."""
    function: Annotated[str, Field(pattern=r"^[\w.\-]+(:[\w.]+)?$")]
    """`module:name` or an entry point. A function, plain or async, declares the parameters that it needs: `task`,
    `trajectory`, `answer`, `messages`, `returned`. A class has the methods of `RewardComponent`, or its objects can be
    called like such a function."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, or further ones of the function."""
    weight: float | None = None
    """Factor of its value in the total. Unset: the decorator's weight, or 1."""
    time_limit: PositiveFloat | None = None
    """Seconds for one evaluation. Unset: the decorator's limit, or 30."""
    concurrency: PositiveInt = 16
    """Concurrent calls of a plain function, each in a thread; a call that hangs occupies its thread."""


class AnswerSettings(ShippedReward):
    """Settings of kinds that check the text of the answer."""

    extract: str | None = None
    """Regular expression that extracts the answer from the text: the first group of its last match, or the whole match if
    it has no group. Without a match the answer is empty. Unset: the whole text, stripped."""


class ExactMatchReward(AnswerSettings):
    """1 if the answer equals a field of the task, else 0."""

    kind: Literal["exact_match"]
    """Chooses this kind."""
    field: str = "answer"
    """Field of the task with the right answer, or a list of right answers."""
    ignore_case: bool = False
    """Whether case is ignored."""
    ignore_punctuation: bool = False
    """Whether punctuation is ignored."""
    ignore_articles: bool = False
    """Whether the words `a`, `an` and `the` are ignored."""
    numeric: bool = False
    """Whether two texts that are numbers are compared as numbers: `1,000` is `1000.0`, and `$5` is `5`."""


class RegexReward(AnswerSettings):
    """1 if a regular expression matches the answer, else 0."""

    kind: Literal["regex"]
    """Chooses this kind."""
    pattern: str
    """The expression, in the syntax of the `regex` package, a superset of `re`."""
    whole: bool = False
    """Whether it must match the whole answer."""
    ignore_case: bool = False
    """Whether case is ignored."""
    seconds: PositiveFloat = 1.0
    """Time limit of one search in seconds; a longer one is a failure."""


class ContainsReward(AnswerSettings):
    """1 if the answer contains given texts, else 0."""

    kind: Literal["contains"]
    """Chooses this kind."""
    texts: tuple[str, ...] = ()
    """The texts; or `field`."""
    field: str | None = None
    """Field of the task with a text, or a list of texts."""
    needs: Literal["all", "any", "none"] = "all"
    """How many of the texts must be contained."""
    ignore_case: bool = False
    """Whether case is ignored."""

    @model_validator(mode="after")
    def _name_texts_once(self) -> "ContainsReward":
        if bool(self.texts) == (self.field is not None):
            raise ValueError("texts: either this or field is needed, and not both")
        return self


class LengthReward(ShippedReward):
    """A penalty for length: 0 up to a limit, then falling linearly to -1."""

    kind: Literal["length"]
    """Chooses this kind."""
    limit: NonNegativeInt
    """Length up to which there is no penalty."""
    ramp: PositiveInt = 1
    """Length above the limit at which the full penalty is reached."""
    unit: Literal["characters", "tokens"] = "characters"
    """`characters` of the answer, or sampled `tokens` of all turns on the path to it."""


class JsonSchemaReward(AnswerSettings):
    """1 if the answer is JSON that matches a schema, else 0."""

    kind: Literal["json_schema"]
    """Chooses this kind."""
    json_schema: dict[str, Any] | None = None
    """The schema; or `field`."""
    field: str | None = None
    """Field of the task with the schema."""

    @model_validator(mode="after")
    def _name_schema_once(self) -> "JsonSchemaReward":
        if (self.json_schema is None) == (self.field is None):
            raise ValueError("json_schema: either this or field is needed, and not both")
        return self


class ReturnedReward(ShippedReward):
    """The number, or the mapping of named numbers, that the agent's function returned."""

    kind: Literal["returned"]
    """Chooses this kind."""
    key: str | None = None
    """Key of the returned mapping to use. Unset: the whole value."""


class UnitTestsReward(ShippedReward):
    """Runs the code of the answer with the task's tests in the Python sandbox: 1 if all pass, else 0."""

    kind: Literal["unit_tests"]
    """Chooses this kind."""
    field: str = "tests"
    """Field of the task with the tests: a list of `{"input": …, "output": …}` (standard input and output), of
    `{"call": "f(2)", "returns": 4}`, or Python text with assertions."""
    partial: bool = False
    """Whether the value is the share of tests that pass."""
    seconds: PositiveFloat = 5.0
    """Time limit in seconds for the code and one test; longer code has not passed."""
    memory_mb: PositiveInt = 256
    """Memory of one sandbox."""
    concurrency: PositiveInt = 4
    """Concurrent sandboxes."""
    max_tests: PositiveInt = 100
    """Limit of tests of a task; more are a failure."""
    time_limit: PositiveFloat = 600.0
    """Seconds for all tests of one answer, including the wait for a sandbox; more is a failure, never a 0."""
    allow_unconfined: bool = False
    """True: on a machine without isolation, code runs with resource limits alone. False: that is a failure."""


class MathVerifyReward(ShippedReward):
    """1 if the answer is mathematically equal to a field of the task, by the package `math-verify`, else 0."""

    kind: Literal["math_verify"]
    """Chooses this kind."""
    field: str = "answer"
    """Field of the task with the right answer, as text or LaTeX, or a list of right answers."""
    cpu_seconds: PositiveInt = 10
    """CPU seconds for one answer. An answer that needs more is not verified and scores 0."""
    memory_mb: PositiveInt = 512
    """Memory for one answer. An answer that needs more is not verified and scores 0."""
    concurrency: PositiveInt = 4
    """Concurrent answers."""
    time_limit: PositiveFloat = 300.0
    """Seconds for one answer, including the wait for a process; more is a failure, never a 0."""
    allow_unconfined: bool = False
    """True: on a machine without isolation, the process runs with resource limits alone. False: that is a failure."""


class JudgeSettings(ShippedReward):
    """Settings of both judges: how they call their model."""

    rubric: Annotated[str, Field(min_length=1)]
    """Criteria by which answers are judged."""
    policy: dict[str, Any] | None = None
    """Policy of the judge, as under `policy`. Unset: the run's own."""
    fields: tuple[str, ...] | None = None
    """Fields of the task that the judge is shown. Unset: all."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: PositiveInt = 512
    """Limit of tokens of one reply."""
    retries: NonNegativeInt = 2
    """Retries after a reply without a verdict; then it is a failure."""
    max_answer: PositiveInt = 20_000
    """Characters of an answer that are shown; the middle of a longer one is replaced by a note."""
    concurrency: PositiveInt = 16
    """Concurrent calls."""
    time_limit: PositiveFloat = 120.0
    """Seconds for one call, without its time in the queue; a longer one is a failure."""
    cache_size: NonNegativeInt = 100_000
    """Number of cached verdicts, so that the same question is asked once."""

    @property
    def model_name(self) -> str:
        """Name of the judge's model in price tables; empty: the run's own policy judges."""
        told = self.policy or {}
        return str(told.get("model") or told.get("kind") or "")


class JudgeReward(JudgeSettings):
    """Score of a model for the answer by a rubric, from 0 to 1."""

    kind: Literal["judge"]
    """Chooses this kind."""


class GroupJudgeReward(JudgeSettings):
    """Rank of the answer in its group by a model: 1 for the best, 0 for the worst, evenly spaced."""

    kind: Literal["group_judge"]
    """Chooses this kind."""
    rounds: PositiveInt = 2
    """Number of rankings to average; every second one shows the answers in reverse order."""
    seed: int = 0
    """Seed of the order in which answers are shown."""


AnyReward = Annotated[
    FunctionReward
    | ExactMatchReward
    | RegexReward
    | ContainsReward
    | LengthReward
    | JsonSchemaReward
    | ReturnedReward
    | UnitTestsReward
    | MathVerifyReward
    | JudgeReward
    | GroupJudgeReward,
    Field(discriminator="kind"),
]


def default_name(settings: RewardSettings) -> str:
    """Name of a reward from its settings, before a function is imported."""
    if settings.name is not None:
        return settings.name
    if isinstance(settings, FunctionReward):
        return settings.function.rpartition(":")[2].rpartition(".")[2]
    return str(getattr(settings, "kind", ""))


def _make_list(value: Any) -> Any:
    """A single reward stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _choose_kind(value: Any) -> Any:
    return choose_kind(value, REWARDS, "function", own="function")


def _refuse_same_names(rewards: tuple[AnyReward, ...]) -> tuple[AnyReward, ...]:
    names = [default_name(each) for each in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rewards have the name {name!r}; give each a `name` of its own")
    return rewards


RewardList = Annotated[
    tuple[Annotated[AnyReward, BeforeValidator(_choose_kind)], ...],
    BeforeValidator(_make_list),
    AfterValidator(_refuse_same_names),
]
"""The type of a `rewards` key."""

_LIST: TypeAdapter[tuple[AnyReward, ...]] = TypeAdapter(RewardList)


def parse_rewards(value: Any) -> tuple[AnyReward, ...]:
    """Reads a list of rewards; a `ConfigError` names the first wrong key in one line."""
    try:
        return _LIST.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"rewards{where}: {reason}") from error
