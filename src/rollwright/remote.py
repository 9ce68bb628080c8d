"""Client for remote programs: takes the next rollout of a run, plays it with any SDK, and reports its result.

    import rollwright as rw

    rw.RemoteRun("http://trainer:8810").play(solve, concurrency=8)

Always true: a rollout that was taken is reported once, as a result or as an error, or its lease ends and another program
gets it; while it is played, heartbeats keep the lease. Only the standard library is used, and the API is plain HTTP
(docs/agents.md), so that a program in any language can do the same.
"""

import asyncio
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from types import TracebackType
from typing import Any, Self

from rollwright.errors import RollwrightError

KEY_VARIABLE = "ROLLWRIGHT_GATEWAY_KEY"

_POLL_SECONDS = 20.0
"""Seconds for which one request waits for a rollout."""

_PAUSE_SECONDS = 0.5
"""Between two tries to reach the run."""

_HEARTBEATS_PER_LEASE = 4

_SLACK_SECONDS = 30.0
"""For an answer, beyond the time that the run may wait before it gives one."""

_NOTHING: Any = object()

_log = logging.getLogger(__name__)


class RunUnreachable(RollwrightError):
    """Nothing answers at the run's address."""


class RunRefused(RollwrightError):
    """The run answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class RemoteRollout:
    """A rollout to be played. `with rollout:` sends heartbeats, and reports an exception as the rollout's failure."""

    rollout_id: str
    tag: str
    task: dict[str, Any]
    """The row."""
    base_url: str
    """For the client of any SDK, as is `api_key`."""
    api_key: str
    lease_seconds: float
    ended: bool = False
    """Whether a result was reported."""
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    def end(self, returned: Any = _NOTHING, *, reward: float | None = None, error: str | None = None) -> bool:
        """Reports the result: the value that the agent came to, or a reward, or why it failed. `False`: the run did not wait
        for it any more."""
        body = {"reward": reward, "error": error}
        body = {name: value for name, value in body.items() if value is not None}
        if returned is not _NOTHING:
            body["returned"] = returned
        self.ended = True
        self._stopped.set()
        try:
            _post(f"{self._address}/end", body, self.api_key)
        except RunRefused as refused:
            if refused.status not in (401, 410):
                raise
            _log.warning("%s: the run has taken it back: %s", self.rollout_id, refused)
            return False
        return True

    def heartbeat(self) -> None:
        """Keeps the lease of a rollout that makes no model call for long."""
        _post(f"{self._address}/heartbeat", {}, self.api_key)

    @property
    def _address(self) -> str:
        return self.base_url.removesuffix("/v1")

    def __enter__(self) -> Self:
        threading.Thread(target=self._send_heartbeats, name=self.rollout_id, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if not self.ended and kind is not None:
            self.end(error=f"{kind.__name__}: {' '.join(str(error).split())}")
        elif not self.ended:
            self.end(error="the program reported no result")

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(self.lease_seconds / _HEARTBEATS_PER_LEASE):
            try:
                self.heartbeat()
            except RunUnreachable:
                continue  # it may be resumed in time
            except RunRefused:
                return  # the rollout is over


@dataclass
class RemoteRun:
    """A run whose tasks this program plays. Iterating gives rollouts until the run has ended."""

    url: str
    """Of the run: `remote.host` and `remote.port` of its settings."""
    key: str | None = None
    """Unset: the variable `ROLLWRIGHT_GATEWAY_KEY`."""
    tags: Sequence[str] | None = None
    """Tags whose rollouts are taken; unset: all."""
    patience: float = 60.0
    """Seconds without an answer after which the run counts as ended, or was never there."""
    _met: bool = field(default=False, init=False, repr=False)
    """Whether the run has answered."""

    def next(self) -> RemoteRollout | None:
        """Waits for the next rollout; `None`: the run has ended."""
        claim, since = uuid.uuid4().hex, time.monotonic()
        body = {"timeout": _POLL_SECONDS, **({} if self.tags is None else {"tags": list(self.tags)})}
        key = self.key if self.key is not None else os.environ.get(KEY_VARIABLE)
        while True:
            try:
                found = _post(f"{self.url.rstrip('/')}/rollouts", body, key, {"idempotency-key": claim})
                self._met = True
                return RemoteRollout(**found)
            except RunUnreachable:
                if time.monotonic() - since > self.patience:
                    if self._met:
                        return None
                    raise
                time.sleep(_PAUSE_SECONDS)
            except RunRefused as refused:
                self._met = True
                if refused.status == 410:
                    return None
                if refused.status != 404:
                    raise
                since = time.monotonic()

    def __iter__(self) -> Iterator[RemoteRollout]:
        while (rollout := self.next()) is not None:
            yield rollout

    def play(self, function: Callable[[dict[str, Any], RemoteRollout], Any], *, concurrency: int = 1) -> int:
        """Plays rollouts with `function(task, session)`, async or plain, until the run has ended; returns their number.

        The session is the rollout: it has `base_url` and `api_key`. What the function returns is its result, and its
        exception a failure, which the run retries.
        """
        counts = [0] * concurrency
        failures: list[BaseException] = []

        def work(place: int) -> None:
            try:
                for rollout in self:
                    _play_one(function, rollout)
                    counts[place] += 1
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(concurrency)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if failures:
            raise failures[0]
        return sum(counts)


def _play_one(function: Callable[..., Any], rollout: RemoteRollout) -> None:
    try:
        with rollout:
            value = function(rollout.task, rollout)
            rollout.end(asyncio.run(_awaited(value)) if isawaitable(value) else value)
    except RollwrightError as error:
        _log.warning("%s: could not be reported: %s", rollout.rollout_id, error)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it is reported
        _log.warning("%s: %s: %s", rollout.rollout_id, type(error).__name__, error)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _post(
    url: str, body: Mapping[str, Any], key: str | None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    try:
        content = json.dumps(body).encode()
    except (TypeError, ValueError) as error:
        raise RollwrightError(f"the result cannot be sent as JSON: {error}") from error
    sent = {"content-type": "application/json", **(headers or {})}
    if key:
        sent["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, content, sent, method="POST")
    try:
        with _opener(url).open(request, timeout=_POLL_SECONDS + _SLACK_SECONDS) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise RunRefused(error.code, _message(error)) from None
    except (OSError, ValueError) as error:
        raise RunUnreachable(f"{url}: {getattr(error, 'reason', error)}") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Goes through the environment's proxy, unless the run is on this machine."""
    local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"
