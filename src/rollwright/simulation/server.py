"""A simulated OpenAI-compatible server, in a process of its own, that injects faults on demand.

    python -m rollwright.simulation.server --latency 0.05 --slots 64

listens on loopback and prints its port. It serves `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, and
`/stats` with its counters. A completion is filler text followed by an action between answer tags; a token is a byte of
UTF-8. For a prompt of token ids it returns token ids, as vLLM does, and it has vLLM's endpoints for weight updates.

Always true: draws are keyed by the seed and the number of the request, so a retry draws again; pipelined requests of one
connection are answered in order. A raw protocol on uvloop makes it far cheaper than any client, so a benchmark measures the
client.
"""

import asyncio
import os
import sys
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, cast

import msgspec
import typer

from rollwright.errors import ConfigError
from rollwright.rng import draw_pair, uniform
from rollwright.simulation.http_messages import (
    CHAT,
    TEXT,
    HttpReply,
    Request,
    RequestReader,
    RequestRefused,
    completion,
    encode,
    error,
)
from rollwright.simulation.lengths import filler_text, lognormal
from rollwright.simulation.slots import Slots
from rollwright.simulation.vllm import CONTROL, SimulatedWeights

_READ_AHEAD = 256 * 1024
"""Bytes of pipelined requests that are buffered while one is served; above it the server pauses reading."""

_BACKLOG = 4096
"""Connections that may wait to be accepted: a benchmark opens thousands at once."""


class InjectedFault(StrEnum):
    """Faults that the server injects instead of a completion."""

    RATE_LIMIT = "rate_limit"
    """Status 429 with `Retry-After`, at once."""
    ERROR = "error"
    """Status 500."""
    TRUNCATE = "truncate"
    """A well-formed HTTP response whose JSON is cut off."""
    DROP = "drop"
    """The connection is closed without a response."""
    HANG = "hang"
    """The request takes a slot and is never answered."""
    WRONG_LOGPROBS = "wrong_logprobs"
    """A response with token ids has one log-probability fewer than tokens."""


@dataclass(frozen=True)
class ServerOptions:
    """Command line options of the server."""

    port: int = 0
    """0: any free port."""
    latency: float = 0.0
    """Mean service time in seconds; 0: no delay."""
    latency_sigma: float = 1.0
    """Sigma of the lognormal latency; 0: constant."""
    slots: int = 0
    """Requests served at a time, others are queued; 0: no limit."""
    filler: int = 0
    """Tokens in front of the answer."""
    actions: tuple[str, ...] = ("Left", "Down", "Right", "Up")
    rate_limit_rate: float = 0.0
    error_rate: float = 0.0
    truncate_rate: float = 0.0
    drop_rate: float = 0.0
    hang_rate: float = 0.0
    wrong_logprobs_rate: float = 0.0
    raw_logprobs: bool = False
    """Return log-probabilities of the unscaled distribution at any temperature, as vLLM does by default."""
    retry_after: float = 1.0
    """Seconds in the `Retry-After` of a 429."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rates.values()) < 0 or sum(self.rates.values()) > 1:
            raise ConfigError("the rates of all faults together must be between 0 and 1")
        if min(self.latency, self.latency_sigma, self.slots, self.filler, self.retry_after) < 0:
            raise ConfigError("latency, latency_sigma, slots, filler and retry_after must not be negative")
        if not self.actions:
            raise ConfigError("actions: none given; accepted: one or more, with commas between them")

    @property
    def rates(self) -> dict[InjectedFault, float]:
        return {fault: getattr(self, f"{fault}_rate") for fault in InjectedFault}


class SimulatedServer:
    """State shared by all connections."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.slots = Slots(options.slots) if options.slots else None
        self.outcomes: Counter[str] = Counter()
        self.weights = SimulatedWeights()
        self._requests = 0
        self._rates = [(fault, rate) for fault, rate in options.rates.items() if rate > 0]
        filler = filler_text(options.filler)
        self._texts = [f"{filler}<answer>{action}</answer>" for action in options.actions]

    def count_request(self) -> int:
        """Count a completion request; return its number."""
        self._requests += 1
        return self._requests

    def draw_outcome(self, number: int) -> tuple[InjectedFault | None, str]:
        """The fault of request `number`, or the text of its completion."""
        share, pick = draw_pair(self.options.seed, number, "server")
        for fault, rate in self._rates:
            if share < rate:
                return fault, ""
            share -= rate
        return None, self._texts[pick % len(self._texts)]

    def service_seconds(self, number: int) -> float:
        """The service time of request `number`."""
        if not self.options.latency:
            return 0.0
        draw = uniform(self.options.seed, number, "latency")
        return lognormal(self.options.latency, self.options.latency_sigma, draw)

    def lookup(self, request: Request) -> HttpReply:
        """Reply to a request that is not a completion."""
        known: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": "simulated", "object": "model"}]},
            "/stats": {"requests": self._requests, "outcomes": self.outcomes},
            "/version": {"version": "simulated"},
            "/weight_info": {"weight_version": self.weights.label},
        }
        posted = (CHAT, TEXT, *CONTROL)
        if request.path not in known and request.path not in posted:
            return error(404, f"there is no {request.path} here")
        if request.method != "GET" or request.path in posted:
            return error(405, f"{request.path} does not take {request.method}")
        return HttpReply(200, encode(known[request.path]))


