"""A whole swarm in virtual time: nodes join, play, share, leave; some are hostile; a partition comes and goes.

Real: keys, signatures, manifests, gossip, admission, selection, fetching rules, decoding, duplicate checks, verification by
replay, quarantine, reputation, round counting. Stand-ins: the network (`network`), the model's play and log-probabilities
(`quiz`), training. What a run gives follows from its seed but for the keys, which are new in every run.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from rollwright import rng
from rollwright.swarm.exchange import Exchange
from rollwright.swarm.gossip import Gossip
from rollwright.swarm.identity import Identity
from rollwright.swarm.settings import CommunicationConfig, SwarmConfig
from rollwright.swarm.simulation.network import (
    REGIONS,
    ArrivalTimes,
    BroadcastTransport,
    SimulatedGossip,
    SimulatedLink,
    SimulatedNetwork,
    Traffic,
    WatchedInbox,
)
from rollwright.swarm.simulation.nodes import (
    Accomplices,
    HostileGossip,
    Poison,
    Role,
    SimulatedNode,
    folder_of,
)
from rollwright.swarm.simulation.quiz import quiz_book, right_answer
from rollwright.swarm.transports.base import Transport
from rollwright.swarm.transports.gossip import GossipTransport

START = 1_800_000_000.0
"""The swarm's clock at its beginning; any time will do."""

ROUND_SECONDS = 20.0
"""Of play, on average. A round takes some ten seconds more where groups are announced that cannot be fetched."""

WATCHED, FOLLOWED = 64, 0.05
"""Manifests whose way is followed, and the share of all that are considered."""


@dataclass(frozen=True)
class WorldSettings:
    """What is simulated."""

    nodes: int
    announce: str = "views"
    """As `swarm.communication.announce`."""
    seconds: float = 120.0
    """Virtual time; a round takes about 20 s."""
    warm_up: float = 40.0
    """Virtual time before anything is measured."""
    hostile: float = 0.2
    """Share of poisoners and censors, as many of each."""
    churn: float = 0.05
    """Share of honest nodes that leave in a round's time; as many new ones join."""
    partition: tuple[float, float] | None = None
    """Virtual times between which regions 0 and 1 cannot reach 2 and 3."""
    local_groups: int = 2
    external_groups: int = 4
    gathering: int | None = None
    """Honest nodes that take groups; `None`: all. The others announce and serve only."""
    seed: int = 0


@dataclass
class WorldReport:
    """What was measured, of honest nodes after the warm-up unless stated."""

    nodes: int
    rounds: int
    """Rounds of nodes that took groups."""
    received: dict[str, float] = field(default_factory=dict)
    """Bytes for each node and round, by kind: `announce`, `fetch`, `content`."""
    sent: dict[str, float] = field(default_factory=dict)
    cpu_ms: float | None = None
    """Of the whole process for each round of a node, the simulator's own share included; `None` where only some nodes take
    groups, because the others do less."""
    cpu_seconds: float = 0.0
    """Of the whole run."""
    useful_share: float = 0.0
    """Foreign groups taken, of those that a round may take."""
    givers: float = 0.0
    """Distinct peers that gave groups to a node."""
    poison_trained: int = 0
    """Groups of poisoners, or with any reward that is not true, among all that were taken: in the whole run."""
    poison_refused: int = 0
    """Groups of poisoners that were checked and refused, by all nodes in the whole run."""
    quarantined: float = 0.0
    """Poisoners that an honest node has in quarantine, on average."""
    newcomer_seconds: float | None = None
    """From joining to the first round with foreign groups, the round's play included: the median of nodes that joined later."""
    newcomer_rounds: float | None = None
    """Rounds until then."""
    newcomers: int = 0
    reached: float = 0.0
    """Nodes that a manifest reached, on average."""
    reach_seconds: float | None = None
    """Until it had reached half of these."""
    hostile_in_view: float | None = None
    """Share of hostile peers in the views of honest nodes."""
    across: dict[str, float] = field(default_factory=dict)
    """Share of groups from the other side of the partition: before, during, after."""


