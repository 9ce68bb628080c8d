"""The default network: zenoh peers that find each other by gossip, from any address of any of them.

True of it: no node is special. A bootstrap address only has to be alive when somebody joins; who has joined is
connected to everybody it heard of, and stays so when the bootstrap dies. An address that does not answer is tried again
in the background for ever, so a node that starts alone joins by itself later. Manifests are put to all; content lies at
its owner and is asked for by a query. Liveliness tokens tell who is there. Callbacks of zenoh's threads only fill
locked, bounded containers or hand a value to the event loop.
"""

import asyncio
import contextlib
import ipaddress
import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from rollwright.errors import ConfigError, RollwrightError
from rollwright.swarm.transport import (
    CALL_SECONDS,
    MAX_CONTENT_BYTES,
    Announced,
    FetchFailed,
    FetchProblem,
    Peer,
    checked_content,
    checked_manifest,
)
from rollwright.swarm.transport_inbox import MAX_PEERS, MAX_PER_PEER, Held, Inbox

LOOPBACK, ALL, ALL_OF_IPV6 = "tcp/127.0.0.1:0", "tcp/0.0.0.0:0", "tcp/[::]:0"
"""Any free port, for this machine alone or for whoever reaches it."""

STARTUP_SECONDS = 60.0

_MAX_MESSAGE_BYTES = 2 * MAX_CONTENT_BYTES
"""zenoh itself would take a message of 1 GiB together."""

_MAX_REPLIES = 16
"""To one query: an honest owner gives one; anybody else may answer too, and is told apart by the digest."""

_HEX = re.compile(r"[0-9a-f]{64}\Z")

_CLOSE_SECONDS = 5.0


