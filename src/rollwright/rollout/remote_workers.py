"""Remote programs and workers in other processes: programs know one address, the run's, wherever their rollout is played.

Always true: an attempt is recorded by the worker that holds it, in the gateway of that worker. The worker announces the
rollouts that wait there to the run (`WorkerBoard`), again and again until they are taken; the run hands them out and
passes every later request of the program on to the worker (`RunBoard`). So leases, journals, retries and late programs are
treated as in one process. Nothing has to be told when a worker dies or the run is resumed: an announced rollout that
cannot be had is skipped, a rollout that another worker announces moves there, and its earlier program is refused.

The run leaves its address and a key for workers in the store (`RunDoor`), anew at each start.
"""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rollwright.agents import EpisodeFailure
from rollwright.gateway import Gateway
from rollwright.gateway.endpoint import EndRequest
from rollwright.gateway.forwarding import Forwarder, RolloutRoute
from rollwright.gateway.registry import unauthorized
from rollwright.gateway.types import decode
from rollwright.http.connection import HttpFault
from rollwright.rollout.remote import Offer, Offered, RemoteBoard
from rollwright.store.errors import StoreUnavailable
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import Boundary, ErrorRecord

_ANNOUNCE_SECONDS = 2.0
"""Between two announcements of the same rollouts: a run that was resumed hears of them so soon."""

DOOR_SECONDS = 120.0
"""Without an answer of the run, after which a waiting rollout fails: a resumed run needs some seconds."""

_NO_RUN = f"the run that remote programs ask did not answer this worker for {DOOR_SECONDS:g} s"
_KIND = "remote"
"""`ErrorRecord.kind` of a rollout that cannot be offered."""

_REMEMBERED = 10_000
"""Number of taken rollouts whose programs still find their worker."""

_log = logging.getLogger(__name__)


class RunDoor(msgspec.Struct, frozen=True):
    """Where workers reach the board of their run."""

    urls: tuple[str, ...]
    """Tried in this order: not every worker reaches each."""
    key: str


class AnnouncedRollout(msgspec.Struct, frozen=True):
    """A rollout that waits at a worker."""

    rollout_id: str
    attempt_id: str
    attempt: int
    """Number of the attempt: a later one is right where two workers announce the same rollout."""
    tag: str


class Announcement(msgspec.Struct, frozen=True):
    """Body of `POST /offers`: all rollouts that wait at one worker."""

    address: str
    """Of the worker's gateway."""
    key: str
    """Takes its rollouts."""
    offers: list[AnnouncedRollout]


_ANNOUNCEMENT = msgspec.json.Decoder(Announcement)


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """An announced rollout, with the worker where it waits."""

    announced: AnnouncedRollout
    address: str
    key: str

    @property
    def rollout_id(self) -> str:
        return self.announced.rollout_id

    @property
    def tag(self) -> str:
        return self.announced.tag


@dataclass(eq=False)
class _TakenRoute(RolloutRoute):
    """The way to a rollout that a program has taken."""

    attempt: int = 0
    claim_id: str | None = None
    described: Mapping[str, Any] | None = None
    """What the program was told."""


