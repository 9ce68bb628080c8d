"""Rules by which the calls of episodes are routed among engines with the same model. Pure: the pool does what they decide.

Always true of every rule here: it chooses one of the servers that it is shown, which are those in service; the same calls give
the same choices; its memory is bounded, and what was used least recently is forgotten first.

What a rule can gain is work that a server's prefix cache saves it. `sticky` keeps the turns of one episode together. `prefix`
also brings the members of a group together, which share their first prompt, and lets an episode leave a server that has far
more to do than the others. `least_loaded` looks at no prefix at all.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from rollwright.trajectory import TokenIds

REMEMBERED_EPISODES = 1 << 16
"""Far more than run at a time; a forgotten episode only loses its cached prefix."""

REMEMBERED_BLOCKS = 1 << 18
"""Blocks of prompts whose servers are known: 33 million tokens."""

BLOCK = 128
"""Tokens of a block. Shorter prefixes in common save too little to look for."""

SPARE_LOAD, LOAD_FACTOR = 1, 1.2
"""A server with more calls than the mean times the factor, and these to spare, is passed over whatever it has cached: a call
that waits for a place loses more than it gains. `bench/fleets.py` compares; with 1.0 the hit rate falls to that of `sticky`."""


class RoutingRule(Protocol):
    """Chooses the server of each call."""

    moved: int
    """Episodes that had to leave their server, because it was out of service."""

    def choose(self, episode: str, ids: TokenIds | None, loads: Mapping[int, int]) -> int:
        """The server of the episode's next call, one of `loads`: the calls under way at each server in service. `ids`: the
        prompt in token ids; `None`: it is text."""
        ...

    def forget_caches(self, server: int | None = None) -> None:
        """The prefix caches of a server are gone, or those of all."""
        ...


class StickyRouting:
    """The calls of an episode go to one server; a new episode to the one with the fewest calls, then episodes."""

    def __init__(self, remembered: int = REMEMBERED_EPISODES) -> None:
        self._remembered = remembered
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._episodes: dict[int, int] = {}
        self.moved = 0

    def choose(self, episode: str, ids: TokenIds | None, loads: Mapping[int, int]) -> int:
        home = self._homes.get(episode)
        if home is not None and home in loads:
            self._homes.move_to_end(episode)
            return home
        chosen = min(loads, key=lambda server: (loads[server], self._episodes.get(server, 0)))
        self.moved += home is not None
        self._settle(episode, chosen)
        return chosen

    def forget_caches(self, server: int | None = None) -> None:
        """Episodes stay where they are: the next turn's prefix is computed there once."""

    def _settle(self, episode: str, server: int) -> None:
        former = self._homes.pop(episode, None)
        if former is None and len(self._homes) >= self._remembered:
            _, former = self._homes.popitem(last=False)
        if former is not None:
            self._episodes[former] -= 1
        self._homes[episode] = server
        self._episodes[server] = self._episodes.get(server, 0) + 1


class LeastLoadedRouting:
    """Each call goes to the server with the fewest calls, and among equals to the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}
        self._count = 0
        self.moved = 0

    def choose(self, episode: str, ids: TokenIds | None, loads: Mapping[int, int]) -> int:
        chosen = min(loads, key=lambda server: (loads[server], self._chosen.get(server, 0)))
        self._count += 1
        self._chosen[chosen] = self._count
        return chosen

    def forget_caches(self, server: int | None = None) -> None:
        """It knows of none."""


class PrefixRouting:
    """Each call goes where the longest prefix of its prompt was computed, unless that server has too much to do."""

    def __init__(self, remembered: int = REMEMBERED_BLOCKS) -> None:
        self._remembered = remembered
        self._servers: OrderedDict[bytes, int] = OrderedDict()
        """The server that computed a block last, by the digest of the prompt up to its end."""
        self._balanced = LeastLoadedRouting()
        self._sticky = StickyRouting()
        self.moved = 0

    def choose(self, episode: str, ids: TokenIds | None, loads: Mapping[int, int]) -> int:
        if ids is None:
            return self._sticky.choose(episode, ids, loads)
        blocks = _digests(ids)
        most = LOAD_FACTOR * sum(loads.values()) / len(loads) + SPARE_LOAD
        chosen = None
        for block in reversed(blocks):
            server = self._servers.get(block)
            if server is None:
                continue
            if server in loads and loads[server] <= most:
                chosen = server
                break
            self.moved += server not in loads
        if chosen is None:
            chosen = self._balanced.choose(episode, ids, loads)
        for block in blocks:
            self._servers[block] = chosen
            self._servers.move_to_end(block)
        while len(self._servers) > self._remembered:
            self._servers.popitem(last=False)
        return chosen

    def forget_caches(self, server: int | None = None) -> None:
        gone = [block for block, found in self._servers.items() if server is None or found == server]
        for block in gone:
            del self._servers[block]


def _digests(ids: TokenIds) -> list[bytes]:
    """Digests of the prompt up to the end of each whole block."""
    data, width = ids.tobytes(), ids.itemsize * BLOCK
    digest = hashlib.blake2b(digest_size=8)
    found = []
    for end in range(width, len(data) + 1, width):
        digest.update(data[end - width : end])
        found.append(digest.digest())
    return found
