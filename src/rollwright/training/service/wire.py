"""Bodies of the batch service's requests and responses, as JSON or MessagePack."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollwright.training.rows import Row

JSON, MSGPACK = "application/json", "application/msgpack"
LONGEST_WAIT = 60.0
"""Seconds for which one request waits for a batch; proxies end requests that take longer."""

LeaseId = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class BatchRow(msgspec.Struct, frozen=True):
    """One token sequence; all lists have the same length."""

    rollout_id: str
    group_id: str
    token_ids: list[int]
    mask: list[int]
    """1 where the token was sampled and its loss counts."""
    logprobs: list[float]
    """Log-probabilities as the engine sampled; 0 where nothing was sampled."""
    versions: list[int]
    """Policy version of each token; -1 where nothing was sampled."""
    weights: list[float]
    """Weight of the token's turn in its tree, 1 in a chain; 0 where the mask is 0."""
    advantages: list[float]
    """By the run's `training.advantage`; 0 where the mask is 0."""
    temperatures: list[float] | None
    """Sampling temperature of each token, 0 where it is unknown; null: unknown for all."""
    reward: float
    """Of the whole rollout; equal in all its rows."""
    success: float | None

    @classmethod
    def of(cls, row: Row) -> "BatchRow":
        return cls(
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            token_ids=row.token_ids.tolist(),
            mask=list(row.mask),
            logprobs=row.logprobs.tolist(),
            versions=row.versions.tolist(),
            weights=row.weights.tolist(),
            advantages=row.advantages.tolist(),
            temperatures=None if row.temperatures is None else row.temperatures.tolist(),
            reward=row.reward,
            success=row.success,
        )


class HandedBatch(msgspec.Struct, frozen=True):
    """A batch under a lease."""

    step: int
    """Number of the batch, from 0. Every batch is trained once, in this order."""
    lease: LeaseId
    lease_seconds: float
    """Without `renew_lease` the batch goes to another trainer after so long."""
    version: int
    """Version of the weights to begin with: those that the last batch came back with."""
    folder: str
    """Where the run has these weights; also by `GET /v1/weights`."""
    temperature: float
    """Sampling temperature of tokens that do not say theirs."""
    rows: Sequence[BatchRow]


class GetBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trainer: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Name of the trainer, for people."""
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT)] = 20.0
    """Time to wait for a batch."""


class BatchReply(msgspec.Struct, frozen=True):
    state: Literal["batch", "wait", "done"]
    """`batch`: here is one. `wait`: none yet, ask again. `done`: the run has ended, there will be none."""
    batch: HandedBatch | None = None


class RenewLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseId


class LeaseReply(msgspec.Struct, frozen=True):
    lease_seconds: float


class ReleaseBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseId
    """The batch goes to the next trainer that asks."""


class FinishBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acknowledges a batch, with the weights that came of it: by `folder`, or uploaded, or none if it was `skipped`."""

    lease: LeaseId
    folder: str | None = None
    """A folder as transformers saves a model, which the run can read."""
    uploaded: dict[str, str] | None = None
    """SHA-256 of each file that was uploaded under this lease, by name."""
    skipped: str | None = None
    """Why the batch changed nothing."""
    metrics: dict[str, float] = {}
    """Figures of the step, for the run's metrics: `loss`, `grad_norm`, `entropy`, and any others."""


class FinishReply(msgspec.Struct, frozen=True):
    version: int
    """Version of the weights from now on."""


class WeightsFile(msgspec.Struct, frozen=True):
    name: str
    size: int


class WeightsReply(msgspec.Struct, frozen=True):
    version: int
    files: list[WeightsFile]


class StatusReply(msgspec.Struct, frozen=True):
    step: int | None
    """Number of the offered batch; null: none is."""
    trainer: str | None
    """Who has it; null: nobody."""
    version: int
    finished: int
    """Acknowledged batches."""
    lost_leases: int


class RefusedBody(msgspec.Struct, frozen=True):
    """Why a request was refused: the body of every response with a status from 400."""

    kind: str
    """For programs."""
    message: str
    """For people: one line."""


class Refusal(Exception):
    """A request is refused."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


CALLS: dict[str, tuple[type[Any], type[Any], str]] = {
    "get_batch": (GetBatch, BatchReply, "Take the next batch under a lease; waits for one."),
    "renew_lease": (RenewLease, LeaseReply, "Keep the batch for another `lease_seconds`."),
    "release_batch": (ReleaseBatch, LeaseReply, "Give the batch back untrained."),
    "finish_batch": (FinishBatch, FinishReply, "Acknowledge the batch once, with new weights."),
}
"""Request, response and summary of each `POST /v1/NAME`."""


def encode(value: Any, media_type: str) -> bytes:
    return msgspec.msgpack.encode(value) if media_type == MSGPACK else msgspec.json.encode(value)


def decode(content: bytes, kind: type[Any], media_type: str) -> Any:
    try:
        if media_type == MSGPACK:
            return msgspec.msgpack.decode(content, type=kind)
        return msgspec.json.decode(content or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(422, "invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, "malformed", f"the body cannot be read: {error}") from None


def document() -> dict[str, Any]:
    """The OpenAPI document of the service."""
    kinds = [each for asked, given, _ in CALLS.values() for each in (asked, given)]
    kinds += [WeightsReply, StatusReply, RefusedBody]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, found, strict=True))

    def content(kind: type[Any], *media_types: str) -> dict[str, Any]:
        return {each: {"schema": schemas[kind]} for each in media_types or (JSON, MSGPACK)}

    def operation(name: str, summary: str, given: type[Any]) -> dict[str, Any]:
        refused = {"description": "Refused.", "content": content(RefusedBody)}
        return {
            "operationId": name,
            "summary": summary,
            "responses": {"200": {"description": "The answer.", "content": content(given)}, "4XX": refused},
        }

    paths: dict[str, Any] = {
        f"/v1/{name}": {
            "post": {
                **operation(name, summary, given),
                "requestBody": {"required": True, "content": content(asked)},
            }
        }
        for name, (asked, given, summary) in CALLS.items()
    }
    paths["/v1/status"] = {"get": operation("status", "What is offered, and who has it.", StatusReply)}
    paths["/v1/weights"] = {"get": operation("weights", "Files of the current weights.", WeightsReply)}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    paths["/v1/weights/{name}"] = {
        "get": {
            "operationId": "download_weights",
            "summary": "One file of the current weights.",
            "parameters": [name],
            "responses": {"200": {"description": "The file.", "content": binary}},
        }
    }
    lease = {"name": "lease", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/uploads/{lease}/{name}"] = {
        "put": {
            **operation("upload_weights", "One file of new weights, before `finish_batch`.", LeaseReply),
            "parameters": [lease, name],
            "requestBody": {"required": True, "content": binary},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollwright batches", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
