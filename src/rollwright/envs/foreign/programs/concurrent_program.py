"""Serves a program whose operations are coroutines: many requests at once, answered as they end.

Always true: one process has one object, made once by the program's `make(**options)`, whose methods are the operations. A
request has an id, and its answer has the same. An operation with a parameter `ask` gets a function that puts a question to
the process at the other end and waits for its answer. When the connection ends, all operations are cancelled, the object's
`close()` is awaited if it has one, and the process ends.

    {"id": 7, "op": "play", "seed": 3}         calls play(seed=3)
    {"id": 7, "value": …}                      is its answer, or {"id": 7, "error": …, "settings": …}
    {"id": 7, "question": 2, "asked": …}       is a question of that operation, answered by
    {"id": 7, "answer": 2, "value": …}
    {"id": 7, "op": "cancel"}                  cancels it
    {"id": 8, "op": "ping"}                    shows that the event loop runs
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

_MAX_LINE = 64 << 20
"""Bytes of one message: a conversation with its tools."""

_CLOSE_SECONDS = 5.0
"""For the end of operations and of the object; the client does not wait for the process any longer."""

Describe = Callable[[BaseException], dict[str, Any]]


async def serve_concurrently(
    program: Any, place: str, token: str, options: dict[str, Any], describe: Describe
) -> None:
    reader, writer = await asyncio.open_unix_connection(place, limit=_MAX_LINE)
    serving = _Serving(program, options, writer, describe)
    serving.send({"token": token, "pid": os.getpid()})
    with contextlib.suppress(OSError, ValueError):
        while line := await reader.readline():
            serving.take(json.loads(line))
    with contextlib.suppress(BaseException):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await serving.close()
    os._exit(0)  # threads of a foreign package must not hold up the end


class _Serving:
    def __init__(
        self, program: Any, options: dict[str, Any], writer: asyncio.StreamWriter, describe: Describe
    ) -> None:
        self._program, self._options = program, options
        self._writer = writer
        self._describe = describe
        self._made: asyncio.Task[Any] | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def take(self, order: dict[str, Any]) -> None:
        number = order.pop("id")
        if "answer" in order:
            waiting = self._questions.pop((number, order["answer"]), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(order["value"])
            return
        operation = order.pop("op")
        if operation == "ping":
            self.send({"id": number, "value": None})
        elif operation == "cancel":
            if (task := self._running.get(number)) is not None:
                task.cancel()
        else:
            self._running[number] = asyncio.ensure_future(self._run(number, operation, order))

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._made is not None and (close := getattr(await self._made, "close", None)) is not None:
            await close()

    async def _run(self, number: int, operation: str, arguments: dict[str, Any]) -> None:
        try:
            call = getattr(await self._make(), operation)
            if "ask" in inspect.signature(call).parameters:
                arguments["ask"] = functools.partial(self._ask, number)
            encoded = json.dumps({"id": number, "value": await call(**arguments)})
        except BaseException as error:  # noqa: BLE001 - also `exit` and Ctrl-C of foreign code
            encoded = json.dumps({"id": number, **self._describe(error)})
        del self._running[number]
        self._writer.write(encoded.encode() + b"\n")

    async def _make(self) -> Any:
        """The object, which the first request makes. One that could not be made is tried again by the next request."""
        if self._made is None or (
            self._made.done() and (self._made.cancelled() or self._made.exception() is not None)
        ):
            self._made = asyncio.ensure_future(self._program.make(**self._options))
        return await asyncio.shield(self._made)

    async def _ask(self, number: int, asked: Any) -> Any:
        question = next(self._numbers)
        waiting = asyncio.get_running_loop().create_future()
        self._questions[number, question] = waiting
        self.send({"id": number, "question": question, "asked": asked})
        try:
            return await waiting
        finally:
            self._questions.pop((number, question), None)
