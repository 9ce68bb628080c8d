"""Queries of a zenoh node: asking peers for their last manifests, and answering what they ask.

Invariants:
- At most `AT_ONCE` peers are asked at the same time, the highest rank first and by lot within a rank, so no stranger
  delays a known peer. A rank that is full forgets one of its peers by lot.
- When many peers wait, one query to all of them replaces the single ones: liveliness tokens without a node behind them
  cannot hold it up. It is sent at most once in `WIDE_SECONDS`, because every peer answers it.
- Taking a query never blocks. zenoh holds a sending thread for some seconds when the receiver does not read, then closes
  that link; on the thread that takes queries, this would soon stop zenoh from reading at all. So replies have a thread
  of their own. It answers the newest query first, because its sender still waits; beyond `MAX_WAITING` the oldest query
  stays unanswered.

Safe to use from threads.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from rollwright.swarm.transports.peer_table import MAX_PEERS, RandomSet, Rank

AT_ONCE = 8
"""Each query occupies one of zenoh's threads until it is answered or times out."""

WIDE_SECONDS = 30.0
"""Least time between two queries to all peers: each peer answers with its last manifests, some 25 KB."""


class CatchUp:
    def __init__(
        self,
        ask: Callable[[str, Callable[[], None]], None],
        ask_all: Callable[[Callable[[], None]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` queries one peer, `ask_all` all peers; both call their argument when all answers have arrived."""
        self._ask = ask
        self._ask_all = ask_all
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = {rank: RandomSet() for rank in sorted(Rank, reverse=True)}
        self._asking = 0
        self._asked_all = float("-inf")

    def want(self, peer: str, rank: Rank) -> None:
        """Ask this peer, which may have announced manifests that did not arrive."""
        with self._lock:
            waiting = self._waiting[rank]
            waiting.add(peer)
            if len(waiting) > MAX_PEERS:
                waiting.discard(waiting.draw())
        self._ask_next()

    def _ask_next(self) -> None:
        with self._lock:
            now = self._clock()
            wide = sum(map(len, self._waiting.values())) > AT_ONCE and now - self._asked_all >= WIDE_SECONDS
            if wide:
                self._asked_all = now
                self._waiting = {rank: RandomSet() for rank in self._waiting}
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
        self._ask_next()


MAX_WAITING = 1024
"""Queries: many times what honest nodes send to one peer while an answer may be held up."""


class ReplyThread:
    """Sends replies on one thread, started when needed: more threads would only wait for the same link."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._waiting: deque[Callable[[], None]] = deque(maxlen=max_waiting)
        self._changed = threading.Condition()
        self._started = False
        self._closed = False

    def send(self, reply: Callable[[], None]) -> None:
        """Run `reply` on the thread; its exceptions are dropped, because its receiver has gone."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(reply)
            if not self._started:
                self._started = True
                threading.Thread(target=self._work, name="zenoh-replies", daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Stop; the waiting queries stay unanswered."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _work(self) -> None:
        while (reply := self._next()) is not None:
            with contextlib.suppress(Exception):  # the asker, or this node, has gone
                reply()
            del reply  # zenoh tells the asker that this was all once nobody holds its query

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting.pop() if self._waiting else None
