"""The default transport: zenoh peers that find each other by gossip, from the address of any one of them.

Invariants:
- No node is special. A bootstrap address has to answer only when a node joins; nodes that have joined are connected to all
  peers that they heard of, and stay so when the bootstrap dies. An address that does not answer is retried in the
  background forever, so a node that starts alone joins later by itself.
- Manifests are put to all peers; content stays with its owner and is fetched by a query. Liveliness tokens show who is
  there. Callbacks on zenoh's threads only fill locked, bounded containers or hand a value to the event loop.
- Any node can answer a query and declare a token in any name, and none of that is trusted: an answer counts only with the
  requested digest, and wrong answers are hashed and dropped where they arrive, however many; a token makes a peer known,
  and only its signature keeps it so (`peer_table`). zenoh slows down a sender that is faster than its answers are dropped,
  so junk costs the sender's own link.
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
from typing import Any, Self

from rollwright.errors import ConfigError, RollwrightError
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.transports.base import (
    CALL_SECONDS,
    MAX_CONTENT_BYTES,
    Announced,
    FetchFailed,
    FetchProblem,
    PassedOver,
    Peer,
    check_content,
    check_manifest,
)
from rollwright.swarm.transports.inbox import MAX_PER_PEER, Held, Inbox
from rollwright.swarm.transports.peer_table import PeerTable, Rank
from rollwright.swarm.transports.zenoh_queries import CatchUp, ReplyThread

LOOPBACK, ALL, ALL_OF_IPV6 = "tcp/127.0.0.1:0", "tcp/0.0.0.0:0", "tcp/[::]:0"
"""Any free port, on loopback or on all addresses."""

STARTUP_SECONDS = 60.0

_MAX_MESSAGE_BYTES = 2 * MAX_CONTENT_BYTES
"""zenoh's own limit for reassembled messages is 1 GiB."""

PEER_NAME = re.compile(r"[0-9a-f]{64}\Z")

_CLOSE_SECONDS = 5.0


def listening(listen: Sequence[str], bootstrap: Sequence[str]) -> list[str]:
    """The addresses that a node listens on: those configured, if any. Otherwise loopback, unless a bootstrap is on another
    machine; then all addresses, because nodes that only the bootstrap can reach would lose each other with it. Links other
    than plain TCP need a configured address, because they need certificates or the like."""
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
        """Manifests for nodes that join later."""
        self._announced = 0
        self._content_replies, self._manifest_replies = ReplyThread(), ReplyThread()
        """Separate, so that a flood of one kind of query does not delay the other."""
        self._peers = PeerTable(peer)
        self._catch_up = CatchUp(self._ask_recent, self._ask_all_recent)
        self._session: Any = None
        self._declared: list[Any] = []
        """Tokens, subscribers and queryables live as long as they are referenced."""

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
    ) -> Self:
        """Join the swarm. Addresses are zenoh's: `tcp/HOST:PORT`; for an empty `listen`, see `listening`. `multicast`: also
        find peers on the local network without an address. `settings` are zenoh's own, by path, such as
        `transport/link/tls` for certificates."""
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

    @classmethod
    async def join(cls, swarm: SwarmConfig, peer: str, *, clock: Callable[[], float] = time.time) -> Self:
        """Join the network as the settings say."""
        settings = swarm.communication
        return await cls.open(
            swarm.name,
            peer,
            listen=settings.listen,
            bootstrap=settings.bootstrap,
            startup_timeout=settings.startup_timeout,
            multicast=settings.multicast,
            settings=settings.zenoh,
            clock=clock,
        )

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        self._announced += 1
        self._recent.append((self._announced, check_manifest(manifest)))
        await self._call(deadline, self._put, self._announced, manifest)

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        return self._inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        self._held.add(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        if not PEER_NAME.match(peer) or not PEER_NAME.match(digest):
            raise FetchFailed(FetchProblem.ABSENT, digest)
        answers = _Answers(asyncio.get_running_loop(), digest, max_bytes)
        key = f"{self._root}/content/{peer}/{digest}"
        try:
            async with asyncio.timeout(deadline):
                await self._call(deadline, self._ask, key, answers, deadline)
                return await answers.right
        except TimeoutError as error:
            raise FetchFailed(FetchProblem.DEADLINE, digest) from error
        except FetchFailed:
            raise
        except RollwrightError as error:
            raise FetchFailed(FetchProblem.CLOSED, digest) from error
        finally:
            answers.stop()
            if answers.junk:
                self._inbox.pass_over(PassedOver.JUNK_REPLY, answers.junk)

    def peers(self) -> Sequence[Peer]:
        return self._peers.all()

    def prefer(self, peer: str) -> None:
        self._peers.raise_to(Rank.PROVEN, peer, seen=self._clock())
        self._inbox.prefer(peer)

    async def close(self) -> None:
        session, self._session = self._session, None
        self._declared.clear()
        self._content_replies.close()
        self._manifest_replies.close()
        if session is not None:
            # A stuck session is abandoned until the process exits.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(session.close), _CLOSE_SECONDS)

    async def _call(self, deadline: float, work: Callable[..., None], *arguments: object) -> None:
        """Run a blocking zenoh call in a thread: a congested link blocks that thread, never the node."""
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
        self._declared = self._declare(session)

    def _declare(self, session: Any) -> list[Any]:
        """Tell the others what this node serves and listens to."""
        tokens = f"{self._root}/alive"
        return [
            session.declare_queryable(f"{self._root}/content/{self._peer}/*", self._serve, complete=True),
            session.declare_queryable(f"{self._root}/manifests/{self._peer}/*", self._tell, complete=True),
            session.declare_subscriber(f"{self._root}/manifests/*/*", self._hear),
            session.liveliness().declare_subscriber(f"{tokens}/*", self._notice, history=True),
            session.liveliness().declare_token(f"{tokens}/{self._peer}"),
        ]

    def _put(self, session: Any, number: int, manifest: bytes) -> None:
        import zenoh

        # On a congested link the message is dropped: a peer that missed it asks for the last ones when it reconnects.
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
            **({} if answers.cancellation is None else {"cancellation_token": answers.cancellation}),
        )

    def _serve(self, query: Any) -> None:
        digest = str(query.key_expr).rpartition("/")[2]
        content = self._held.get(digest)
        if content is not None:
            self._content_replies.send(lambda: query.reply(query.key_expr, content))

    def _tell(self, query: Any) -> None:
        self._manifest_replies.send(lambda: self._tell_now(query))

    def _tell_now(self, query: Any) -> None:
        for number, manifest in list(self._recent):
            query.reply(f"{self._root}/manifests/{self._peer}/{number}", manifest)

    def _hear(self, sample: Any) -> None:
        peer = self._inbox.add(sample.payload.to_bytes())
        if peer is not None and self._peers.raise_to(Rank.SIGNED, peer, seen=self._clock()):
            self._catch_up.want(peer, Rank.SIGNED)  # its token was pushed out, or has not arrived yet

    def _notice(self, sample: Any) -> None:
        """Handle a liveliness token: a peer came or went. A peer that came is asked for its last manifests."""
        import zenoh

        peer = str(sample.key_expr).rpartition("/")[2]
        if peer == self._peer or not PEER_NAME.match(peer):
            return
        came = sample.kind == zenoh.SampleKind.PUT
        if came or peer in self._peers:
            self._peers.note(peer, alive=came, seen=self._clock())
        if came:
            self._catch_up.want(peer, self._peers.rank(peer) or Rank.HEARD)

    def _ask_recent(self, peer: str, done: Callable[[], None]) -> None:
        if not self._peers.is_alive(peer):
            self._ask_alive(peer)
        self._get(f"{self._root}/manifests/{peer}/*", self._remember, done)

    def _ask_all_recent(self, done: Callable[[], None]) -> None:
        self._get(f"{self._root}/manifests/*/*", self._remember, done)

    def _get(self, key: str, heard: Callable[[Any], None], done: Callable[[], None]) -> None:
        """Query all nodes that may know: of several that claim completeness, zenoh would choose one."""
        import zenoh

        session = self._session
        if session is None:
            return
        with contextlib.suppress(zenoh.ZError):  # closed meanwhile
            session.get(
                key,
                zenoh.handlers.Callback(heard, done),
                target=zenoh.QueryTarget.ALL,
                consolidation=zenoh.ConsolidationMode.NONE,
                timeout=CALL_SECONDS,
            )

    def _ask_alive(self, peer: str) -> None:
        import zenoh

        session = self._session
        if session is None:
            return
        with contextlib.suppress(zenoh.ZError):
            session.liveliness().get(
                f"{self._root}/alive/{peer}",
                zenoh.handlers.Callback(self._there),
                timeout=CALL_SECONDS,
            )

    def _there(self, reply: Any) -> None:
        if reply.ok is not None:
            self._peers.note(str(reply.ok.key_expr).rpartition("/")[2], alive=True, seen=self._clock())

    def _remember(self, reply: Any) -> None:
        if reply.ok is not None:
            self._hear(reply.ok)