class RunBoard(RemoteBoard):
    """The board of a run: hands out its own rollouts, and those that its workers announce."""

    def __init__(self, key: str | None = None) -> None:
        super().__init__(key)
        self.worker_key = secrets.token_urlsafe(32)
        self._routes: dict[str, _TakenRoute] = {}
        """Latest rollouts that were taken from workers, by id."""
        self._forwarder = Forwarder()
        self._reached: set[str] = set()
        """Addresses of workers that have answered."""
        self._taking: set[asyncio.Future[Any]] = set()

    def serve(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.listen(self, self)

    async def close(self) -> None:
        await super().close()
        for route in self._routes.values():
            route.moved.set()
        await self._forwarder.close()

    # -- routing ----------------------------------------------------------------------------------------

    def find_route(self, rollout_id: str, key: bytes | None) -> RolloutRoute | None:
        route = self._routes.get(rollout_id)
        if route is None or key is None or not hmac.compare_digest(route.key, key):
            return None
        if route.moved.is_set():
            raise HttpRefusal(410, "sealed", "the rollout was taken back, or is over")
        return route

    def admit_worker(self, key: bytes | None) -> None:
        if key is None or not hmac.compare_digest(key, self.worker_key.encode()):
            raise unauthorized("announcing rollouts needs the key that the run left in its store")

    async def announce(self, body: bytes) -> Mapping[str, Any]:
        told: Announcement = decode(_ANNOUNCEMENT, body)
        if told.address not in self._reached:
            if (why := await self._forwarder.is_there(told.address)) is not None:
                raise HttpRefusal(502, "unreachable", f"the run cannot reach {told.address}: {why}")
            self._reached.add(told.address)
        offered = {each.attempt_id for each in told.offers}
        for each in [each for each in self._waiting if isinstance(each, _Elsewhere)]:
            if each.address == told.address and each.announced.attempt_id not in offered:
                self._waiting.remove(each)  # withdrawn
        for announced in told.offers:
            self._add(_Elsewhere(announced, told.address, told.key))
        async with self._news:
            self._news.notify_all()
        return {"status": "ok"}

    async def note_fault(self, route: RolloutRoute) -> None:
        if await self._forwarder.is_there(route.address) is not None:
            route.moved.set()
            self._reached.discard(route.address)

    def _add(self, new: _Elsewhere) -> None:
        """Adds what waits at a worker, in place of an earlier attempt at the same rollout."""
        route = self._routes.get(new.rollout_id)
        if route is not None and route.attempt >= new.announced.attempt:
            return
        for each in self._waiting:
            if isinstance(each, _Elsewhere) and each.rollout_id == new.rollout_id:
                if each.announced.attempt >= new.announced.attempt:
                    return
                self._waiting.remove(each)
                break
        if route is not None:
            route.moved.set()
        self._waiting.append(new)

    # -- handing out ------------------------------------------------------------------------------------

    def _find_claimed(self, claim_id: str) -> Mapping[str, Any] | None:
        for route in self._routes.values():
            if route.claim_id == claim_id and not route.moved.is_set():
                return route.described
        return super()._find_claimed(claim_id)

    async def _hand_out(self, offer: Offered, claim_id: str | None) -> Mapping[str, Any] | None:
        if not isinstance(offer, _Elsewhere):
            return await super()._hand_out(offer, claim_id)
        # Shielded: the worker has handed it out even if this program has left, which repeats its request then.
        taking = asyncio.ensure_future(self._take(offer, claim_id))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        return await asyncio.shield(taking)

    async def _take(self, offer: _Elsewhere, claim_id: str | None) -> Mapping[str, Any] | None:
        wanted = {"rollout_id": offer.rollout_id, "timeout": 0.0}
        try:
            status, found = await self._forwarder.post(
                f"{offer.address}/rollouts", wanted, offer.key, claim_id
            )
        except HttpFault as fault:
            self._reached.discard(offer.address)
            _log.info("%s: its worker does not answer: %s", offer.rollout_id, fault)
            return None
        if status != 200:
            return None  # withdrawn meanwhile
        assert self._gateway is not None, "requests come through the gateway"
        described = {**found, "base_url": f"{self._gateway.address(offer.rollout_id)}/v1"}
        self._routes.pop(offer.rollout_id, None)
        self._routes[offer.rollout_id] = _TakenRoute(
            offer.address,
            str(found["api_key"]).encode(),
            attempt=offer.announced.attempt,
            claim_id=claim_id,
            described=described,
        )
        while len(self._routes) > _REMEMBERED:
            del self._routes[next(iter(self._routes))]
        return described


class WorkerBoard(RemoteBoard):
    """The board of a worker in another process than its run: what waits here is announced to the run."""

    def __init__(self, find_door: Callable[[], Awaitable[RunDoor | None]]) -> None:
        """`find_door`: reads from the store where the run is now."""
        self._own_key = secrets.token_urlsafe(32)
        super().__init__(self._own_key)
        self._find_door = find_door
        self._forwarder = Forwarder()
        self._announcing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Set when there is a new offer."""
        self._starting = asyncio.Lock()

    async def play(self, offer: Offer, episode_seconds: float) -> EndRequest:
        offer.session.gateway = await self._listen(len(offer.session.trajectory.turns))
        self._changed.set()
        return await super().play(offer, episode_seconds)

    async def close(self) -> None:
        await super().close()
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        await self._forwarder.close()
        if self._gateway is not None:
            await self._gateway.close()

    async def _listen(self, turns: int) -> Gateway:
        """The gateway of this worker, on the address from which it reaches the run."""
        clock = asyncio.get_running_loop().time
        async with self._starting:
            ends = clock() + DOOR_SECONDS
            while self._gateway is None:
                door = await self._find_door()
                for url in () if door is None else door.urls:
                    if await self._forwarder.is_there(url) is None:
                        self.serve(Gateway(host=address_towards(url)))
                        self._announcing = asyncio.create_task(self._announce_always(), name="announce")
                        break
                else:
                    if clock() > ends:
                        raise EpisodeFailure(ErrorRecord(Boundary.SYSTEM, _KIND, _NO_RUN, turns))
                    await asyncio.sleep(_ANNOUNCE_SECONDS)
            return self._gateway

    async def _announce_always(self) -> None:
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            while not (waiting := self._untaken()):
                self._changed.clear()
                await self._changed.wait()
                heard = clock()
            self._changed.clear()
            try:
                refusal = await self._announce(waiting)
                heard = clock()
            except (HttpFault, StoreUnavailable) as error:
                _log.info("remote: the run does not answer: %s", error)
                refusal = _NO_RUN if clock() - heard > DOOR_SECONDS else None
            if refusal is not None:
                self._fail(waiting, refusal)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANNOUNCE_SECONDS):
                    await self._changed.wait()

    async def _announce(self, waiting: Sequence[Offer]) -> str | None:
        """Tells the run what waits here; returns why the run cannot have it. Raises if the run does not answer."""
        door = await self._find_door()
        assert self._gateway is not None, "listens before anything is offered"
        told = Announcement(self._gateway.url, self._own_key, [_announced(each) for each in waiting])
        fault = HttpFault("it has left no address")
        if door is None:
            raise fault
        for url in door.urls:
            try:
                status, answer = await self._forwarder.post(f"{url}/offers", told, door.key)
            except HttpFault as error:
                fault = error
                continue
            if status == 200:
                return None
            if status == 502:
                return str(answer["error"]["message"])
            fault = HttpFault(f"{url}: HTTP {status}")  # of another run, or of one that has ended
        raise fault

    def _untaken(self) -> list[Offer]:
        return [each for each in self._waiting if isinstance(each, Offer) and not each.taken.done()]

    def _fail(self, offers: Sequence[Offer], why: str) -> None:
        for offer in offers:
            if not offer.taken.done():
                record = ErrorRecord(Boundary.SYSTEM, _KIND, why, len(offer.session.trajectory.turns))
                offer.taken.set_exception(EpisodeFailure(record))


def _announced(offer: Offer) -> AnnouncedRollout:
    session = offer.session
    return AnnouncedRollout(
        offer.rollout_id, session.trajectory.attempt_id, session.attempt_number, offer.tag
    )


def address_towards(url: str) -> str:
    """This machine's address on the way to a server, at which that server reaches this machine unless a translation of
    addresses is between them."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
