"""Remote programs as agents: a program anywhere takes the next rollout of a run by HTTP, plays it, and reports its result.

Always true: an offered rollout is an attempt that a worker of the run holds, so leases, retries, journals and weights are
those of any other rollout. It goes to one program at a time. A program that is silent for longer than the lease has lost
it: the attempt fails and is offered again, with the recorded answers to the same calls, and the late program is refused.
The time for which a rollout waits for a program counts for no limit.

`RemoteBoard` is what the run's gateway serves beside the model APIs: `POST /rollouts` takes the next offer, and waits for
one; `POST /rollouts/ID/end` reports the result.
"""

import asyncio
import hmac
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rollwright.agents import EpisodeFailure, timed_out
from rollwright.gateway import Gateway
from rollwright.gateway.endpoint import EndRequest
from rollwright.gateway.recorder import Given
from rollwright.gateway.registry import check_key, unauthorized
from rollwright.gateway.types import decode
from rollwright.rollout.agent_session import AgentSession
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import Boundary, ErrorRecord

LONGEST_WAIT = 60.0
"""Seconds for which one request waits for a rollout; proxies end requests that take longer."""

_REMEMBERED = 10_000
"""Number of ended rollouts whose repeated reports are answered again."""


class NextRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /rollouts`."""

    timeout: float = 20.0
    """Seconds to wait for a rollout."""
    tags: list[str] | None = None
    """Tags whose rollouts are taken; `None`: all."""
    rollout_id: str | None = None
    """The one to take; `None`: any."""

    def takes(self, offer: "Offered") -> bool:
        return (self.tags is None or offer.tag in self.tags) and self.rollout_id in (None, offer.rollout_id)


class Offered(Protocol):
    """A rollout that waits for a program."""

    @property
    def rollout_id(self) -> str: ...

    @property
    def tag(self) -> str: ...


_NEXT = msgspec.json.Decoder(NextRequest)


@dataclass(eq=False)
class Offer:
    """A rollout that waits for a program, or is played by one."""

    task: Any
    session: AgentSession
    lease_seconds: float
    taken: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Has its result when a program plays the rollout, or the failure of a rollout that none can take."""
    claim_id: str | None = None
    """Idempotency key of the request that took it."""
    result: "asyncio.Future[EndRequest]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def rollout_id(self) -> str:
        return self.session.trajectory.rollout_id

    @property
    def tag(self) -> str:
        return self.session.trajectory.tag

    @property
    def silent_seconds(self) -> float:
        recorder = self.session.recorder
        assert recorder is not None, "opened when it was taken"
        return recorder.silent_seconds


class RemoteBoard:
    """The rollouts of a run that remote programs may take. Belongs to one event loop."""

    polls = True

    def __init__(self, key: str | None = None) -> None:
        """`key`: what programs must send; `None`: nothing, on a gateway that only its own machine reaches."""
        self._key = None if key is None else check_key("ROLLWRIGHT_GATEWAY_KEY", key).encode()
        self._gateway: Gateway | None = None
        self._waiting: deque[Offered] = deque()
        self._held: dict[str, Offer] = {}
        """Taken offers, by rollout."""
        self._ended: dict[str, tuple[EndRequest, Mapping[str, Any]]] = {}
        """Latest ended rollouts, for repeated requests."""
        self._news = asyncio.Condition()
        self._closed = False

    def serve(self, gateway: Gateway) -> None:
        """Starts the gateway with the board."""
        self._gateway = gateway
        gateway.listen(self)

    @property
    def url(self) -> str:
        """Address for programs; empty before `serve`."""
        return "" if self._gateway is None else self._gateway.url

    async def close(self) -> None:
        """Tells waiting programs that the run has ended."""
        self._closed = True
        async with self._news:
            self._news.notify_all()

    # -- the run's side ---------------------------------------------------------------------------------

    async def play(self, offer: Offer, episode_seconds: float) -> EndRequest:
        """Offers a rollout and waits for its result. Raises the attempt's failure."""
        self._waiting.append(offer)
        try:
            async with self._news:
                self._news.notify_all()
            await offer.taken
            return await self._follow(offer, episode_seconds)
        finally:
            self._withdraw(offer)

    async def _follow(self, offer: Offer, episode_seconds: float) -> EndRequest:
        loop = asyncio.get_running_loop()
        ends = loop.time() + episode_seconds
        while True:
            left = min(offer.lease_seconds - offer.silent_seconds, ends - loop.time())
            if left <= 0:
                break
            done, _ = await asyncio.wait({offer.result}, timeout=left)
            if done:
                return offer.result.result()
        turns = len(offer.session.trajectory.turns)
        if loop.time() >= ends:
            why = f"the episode took longer than {episode_seconds:g} s"
            raise timed_out(Boundary.SYSTEM, why, turns)
        why = f"the program made no call and sent no heartbeat for {offer.lease_seconds:g} s"
        raise timed_out(Boundary.AGENT, why, turns)

    def _withdraw(self, offer: Offer) -> None:
        if offer in self._waiting:
            self._waiting.remove(offer)
        if self._held.get(offer.rollout_id) is offer:
            del self._held[offer.rollout_id]

    # -- the programs' side: what the endpoint calls ----------------------------------------------------

    def admit(self, rollout_id: str | None, key: bytes | None) -> None:
        """Checks the key before the body of a request is read."""
        if self._is_program(key) and (rollout_id is None or self._key is not None):
            return
        if rollout_id is None:
            raise unauthorized("taking a rollout needs the key of ROLLWRIGHT_GATEWAY_KEY")
        # A report that is repeated may be answered again, unless another program plays the next attempt by now.
        if rollout_id in self._held or rollout_id not in self._ended:
            assert self._gateway is not None, "requests come through the gateway"
            self._gateway.registry.find(rollout_id, key)

    async def create(self, key: bytes | None, body: bytes, claim_id: str | None) -> Mapping[str, Any]:
        """Takes the next offer; a repeated request gets the same one."""
        request: NextRequest = decode(_NEXT, body or b"{}")
        if claim_id is not None and (earlier := self._find_claimed(claim_id)) is not None:
            return earlier
        ends = asyncio.get_running_loop().time() + min(max(request.timeout, 0.0), LONGEST_WAIT)
        while True:
            described = await self._hand_out(await self._next(request, ends), claim_id)
            if described is not None:
                return described

    def _find_claimed(self, claim_id: str) -> Mapping[str, Any] | None:
        """The rollout that an earlier request with this key took."""
        held = (each for each in self._held.values() if each.claim_id == claim_id)
        return next(map(self._describe, held), None)

    async def _hand_out(self, offer: Offered, claim_id: str | None) -> Mapping[str, Any] | None:
        """Gives a rollout to a program; `None`: it cannot be played any more."""
        assert isinstance(offer, Offer), "others are handed out by the run's board"
        if offer.taken.done():  # its attempt is being cancelled
            return None
        offer.claim_id = claim_id
        offer.session.access()
        self._held[offer.rollout_id] = offer
        offer.taken.set_result(None)
        return self._describe(offer)

    async def end(self, rollout_id: str, key: bytes | None, request: EndRequest) -> Mapping[str, Any]:
        """Takes the result of a program."""
        offer = self._held.get(rollout_id)
        if offer is None:
            return await self._end_other(rollout_id, key, request)
        if request.reward is not msgspec.UNSET and request.returned is not msgspec.UNSET:
            raise HttpRefusal(400, "bad_request", "reward, returned: both are given; one is accepted")
        if not offer.result.done():
            offer.result.set_result(request)
        answer = {"status": "failed" if request.error is not None else "reported"}
        del self._held[rollout_id]
        self._ended[rollout_id] = request, answer
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return answer

    async def _end_other(self, rollout_id: str, key: bytes | None, request: EndRequest) -> Mapping[str, Any]:
        """Ends what no program holds: a rollout that has ended already, or that of an agent in the run itself."""
        earlier = self._ended.get(rollout_id)
        if earlier is not None and earlier[0] == request:
            return earlier[1]  # a repeated request, whose first response was lost
        assert self._gateway is not None, "requests come through the gateway"
        recorder = self._gateway.registry.find(rollout_id, key)
        if request.error is not None:
            raise HttpRefusal(400, "unsupported", "error: raise it in the agent function instead")
        recorder.given = Given(request.given_reward, request.success)
        await recorder.seal()
        return {"status": "sealed"}

    def _is_program(self, key: bytes | None) -> bool:
        return self._key is None or (key is not None and hmac.compare_digest(key, self._key))

    async def _next(self, request: NextRequest, ends: float) -> Offered:
        """Waits for an offer; refuses when there is none in time, and when the run has ended."""
        try:
            async with asyncio.timeout_at(ends), self._news:
                while (
                    not self._closed and (offer := next(filter(request.takes, self._waiting), None)) is None
                ):
                    await self._news.wait()
        except TimeoutError:
            raise HttpRefusal(404, "no_rollout", "no rollout waits now; ask again") from None
        if self._closed or offer is None:
            raise HttpRefusal(410, "over", "the run has ended")
        self._waiting.remove(offer)
        return offer

    def _describe(self, offer: Offer) -> Mapping[str, Any]:
        access = offer.session.access()
        return {
            "rollout_id": offer.rollout_id,
            "tag": offer.tag,
            "task": offer.task,
            "base_url": access.base_url,
            "api_key": access.api_key,
            "lease_seconds": offer.lease_seconds,
        }


@dataclass(frozen=True)
class RemoteAgent:
    """Plays a task by the program that takes it."""

    board: RemoteBoard
    lease_seconds: float
    episode_seconds: float

    async def __call__(self, task: Any, session: AgentSession) -> Any:
        sent = msgspec.to_builtins(task, enc_hook=str)  # a dataset may hold what JSON cannot
        ended = await self.board.play(Offer(sent, session, self.lease_seconds), self.episode_seconds)
        if ended.error is not None:
            line = " ".join(ended.error.split())
            record = ErrorRecord(Boundary.AGENT, "reported", line, len(session.trajectory.turns))
            raise EpisodeFailure(record)
        given = ended.reward if ended.returned is msgspec.UNSET else ended.returned
        return None if given is msgspec.UNSET else given
