"""The store's errors as HTTP statuses, and back: the client raises the error that the server's store raised."""

from typing import NamedTuple

import msgspec

from rollwright.errors import RollwrightError
from rollwright.store.errors import (
    AttemptRefused,
    ImpossibleChange,
    NotFound,
    StoreError,
    StoreUnavailable,
)

_KINDS: dict[type[RollwrightError], tuple[int, str]] = {
    NotFound: (404, "not_found"),
    AttemptRefused: (409, "attempt_refused"),
    ImpossibleChange: (409, "impossible_change"),
    StoreUnavailable: (503, "unavailable"),
    StoreError: (400, "refused"),
}
"""By class; a subclass stands before its base."""

_CLASSES = {kind: error for error, (_, kind) in _KINDS.items()}


class ErrorBody(msgspec.Struct, frozen=True):
    """Why a call failed: the body of every reply with a status from 400."""

    kind: str
    """For programs."""
    message: str
    """For people: one line."""


class HttpRefusal(Exception):
    """The server rejects the request before any store has seen it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class ErrorReply(NamedTuple):
    """An error as a reply: its status and its body."""

    status: int
    body: ErrorBody


def error_reply(error: HttpRefusal | StoreError | StoreUnavailable) -> ErrorReply:
    message = " ".join(str(error).splitlines())
    if isinstance(error, HttpRefusal):
        return ErrorReply(error.status, ErrorBody(error.kind, message))
    status, kind = next(found for base, found in _KINDS.items() if isinstance(error, base))
    return ErrorReply(status, ErrorBody(kind, message))


INTERNAL = ErrorReply(500, ErrorBody("internal", "the server failed at this call; its log says why"))

PASSING_KINDS = frozenset({INTERNAL.body.kind, _KINDS[StoreUnavailable][1]})
"""The kinds of a status from 500: a retry of the same call may succeed."""


def error_of(body: ErrorBody) -> RollwrightError:
    """The error that the client raises; a `StoreError` for a kind that it does not know."""
    return _CLASSES.get(body.kind, StoreError)(body.message)
