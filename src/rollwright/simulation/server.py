"""An OpenAI-compatible server without a model, in a process of its own, that also fails on purpose.

    python -m rollwright.simulation.server --latency 0.05 --slots 64

prints the port it listens on, on loopback. It answers `/v1/chat/completions`, `/v1/completions`,
`/v1/models`, `/health`, and `/stats` with what it has done so far. A completion is filler and then an action
between answer tags; a token is a byte of UTF-8. A prompt of token ids is answered with token ids, as vLLM does,
and vLLM's endpoints for new weights are there too.

What is true: draw_pair is keyed by the seed and the number of the request, so a retry is a new draw; requests
that are pipelined on one connection are answered in order; a raw protocol on uvloop keeps it far cheaper
than any client, so that a benchmark measures the client.
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
from rollwright.simulation.lengths import filler_text, lognormal
from rollwright.simulation.replies import (
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
from rollwright.simulation.slots import Slots
from rollwright.simulation.vllm import CONTROL, SimulatedWeights

_READ_AHEAD = 256 * 1024
"""Bytes of pipelined requests that are kept while one is served; beyond it the client has to wait."""

_BACKLOG = 4096
"""Connections that may wait to be accepted: a benchmark opens thousands at once."""


class InjectedFault(StrEnum):
    """What the server does instead of answering."""

    RATE_LIMIT = "rate_limit"
    """429 with `Retry-After`, at once."""
    ERROR = "error"
    """500."""
    TRUNCATE = "truncate"
    """A well-formed response whose JSON is cut in the middle."""
    DROP = "drop"
    """Closes the connection without a word."""
    HANG = "hang"
    """Takes a slot and never answers."""
    WRONG_LOGPROBS = "wrong_logprobs"
    """One log-probability fewer than tokens, where a prompt of token ids is answered."""


@dataclass(frozen=True)
class ServerOptions:
    port: int = 0
    """0: any free one."""
    latency: float = 0.0
    """Mean seconds of service; 0: at once."""
    latency_sigma: float = 1.0
    """Spread of the lognormal latency; 0: every request takes equally long."""
    slots: int = 0
    """Requests served at a time, others wait in line; 0: no limit."""
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
    """Log-probabilities are the model's own whatever the temperature, as vLLM's are by default."""
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
    """All that the connections share."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.slots = Slots(options.slots) if options.slots else None
        self.outcomes: Counter[str] = Counter()
        self.weights = SimulatedWeights()
        self._requests = 0
        self._rates = [(fault, rate) for fault, rate in options.rates.items() if rate > 0]
        filler = filler_text(options.filler)
        self._texts = [f"{filler}<answer>{action}</answer>" for action in options.actions]

    def count(self) -> int:
        """The number of the next completion request."""
        self._requests += 1
        return self._requests

    def fate(self, number: int) -> tuple[InjectedFault | None, str]:
        """What request `number` meets: a fault, or else this text."""
        share, pick = draw_pair(self.options.seed, number, "server")
        for fault, rate in self._rates:
            if share < rate:
                return fault, ""
            share -= rate
        return None, self._texts[pick % len(self._texts)]

    def seconds(self, number: int) -> float:
        if not self.options.latency:
            return 0.0
        draw = uniform(self.options.seed, number, "latency")
        return lognormal(self.options.latency, self.options.latency_sigma, draw)

    def lookup(self, request: Request) -> HttpReply:
        """Everything but completions."""
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


class ServerConnection(asyncio.Protocol):
    """One client's connection; its requests are served one after the other."""

    _transport: asyncio.Transport

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._reader = RequestReader()
        self._task: asyncio.Task[None] | None = None
        """Of the request that is being served; `None`: none is."""

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
            self._task = asyncio.get_running_loop().create_task(self._change(request))
            return
        if request.method != "POST" or request.path not in (CHAT, TEXT):
            self._send(self._server.lookup(request), request.keep_alive)
            return
        number = self._server.count()
        fault, text = self._server.fate(number)
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
        share = await self._server.weights.work(self._server.slots, self._server.seconds(number))
        self._task = None
        self._answer(request, number, fault, text, share)
        self._go_on()

    async def _hang(self) -> None:
        """Until the client goes away."""
        slots = self._server.slots
        if slots is not None:
            await slots.acquire()
        try:
            self._server.outcomes[InjectedFault.HANG] += 1
            await asyncio.get_running_loop().create_future()
        finally:
            if slots is not None:
                slots.release()

    async def _change(self, request: Request) -> None:
        try:
            reply = HttpReply(200, encode(await self._server.weights.change(request.path, request.body)))
        except (ValueError, KeyError, TypeError, AttributeError) as mistake:
            reply = error(400, f"{request.path}: not understood: {mistake}")
        self._task = None
        self._send(reply, request.keep_alive)
        self._go_on()

    def _go_on(self) -> None:
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
            reply = _faulty(fault, reply, self._server.options.retry_after)
        else:
            self._server.outcomes["answer" if reply.status == 200 else "refusal"] += 1
        self._send(reply, request.keep_alive)

    def _send(self, reply: HttpReply, keep_alive: bool) -> None:
        self._transport.write(reply.to_bytes(keep_alive))
        if not keep_alive:
            self._transport.close()


def _faulty(fault: InjectedFault, reply: HttpReply, retry_after: float) -> HttpReply:
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
    """Prints the port, then serves for ever, or until whoever holds the other end of stdin is gone."""
    loop = asyncio.get_running_loop()
    shared = SimulatedServer(options)
    listener = await loop.create_server(
        lambda: ServerConnection(shared), "127.0.0.1", options.port, backlog=_BACKLOG
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
    """An OpenAI-compatible server without a model; prints its port."""
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
