"""A whole swarm in virtual time: nodes join, play, share, leave; some are hostile; a partition comes and goes.

Real: keys, signatures, manifests, gossip, admission, selection, fetching rules, decoding, duplicate checks, verification by
replay, quarantine, reputation, round counting. Stand-ins: the network (`network`), the model's play and log-probabilities
(`quiz`), training. What a run gives follows from its seed but for the keys, which are new in every run.
"""

import asyncio
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from rollwright import rng
from rollwright.swarm.exchange import Exchange, ForeignGroup
from rollwright.swarm.gossip import CHECKED, SIGNED, Gossip
from rollwright.swarm.identity import Identity, shared_signatures
from rollwright.swarm.settings import CommunicationConfig, SwarmConfig
from rollwright.swarm.signed import REMEMBERED, remember_envelopes
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
    RoundNote,
    SimulatedNode,
    TakenGroup,
    folder_of,
)
from rollwright.swarm.simulation.quiz import quiz_book, right_answer
from rollwright.swarm.transports.base import Transport
from rollwright.swarm.transports.gossip import GossipTransport

START = 1_800_000_000.0
"""The swarm's clock at its beginning; any time will do."""

ROUND_SECONDS = 20.0
"""Of play, on average. A round takes some ten seconds more where groups are announced that cannot be fetched."""

WATCHED = 64
"""Manifests whose way is followed: the first ones of honest nodes after the warm-up."""

PROGRESS_SECONDS = 10.0
"""Virtual time between two reports of a run that is under way."""

SIGNATURES_OF_A_NODE = 64
"""Signatures that the shared table holds for each node: of about two rounds."""

GC_THRESHOLD = (200_000, 20, 100)
"""Going through millions of live objects after every few thousand new ones would cost more than the nodes' own work."""

ENVELOPES_OF_A_NODE = 64
"""Verified manifests that the shared cache holds for each node; one announces a dozen while a manifest can be taken."""


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


@dataclass(frozen=True)
class RoundFigures:
    """One round, on average over the nodes that played it."""

    round: int
    """Counted by each node from its first."""
    nodes: int
    seconds: float
    """When it ended, on average, since the beginning."""
    useful_share: float
    hostile_in_view: float | None
    kilobytes: float
    """Received in the round, of all kinds."""
    checked: float
    """Signatures checked in the round."""


