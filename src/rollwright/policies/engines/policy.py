"""A policy over engines that speak token ids: what they sampled is what is recorded, id by id.

What is true:
- A call ends with a whole, checked completion or with one `EngineError`. Every id has its log-probability and
  the version of the weights that made it: while weights change, nothing is sampled, and a piece that comes back
  was made by the weights that were in force when it was sent.
- An answer that is not whole (see `pieces`) is retried and counted; nothing of it is kept.
- `update_weights` drops no call. While it runs new requests wait; those under way finish (`drain`), or are
  answered with the tokens they have, which are kept (`abort_and_resume`) or counted and thrown away
  (`restart_turn`).
- Where log-probabilities are not those of the distribution that was sampled from, the generation is marked as
  not exact, and `probe` says why.

A stop string that begins before an abort and ends after it is not seen by the engine; ids stay exact.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rollwright.draws import seed
from rollwright.errors import ConfigError, FormatError
from rollwright.policies.base import (
    Capabilities,
    EngineError,
    Generation,
    Prompt,
    Renderer,
    Sampling,
    UpdateMode,
    Weights,
)
from rollwright.policies.engines.counters import EngineCounters
from rollwright.policies.engines.dialect import EngineDialect, folder_of
from rollwright.policies.engines.fleet import EnginePool
from rollwright.policies.engines.pieces import Ask, Piece
from rollwright.policies.http_calls import Fault, HttpCalls
from rollwright.policies.retry import FaultCause, RetryPolicy
from rollwright.trajectory import (
    FinishReason,
    Floats,
    SamplingParams,
    TokenIds,
    VersionRun,
    floats,
    token_ids,
)

GRACE_SECONDS = 5.0
"""An aborted call is answered within one step of the engine. One that is not was still on its way when the
engine paused: it made no token, and is sent again afterwards."""


@dataclass(eq=False)
class _Flight:
    """One request under way."""

    place: int
    version: int
    """In force when it was sent."""
    task: asyncio.Task[bytes | Fault]
    cut: UpdateMode | None = None
    """The update that began while it was under way, unless that lets it finish."""


class _Landed(NamedTuple):
    """What one request brought."""

    piece: Piece | None
    """`None`: it was cut off before it was answered."""
    version: int
    cut: UpdateMode | None
    """The update that cut it short; `None`: it ended by itself."""


class _Processed(NamedTuple):
    """What an engine said of its log-probabilities."""

    processed: bool


@dataclass
class _Progress:
    """A completion under way."""

    ids: TokenIds = field(default_factory=token_ids)
    logprobs: Floats = field(default_factory=floats)
    versions: list[VersionRun] = field(default_factory=list)
    pieces: int = 0
    served: float | None = None
    """Seconds that the engine says it took for them; `None`: it does not say."""

    def add(self, piece: Piece, version: int) -> None:
        if piece.served is not None:
            self.served = (self.served or 0.0) + piece.served
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        count = len(piece.ids)
        if self.versions and self.versions[-1].version == version:
            count += self.versions.pop().count
        if count:
            self.versions.append(VersionRun(version, count))


class EnginePolicy:
    """See the module's docstring for what always holds. Serves one event loop at a time."""

    def __init__(
        self,
        base_urls: str | Sequence[str],
        dialect: EngineDialect,
        renderer: Renderer,
        *,
        api_key: str | None = None,
        api_key_env: str | None = None,
        request_timeout: float = 600.0,
        retry: RetryPolicy | None = None,
        max_connections: int = 4096,
        vocabulary_size: int | None = None,
        seeded: bool = True,
        outage_patience: float = 300.0,
        version: int = 0,
    ) -> None:
        """`base_urls`: one address or several of engines with the same model, like `http://127.0.0.1:8000`.

        `vocabulary_size`: ids from there on are refused as broken. `seeded`: each request carries a seed that
        follows from its key, so that an engine which heeds it repeats itself. `outage_patience`: seconds that a
        call waits while no engine is in service. `version`: of the weights the engines were started with.
        """
        self._calls = HttpCalls(
            api_key=api_key,
            api_key_env=api_key_env,
            request_timeout=request_timeout,
            retry=retry,
            max_connections=max_connections,
        )
        self.counters = self._calls.counters = EngineCounters()
        self._dialect = dialect
        self._renderer = renderer
        urls = [base_urls] if isinstance(base_urls, str) else list(base_urls)
        addresses = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._fleet = EnginePool(addresses, dialect, self._calls, self.counters, outage_patience)
        self._vocabulary_size = vocabulary_size
        self._seeded = seeded
        self._version = version
        self._processed: bool | None = None
        """Whether log-probabilities are of the distribution sampled from; `None`: not asked yet."""
        self._asking = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._flights: set[_Flight] = set()

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def version(self) -> int:
        return self._version

    @property
    def pressure(self) -> int:
        return self.counters.pressure

    async def close(self) -> None:
        await self._fleet.close()
        await self._calls.close()

    async def probe(self) -> Capabilities:
        """Asks every engine; what they can do is what all of them can."""
        found = [await self._dialect.probe(control) for control in self._fleet.controls]
        first = found[0]
        for control, each in zip(self._fleet.controls, found, strict=True):
            if each.model != first.model:
                raise ConfigError(
                    f"base_urls: {control.base_url} serves {each.model!r}, "
                    f"{self._fleet.controls[0].base_url} serves {first.model!r}; accepted: one model everywhere"
                )
        return msgspec.structs.replace(
            first,
            token_ids=all(each.token_ids for each in found),
            logprobs=all(each.logprobs for each in found),
            update_modes=tuple(
                mode for mode in UpdateMode if all(mode in each.update_modes for each in found)
            ),
            missing=next((each.missing for each in found if each.missing), ""),
        )

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.counters.requests += 1
        if prompt.ids is None:
            raise EngineError("the prompt has no token ids; this policy's renderer makes them")
        drawn = self._dialect.sent(sampling)
        faithful = await self._faithful(sampling.params() if drawn is None else drawn)
        progress = _Progress()
        while True:
            landed = await self._request(prompt, self._ask(prompt, sampling, progress))
            if landed.cut is UpdateMode.RESTART_TURN:
                self.counters.restarted_calls += 1
                self.counters.discarded_tokens += len(progress.ids)
                self.counters.discarded_tokens += len(landed.piece.ids) if landed.piece else 0
                progress = _Progress(pieces=progress.pieces + 1)
                continue
            piece = landed.piece
            if piece is not None:
                progress.add(piece, landed.version)
                if len(progress.ids) == sampling.max_tokens and piece.finish is FinishReason.ABORT:
                    piece = msgspec.structs.replace(piece, finish=FinishReason.LENGTH)
                if piece.finish is not FinishReason.ABORT:
                    made = self._generation(prompt, progress, piece, faithful)
                    return made if drawn is None else msgspec.structs.replace(made, sampling=drawn)
            if landed.cut is not None:
                self.counters.resumed_calls += 1
            progress.pieces += 1

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        folder_of(weights)
        if mode not in self._dialect.update_modes:
            raise ConfigError(
                f"{self._fleet.controls[0].base_url}: this engine cannot exchange weights while it runs"
            )
        await asyncio.to_thread(_check_folder, weights)
        async with self._updating:
            self._open.clear()
            try:
                if mode is UpdateMode.DRAIN:
                    await _ended(self._flights)
                for flight in self._flights:
                    flight.cut = mode
                await self._fleet.update(weights, mode, self._settle)
                self._version = weights.version
                self.counters.updates += 1
            finally:
                self._open.set()

    def _ask(self, prompt: Prompt, sampling: Sampling, progress: _Progress) -> Ask:
        assert prompt.ids is not None
        key = prompt.key if not progress.pieces else (*prompt.key, "piece", progress.pieces)
        return Ask(
            ids=prompt.ids + progress.ids if progress.ids else prompt.ids,
            sampling=sampling,
            max_tokens=sampling.max_tokens - len(progress.ids),
            stop_ids=tuple(self._renderer.stop_ids),
            seed=seed(*key) if self._seeded else None,
            vocabulary_size=self._vocabulary_size,
        )

    async def _request(self, prompt: Prompt, ask: Ask) -> _Landed:
        """One piece, however many tries it takes."""
        urls = self._fleet.urls
        where = urls[0] if len(urls) == 1 else f"{len(urls)} engines"
        return await self._calls.repeat(lambda: self._try(prompt, ask), prompt.key, where)

    async def _try(self, prompt: Prompt, ask: Ask) -> _Landed | Fault:
        body = self._dialect.request(ask)
        place = await self._place(prompt.episode)
        if isinstance(place, Fault):
            return place
        router = self._fleet.router
        router.begin(place)
        task = asyncio.create_task(self._calls.once(self._fleet.urls[place], body, ask.max_answer))
        flight = _Flight(place, self._version, task)
        self._flights.add(flight)
        try:
            answer = await _answer(flight)
        finally:
            self._flights.discard(flight)
            router.end(place)
        if answer is None:
            return _Landed(None, flight.version, flight.cut)
        read = answer if isinstance(answer, Fault) else self._read(flight, answer, ask)
        if isinstance(read, Fault):
            self._fleet.report(place, read)
            return read
        self._fleet.report(place, None)
        return _Landed(read, flight.version, flight.cut if read.finish is FinishReason.ABORT else None)

    async def _place(self, episode: str) -> int | Fault:
        """The engine to ask, at a moment when no update is under way; nothing is awaited after that moment."""
        while True:
            await self._open.wait()
            place = await self._fleet.place(episode)
            if isinstance(place, Fault) or self._open.is_set():
                return place

    def _read(self, flight: _Flight, answer: bytes, ask: Ask) -> Piece | Fault:
        try:
            piece = self._dialect.response(answer, ask)
        except FormatError as error:
            return Fault(FaultCause.BROKEN_BODY, f"not a completion: {error}")
        if piece.finish is FinishReason.ABORT and flight.cut is None and not piece.ids:
            return Fault(FaultCause.SERVER_ERROR, "the engine aborted the call")
        known = piece.label is not None and self._fleet.weights is not None
        if known and flight.version == self._version and piece.label != str(self._version):
            self._fleet.suspect(flight.place)
            return Fault(
                FaultCause.SERVER_ERROR, f"made by weights {piece.label!r}, not by version {self._version}"
            )
        return piece

    async def _faithful(self, drawn: SamplingParams) -> bool:
        """Whether log-probabilities under these settings may be trained on; the engine is asked once."""
        if self._processed is None and not self._dialect.faithful(drawn, processed=False):
            async with self._asking:
                if self._processed is None:
                    asked = await self._calls.repeat(self._ask_processed, ("processed",), self._fleet.urls[0])
                    self._processed = asked.processed
        return self._dialect.faithful(drawn, bool(self._processed))

    async def _ask_processed(self) -> _Processed | Fault:
        place = await self._fleet.place("")
        if isinstance(place, Fault):
            return place
        try:
            return _Processed(await self._dialect.processed(self._fleet.controls[place]))
        except EngineError as error:
            return Fault(FaultCause.SERVER_ERROR, str(error))

    def _generation(self, prompt: Prompt, progress: _Progress, piece: Piece, faithful: bool) -> Generation:
        counters = self.counters
        sampled = progress.ids
        exact = faithful and piece.text is None
        counters.not_exact += not exact
        counters.prompt_tokens += len(prompt.ids or ())
        counters.completion_tokens += len(sampled)
        return Generation(
            text=self._renderer.decode(sampled) if piece.text is None else piece.text,
            sampled_ids=sampled,
            logprobs=progress.logprobs,
            versions=tuple(progress.versions),
            finish=piece.finish,
            exact=exact,
            prompt_tokens=len(prompt.ids or ()),
            completion_tokens=len(sampled),
            served=progress.served,
            checked=True,
        )

    async def _settle(self, place: int) -> None:
        """After an engine has paused: its aborted calls are answered, those it did not know of yet are cut off."""
        flights = {flight for flight in self._flights if flight.place == place}
        await _ended(flights, GRACE_SECONDS)
        for flight in flights:
            flight.task.cancel()
        await _ended(flights)


def _check_folder(weights: Weights) -> None:
    """Where the engine's folder is on this machine too, it must be whole before it is announced."""
    from rollwright.models import weights_checksum

    folder = weights.folder
    if folder is None or weights.checksum is None or not folder.is_dir():
        return
    if (found := weights_checksum(folder)) != weights.checksum:
        raise EngineError(f"{folder}: has checksum {found[:12]}…, not the announced {weights.checksum[:12]}…")


async def _ended(flights: set[_Flight], seconds: float | None = None) -> None:
    if tasks := {flight.task for flight in flights}:
        await asyncio.wait(tasks, timeout=seconds)


async def _answer(flight: _Flight) -> bytes | Fault | None:
    """What came back; `None` where an update cut the request off."""
    try:
        return await flight.task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if flight.cut is None or (caller is not None and caller.cancelling()):
            raise
        return None