class World:
    def __init__(self, settings: WorldSettings, home: Path) -> None:
        self.settings = settings
        self.home = home
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        self.network = SimulatedNetwork(settings.seed, self.clock)
        self.times = ArrivalTimes()
        self.nodes: list[SimulatedNode] = []
        """All that ever joined."""
        self.present: dict[str, SimulatedNode] = {}
        self.book = quiz_book()
        self.accomplices = Accomplices()
        self.random = rng.generator("swarm world", settings.seed)
        self.swarm = SwarmConfig(
            name="simulated",
            local_groups=settings.local_groups,
            external_groups=settings.external_groups,
            communication=CommunicationConfig(announce="views" if settings.announce == "views" else "all"),
        )
        self._gathering = 0

    def clock(self) -> float:
        return START + asyncio.get_running_loop().time() - self._started

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.clock() - START

    async def run(self) -> WorldReport:
        settings = self.settings
        cpu_before = time.process_time()
        background = [asyncio.create_task(self._populate())]
        if settings.partition is not None:
            background.append(asyncio.create_task(self._part(*settings.partition)))
        await asyncio.sleep(settings.warm_up)
        traffic_before = {peer: each.copy() for peer, each in self.network.traffic.items()}
        rounds_before = {each.peer: each.rounds for each in self.nodes}
        cpu_warm = time.process_time()
        await asyncio.sleep(settings.seconds - settings.warm_up)
        cpu = time.process_time()
        report = self._report(traffic_before, rounds_before)
        all_rounds = sum(each.rounds - rounds_before.get(each.peer, 0) for each in self.nodes)
        if settings.gathering is None:
            report.cpu_ms = 1e3 * (cpu - cpu_warm) / max(all_rounds, 1)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for node in list(self.present.values()):
            await node.leave()
        report.cpu_seconds = time.process_time() - cpu_before
        return report

    async def _populate(self) -> None:
        settings = self.settings
        for number in range(settings.nodes):
            await self._join(self._role(number))
            # All within one round's time, not at once: honest nodes never start together.
            await asyncio.sleep(ROUND_SECONDS / settings.nodes)
        while settings.churn:
            honest = sum(each.role is Role.HONEST for each in self.present.values())
            await asyncio.sleep(ROUND_SECONDS / max(settings.churn * honest, 1e-9))
            leaver = self.random.choice(list(self.present))
            while self.present[leaver].role is not Role.HONEST:
                leaver = self.random.choice(list(self.present))
            node = self.present.pop(leaver)
            self._gathering -= node.gathers
            await node.leave()
            await self._join(Role.HONEST)

    def _role(self, number: int) -> Role:
        """Hostile nodes are spread evenly over the order of joining."""
        share = self.settings.hostile
        if int((number + 1) * share) == int(number * share):
            return Role.HONEST
        return Role.POISONER if int(number * share) % 2 else Role.CENSOR

    async def _join(self, role: Role) -> None:
        identity = Identity.generate()
        region = self.random.randrange(REGIONS)
        link = SimulatedLink(self.network, identity.peer, region)
        limit = self.settings.gathering
        gathers = role is Role.HONEST and (limit is None or self._gathering < limit)
        link.listens = gathers or self.settings.announce == "views"
        transport = await self._transport(identity, link, role)
        exchange = Exchange(
            identity,
            self.swarm.name,
            transport,
            self.book,
            folder_of(self.home, identity.peer),
            settings=self.swarm,
            clock=self.clock,
        )
        self._gathering += gathers
        node = SimulatedNode(
            identity,
            role,
            region,
            self.now,
            exchange,
            transport,
            self.book,
            self.swarm,
            rng.generator("swarm node", self.settings.seed, len(self.nodes)),
            (0.75 * ROUND_SECONDS, 1.25 * ROUND_SECONDS),
            gathers,
            poison=list(Poison)[len(self.network.hostile) // 2 % len(Poison)],
        )
        if role is not Role.HONEST:
            self.network.hostile.append(identity.peer)
        self.nodes.append(node)
        self.present[identity.peer] = node
        node.task = asyncio.create_task(node.run(self.clock))

    async def _transport(self, identity: Identity, link: SimulatedLink, role: Role) -> Transport:
        inbox = WatchedInbox(identity.peer, self.times, self.clock)
        if self.settings.announce != "views":
            return BroadcastTransport(link, inbox, self._note_announced)
        kind = Gossip if role is Role.HONEST else HostileGossip
        entropy = rng.digest("gossip", self.settings.seed, len(self.nodes)).to_bytes(8, "big") * 2
        made = SimulatedGossip(
            identity, self.swarm, link, clock=self.clock, entropy=entropy, gossip_type=kind
        )
        made.note_announced = self._note_announced
        if isinstance(made.gossip, HostileGossip):
            made.gossip.accomplices = self.accomplices
            made.gossip.offers_junk = role is Role.CENSOR
        made.join(inbox)
        return made

    def _note_announced(self, manifest: bytes) -> None:
        """Follow the way of some manifests, by lot."""
        in_time = self.settings.warm_up < self.now < self.settings.seconds - 2 * ROUND_SECONDS
        if in_time and len(self.times.announced) < WATCHED and self.random.random() < FOLLOWED:
            self.times.note_announced(manifest, self.clock())

    async def _part(self, begins: float, ends: float) -> None:
        await asyncio.sleep(begins)
        self.network.parted = frozenset({0, 1})
        await asyncio.sleep(ends - begins)
        self.network.parted = frozenset()

    # -- what came out ------------------------------------------------------------------------------

    def _report(self, traffic_before: dict[str, Traffic], rounds_before: dict[str, int]) -> WorldReport:
        honest = [each for each in self.nodes if each.role is Role.HONEST]
        measured = [each for each in honest if each.gathers and each.rounds > rounds_before.get(each.peer, 0)]
        rounds = sum(each.rounds - rounds_before.get(each.peer, 0) for each in measured)
        report = WorldReport(self.settings.nodes, rounds)
        for kind in ("announce", "fetch", "content"):
            received = sent = 0.0
            for node in measured:
                traffic = self.network.traffic[node.peer]
                before = traffic_before.get(node.peer) or Traffic()
                received += traffic.received[kind] - before.received[kind]
                sent += traffic.sent[kind] - before.sent[kind]
            report.received[kind], report.sent[kind] = received / max(rounds, 1), sent / max(rounds, 1)
        self._report_groups(report, honest)
        self._report_newcomers(report, honest)
        self._report_reach(report, honest)
        return report

    def _report_groups(self, report: WorldReport, honest: Sequence[SimulatedNode]) -> None:
        roles = {each.peer: each.role for each in self.nodes}
        regions = {each.peer: each.region for each in self.nodes}
        warm = [
            (node, at - START, most, taken)
            for node in honest
            for at, most, taken in node.taken
            if at - START > self.settings.warm_up
        ]
        report.useful_share = sum(len(taken) for *_, taken in warm) / max(
            sum(most for _, _, most, _ in warm), 1
        )
        givers: dict[str, set[str]] = {}
        for node, _, _, taken in warm:
            givers.setdefault(node.peer, set()).update(each.peer for each in taken)
        report.givers = mean(map(len, givers.values())) if givers else 0.0
        every = [each for node in honest for *_, taken in node.taken for each in taken]
        report.poison_trained = sum(
            roles[each.peer] is Role.POISONER
            or any(
                trajectory.reward != float(trajectory.turns[0].text == right_answer(trajectory.seed))
                for trajectory in each.trajectories
            )
            for each in every
        )
        verdicts = [len(each.exchange.quarantine.verdicts) for each in honest]
        report.poison_refused = sum(verdicts)
        report.quarantined = mean(verdicts) if verdicts else 0.0
        if self.settings.partition is not None:
            begins, ends = self.settings.partition
            parts: dict[str, list[bool]] = {"before": [], "during": [], "after": []}
            for node, at, _, taken in warm:
                # A round that ends shortly after a change gathered before it.
                part = "before" if at < begins else "during" if begins + 10 < at < ends else "after"
                parts[part] += [(regions[each.peer] < 2) != (node.region < 2) for each in taken]
            report.across = {part: mean(found) if found else 0.0 for part, found in parts.items()}

    def _report_newcomers(self, report: WorldReport, honest: Sequence[SimulatedNode]) -> None:
        late = [
            each for each in honest if each.joined > self.settings.warm_up and each.gathers and each.taken
        ]
        report.newcomers = len(late)
        first = [
            (at - START - node.joined, number)
            for node in late
            for number, (at, _, taken) in list(enumerate(node.taken, 1))
            if taken and not any(earlier for *_, earlier in node.taken[: number - 1])
        ]
        if first:
            report.newcomer_seconds = median(seconds for seconds, _ in first)
            report.newcomer_rounds = mean(number for _, number in first)

    def _report_reach(self, report: WorldReport, honest: Sequence[SimulatedNode]) -> None:
        delays = [sorted(each) for each in self.times.delays.values()]
        report.reached = mean(map(len, delays)) if delays else 0.0
        halves = [each[len(each) // 2] for each in delays if each]
        report.reach_seconds = median(halves) if halves else None
        if self.settings.announce == "views":
            hostile = set(self.network.hostile)
            views = [
                each.transport.gossip.view.members
                for each in self.present.values()
                if each.role is Role.HONEST and isinstance(each.transport, GossipTransport)
            ]
            report.hostile_in_view = mean(len(each & hostile) / len(each) for each in views if each)


async def simulate(settings: WorldSettings) -> WorldReport:
    """Run a world to its end; on a virtual clock, see `rollwright.aio.run_virtual`."""
    home = _new_home()
    try:
        return await World(settings, home).run()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _new_home() -> Path:
    """In memory where that can be: each node flushes its sequence number to disk, which costs time and no CPU."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="rollwright-swarm-", dir=memory if memory.is_dir() else None))