@dataclass
class WorldReport:
    """What was measured, of honest nodes after the warm-up unless stated."""

    nodes: int
    rounds: int
    """Rounds of nodes that took groups."""
    seconds: float = 0.0
    """Virtual time that has passed."""
    curve: list[RoundFigures] = field(default_factory=list)
    """By round, of honest nodes that were there from the start."""
    checked: float = 0.0
    """Signatures that a node checks in a round."""
    signed: float = 0.0
    """Signatures that a node makes in a round for its gossip."""
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
    def __init__(
        self, settings: WorldSettings, home: Path, progress: Callable[[WorldReport], None] | None = None
    ) -> None:
        self.settings = settings
        self._progress = progress
        self.home = home
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        self.network = SimulatedNetwork(settings.seed, self.clock)
        self.times = ArrivalTimes()
        self.nodes: list[SimulatedNode] = []
        """All that ever joined."""
        self.present: dict[str, SimulatedNode] = {}
        self.book = quiz_book()
        self.accomplices = Accomplices(self.network.names)
        self.hostile: set[str] = set()
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
        gc_before = gc.get_threshold()
        gc.set_threshold(*GC_THRESHOLD)
        # A node's own cache would hold every manifest until it is admitted, so each node counts one check for it.
        remember_envelopes(max(REMEMBERED, ENVELOPES_OF_A_NODE * settings.nodes))
        background = [asyncio.create_task(self._populate())]
        if settings.partition is not None:
            background.append(asyncio.create_task(self._part(*settings.partition)))
        await asyncio.sleep(settings.warm_up)
        traffic_before = {peer: each.copy() for peer, each in self.network.traffic.items()}
        work_before = {each.peer: self._work(each) for each in self.nodes}
        rounds_before = {each.peer: each.rounds for each in self.nodes}
        cpu_warm = time.process_time()
        while True:
            await asyncio.sleep(min(PROGRESS_SECONDS, settings.seconds - self.now))
            cpu = time.process_time()
            report = self._report(traffic_before, rounds_before, work_before)
            report.seconds, report.cpu_seconds = self.now, cpu - cpu_before
            all_rounds = sum(each.rounds - rounds_before.get(each.peer, 0) for each in self.nodes)
            if settings.gathering is None:
                report.cpu_ms = 1e3 * (cpu - cpu_warm) / max(all_rounds, 1)
            if self.now >= settings.seconds:
                break
            if self._progress is not None:
                self._progress(report)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for node in list(self.present.values()):
            await node.leave()
        report.cpu_seconds = time.process_time() - cpu_before
        remember_envelopes(REMEMBERED)
        gc.set_threshold(*gc_before)
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
            self.hostile.add(identity.peer)
        self.nodes.append(node)
        self.present[identity.peer] = node
        node.note = self._note_round
        node.task = asyncio.create_task(node.run())

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
        """Follow the way of some manifests."""
        if self.now > self.settings.warm_up and len(self.times.announced) < WATCHED:
            self.times.note_announced(manifest, self.clock())

    def _note_round(self, node: SimulatedNode, most: int, taken: Sequence[ForeignGroup]) -> RoundNote:
        traffic = self.network.traffic[node.peer]
        checked, signed = self._work(node)
        view = node.transport.gossip.view.members if isinstance(node.transport, GossipTransport) else None
        return RoundNote(
            self.clock(),
            most,
            tuple(TakenGroup(each.peer, _is_true(each)) for each in taken),
            sum(traffic.received.values()),
            sum(traffic.sent.values()),
            checked,
            signed,
            len(view & self.hostile) / len(view) if view else None,
        )

    def _work(self, node: SimulatedNode) -> tuple[int, int]:
        """Signatures that a node has checked and made."""
        if isinstance(node.transport, GossipTransport):
            work = node.transport.gossip.work
            return work[CHECKED], work[SIGNED]
        return (node.transport.checked, 0) if isinstance(node.transport, BroadcastTransport) else (0, 0)

    async def _part(self, begins: float, ends: float) -> None:
        await asyncio.sleep(begins)
        self.network.parted = frozenset({0, 1})
        await asyncio.sleep(ends - begins)
        self.network.parted = frozenset()

    # -- what came out ------------------------------------------------------------------------------

    def _report(
        self,
        traffic_before: dict[str, Traffic],
        rounds_before: dict[str, int],
        work_before: dict[str, tuple[int, int]],
    ) -> WorldReport:
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
        for node in measured:
            (checked, signed), before_work = self._work(node), work_before.get(node.peer, (0, 0))
            report.checked += (checked - before_work[0]) / rounds
            report.signed += (signed - before_work[1]) / rounds
        report.curve = _curve([each for each in honest if each.joined <= ROUND_SECONDS])
        self._report_groups(report, honest)
        self._report_newcomers(report, honest)
        self._report_reach(report, honest)
        return report

    def _report_groups(self, report: WorldReport, honest: Sequence[SimulatedNode]) -> None:
        roles = {each.peer: each.role for each in self.nodes}
        regions = {each.peer: each.region for each in self.nodes}
        warm = [
            (node, each) for node in honest for each in node.notes if each.at - START > self.settings.warm_up
        ]
        report.useful_share = sum(len(note.taken) for _, note in warm) / max(
            sum(note.most for _, note in warm), 1
        )
        givers: dict[str, set[str]] = {}
        for node, note in warm:
            givers.setdefault(node.peer, set()).update(each.peer for each in note.taken)
        report.givers = mean(map(len, givers.values())) if givers else 0.0
        every = [each for node in honest for note in node.notes for each in note.taken]
        report.poison_trained = sum(roles[each.peer] is Role.POISONER or not each.is_true for each in every)
        verdicts = [len(each.exchange.quarantine.verdicts) for each in honest]
        report.poison_refused = sum(verdicts)
        report.quarantined = mean(verdicts) if verdicts else 0.0
        if self.settings.partition is not None:
            begins, ends = self.settings.partition
            parts: dict[str, list[bool]] = {"before": [], "during": [], "after": []}
            for node, note in warm:
                at = note.at - START
                # A round that ends shortly after a change gathered before it.
                part = "before" if at < begins else "during" if begins + 10 < at < ends else "after"
                parts[part] += [(regions[each.peer] < 2) != (node.region < 2) for each in note.taken]
            report.across = {part: mean(found) if found else 0.0 for part, found in parts.items()}

    def _report_newcomers(self, report: WorldReport, honest: Sequence[SimulatedNode]) -> None:
        late = [
            each for each in honest if each.joined > self.settings.warm_up and each.gathers and each.notes
        ]
        report.newcomers = len(late)
        first = [
            (node.notes[number].at - START - node.joined, number + 1)
            for node in late
            if (number := next((place for place, each in enumerate(node.notes) if each.taken), None))
            is not None
        ]
        if first:
            report.newcomer_seconds = median(seconds for seconds, _ in first)
            report.newcomer_rounds = mean(number for _, number in first)

    def _report_reach(self, report: WorldReport, honest: Sequence[SimulatedNode]) -> None:
        delays = [sorted(each) for each in self.times.delays.values()]
        report.reached = mean(map(len, delays)) if delays else 0.0
        halves = [each[len(each) // 2] for each in delays if each]
        report.reach_seconds = median(halves) if halves else None
        shares = [each.notes[-1].hostile_in_view for each in self.present.values() if each.notes]
        known = [each for each in shares if each is not None]
        report.hostile_in_view = mean(known) if known else None


def _is_true(group: ForeignGroup) -> bool:
    """Whether every answer earned what it should: known here, because the simulation knows all answers."""
    return all(
        each.reward == float(each.turns[0].text == right_answer(each.seed)) for each in group.trajectories
    )


def _curve(nodes: Sequence[SimulatedNode]) -> list[RoundFigures]:
    """Figures by round, up to the last round that at least half of the nodes have played."""
    curve = []
    for place in range(max((len(each.notes) for each in nodes), default=0)):
        played = [each.notes for each in nodes if len(each.notes) > place]
        if 2 * len(played) < len(nodes):
            break
        notes = [each[place] for each in played]
        before = [each[place - 1] for each in played] if place else []
        shares = [each.hostile_in_view for each in notes if each.hostile_in_view is not None]
        curve.append(
            RoundFigures(
                place + 1,
                len(played),
                mean(each.at - START for each in notes),
                sum(len(each.taken) for each in notes) / sum(each.most for each in notes),
                mean(shares) if shares else None,
                (sum(each.received for each in notes) - sum(each.received for each in before))
                / len(notes)
                / 1e3,
                (sum(each.checked for each in notes) - sum(each.checked for each in before)) / len(notes),
            )
        )
    return curve


async def simulate(
    settings: WorldSettings, progress: Callable[[WorldReport], None] | None = None
) -> WorldReport:
    """Run a world to its end; on a virtual clock, see `rollwright.aio.run_virtual`. `progress`: gets the report as it stands,
    every `PROGRESS_SECONDS` after the warm-up."""
    home = _new_home()
    try:
        with shared_signatures(SIGNATURES_OF_A_NODE * settings.nodes):
            return await World(settings, home, progress).run()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _new_home() -> Path:
    """In memory where that can be: each node flushes its sequence number to disk, which costs time and no CPU."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="rollwright-swarm-", dir=memory if memory.is_dir() else None))
