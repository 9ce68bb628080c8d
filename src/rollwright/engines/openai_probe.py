"""Probes an OpenAI-compatible API before a run starts: does it serve the run's model?

The list of models is requested first, because it costs nothing. It is conclusive only if it contains the model: hosted APIs
do not list everything, some servers accept any name, and a key may be allowed to generate but not to list. Otherwise a
completion of one token decides. Transient failures (429, a slow first token while the model loads) do not fail the probe.
"""

import asyncio
import difflib
from collections.abc import Sequence
from typing import Any

import msgspec

from rollwright.engines.base import Capabilities, EngineError, Prompt, Sampling
from rollwright.engines.http_calls import MAX_CONTROL_ANSWER, CallFault, HttpCalls, engine_error
from rollwright.engines.openai_api import TextApi
from rollwright.errors import FormatError
from rollwright.http import Url
from rollwright.http.retry import FaultCause
from rollwright.trajectory import Message

ANSWER_SECONDS = 10.0
"""For the list of models, and to find out whether the server is reachable."""

TOKEN_SECONDS = 30.0
"""For one token. An engine that takes longer is loading its model; then the run's own time limit decides."""

SERVER_TRIES = 3
"""Requests with a server error before the server counts as down."""

PAUSE = 1.0
"""Seconds between them."""

NAMED = 10
"""Most models that an error message lists."""

TEXT_ONLY = "it returns text without token ids; for training use vllm, sglang, llama_cpp or torch"


async def probe_openai(
    calls: HttpCalls, models: Url, completions: Url, api: TextApi, model: str
) -> Capabilities:
    """Probe the API; raise an `EngineError` with the server's message."""
    can = Capabilities("OpenAI-compatible API", model, missing=TEXT_ONLY)
    names: list[str] = []
    try:
        listed = await calls.send_control("GET", models, None, ANSWER_SECONDS, max_answer=MAX_CONTROL_ANSWER)
        names = served_models(_decoded(listed))
    except CallFault as fault:
        if not _has_responded(fault):
            raise engine_error(fault, 1, models) from fault
    if model not in names:
        await _sample_one_token(calls, completions, api, _unknown(model, names))
    return can


def served_models(answer: Any) -> list[str]:
    """The names in a response of `/models`; empty if it has another format."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    found = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [name for name in found if isinstance(name, str)]


def name_some(names: Sequence[str], wanted: str = "") -> str:
    """Names for an error message, the nearest to `wanted` first, at most `NAMED`."""
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    ordered = [*near, *(each for each in names if each not in near)]
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + more


async def _sample_one_token(calls: HttpCalls, url: Url, api: TextApi, unknown: str) -> None:
    body = api.request(Prompt("probe", ("probe",), (Message("user", "Hello"),)), Sampling(max_tokens=1))
    tries = 1
    while True:
        try:
            answer = await calls.send_control("POST", url, body, TOKEN_SECONDS, max_answer=MAX_CONTROL_ANSWER)
            break
        except CallFault as fault:
            if fault.cause in (FaultCause.RATE_LIMITED, FaultCause.TIMEOUT):
                return
            if fault.cause is not FaultCause.SERVER_ERROR or tries == SERVER_TRIES:
                told = unknown if fault.cause is FaultCause.REFUSED else ""
                raise EngineError(f"{engine_error(fault, tries, url)}{told}") from fault
        await asyncio.sleep(PAUSE)
        tries += 1
    try:
        api.response(answer)
    except FormatError as error:
        raise EngineError(f"{url}: not a completion: {error}") from error


def _unknown(model: str, names: Sequence[str]) -> str:
    return f"; model {model!r} is not in its list, which has: {name_some(names, model)}" if names else ""


def _has_responded(fault: CallFault) -> bool:
    """Whether the server sent an HTTP response at all."""
    return fault.cause in (FaultCause.REFUSED, FaultCause.SERVER_ERROR, FaultCause.RATE_LIMITED)


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
