"""A policy over HTTP engines that speak token ids, with the exact ids that were sampled.

One call is one loop in `generate`: pick a server, send, continue behind the sampled tokens if the response was cut short, back
off if there was none, until the completion is whole.

Always true:
- A call ends with a whole, checked completion or with one `EngineError`. Every id has its log-probability and the version of
  the weights that made it: nothing is sampled while weights change, so a piece was made by the weights in force when its
  request was sent.
- A response that is not whole (see `partial`) is retried and counted, and nothing of it is kept.
- `update_weights` drops no call. New requests wait for it; requests under way finish (`drain`), or return the tokens they
  have, which are kept (`abort_and_resume`) or counted and discarded (`restart_turn`).
- A generation whose log-probabilities are not those of the sampled distribution is marked as not exact; `probe` says why.

The engine misses a stop string that starts before an abort and ends after it; ids stay exact.
"""

import asyncio

import msgspec

from rollwright.engines.base import (
    Capabilities,
    EngineError,
    Generation,
    Prompt,
    Renderer,
    Sampling,
    UpdateMode,
    Weights,
)
from rollwright.engines.dialect import AdapterDialect, EngineDialect, folder_of
from rollwright.engines.http_calls import CallFault, HttpCalls
from rollwright.engines.partial import PartialCompletion, Piece
from rollwright.engines.pool import EngineCounters, EnginePool, Flight
from rollwright.engines.settings import ROUTING, EngineServersConfig
from rollwright.errors import ConfigError, FormatError
from rollwright.http.retry import FaultCause, RetryPolicy
from rollwright.rng import seed
from rollwright.trajectory import (
    FinishReason,
    SamplingParams,
)


