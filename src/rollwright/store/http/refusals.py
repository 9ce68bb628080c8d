"""The store's errors as HTTP statuses, and back: the client raises what the server's store raised."""

from typing import NamedTuple

from rollwright.errors import RollwrightError
from rollwright.store.contract import (
    AttemptRefused,
    ImpossibleChange,
    NotFound,
    StoreError,
    StoreUnavailable,
)
from rollwright.store.http.messages import Refusal

_KINDS: dict[type[RollwrightError], tuple[int, str]] = {
    NotFound: (404, "not_found"),
    AttemptRefused: (409, "attempt_refused"),
    ImpossibleChange: (409, "impossible_change"),
    StoreUnavailable: (503, "unavailable"),
    StoreError: (400, "refused"),
}
"""By class; a subclass stands before its base."""

_CLASSES = {kind: error for error, (_, kind) in _KINDS.items()}


class HttpRefusal(Exception):
    """The server does not take the request, before any store has seen it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Fault(NamedTuple):
    """How an error is answered."""

    status: int
    refusal: Refusal


def fault_of(error: HttpRefusal | StoreError | StoreUnavailable) -> Fault:
    message = " ".join(str(error).splitlines())
    if isinstance(error, HttpRefusal):
        return Fault(error.status, Refusal(error.kind, message))
    status, kind = next(found for base, found in _KINDS.items() if isinstance(error, base))
    return Fault(status, Refusal(kind, message))


INTERNAL = Fault(500, Refusal("internal", "the server failed at this call; its log says why"))

PASSING_KINDS = frozenset({INTERNAL.refusal.kind, _KINDS[StoreUnavailable][1]})
"""The kinds of a status from 500: the same call may be answered a little later."""


def error_of(refusal: Refusal) -> RollwrightError:
    """What the client raises. A kind that only the server knows is a refusal all the same."""
    return _CLASSES.get(refusal.kind, StoreError)(refusal.message)
