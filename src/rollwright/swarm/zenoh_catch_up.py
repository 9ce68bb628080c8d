"""Whom to ask for its last manifests: peers that just came, a few at a time, however many tokens somebody declares.

True of it: at most `AT_ONCE` peers are asked at the same time, the highest rank first and by lot within it, so no stranger
stands in front of anybody else; one that is too many for its rank is forgotten by lot. When many wait, all are asked
together in one query, which tokens of peers that answer nothing cannot hold up; not more often than once in
`WIDE_SECONDS`, because everybody answers that one. Safe to use from threads; asking is left to the caller.
"""

import threading
import time
from collections.abc import Callable

from rollwright.swarm.peer_table import MAX_PEERS, LotSet, Rank

AT_ONCE = 8
"""Each takes one of zenoh's threads until it is answered or its time is over."""

WIDE_SECONDS = 30.0
"""Between two questions to everybody: each is answered with the last manifests of all, some 25 KB a peer."""


class CatchUp:
    def __init__(
        self,
        ask: Callable[[str, Callable[[], None]], None],
        ask_all: Callable[[Callable[[], None]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` asks one peer, `ask_all` everybody; both call what they are given when there is nothing more to come."""
        self._ask = ask
        self._ask_all = ask_all
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = {rank: LotSet() for rank in sorted(Rank, reverse=True)}
        self._asking = 0
        self._asked_all = float("-inf")

    def want(self, peer: str, rank: Rank) -> None:
        """This peer may have announced something that was not heard."""
        with self._lock:
            waiting = self._waiting[rank]
            waiting.add(peer)
            if len(waiting) > MAX_PEERS:
                waiting.discard(waiting.draw())
        self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            now = self._clock()
            wide = sum(map(len, self._waiting.values())) > AT_ONCE and now - self._asked_all >= WIDE_SECONDS
            if wide:
                self._asked_all = now
                self._waiting = {rank: LotSet() for rank in self._waiting}
            peers = []
            while self._asking < AT_ONCE and (waiting := next(filter(len, self._waiting.values()), None)):
                peer = waiting.draw()
                waiting.discard(peer)
                peers.append(peer)
                self._asking += 1
        if wide:
            self._ask_all(lambda: None)
        for peer in peers:
            self._ask(peer, self._done)

    def _done(self) -> None:
        with self._lock:
            self._asking -= 1
        self._go_on()
