"""Rewards that check the text of the answer, without a subprocess or an engine.

Always true: the value depends on the attempt alone. A regular expression that exceeds its time limit on an answer is a
failure. References in a JSON schema are never loaded from a file or the network.
"""

import asyncio
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import regex

from rollwright.errors import ConfigError
from rollwright.rewards.failure import NoReward, describe
from rollwright.rewards.functions import Value
from rollwright.rewards.scored import ScoredAttempt
from rollwright.rewards.settings import (
    AnswerSettings,
    ContainsReward,
    ExactMatchReward,
    JsonSchemaReward,
    LengthReward,
    RegexReward,
    ReturnedReward,
)

_EXTRACT_SECONDS = 1.0
"""Time limit for extracting the answer; a well-behaved expression takes microseconds."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?")


class ExactMatch:
    """See `ExactMatchReward`."""

    def __init__(self, name: str, settings: ExactMatchReward) -> None:
        self._settings = settings
        self._extract = AnswerReader(name, settings)

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        right = texts_of(attempt.task_field(self._settings.field), self._settings.field)
        answer = self._normalize(await self._extract.read(attempt))
        return float(any(answer == self._normalize(each) for each in right))

    async def close(self) -> None:
        """Releases nothing: no resource is held."""

    def _normalize(self, text: str) -> "str | Decimal":
        settings = self._settings
        if settings.numeric and (number := read_number(text)) is not None:
            return number
        if settings.ignore_case:
            text = text.casefold()
        if settings.ignore_punctuation:
            text = text.translate(_NO_PUNCTUATION)
        if settings.ignore_articles:
            text = _ARTICLES.sub(" ", text)
        return " ".join(text.split())


class RegexMatch:
    """See `RegexReward`."""

    def __init__(self, name: str, settings: RegexReward) -> None:
        flags = regex.IGNORECASE if settings.ignore_case else 0
        compiled = compile_pattern(settings.pattern, f"reward {name}: pattern", flags)
        self._find = compiled.fullmatch if settings.whole else compiled.search
        self._seconds = settings.seconds
        self._extract = AnswerReader(name, settings)

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        answer = await self._extract.read(attempt)
        return float(await search(self._find, answer, self._seconds) is not None)

    async def close(self) -> None:
        """Releases nothing: no resource is held."""


class Contains:
    """See `ContainsReward`."""

    def __init__(self, name: str, settings: ContainsReward) -> None:
        self._settings = settings
        self._extract = AnswerReader(name, settings)

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        settings = self._settings
        texts: Sequence[str] = settings.texts
        if settings.field is not None:
            texts = texts_of(attempt.task_field(settings.field), settings.field)
        fold: Callable[[str], str] = str.casefold if settings.ignore_case else str
        answer = fold(await self._extract.read(attempt))
        found = [fold(each) in answer for each in texts]
        if settings.needs == "none":
            return float(not any(found))
        return float(all(found) if settings.needs == "all" else any(found))

    async def close(self) -> None:
        """Releases nothing: no resource is held."""


class LengthPenalty:
    """See `LengthReward`."""

    def __init__(self, name: str, settings: LengthReward) -> None:
        self._settings = settings

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        settings = self._settings
        if settings.unit == "tokens":
            length = sum(turn.completion_tokens for turn in attempt.turns)
        else:
            length = len(attempt.answer)
        over = max(0, length - settings.limit)
        return 0.0 - min(1.0, over / settings.ramp)  # 0.0 instead of -0.0 without a penalty

    async def close(self) -> None:
        """Releases nothing: no resource is held."""


class JsonSchema:
    """See `JsonSchemaReward`."""

    def __init__(self, name: str, settings: JsonSchemaReward) -> None:
        try:
            import jsonschema
            import referencing
        except ImportError as error:
            raise ConfigError(
                f"reward {name}: json_schema needs the package `jsonschema`: pip install rollwright[rewards]"
            ) from error
        self._settings = settings
        self._extract = AnswerReader(name, settings)
        self._library: Any = jsonschema
        self._no_references: Any = referencing.Registry()
        self._validator: Any = None
        if settings.json_schema is not None:
            try:
                self._validator = self._make_validator(settings.json_schema)
            except jsonschema.SchemaError as error:
                raise ConfigError(f"reward {name}: json_schema is not a schema: {error.message}") from error

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        field = self._settings.field
        validator = self._validator
        if field is not None:
            try:
                validator = self._make_validator(attempt.task_field(field))
            except self._library.SchemaError as error:
                raise NoReward(f"the task's {field!r} is not a JSON schema: {error.message}") from error
        answer = await self._extract.read(attempt)
        fenced = _FENCED.match(answer)
        try:
            value = msgspec.json.decode(fenced.group(1) if fenced else answer)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return 0.0
        # In a thread, because a pattern in the schema may run up to its time limit.
        return float(await asyncio.to_thread(validator.is_valid, value))

    async def close(self) -> None:
        """Releases nothing: no resource is held."""

    def _make_validator(self, schema: Any) -> Any:
        kind = self._library.validators.validator_for(schema, default=self._library.Draft202012Validator)
        kind.check_schema(schema)
        kind = self._library.validators.extend(kind, {"pattern": _check_pattern})
        return kind(schema, registry=self._no_references)


class Returned:
    """See `ReturnedReward`."""

    def __init__(self, name: str, settings: ReturnedReward) -> None:
        self._key = settings.key

    async def evaluate(self, attempt: ScoredAttempt) -> Value:
        value = attempt.returned
        if value is None:
            raise NoReward("the agent returned nothing; a number or named numbers are accepted")
        if self._key is None:
            return value  # type: ignore[no-any-return]  # checked with every other value
        if not isinstance(value, dict) or self._key not in value:
            raise NoReward(f"the agent returned nothing under the key {self._key!r}")
        return value[self._key]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Releases nothing: no resource is held."""