class _Answers:
    """Waits for the right reply to one query. Wrong replies are dropped on zenoh's thread, so they take no memory. Their
    number is not limited, because an attacker could use up a limit and so keep the right reply out."""

    def __init__(self, loop: asyncio.AbstractEventLoop, digest: str, max_bytes: int) -> None:
        import zenoh

        self._loop = loop
        self._digest = digest
        self._max_bytes = max_bytes
        self._problem = FetchProblem.ABSENT
        self.right: asyncio.Future[bytes] = loop.create_future()
        """The content, or `FetchFailed` once no further reply can arrive."""
        self.junk = 0
        """Replies with another digest or size."""
        made = getattr(zenoh, "CancellationToken", None)  # releases before 1.7 have none
        self.cancellation: Any = None if made is None else made()

    def add(self, reply: Any) -> None:
        if reply.ok is None or self.right.done():
            return
        try:
            if len(reply.ok.payload) > self._max_bytes:  # not worth a copy
                raise FetchFailed(FetchProblem.TOO_LARGE, self._digest)
            content = check_content(reply.ok.payload.to_bytes(), self._digest, self._max_bytes)
        except FetchFailed as failed:
            self.junk += 1
            self._problem = failed.problem
            return
        self._post(lambda: self.right.set_result(content))

    def end(self) -> None:
        self._post(lambda: self.right.set_exception(FetchFailed(self._problem, self._digest)))

    def stop(self) -> None:
        """Stop waiting; zenoh drops later replies."""
        if self.cancellation is not None:
            self.cancellation.cancel()
        if self.right.done() and not self.right.cancelled():
            self.right.exception()  # marks it as retrieved
        self.right.cancel()

    def _post(self, settle: Callable[[], None]) -> None:
        def settle_once() -> None:
            if not self.right.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(settle_once)


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
    """zenoh's message without its source location."""
    return " ".join(str(error).partition(" at /")[0].split())


async def open_zenoh(
    swarm: SwarmConfig, peer: str, *, clock: Callable[[], float] = time.time
) -> ZenohTransport:
    return await ZenohTransport.join(swarm, peer, clock=clock)