def listening(listen: Sequence[str], bootstrap: Sequence[str]) -> list[str]:
    """Where a node is reached: at the addresses that it is told. Without any it is loopback as long as it knows this
    machine alone, else every address of the machine: nodes that only a bootstrap can reach would lose each other with
    it. For links other than plain TCP an address has to be told, because they need certificates or the like."""
    if listen:
        return list(listen)
    hosts = [
        place.rpartition(":")[0]
        for kind, _, place in (each.partition("/") for each in bootstrap)
        if kind == "tcp"
    ]
    others = [host.strip("[]") for host in hosts if not _is_loopback(host.strip("[]"))]
    if not others:
        return [LOOPBACK]
    return [ALL_OF_IPV6 if all(":" in host for host in others) else ALL]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class ZenohTransport:
    """Made by `open`."""

    def __init__(self, swarm: str, peer: str, clock: Callable[[], float]) -> None:
        self._root = f"rollwright/{sha256(swarm.encode()).hexdigest()[:16]}"
        self._peer = peer
        self._clock = clock
        self._inbox = Inbox(peer)
        self._held = Held()
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=MAX_PER_PEER)
        """What a node that joins now is told of this one."""
        self._announced = 0
        self._peers: dict[str, Peer] = {}
        self._session: Any = None
        self._declared: list[Any] = []
        """Tokens, subscribers and queryables live as long as somebody holds them."""

    @classmethod
    async def open(
        cls,
        swarm: str,
        peer: str,
        *,
        listen: Sequence[str] = (),
        bootstrap: Sequence[str] = (),
        startup_timeout: float = STARTUP_SECONDS,
        multicast: bool = False,
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> "ZenohTransport":
        """Joins. Addresses are zenoh's: `tcp/HOST:PORT`; without any in `listen`, see `listening`. `multicast`: also find
        peers on the same network without any address. `settings` are zenoh's own, by path: `transport/link/tls` for
        certificates, say."""
        made = cls(swarm, peer, clock)
        config = _config(listening(listen, bootstrap), bootstrap, multicast, settings or {})
        try:
            await asyncio.wait_for(asyncio.to_thread(made._join, config), startup_timeout)
        except TimeoutError as error:
            raise RollwrightError(
                f"zenoh did not start in {startup_timeout:g} s; raise communication.startup_timeout, "
                "or look whether the addresses in communication.listen are free"
            ) from error
        return made

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        self._announced += 1
        self._recent.append((self._announced, checked_manifest(manifest)))
        await self._call(deadline, self._put, self._announced, manifest)

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        return self._inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        self._held.add(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        if not _HEX.match(peer) or not _HEX.match(digest):
            raise FetchFailed(FetchProblem.ABSENT, digest)
        answers = _Answers(asyncio.get_running_loop())
        key = f"{self._root}/content/{peer}/{digest}"
        try:
            async with asyncio.timeout(deadline):
                await self._call(deadline, self._ask, key, answers, deadline)
                return await answers.first(digest, max_bytes)
        except TimeoutError as error:
            raise FetchFailed(FetchProblem.DEADLINE, digest) from error
        except FetchFailed:
            raise
        except RollwrightError as error:
            raise FetchFailed(FetchProblem.CLOSED, digest) from error

    def peers(self) -> Sequence[Peer]:
        return [each for _, each in sorted(self._peers.copy().items())]

    async def close(self) -> None:
        session, self._session = self._session, None
        self._declared.clear()
        if session is not None:
            # A session that is stuck is left to the end of the process.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(session.close), _CLOSE_SECONDS)

    async def _call(self, deadline: float, work: Callable[..., None], *arguments: object) -> None:
        """zenoh's calls are short but blocking: a congested link holds a thread, never the node."""
        import zenoh

        session = self._session
        if session is None:
            raise RollwrightError("the transport is closed")
        try:
            await asyncio.wait_for(asyncio.to_thread(work, session, *arguments), deadline)
        except TimeoutError as error:
            raise RollwrightError(f"zenoh did not take a message in {deadline:g} s") from error
        except zenoh.ZError as error:  # closed meanwhile
            raise RollwrightError(f"zenoh did not take a message: {_line(error)}") from error

    def _join(self, config: Any) -> None:
        import zenoh

        try:
            session = zenoh.open(config)
        except zenoh.ZError as error:
            raise RollwrightError(f"zenoh cannot start: {_line(error)}") from error
        self._session = session
        tokens = f"{self._root}/alive"
        self._declared = [
            session.declare_queryable(f"{self._root}/content/{self._peer}/*", self._serve, complete=True),
            session.declare_queryable(f"{self._root}/manifests/{self._peer}/*", self._tell, complete=True),
            session.declare_subscriber(f"{self._root}/manifests/*/*", self._hear),
            session.liveliness().declare_subscriber(f"{tokens}/*", self._notice, history=True),
            session.liveliness().declare_token(f"{tokens}/{self._peer}"),
        ]

    def _put(self, session: Any, number: int, manifest: bytes) -> None:
        import zenoh

        # Dropped rather than waited for on a congested link: who missed it asks for the last ones when it reconnects.
        session.put(
            f"{self._root}/manifests/{self._peer}/{number}",
            manifest,
            congestion_control=zenoh.CongestionControl.DROP,
        )

    def _ask(self, session: Any, key: str, answers: "_Answers", seconds: float) -> None:
        import zenoh

        session.get(
            key,
            zenoh.handlers.Callback(answers.add, answers.end),
            target=zenoh.QueryTarget.ALL,
            consolidation=zenoh.ConsolidationMode.NONE,
            timeout=seconds,
        )

    def _serve(self, query: Any) -> None:
        digest = str(query.key_expr).rpartition("/")[2]
        content = self._held.get(digest)
        if content is not None:
            query.reply(query.key_expr, content)

    def _tell(self, query: Any) -> None:
        for number, manifest in list(self._recent):
            query.reply(f"{self._root}/manifests/{self._peer}/{number}", manifest)

    def _hear(self, sample: Any) -> None:
        self._inbox.add(sample.payload.to_bytes())

    def _notice(self, sample: Any) -> None:
        """Somebody came or went; of who came, the last manifests are asked for."""
        import zenoh

        peer = str(sample.key_expr).rpartition("/")[2]
        if peer == self._peer or not _HEX.match(peer):
            return
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            gone = [name for name, each in self._peers.copy().items() if not each.alive]
            if not gone:
                return
            del self._peers[gone[0]]
        came = sample.kind == zenoh.SampleKind.PUT
        self._peers[peer] = Peer(peer, came, self._clock())
        session = self._session
        if came and session is not None:
            session.get(
                f"{self._root}/manifests/{peer}/*",
                self._remember,
                consolidation=zenoh.ConsolidationMode.NONE,
                timeout=CALL_SECONDS,
            )

    def _remember(self, reply: Any) -> None:
        if reply.ok is not None:
            self._hear(reply.ok)


class _Answers:
    """Replies to one query, handed from zenoh's threads to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._count = 0

    def add(self, reply: Any) -> None:
        if reply.ok is not None and self._count < _MAX_REPLIES:
            self._count += 1
            self._post(reply.ok.payload.to_bytes())

    def end(self) -> None:
        self._post(None)

    def _post(self, answer: bytes | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, answer)

    async def first(self, digest: str, max_bytes: int) -> bytes:
        """The first answer that is what was asked for."""
        problem = FetchFailed(FetchProblem.ABSENT, digest)
        while (answer := await self._queue.get()) is not None:
            try:
                return checked_content(answer, digest, max_bytes)
            except FetchFailed as error:
                problem = error
        raise problem


def _config(
    listen: Sequence[str], bootstrap: Sequence[str], multicast: bool, settings: Mapping[str, Any]
) -> Any:
    try:
        import zenoh
    except ImportError as error:
        raise ConfigError("eclipse-zenoh is not installed; install rollwright[swarm]") from error

    config = zenoh.Config()
    told: dict[str, Any] = {
        "mode": "peer",
        "listen/endpoints": list(listen),
        "connect/endpoints": list(bootstrap),
        "scouting/multicast/enabled": multicast,
        "scouting/gossip/enabled": True,
        "transport/link/rx/max_message_size": _MAX_MESSAGE_BYTES,
        **settings,
    }
    for key, value in told.items():
        try:
            config.insert_json5(key, json.dumps(value))
        except zenoh.ZError as error:
            raise ConfigError(
                f"communication: zenoh does not accept {key} = {value!r}: {_line(error)}"
            ) from error
    return config


def _line(error: Exception) -> str:
    """What zenoh says, without where in its source it says so."""
    return " ".join(str(error).partition(" at /")[0].split())