class AnswerReader:
    """Extracts the answer from the text with the pattern `extract`."""

    def __init__(self, name: str, settings: AnswerSettings) -> None:
        self._pattern = (
            None if settings.extract is None else compile_pattern(settings.extract, f"reward {name}: extract")
        )

    async def read(self, attempt: ScoredAttempt) -> str:
        text = attempt.answer.strip()
        pattern = self._pattern
        if pattern is None:
            return text

        def last(text: str, **limits: Any) -> Any:
            found = None
            for found in pattern.finditer(text, **limits):  # noqa: B007 - the last one counts
                pass
            return found

        found = await search(last, text, _EXTRACT_SECONDS)
        if found is None:
            return ""
        return (found.group(1 if pattern.groups else 0) or "").strip()


def compile_pattern(pattern: str, where: str, flags: int = 0) -> Any:
    """Compiles a regular expression; raises a `ConfigError` for an invalid one."""
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise ConfigError(f"{where}: not a regular expression: {error}") from error


async def search(find: Callable[..., Any], text: str, seconds: float) -> Any:
    """Searches in a thread without the GIL, so that a slow expression blocks nothing else."""
    try:
        return await asyncio.to_thread(find, text, timeout=seconds, concurrent=True)
    except TimeoutError as error:
        raise NoReward(f"the expression did not come to an end on the answer within {seconds:g} s") from error


def texts_of(value: Any, field: str) -> Sequence[str]:
    """The texts in a field of a task, which holds one text or a list."""
    many = value if isinstance(value, list | tuple) else [value]
    if not many:
        raise NoReward(f"the task's {field!r} is an empty list")
    for each in many:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            kind = type(each).__name__
            raise NoReward(
                f"the task's {field!r} holds a {kind}; a text, a number or a list of them is accepted"
            )
    return [str(each) for each in many]


def read_number(text: str) -> Decimal | None:
    """The number that a text consists of; `None` if it is not a number."""
    plain = text.strip().removesuffix(".").lstrip("$€£").strip()
    is_percent = plain.endswith("%")
    plain = plain.removesuffix("%").strip()
    if not plain or not _NUMBER.fullmatch(plain):
        return None
    try:
        number = Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None
    return number / 100 if is_percent else number


def _check_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Any:
    """Implements the JSON Schema keyword `pattern` with a time limit."""
    if not validator.is_type(instance, "string"):
        return
    try:
        found = regex.search(pattern, instance, timeout=_EXTRACT_SECONDS, concurrent=True)
    except TimeoutError as error:
        raise NoReward(f"the schema's pattern {pattern!r} did not come to an end on the answer") from error
    except regex.error as error:
        raise NoReward(f"the schema's pattern {pattern!r}: {describe(error)}") from error
    if found is None:
        from jsonschema import ValidationError

        yield ValidationError(f"{instance!r} does not match {pattern!r}")