class HttpEnginePolicy:
    """One policy over several engines with the same model. Used in one event loop at a time."""

    def __init__(
        self,
        servers: EngineServersConfig | str,
        dialect: EngineDialect,
        renderer: Renderer,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        version: int = 0,
    ) -> None:
        """`servers`: an address alone stands for one server with the default settings.

        `api_key`, `retry`: see `HttpCalls`. `version`: of the weights that the engines were started with.
        """
        if isinstance(servers, str):
            servers = EngineServersConfig(base_urls=[servers])
        self._calls = HttpCalls(servers, api_key=api_key, retry=retry)
        self.counters = self._calls.counters = EngineCounters()
        self._dialect = dialect
        self._renderer = renderer
        addresses = [url.rstrip("/").removesuffix("/v1") for url in servers.base_urls]
        rule = ROUTING.make(servers.routing)
        self._pool = EnginePool(addresses, dialect, self._calls, self.counters, servers.outage_patience, rule)
        where = self._pool.urls
        self._where = where[0] if len(where) == 1 else f"{len(where)} engines"
        """The name of the engines in error messages."""
        self._vocabulary_size = servers.vocabulary_size
        self._seeded = servers.seeded
        self._version = version
        self._processed: bool | None = None
        """Whether log-probabilities are of the distribution sampled from; `None`: not asked yet."""
        self._asking = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._adapter: Weights | None = None
        """The adapter that new requests name; `None`: the engine's own weights."""
        self._retiring: set[asyncio.Task[None]] = set()
        """Tasks that unload earlier adapters."""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def constrains_output(self) -> bool:
        """Whether this kind of engine enforces forced tool calls and JSON formats."""
        return bool(getattr(self._dialect, "constrains_output", False))

    @property
    def version(self) -> int:
        return self._version

    @property
    def pressure(self) -> int:
        return self.counters.pressure

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self._pool.close()
        await self._calls.close()

    async def probe(self) -> Capabilities:
        """Probe every engine; return the capabilities that all of them have."""
        found = [await self._dialect.probe(control) for control in self._pool.controls]
        first = found[0]
        for control, each in zip(self._pool.controls, found, strict=True):
            if each.model != first.model:
                raise ConfigError(
                    f"base_urls: {control.base_url} serves {each.model!r}, "
                    f"{self._pool.controls[0].base_url} serves {first.model!r}; accepted: one model everywhere"
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
        # A constrained turn is left out of the loss anyway, so the constraint does not decide whether its ids are exact.
        asked = sampling.params() if drawn is None else drawn
        faithful = await self._check_logprobs(msgspec.structs.replace(asked, constraint=""))
        stop_ids = tuple(self._renderer.stop_ids)
        partial = PartialCompletion(
            prompt.ids, sampling, stop_ids, self._seed_of(prompt, 0), self._vocabulary_size
        )
        tries, answers = 1, 0
        while True:
            try:
                flight = await self._send(prompt, partial)
            except CallFault as fault:
                tries = await self._calls.back_off(fault, tries, prompt.key, self._where)
                continue
            piece, cut_by = flight.piece, flight.cut_by
            # An engine begins the grammar with each request, so a constrained completion cannot be continued.
            cut = piece is None or (piece.finish is FinishReason.ABORT and bool(partial.max_tokens))
            if cut_by is UpdateMode.RESTART_TURN or (cut and sampling.output is not None):
                self.counters.restarted_calls += 1
                self.counters.discarded_tokens += partial.discard() + (len(piece.ids) if piece else 0)
            else:
                if piece is not None:
                    partial.add(piece, flight.version)
                    # An abort behind the last requested token has cut nothing off.
                    if piece.finish is not FinishReason.ABORT or not partial.max_tokens:
                        return self._finish(partial, piece, faithful, drawn)
                self.counters.resumed_calls += cut_by is not None
            # Each further request gets a new seed: the same seed would repeat the draws of the first tokens.
            tries, answers = 1, answers + 1
            partial.seed = self._seed_of(prompt, answers)

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        if weights.adapter is not None:
            await self._update_adapter(weights, mode)
            return
        folder_of(weights)
        if mode not in self._dialect.update_modes:
            raise ConfigError(
                f"{self._pool.controls[0].base_url}: this engine cannot exchange weights while it runs"
            )
        await asyncio.to_thread(_check_folder, weights)
        async with self._updating:
            self._open.clear()
            try:
                await self._pool.update(weights, mode)
                self._version = weights.version
                self.counters.updates += 1
            finally:
                self._open.set()

    @property
    def takes_adapters(self) -> bool:
        """Whether this kind of engine loads LoRA adapters while it runs."""
        return isinstance(self._dialect, AdapterDialect)

    async def _update_adapter(self, weights: Weights, mode: UpdateMode) -> None:
        """Load an adapter beside the earlier ones; from then on requests name it. Nothing pauses: calls under way finish with
        the adapter they began with, which is unloaded behind the last of them."""
        if not self.takes_adapters:
            raise ConfigError(
                f"{self._pool.controls[0].base_url}: this engine takes no adapters; accepted: folders"
            )
        await asyncio.to_thread(_check_folder, weights)
        async with self._updating:
            before = self._adapter
            await self._pool.update(weights, mode)
            self._version, self._adapter = weights.version, weights
            self.counters.updates += 1
        if before is not None and before.adapter_name != weights.adapter_name:
            retiring = asyncio.create_task(self._pool.retire_adapter(before))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)

    def _seed_of(self, prompt: Prompt, answers: int) -> int | None:
        """The seed of the request that follows this many responses."""
        if not self._seeded:
            return None
        return seed(*prompt.key) if not answers else seed(*prompt.key, "piece", answers)

    async def _send(self, prompt: Prompt, partial: PartialCompletion) -> Flight:
        """Send one request to a server in service and parse its response; raise `CallFault`."""
        server = await self._pick_server(prompt)
        body = self._dialect.request(partial)
        if self._adapter is not None and isinstance(self._dialect, AdapterDialect):
            body = self._dialect.with_adapter(body, self._adapter.adapter_name)
        # In its own task, so that an update can cancel the request without cancelling the call.
        task = asyncio.create_task(self._calls.post(self._pool.urls[server], body, partial.max_answer))
        flight = self._pool.begin_flight(server, self._version, task)
        try:
            answer = await flight.wait()
            if answer is not None:
                flight.piece = self._read(flight, answer, partial)
                self._pool.report_success(server)
        except CallFault as fault:
            self._pool.report_failure(server, fault)
            raise
        finally:
            self._pool.end_flight(flight)
        return flight

    async def _pick_server(self, prompt: Prompt) -> int:
        """Pick a server at a moment when no update is running. The caller must send without awaiting anything in between."""
        while True:
            await self._open.wait()
            server = await self._pool.pick_server(prompt.episode, prompt.ids)
            if self._open.is_set():
                return server

    def _read(self, flight: Flight, answer: bytes, partial: PartialCompletion) -> Piece:
        """Parse and check a response; raise `CallFault` for an unusable one."""
        try:
            piece = self._dialect.response(answer, partial)
        except FormatError as error:
            raise CallFault(FaultCause.BROKEN_BODY, f"not a completion: {error}") from error
        if piece.finish is FinishReason.ABORT and flight.update is None and not piece.ids:
            raise CallFault(FaultCause.SERVER_ERROR, "the engine aborted the call")
        # With an adapter, the label is that of the weights below it.
        known = piece.label is not None and self._pool.weights is not None and self._adapter is None
        if known and flight.version == self._version and piece.label != str(self._version):
            self._pool.suspect(flight.server)
            message = f"made by weights {piece.label!r}, not by version {self._version}"
            raise CallFault(FaultCause.SERVER_ERROR, message)
        return piece

    async def _check_logprobs(self, drawn: SamplingParams) -> bool:
        """Whether log-probabilities under these settings may be trained; the engine is asked once."""
        if self._processed is None and not self._dialect.faithful(drawn, processed=False):
            async with self._asking:
                if self._processed is None:
                    self._processed = await self._ask_processed()
        return self._dialect.faithful(drawn, bool(self._processed))

    async def _ask_processed(self) -> bool:
        tries = 1
        while True:
            try:
                server = await self._pool.pick_server("")
                return await self._dialect.ask_processed(self._pool.controls[server])
            except CallFault as found:
                fault = found
            except EngineError as error:
                fault = CallFault(FaultCause.SERVER_ERROR, str(error))
            tries = await self._calls.back_off(fault, tries, ("processed",), self._pool.urls[0])

    def _finish(
        self, partial: PartialCompletion, last: Piece, faithful: bool, drawn: SamplingParams | None
    ) -> Generation:
        """Count the whole completion and build its generation."""
        counters = self.counters
        sampled, prompt_tokens = partial.ids, len(partial.prompt_ids)
        exact = faithful and last.text is None
        counters.not_exact += not exact
        counters.prompt_tokens += prompt_tokens
        counters.completion_tokens += len(sampled)
        return Generation(
            text=self._renderer.decode(sampled) if last.text is None else last.text,
            sampled_ids=sampled,
            logprobs=partial.logprobs,
            versions=tuple(partial.versions),
            finish=FinishReason.LENGTH if last.finish is FinishReason.ABORT else last.finish,
            exact=exact,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(sampled),
            served=partial.served,
            sampling=drawn,
            checked=True,
        )


def _check_folder(weights: Weights) -> None:
    """Check the checksum of a weights folder that is visible on this machine before the engines load it."""
    from rollwright.models import weights_checksum

    folder = weights.adapter or weights.folder
    if folder is None or weights.checksum is None or not folder.is_dir():
        return
    if (found := weights_checksum(folder)) != weights.checksum:
        raise EngineError(f"{folder}: has checksum {found[:12]}…, not the announced {weights.checksum[:12]}…")
