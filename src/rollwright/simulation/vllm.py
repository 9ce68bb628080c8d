"""vLLM's API in the simulated server: token ids in and out, pausing, weight updates.

Always true: the log-probability of a token encodes the weights that made it (see `logprob_of`), so a test can compare it with
the version that a client recorded. While paused the server serves nothing; an abort returns running requests with the tokens
they have.
"""

import asyncio
from math import isclose
from typing import Any

import msgspec

from rollwright.engines.openai_api import one_line
from rollwright.engines.rendering.bytes import END
from rollwright.simulation.slots import Slots

CONTROL = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
"""Control endpoints, which take a POST."""

MISSING_FOLDER = "missing"
"""The name of a weights folder that fails to load, for tests."""


def logprob_of(loads: int, temperature: float = 1.0) -> float:
    """The log-probability of every token made after `loads` weight updates."""
    return -(1 + loads) / 8 / (temperature or 1.0)


class SimulatedWeights:
    """The weights of the simulated engine, and whether it is paused."""

    def __init__(self) -> None:
        self.label = "default"
        self.loads = 0
        """Weight updates since the process started."""
        self.paused = False
        self._resumed = asyncio.Event()
        self._idle = asyncio.Event()
        self._present: set[asyncio.Future[None]] = set()

    async def serve(self, slots: Slots | None, seconds: float) -> float:
        """Serve one request; return the share of its tokens that were sampled, 1 unless it was aborted."""
        while self.paused:
            await self._resumed.wait()
        loop = asyncio.get_running_loop()
        abort: asyncio.Future[None] = loop.create_future()
        self._present.add(abort)
        try:
            if slots is not None and not await _acquire(slots, abort):
                return 0.0
            start = loop.time()
            try:
                aborted, _ = await asyncio.wait([abort], timeout=seconds)
            finally:
                if slots is not None:
                    slots.release()
        finally:
            self._present.discard(abort)
            if not self._present:
                self._idle.set()
        return min(1.0, (loop.time() - start) / seconds) if aborted and seconds else 1.0

    async def control(self, target: str, body: bytes) -> dict[str, Any]:
        """Handle a POST to one of `CONTROL`; raise `ValueError` for an invalid request."""
        path, _, query = target.partition("?")
        fields = msgspec.json.decode(body) if body.strip() else {}
        if path == "/pause":
            await self._pause(query)
        elif path == "/resume":
            self.paused = False
            self._resumed.set()
        elif path == "/collective_rpc":
            if fields.get("method") != "reload_weights" or not fields["kwargs"]["weights_path"]:
                raise ValueError(one_line(f"method {fields.get('method')!r}; accepted: reload_weights"))
            if not self.paused:
                raise ValueError("the engine is not paused")
            if fields["kwargs"]["weights_path"] == MISSING_FOLDER:
                raise ValueError("no such folder")
            self.loads += 1
        elif path == "/update_weight_version":
            self.label = fields["new_version"]
        return {"status": "ok"}

    async def _pause(self, query: str) -> None:
        mode = dict(part.partition("=")[::2] for part in query.split("&")).get("mode", "abort")
        if mode not in ("abort", "wait"):
            raise ValueError(f"mode {mode!r}; accepted: abort, wait")
        self.paused = True
        self._resumed.clear()
        if mode == "abort":
            for abort in self._present:
                if not abort.done():
                    abort.set_result(None)
        if self._present:
            self._idle.clear()
            await self._idle.wait()


async def _acquire(slots: Slots, abort: asyncio.Future[None]) -> bool:
    """Acquire a slot; false: the abort came first."""
    turn = asyncio.ensure_future(slots.acquire())
    try:
        await asyncio.wait([turn, abort], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if not turn.cancel():
            slots.release()
        raise
    if turn.done():
        return True
    turn.cancel()
    return False


def token_choice(
    prompt: list[int], text: str, max_tokens: int | None, share: float, loads: int, temperature: float
) -> dict[str, Any]:
    """A completion in vLLM's format, cut to `max_tokens` and to the `share` that was sampled before an abort."""
    ids = [*text.encode(), END]
    finish = "stop"
    if max_tokens is not None and max_tokens < len(ids):
        ids, finish = ids[:max_tokens], "length"
    if not isclose(share, 1.0):
        ids, finish = ids[: int(share * len(ids))], "abort"
    logprobs = [logprob_of(loads, temperature)] * len(ids)
    return {
        "index": 0,
        "text": bytes(each for each in ids if each < END).decode(errors="replace"),
        "finish_reason": finish,
        "token_ids": ids,
        "prompt_token_ids": prompt,
        "logprobs": {
            "token_logprobs": logprobs,
            "top_logprobs": [
                {f"token_id:{each}": logprob} for each, logprob in zip(ids, logprobs, strict=True)
            ],
        },
    }
