"""The stages of one swarm round, and the loop body that composes them.

A round: find out its number, play own groups, publish them, gather and verify groups of peers, select those that this
node's filters keep, hand the batch to the trainer, report the status. Each stage is given what it needs; none knows the
node or another stage's caller.

Invariants:
- A node waits for no peer: the manifests that have arrived when its own groups are played are what it selects from.
- Without peers, or with an unreachable network, a round has its own groups alone, and the next round looks again.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollwright.rollout import Batch
from rollwright.rollout.filters import Catches, Filter, judge, judge_group
from rollwright.rollout.groups import Group
from rollwright.swarm.exchange import ACCEPTED, Exchange, ForeignGroup
from rollwright.swarm.heartbeat import NodePhase, NodeStatus, PeerStatus, Pulse, RoundStatus, write_status
from rollwright.swarm.identity import short_name
from rollwright.swarm.publishing import SHARED
from rollwright.swarm.verification import Scorer

FILTERED = "filtered"
"""Counter beside the reasons of `PeerRefusal`: verified foreign groups that this node's own filters dropped."""

SHOWN_ROUNDS = 100
"""Rounds in the status; the record has more."""

SILENT_ROUNDS = 10
"""Own rounds without an announcement after which a peer's round is ignored: the peer may be stuck."""

RecordRow = Callable[[str, int, float, Batch], dict[str, Any]]
"""Makes a batch's line of the record: `(mode, step, seconds, batch)`."""