class SimulatedConnection(asyncio.Protocol):
    """The connection of one client; serves its requests one after the other."""

    _transport: asyncio.Transport

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._reader = RequestReader()
        self._task: asyncio.Task[None] | None = None
        """Serves the current request; `None`: no request is waiting for its service time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._serve_buffered()
        if self._task is not None and self._reader.buffered > _READ_AHEAD:
            self._transport.pause_reading()

    def _serve_buffered(self) -> None:
        try:
            while self._task is None and not self._transport.is_closing():
                request = self._reader.next()
                if request is None:
                    return
                self._serve(request)
        except RequestRefused as refusal:
            self._send(error(refusal.status, str(refusal)), keep_alive=False)

    def _serve(self, request: Request) -> None:
        if request.method == "POST" and request.path.partition("?")[0] in CONTROL:
            self._task = asyncio.get_running_loop().create_task(self._control(request))
            return
        if request.method != "POST" or request.path not in (CHAT, TEXT):
            self._send(self._server.lookup(request), request.keep_alive)
            return
        number = self._server.count_request()
        fault, text = self._server.draw_outcome(number)
        if fault is InjectedFault.RATE_LIMIT or (
            fault is not InjectedFault.HANG
            and not self._server.options.latency
            and self._server.slots is None
            and not self._server.weights.paused
        ):
            self._answer(request, number, fault, text)
        else:
            self._task = asyncio.get_running_loop().create_task(
                self._serve_slowly(request, number, fault, text)
            )

    async def _serve_slowly(
        self, request: Request, number: int, fault: InjectedFault | None, text: str
    ) -> None:
        if fault is InjectedFault.HANG:
            await self._hang()
        share = await self._server.weights.serve(self._server.slots, self._server.service_seconds(number))
        self._task = None
        self._answer(request, number, fault, text, share)
        self._serve_next()

    async def _hang(self) -> None:
        """Hold a slot until the client disconnects."""
        slots = self._server.slots
        if slots is not None:
            await slots.acquire()
        try:
            self._server.outcomes[InjectedFault.HANG] += 1
            await asyncio.get_running_loop().create_future()
        finally:
            if slots is not None:
                slots.release()

    async def _control(self, request: Request) -> None:
        try:
            reply = HttpReply(200, encode(await self._server.weights.control(request.path, request.body)))
        except (ValueError, KeyError, TypeError, AttributeError) as mistake:
            reply = error(400, f"{request.path}: not understood: {mistake}")
        self._task = None
        self._send(reply, request.keep_alive)
        self._serve_next()

    def _serve_next(self) -> None:
        self._transport.resume_reading()
        self._serve_buffered()

    def _answer(
        self, request: Request, number: int, fault: InjectedFault | None, text: str, share: float = 1.0
    ) -> None:
        options, weights = self._server.options, self._server.weights
        reply = completion(request, number, text, share, weights, options.raw_logprobs)
        if reply.status == 200 and fault is not None:
            self._server.outcomes[fault] += 1
            if fault is InjectedFault.DROP:
                self._transport.abort()
                return
            reply = _inject(fault, reply, self._server.options.retry_after)
        else:
            self._server.outcomes["answer" if reply.status == 200 else "refusal"] += 1
        self._send(reply, request.keep_alive)

    def _send(self, reply: HttpReply, keep_alive: bool) -> None:
        self._transport.write(reply.to_bytes(keep_alive))
        if not keep_alive:
            self._transport.close()


def _inject(fault: InjectedFault, reply: HttpReply, retry_after: float) -> HttpReply:
    if fault is InjectedFault.WRONG_LOGPROBS:
        answer = msgspec.json.decode(reply.body)
        answer["choices"][0].get("logprobs", {}).get("token_logprobs", [None]).pop()
        return reply._replace(body=encode(answer))
    if fault is InjectedFault.TRUNCATE:
        return reply._replace(body=reply.body[: len(reply.body) // 2])
    if fault is InjectedFault.RATE_LIMIT:
        return error(429, "too many requests, as rate_limit_rate says", f"Retry-After: {retry_after:g}\r\n")
    return error(500, "an internal error, as error_rate says")


async def serve(options: ServerOptions, until_stdin_closes: bool = False) -> None:
    """Print the port and serve forever, or until the parent process closes stdin."""
    loop = asyncio.get_running_loop()
    shared = SimulatedServer(options)
    listener = await loop.create_server(
        lambda: SimulatedConnection(shared), "127.0.0.1", options.port, backlog=_BACKLOG
    )
    typer.echo(listener.sockets[0].getsockname()[1])
    ended = loop.create_future()
    if until_stdin_closes:
        loop.add_reader(sys.stdin, _watch_stdin, ended)
    await ended


def _watch_stdin(ended: asyncio.Future[None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096) and not ended.done():
        ended.set_result(None)


def main(
    port: int = ServerOptions.port,
    latency: float = ServerOptions.latency,
    latency_sigma: float = ServerOptions.latency_sigma,
    slots: int = ServerOptions.slots,
    filler: int = ServerOptions.filler,
    actions: str = ",".join(ServerOptions.actions),
    rate_limit_rate: float = ServerOptions.rate_limit_rate,
    error_rate: float = ServerOptions.error_rate,
    truncate_rate: float = ServerOptions.truncate_rate,
    drop_rate: float = ServerOptions.drop_rate,
    hang_rate: float = ServerOptions.hang_rate,
    wrong_logprobs_rate: float = ServerOptions.wrong_logprobs_rate,
    raw_logprobs: Annotated[bool, typer.Option("--raw-logprobs")] = ServerOptions.raw_logprobs,
    retry_after: float = ServerOptions.retry_after,
    seed: int = ServerOptions.seed,
    until_stdin_closes: bool = False,
) -> None:
    """Serve an OpenAI-compatible API without a model; prints its port."""
    try:
        options = ServerOptions(
            port=port,
            latency=latency,
            latency_sigma=latency_sigma,
            slots=slots,
            filler=filler,
            actions=tuple(action for action in actions.split(",") if action),
            rate_limit_rate=rate_limit_rate,
            error_rate=error_rate,
            truncate_rate=truncate_rate,
            drop_rate=drop_rate,
            hang_rate=hang_rate,
            wrong_logprobs_rate=wrong_logprobs_rate,
            raw_logprobs=raw_logprobs,
            retry_after=retry_after,
            seed=seed,
        )
    except ConfigError as mistake:
        typer.echo(mistake, err=True)
        raise typer.Exit(2) from None
    if sys.platform == "win32":
        asyncio.run(serve(options, until_stdin_closes))
    else:
        import uvloop

        uvloop.run(serve(options, until_stdin_closes))


if __name__ == "__main__":
    typer.run(main)
