"""Rows of the database, and their conversion to records.

A row type's fields have the order of the columns that are selected for it.
"""

from typing import Any

import msgspec
from sqlalchemy import ColumnElement

from rollwright.store.checks import EMPTY, config_from_bytes, unpack
from rollwright.store.errors import StoreError
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.store.sql.schema import attempts, rollouts

_ROLLOUT_STATUS = {status.value: status for status in RolloutStatus}
_ATTEMPT_STATUS = {status.value: status for status in AttemptStatus}
"""Faster than calling the enums, for every row."""


def stored_config(data: bytes) -> RolloutConfig:
    """Decodes a config that the store wrote itself: an unreadable one means damage, not an invalid call."""
    try:
        return config_from_bytes(data)
    except StoreError as error:
        raise ValueError(str(error)) from error


class RolloutRow(msgspec.Struct, frozen=True, gc=False):
    """A rollout with the attempt that holds it, if any."""

    place: int
    rollout_id: str
    status: str
    start_time: float
    end_time: float | None
    mode: str | None
    resources_id: str | None
    config_data: bytes
    metadata: bytes
    priority: int
    tries: int
    attempts: int
    attempt_id: str | None
    worker_id: str | None
    attempt_start: float | None
    last_heartbeat_time: float | None
    lease_expires: float | None
    last_append_id: str | None
    attempt_metadata: bytes | None
    input: bytes = b""
    """Not selected where only the transition rules are needed."""

    @property
    def config(self) -> RolloutConfig:
        return stored_config(self.config_data)

    @property
    def rollout_status(self) -> RolloutStatus:
        return _ROLLOUT_STATUS[self.status]

    @property
    def attempt_status(self) -> AttemptStatus:
        """The status of the attempt that holds the rollout: always equal to the rollout's."""
        return _ATTEMPT_STATUS[self.status]

    def record(self) -> Rollout:
        return Rollout(
            self.rollout_id,
            unpack(self.input),
            _ROLLOUT_STATUS[self.status],
            self.start_time,
            self.end_time,
            self.mode,
            self.resources_id,
            self.config,
            unpack(self.metadata),
            self.priority,
        )

    def attempt(self) -> Attempt:
        """The attempt that holds the rollout."""
        assert self.attempt_id is not None
        assert self.attempt_start is not None
        return Attempt(
            self.rollout_id,
            self.attempt_id,
            self.attempts,
            _ATTEMPT_STATUS[self.status],
            self.attempt_start,
            None,
            self.worker_id,
            self.last_heartbeat_time,
            self.lease_expires,
            None,
            unpack(self.attempt_metadata or EMPTY),
        )

    def attempted(self) -> AttemptedRollout:
        """The rollout with the attempt that holds it."""
        return AttemptedRollout(
            self.rollout_id,
            unpack(self.input),
            _ROLLOUT_STATUS[self.status],
            self.start_time,
            self.end_time,
            self.mode,
            self.resources_id,
            self.config,
            unpack(self.metadata),
            self.priority,
            attempt=self.attempt(),
        )


class AttemptRow(msgspec.Struct, frozen=True, gc=False):
    """An attempt that has ended."""

    attempt_id: str
    sequence_id: int
    status: str
    start_time: float
    end_time: float
    worker_id: str | None
    last_heartbeat_time: float
    lease_expires: float | None
    reason: str | None
    metadata: bytes

    def record(self, rollout_id: str) -> Attempt:
        return Attempt(
            rollout_id,
            self.attempt_id,
            self.sequence_id,
            _ATTEMPT_STATUS[self.status],
            self.start_time,
            self.end_time,
            self.worker_id,
            self.last_heartbeat_time,
            self.lease_expires,
            self.reason,
            unpack(self.metadata),
        )


ROLLOUT_COLUMNS: list[ColumnElement[Any]] = [
    rollouts.c["config" if name == "config_data" else name] for name in RolloutRow.__struct_fields__
]
RULE_COLUMNS = ROLLOUT_COLUMNS[:-1]
"""All columns but the input."""
ATTEMPT_COLUMNS: list[ColumnElement[Any]] = [attempts.c[name] for name in AttemptRow.__struct_fields__]
