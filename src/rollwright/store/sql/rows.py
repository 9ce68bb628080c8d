"""Rows as operations read them, and the records made of them.

The order of a row's fields is the order of the columns that are selected for it.
"""

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement

from rollwright.store.checks import config_from_bytes, unpack
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.store.sql.schema import attempts, rollouts


class RolloutRow(NamedTuple):
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
    input: bytes

    @property
    def config(self) -> RolloutConfig:
        return config_from_bytes(self.config_data)

    def record(self) -> Rollout:
        return Rollout(
            self.rollout_id,
            unpack(self.input),
            RolloutStatus(self.status),
            self.start_time,
            self.end_time,
            self.mode,
            self.resources_id,
            self.config,
            unpack(self.metadata),
            self.priority,
        )

    def attempted(self, attempt: Attempt) -> AttemptedRollout:
        return AttemptedRollout(
            self.rollout_id,
            unpack(self.input),
            RolloutStatus(self.status),
            self.start_time,
            self.end_time,
            self.mode,
            self.resources_id,
            self.config,
            unpack(self.metadata),
            self.priority,
            attempt=attempt,
        )


class AttemptRow(NamedTuple):
    place: int
    sequence_id: int
    attempt_id: str
    status: str
    start_time: float
    end_time: float | None
    worker_id: str | None
    last_heartbeat_time: float
    lease_expires: float | None
    reason: str | None
    metadata: bytes
    last_append_id: str | None

    def record(self, rollout_id: str) -> Attempt:
        return Attempt(
            rollout_id,
            self.attempt_id,
            self.sequence_id,
            AttemptStatus(self.status),
            self.start_time,
            self.end_time,
            self.worker_id,
            self.last_heartbeat_time,
            self.lease_expires,
            self.reason,
            unpack(self.metadata),
        )


class RuleRow(NamedTuple):
    """What the rules need to know of a rollout, without its input."""

    place: int
    rollout_id: str
    status: str
    config_data: bytes
    tries: int
    attempts: int

    @property
    def config(self) -> RolloutConfig:
        return config_from_bytes(self.config_data)


ROLLOUT_COLUMNS: list[ColumnElement[Any]] = [
    rollouts.c["config" if name == "config_data" else name] for name in RolloutRow._fields
]
RULE_COLUMNS: list[ColumnElement[Any]] = [
    rollouts.c["config" if name == "config_data" else name] for name in RuleRow._fields
]
ATTEMPT_COLUMNS: list[ColumnElement[Any]] = [attempts.c[name] for name in AttemptRow._fields]
