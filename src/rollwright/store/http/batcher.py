"""Concurrent calls share a request.

Always true: a call is sent in the tick of the event loop in which it was made, unless `MAX_IN_FLIGHT` requests are in
flight; then it goes with the next. So a single caller never waits, and many concurrent callers pay for few requests.
Each caller gets its own result or its own error.
"""

import asyncio
from collections import deque
from typing import Any, NamedTuple

import msgspec

from rollwright.errors import RollwrightError
from rollwright.store.call_kinds import Result, StoreCall
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.http.connection import ServerConnection
from rollwright.store.http.errors import PASSING_KINDS, error_of
from rollwright.store.http.protocol import BATCH, MAX_BATCH, BatchEntry, RawOutcome

MAX_IN_FLIGHT = 2
"""Requests at a time: the store works on one while the other travels, and further calls collect meanwhile."""

MAX_BATCH_BYTES = 256 * 1024
"""A call that would make a batch larger is sent alone: the others do not wait for its bytes."""

_encoder = msgspec.msgpack.Encoder()
_outcomes = msgspec.msgpack.Decoder(list[RawOutcome])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}


class _Pending(NamedTuple):
    call: str
    body: bytes
    answered: "asyncio.Future[Any]"


class CallBatcher:
    """Sends short calls, those of the same moment in one request. Belongs to one event loop."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._waiting: deque[_Pending] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._flush_is_due = False

    async def send(self, call: StoreCall[Result]) -> Result:
        """For calls that are short and do not wait."""
        body = encode(call)
        if len(body) > MAX_BATCH_BYTES:
            raw = await self._connection.post(call.name, body)
        else:
            loop = asyncio.get_running_loop()
            pending = _Pending(call.name, body, loop.create_future())
            self._waiting.append(pending)
            if not self._flush_is_due:
                self._flush_is_due = True
                loop.call_soon(self._flush)
            raw = await pending.answered
        return decode(call, raw)

    async def close(self) -> None:
        """Cancels requests in flight; their callers get an error that the store is closed."""
        while self._waiting:
            _fail(self._waiting.popleft(), StoreError("the store is closed"))
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _flush(self) -> None:
        self._flush_is_due = False
        while self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
            batch: list[_Pending] = []
            size = 0
            while self._waiting and len(batch) < MAX_BATCH:
                if batch and size + len(self._waiting[0].body) > MAX_BATCH_BYTES:
                    break
                pending = self._waiting.popleft()
                if not pending.answered.done():  # its caller still waits
                    size += len(pending.body)
                    batch.append(pending)
            if batch:
                task = asyncio.get_running_loop().create_task(self._deliver(batch))
                self._in_flight.add(task)
                task.add_done_callback(self._delivered)

    def _delivered(self, task: "asyncio.Task[None]") -> None:
        self._in_flight.discard(task)
        self._flush()

    async def _deliver(self, batch: list[_Pending]) -> None:
        try:
            if len(batch) == 1:
                _answer(batch[0], await self._connection.post(batch[0].call, batch[0].body))
                return
            entries = [BatchEntry(each.call, msgspec.Raw(each.body)) for each in batch]
            raw = await self._connection.post(BATCH, _encoder.encode(entries))
            again = [
                pending
                for pending, outcome in zip(batch, _outcomes.decode(raw), strict=True)
                if not _settle(pending, outcome)
            ]
            if again:
                await asyncio.gather(*[self._deliver([pending]) for pending in again])
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            for pending in batch:
                _fail(pending, StoreUnavailable(f"the server's answer cannot be read: {error}"))
        except RollwrightError as error:
            for pending in batch:
                _fail(pending, type(error)(str(error)))
        except asyncio.CancelledError:
            for pending in batch:
                _fail(pending, StoreError("the store is closed"))
            raise


def encode(call: StoreCall[Any]) -> bytes:
    try:
        return _encoder.encode(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{call.name} was given what is not plain data: {error}") from error


def decode(call: StoreCall[Result], raw: bytes) -> Result:
    decoder = _decoders.get(call.name)
    if decoder is None:
        decoder = _decoders[call.name] = msgspec.msgpack.Decoder(call.reply)
    try:
        result: Result = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"{call.name}: the server's answer cannot be read: {error}") from error
    return result


def _settle(pending: _Pending, outcome: RawOutcome) -> bool:
    """Resolves the caller's future; returns False for a transient failure, when the call must be sent again."""
    if isinstance(outcome.answer, msgspec.Raw):
        _answer(pending, bytes(outcome.answer))
        return True
    if isinstance(outcome.refusal, msgspec.UnsetType) or outcome.refusal.kind in PASSING_KINDS:
        return False
    _fail(pending, error_of(outcome.refusal))
    return True


def _answer(pending: _Pending, raw: bytes) -> None:
    if not pending.answered.done():
        pending.answered.set_result(raw)


def _fail(pending: _Pending, error: RollwrightError) -> None:
    if not pending.answered.done():
        pending.answered.set_exception(error)
