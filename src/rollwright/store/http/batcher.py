"""Calls that are made at the same time share a request.

Always true: a call is sent in the very tick in which it was made, unless `MAX_IN_FLIGHT` requests are under way;
then it goes with the next. So a lone caller waits for nobody, and many callers at once pay for few requests. Each
caller gets its own answer or its own error.
"""

import asyncio
from collections import deque
from typing import Any, NamedTuple

import msgspec

from rollwright.errors import RollwrightError
from rollwright.store.contract import StoreError, StoreUnavailable
from rollwright.store.http.catalogue import BATCH, MAX_BATCH
from rollwright.store.http.connection import Connection
from rollwright.store.http.messages import Answer, Call, Entry, RawOutcome
from rollwright.store.http.refusals import PASSING_KINDS, error_of

MAX_IN_FLIGHT = 2
"""Requests at a time: the store works on one while the other travels, and the next calls gather meanwhile."""

MAX_BATCH_BYTES = 256 * 1024
"""A call that would swell a batch beyond this goes alone: the others do not wait for its bytes."""

_encoder = msgspec.msgpack.Encoder()
_outcomes = msgspec.msgpack.Decoder(list[RawOutcome])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}


class _Letter(NamedTuple):
    call: str
    body: bytes
    answered: "asyncio.Future[Any]"


class Batcher:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: deque[_Letter] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._flush_is_due = False

    async def send(self, call: Call[Answer]) -> Answer:
        """For calls that are short and do not wait."""
        body = encode(call)
        if len(body) > MAX_BATCH_BYTES:
            raw = await self._connection.post(call.name, body)
        else:
            loop = asyncio.get_running_loop()
            letter = _Letter(call.name, body, loop.create_future())
            self._waiting.append(letter)
            if not self._flush_is_due:
                self._flush_is_due = True
                loop.call_soon(self._flush)
            raw = await letter.answered
        return decode(call, raw)

    async def close(self) -> None:
        """Ends what is under way; its callers learn that the store is closed."""
        while self._waiting:
            _fail(self._waiting.popleft(), StoreError("the store is closed"))
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _flush(self) -> None:
        self._flush_is_due = False
        while self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
            batch: list[_Letter] = []
            size = 0
            while self._waiting and len(batch) < MAX_BATCH:
                if batch and size + len(self._waiting[0].body) > MAX_BATCH_BYTES:
                    break
                letter = self._waiting.popleft()
                if not letter.answered.done():  # its caller is still there
                    size += len(letter.body)
                    batch.append(letter)
            if batch:
                task = asyncio.get_running_loop().create_task(self._deliver(batch))
                self._in_flight.add(task)
                task.add_done_callback(self._delivered)

    def _delivered(self, task: "asyncio.Task[None]") -> None:
        self._in_flight.discard(task)
        self._flush()

    async def _deliver(self, batch: list[_Letter]) -> None:
        try:
            if len(batch) == 1:
                _answer(batch[0], await self._connection.post(batch[0].call, batch[0].body))
                return
            entries = [Entry(each.call, msgspec.Raw(each.body)) for each in batch]
            raw = await self._connection.post(BATCH, _encoder.encode(entries))
            again = [
                letter
                for letter, outcome in zip(batch, _outcomes.decode(raw), strict=True)
                if not _settle(letter, outcome)
            ]
            if again:
                await asyncio.gather(*[self._deliver([letter]) for letter in again])
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            for letter in batch:
                _fail(letter, StoreUnavailable(f"the server's answer cannot be read: {error}"))
        except RollwrightError as error:
            for letter in batch:
                _fail(letter, type(error)(str(error)))
        except asyncio.CancelledError:
            for letter in batch:
                _fail(letter, StoreError("the store is closed"))
            raise


def encode(call: Call[Any]) -> bytes:
    try:
        return _encoder.encode(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{call.name} was given what is not plain data: {error}") from error


def decode(call: Call[Answer], raw: bytes) -> Answer:
    decoder = _decoders.get(call.name)
    if decoder is None:
        decoder = _decoders[call.name] = msgspec.msgpack.Decoder(call.answer)
    try:
        answer: Answer = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"{call.name}: the server's answer cannot be read: {error}") from error
    return answer


def _settle(letter: _Letter, outcome: RawOutcome) -> bool:
    """Tells the caller; or returns False for a failure that may pass, when the call is to be made again."""
    if isinstance(outcome.answer, msgspec.Raw):
        _answer(letter, bytes(outcome.answer))
        return True
    if isinstance(outcome.refusal, msgspec.UnsetType) or outcome.refusal.kind in PASSING_KINDS:
        return False
    _fail(letter, error_of(outcome.refusal))
    return True


def _answer(letter: _Letter, raw: bytes) -> None:
    if not letter.answered.done():
        letter.answered.set_result(raw)


def _fail(letter: _Letter, error: RollwrightError) -> None:
    if not letter.answered.done():
        letter.answered.set_exception(error)
