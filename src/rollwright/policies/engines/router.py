"""Which of several engine addresses serves a call: decided here, in pure code.

What is true: an episode's calls go to one address as long as it is in service, so that they meet the same
prefix cache; an episode without one gets the address with the least load; an address that is out of service
is never picked, and its episodes find another; memory is bounded, the episodes not heard of for longest are
forgotten first. An address goes out at once when it cannot be reached, and after a few other failures in a
row; an answer of any kind that shows it alive begins the count anew.
"""

from collections import OrderedDict
from dataclasses import dataclass

from rollwright.errors import ConfigError
from rollwright.policies.retry import FaultCause

FAILURES_IN_A_ROW = 3
"""One or two bad answers happen to a healthy engine under load; three in a row are worth asking after."""

REMEMBERED_EPISODES = 1 << 16
"""Far more than run at a time; a forgotten episode only loses its prefix cache."""

_TELLING = frozenset({FaultCause.TIMEOUT, FaultCause.SERVER_ERROR, FaultCause.BROKEN_BODY})
"""Failures that say something about the engine. A refusal is about the request, a 429 about load."""


@dataclass
class _Address:
    load: int = 0
    """Calls under way."""
    episodes: int = 0
    """Remembered ones that belong here."""
    failures: int = 0
    """In a row."""
    serving: bool = True


class Router:
    """Addresses are numbers from 0; whoever calls it does what it decides."""

    def __init__(self, addresses: int, remembered: int = REMEMBERED_EPISODES) -> None:
        if addresses < 1:
            raise ConfigError("base_urls: none given; accepted: one address or more")
        self._addresses = [_Address() for _ in range(addresses)]
        self._remembered = remembered
        self._homes: OrderedDict[str, int] = OrderedDict()
        self.moved = 0
        """Episodes that lost their address to a failure so far."""

    @property
    def serving(self) -> list[int]:
        return [place for place, each in enumerate(self._addresses) if each.serving]

    def loads(self) -> list[int]:
        return [each.load for each in self._addresses]

    def pick(self, episode: str) -> int | None:
        """Where the episode's next call goes; `None`: no address is in service."""
        home = self._homes.get(episode)
        if home is not None and self._addresses[home].serving:
            self._homes.move_to_end(episode)
            return home
        candidates = self.serving
        if not candidates:
            return None
        chosen = min(
            candidates, key=lambda place: (self._addresses[place].load, self._addresses[place].episodes)
        )
        self.moved += home is not None
        self._settle(episode, chosen)
        return chosen

    def begin(self, place: int) -> None:
        self._addresses[place].load += 1

    def end(self, place: int) -> None:
        self._addresses[place].load -= 1

    def succeeded(self, place: int) -> None:
        self._addresses[place].failures = 0

    def failed(self, place: int, cause: FaultCause) -> bool:
        """Counts a failure; true when it takes the address out of service now."""
        address = self._addresses[place]
        if cause is FaultCause.CONNECTION:
            address.failures = FAILURES_IN_A_ROW
        elif cause in _TELLING:
            address.failures += 1
        else:
            address.failures = 0
        if address.failures < FAILURES_IN_A_ROW or not address.serving:
            return False
        address.serving = False
        return True

    def take_out(self, place: int) -> None:
        self._addresses[place].serving = False

    def bring_back(self, place: int) -> None:
        self._addresses[place].serving = True
        self._addresses[place].failures = 0

    def _settle(self, episode: str, place: int) -> None:
        former = self._homes.pop(episode, None)
        if former is not None:
            self._addresses[former].episodes -= 1
        elif len(self._homes) >= self._remembered:
            _, forgotten = self._homes.popitem(last=False)
            self._addresses[forgotten].episodes -= 1
        self._homes[episode] = place
        self._addresses[place].episodes += 1