def next_round(last: int, told: Iterable[int]) -> int:
    """The number of the round after `last`, given the rounds that live peers told. Pure.

    A round's number only says how old a group is, so it follows the swarm. A node that joins late or was away continues
    with its peers' round, or its groups would count as old; a node that is faster, or was alone for a while, is at most
    one round ahead, or its peers' groups would. The lower median decides: it takes at least half of the peers to move a
    node that has more than one. Without peers a node counts for itself.
    """
    rounds = sorted(told)
    if not rounds:
        return last + 1
    swarm = rounds[(len(rounds) - 1) // 2]
    return min(max(last + 1, swarm), swarm + 1)


class RoundCounter:
    """The stage that finds out which round it is."""

    def __init__(self, exchange: Exchange, last: int) -> None:
        self._exchange = exchange
        self.round = last
        self.heard: dict[str, tuple[int, int]] = {}
        """Each peer's last sequence number, and the step in which it was new; bounded as the admission's peers are."""

    async def advance(self, step: int) -> int:
        exchange = self._exchange
        await exchange.listen(self.round)
        earlier = self.heard
        self.heard = {
            peer: earlier[peer] if peer in earlier and earlier[peer][0] == sequence else (sequence, step)
            for peer, sequence in exchange.sequences().items()
        }
        told, alive = exchange.rounds(), {each.id for each in exchange.peers() if each.alive}
        recent = [
            told[peer]
            for peer, (_, new_in) in self.heard.items()
            if peer in alive and peer not in exchange.quarantine and step - new_in < SILENT_ROUNDS
        ]
        self.round = next_round(self.round, recent)
        return self.round


@dataclass(frozen=True)
class ForeignSelection:
    """The stage that applies this node's own filters to verified groups of peers."""

    filters: Sequence[Filter]
    catches: Catches
    counts: Counter[str]

    def select(self, foreign: Sequence[ForeignGroup]) -> list[Group]:
        return [kept for each in foreign if (kept := self._filter(each)) is not None]

    def _filter(self, foreign: ForeignGroup) -> Group | None:
        judged = [judge(self.filters, each, self.catches) for each in foreign.trajectories]
        kept = {place: each.trajectory for place, each in enumerate(judged) if each.dropped is None}
        members, dropped = judge_group(self.filters, list(kept.values()), self.catches)
        if dropped is not None or len(members) < 2:
            self.counts[FILTERED] += 1
            return None
        first = members[0]
        return Group(
            group_id=first.group_id,
            index=0,
            tag=first.tag,
            seed=first.seed,
            size=len(members),
            members=len(members),
            finished=dict(zip(kept, members, strict=True)),
        )


class RoundLog:
    """The rounds so far, and the lines that they add to the run's record."""

    def __init__(self, run_name: str, row: RecordRow) -> None:
        self.round = 0
        """The last round that is in the record or under way."""
        self.rounds: deque[RoundStatus] = deque(maxlen=SHOWN_ROUNDS)
        self._own_prefix = f"{run_name}.train-"
        self._row = row
        self._foreign: dict[str, ForeignGroup] = {}
        """The foreign groups of the current round, by group id."""

    def begin(self, round: int) -> None:
        self.round = round
        self._foreign = {}

    def note_foreign(self, foreign: Sequence[ForeignGroup]) -> None:
        self._foreign = {each.trajectories[0].group_id: each for each in foreign}

    def record(self, mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
        """A batch's line of the record; a `RecordRow`."""
        row = self._row(mode, step, seconds, batch)
        if mode != "train":
            return row
        own = [each for each in batch.groups if each.group_id.startswith(self._own_prefix)]
        rewards = [each.reward for group in own for each in group.trajectories]
        row |= {
            "round": self.round,
            "own_reward": sum(rewards) / len(rewards) if rewards else None,
            "own_groups": len(own),
            "foreign_groups": len(batch.groups) - len(own),
            "foreign": [
                {"group": each.group_id, "peer": given.peer, "round": given.round}
                for each in batch.groups
                if (given := self._foreign.get(each.group_id)) is not None
            ],
        }
        self.restore([row])
        return row

    def restore(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rounds that stand in the record."""
        for row in rows:
            self.round = row["round"]
            self.rounds.append(
                RoundStatus(row["round"], row["own_reward"], row["own_groups"], row["foreign_groups"])
            )

    def note_evaluation(self, reward: float | None) -> None:
        """Add the validation's mean reward to the last round."""
        if self.rounds:
            self.rounds.append(msgspec.structs.replace(self.rounds.pop(), evaluation=reward))


@dataclass(frozen=True)
class SwarmRound:
    """One round, from its number to its batch; the training loop trains on it next."""

    counter: RoundCounter
    exchange: Exchange
    scorer: Scorer
    selection: ForeignSelection
    log: RoundLog
    pulse: Pulse
    external_groups: int
    """Foreign groups that a round may take."""

    async def next_batch(self, step: int, play: Callable[[], Awaitable[Batch]]) -> Batch:
        """`play` plays this node's own groups."""
        round = await self.counter.advance(step)
        self.log.begin(round)

        self.pulse.enter(NodePhase.GENERATE, round, step)
        own = await play()

        self.pulse.enter(NodePhase.SHARE, round, step)
        await self._publish(round, own.groups)

        self.pulse.enter(NodePhase.SAMPLE, round, step)
        foreign = await self._gather(round)
        self.log.note_foreign(foreign)
        selected = self.selection.select(foreign)

        return Batch([*own.groups, *selected], own.version, own.ledger)

    async def _publish(self, round: int, groups: Sequence[Group]) -> None:
        for group in groups:
            await self.exchange.share(
                round, group.index, group.tag, group.trajectories, self.scorer.tokenizer
            )
            self.pulse.progress()

    async def _gather(self, round: int) -> Sequence[ForeignGroup]:
        if not self.external_groups:
            return ()
        return await self.exchange.gather(round, self.external_groups, self.scorer)


@dataclass(frozen=True)
class StatusReporter:
    """The stage that reports the end of a round: in `status.json`, and to the caller's `on_round`."""

    home: Path
    peer: str
    swarm: str
    log: RoundLog
    exchange: Exchange
    clock: Callable[[], float]
    on_round: Callable[[NodeStatus], None]

    def report(self, rounds_done: int, version: int) -> None:
        status = self.status(rounds_done, version)
        write_status(self.home, status)
        self.on_round(status)

    def status(self, rounds_done: int, version: int) -> NodeStatus:
        """The status now. `version`: of the weights."""
        counts, told = self.exchange.counts, self.exchange.rounds()
        everybody = self.exchange.peers()
        peers = [each for each in everybody if each.verified or each.id in told]
        return NodeStatus(
            name=short_name(self.peer),
            peer=self.peer,
            swarm=self.swarm,
            time=self.clock(),
            version=version,
            rounds_done=rounds_done,
            rounds=list(self.log.rounds),
            peers=[PeerStatus(short_name(each.id), each.id, each.alive, told.get(each.id)) for each in peers],
            accepted=counts[ACCEPTED],
            shared=counts[SHARED],
            refused={
                reason: count for reason, count in sorted(counts.items()) if reason not in (ACCEPTED, SHARED)
            },
            quarantined=[each.name for each in self.exchange.quarantine.verdicts],
            strangers=len(everybody) - len(peers),
        )
