"""A node of a swarm: a training run whose batches are own groups and groups of peers.

True of it:
- It is the same run as `rollwright train`: scheduler, filters, store, record, trainer, checkpoints. A peer's groups are
  one more source of a batch, and stand in the record with their trajectories, so that a node which is killed anywhere
  comes back to the same weights.
- It waits for nobody: what peers have announced when its own groups are played is what it chooses from. Without peers,
  or with an unreachable network, a round has its own groups alone, and the next one looks again.
- A foreign group is trained on at most once, and not when it is older than `max_round_lag` rounds. Its age counts from
  when the peer began to play it.
- Identity, what was seen, the quarantine and the weights are all in the home folder: a restart with the same folder is
  the same node.
- It can run for ever: what it keeps of rounds, in memory and in its home, is bounded by `training.keep_steps`, and what
  it keeps of peers by limits of their own.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.policies.base import Policy
from rollwright.rollout import Batch
from rollwright.rollout.filters import Catches, build_filters, judge, judge_group
from rollwright.rollout.groups import Group
from rollwright.run.folder import CONFIG, RunFolder, RunReader
from rollwright.run.swarm_assembly import node_config, open_transport, swarm_of, task_book
from rollwright.run.swarm_scorer import PolicyScorer
from rollwright.run.training_assembly import make_policy, model_name
from rollwright.run.training_record import plain_row, training_rows
from rollwright.run.training_run import Row, TrainingRun
from rollwright.swarm.exchange import ACCEPTED, SHARED, Exchange, ForeignGroup
from rollwright.swarm.heartbeat import NodeStatus, PeerStatus, Phase, Pulse, RoundStatus, write_status
from rollwright.swarm.identity import IDENTITY_FILE, load_identity, short_name
from rollwright.swarm.rounds import next_round
from rollwright.swarm.transport import Transport

FILTERED = "filtered"
"""Counter beside the reasons of `Refusal`: foreign groups that held up and were left out by this node's own filters."""

SHOWN_ROUNDS = 100
"""In the status; more of them are in the record."""

SILENT_ROUNDS = 10
"""Own rounds after which a peer that announced nothing does not count for which round it is: it may be stuck."""

LOOK_SECONDS = 1.0
"""Between two looks at whether the engine got on."""

_PHASES = {"rollout": Phase.GENERATE, "validate": Phase.EVALUATE, "checkpoint": Phase.CHECKPOINT}
"""What the stages of the pipeline are called here; the others are part of training."""

_log = logging.getLogger(__name__)


class SwarmNode:
    """`await SwarmNode(config, home).run()`; with a home that exists it goes on where that stopped."""

    def __init__(
        self,
        config: RunConfig,
        home: Path,
        *,
        policy: Policy | None = None,
        transport: Transport | None = None,
        store: str | None = None,
        row: Row = plain_row,
        on_round: Callable[[NodeStatus], None] = lambda status: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`policy`, `transport`: instead of those that the settings name. `on_round` is told of every round's end."""
        self.swarm = swarm_of(config)
        self.home = home
        resume = (home / CONFIG).is_file()
        if resume:  # its rollouts are known by the name that it began with
            config = config.model_copy(update={"name": RunReader(home).config.name})
        self.identity = load_identity(home / IDENTITY_FILE)
        config = node_config(config, self.identity.peer)
        policy = policy or make_policy(config)
        assert policy is not None, "see `node_config`"
        self._policy = policy
        self._transport = transport
        self._row = row
        self._on_round = on_round
        self._clock = clock
        self._filters = build_filters(config.train_env_manager) if config.train_env_manager else ()
        self._catches = Catches()
        self._counts: Counter[str] = Counter()
        self.exchange: Exchange | None = None
        """Once it has joined."""
        self._scorer: PolicyScorer | None = None
        self._foreign: dict[str, ForeignGroup] = {}
        """Those of this round, by the id that they have in the record."""
        self.round = 0
        """Of the swarm; the own ones are counted in `training.pipeline.done`."""
        self._heard: dict[str, tuple[int, int]] = {}
        """Of each peer, the last sequence number, and in which step it was new."""
        self._rounds: deque[RoundStatus] = deque(maxlen=SHOWN_ROUNDS)
        folder = RunFolder.reopen(home) if resume else RunFolder.begin(home, config)
        if resume:
            for line in folder.repairs:
                _log.warning("%s", line)
            folder.keep_settings(config)
            self._remember(training_rows(RunReader(home)))
        self.pulse = Pulse(home, clock=clock)
        self.training = TrainingRun(
            config,
            folder,
            resume=resume,
            policy=policy,
            store=folder.store_address(store),
            row=self._recorded,
            sharing=self,
            on_progress=self.pulse.progress,
        )
        self.training.pipeline.on_stage = self._on_stage

    async def run(self) -> None:
        """Rounds until `max_steps`."""
        self._beat(Phase.START)
        config = self.training.config
        watch = asyncio.create_task(self._watch(), name="heartbeat")
        try:
            transport = self._transport or await open_transport(
                self.swarm, self.identity.peer, clock=self._clock
            )
            assert config.train_env_manager is not None, "see `node_config`"
            self.exchange = Exchange(
                self.identity,
                self.swarm.name,
                transport,
                task_book(config),
                self.home,
                settings=self.swarm,
                max_group_size=config.train_env_manager.group_size,
                clock=self._clock,
            )
            self._scorer = await asyncio.to_thread(self._make_scorer)
            await self.training.run()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            if self.exchange is not None:
                await self.exchange.close()
            self.training.folder.finish({"name": config.name, "training": self.training.summary()})
            self._beat(Phase.STOPPED)

    async def begin(self, step: int) -> None:
        """Finds out which round it is."""
        exchange = self._joined
        await exchange.listen(self.round)
        heard = self._heard
        self._heard = {  # of the peers that the gate knows, so that it is bounded as that is
            peer: heard[peer] if peer in heard and heard[peer][0] == sequence else (sequence, step)
            for peer, sequence in exchange.sequences().items()
        }
        told, there = exchange.rounds(), {each.id for each in exchange.peers() if each.alive}
        recent = [
            told[peer]
            for peer, (_, heard) in self._heard.items()
            if peer in there and peer not in exchange.quarantine and step - heard < SILENT_ROUNDS
        ]
        self.round = next_round(self.round, recent)
        self._beat(Phase.GENERATE)

    async def complete(self, own: Batch) -> Batch:
        """Shares the own groups, and adds those of peers."""
        exchange, scorer = self._joined, self._scorer
        assert scorer is not None
        self._beat(Phase.SHARE)
        for group in own.groups:
            await exchange.share(self.round, group.index, group.tag, group.trajectories, scorer.tokenizer)
            self.pulse.progress()
        self._beat(Phase.SAMPLE)
        foreign: Sequence[ForeignGroup] = ()
        if self.swarm.external_groups:
            foreign = await exchange.gather(self.round, self.swarm.external_groups, scorer)
        self._foreign = {each.trajectories[0].group_id: each for each in foreign}
        taken = [left for each in foreign if (left := self._filtered(each)) is not None]
        return Batch([*own.groups, *taken], own.version, own.ledger)

    def status(self) -> NodeStatus:
        """As it is now."""
        counts = self._counts + (Counter() if self.exchange is None else self.exchange.counts)
        ours = (ACCEPTED, SHARED)
        told = {} if self.exchange is None else self.exchange.rounds()
        everybody = () if self.exchange is None else self.exchange.peers()
        peers = [each for each in everybody if each.verified or each.id in told]
        trainer = self.training.trained
        return NodeStatus(
            name=short_name(self.identity.peer),
            peer=self.identity.peer,
            swarm=self.swarm.name,
            time=self._clock(),
            version=0 if trainer is None else trainer,
            rounds_done=self.training.pipeline.done,
            rounds=list(self._rounds),
            peers=[PeerStatus(short_name(each.id), each.id, each.alive, told.get(each.id)) for each in peers],
            accepted=counts[ACCEPTED],
            shared=counts[SHARED],
            refused={reason: count for reason, count in sorted(counts.items()) if reason not in ours},
            quarantined=[]
            if self.exchange is None
            else [each.name for each in self.exchange.quarantine.verdicts],
            strangers=len(everybody) - len(peers),
        )

    @property
    def _joined(self) -> Exchange:
        if self.exchange is None:
            raise ConfigError("swarm: is joined when the node runs")
        return self.exchange

    def _make_scorer(self) -> PolicyScorer:
        from rollwright.models.loading import load_tokenizer

        tokenizer = load_tokenizer(model_name(self.training.config))
        return PolicyScorer(self.training, self._policy, tokenizer, self.pulse.progress)

    def _filtered(self, foreign: ForeignGroup) -> Group | None:
        """A peer's group, as this node's own filters leave it; `None`: nothing of it."""
        judged = [judge(self._filters, each, self._catches) for each in foreign.trajectories]
        kept = {place: each.trajectory for place, each in enumerate(judged) if each.dropped is None}
        members, dropped = judge_group(self._filters, list(kept.values()), self._catches)
        if dropped is not None or len(members) < 2:
            self._counts[FILTERED] += 1
            return None
        first = members[0]
        return Group(
            group_id=first.group_id,
            index=0,
            tag=first.tag,
            seed=first.seed,
            members=len(members),
            finished=dict(zip(kept, members, strict=True)),
        )

    def _recorded(self, mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
        """A batch's line in the record."""
        row = self._row(mode, step, seconds, batch)
        if mode != "train":
            return row
        start = f"{self.training.config.name}.train-"
        own = [each for each in batch.groups if each.group_id.startswith(start)]
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
        self._remember([row])
        return row

    def _remember(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self.round = row["round"]
            self._rounds.append(
                RoundStatus(row["round"], row["own_reward"], row["own_groups"], row["foreign_groups"])
            )

    def _on_stage(self, stage: str) -> None:
        self._beat(_PHASES.get(stage, Phase.TRAIN))
        if stage in ("rollout", "done"):
            self._tell()

    def _tell(self) -> None:
        """The last round is over: everybody may know."""
        if self._rounds and (judged := self.training.validations):
            last = judged[-1]
            if last["step"] == self.training.pipeline.done:
                done = self._rounds.pop()
                self._rounds.append(
                    RoundStatus(
                        done.round, done.reward, done.own_groups, done.foreign_groups, last.get("reward")
                    )
                )
        status = self.status()
        write_status(self.home, status)
        self._on_round(status)

    def _beat(self, phase: Phase) -> None:
        self.pulse.enter(phase, self.round, self.training.pipeline.done)

    async def _watch(self) -> None:
        """Beats when the engine got on inside an episode."""
        before: object = None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            counters = getattr(self._policy, "counters", None)
            local = self.training.local
            now = (
                getattr(counters, "steps", None),
                None if local is None else local.activity.total().turns,
            )
            if now != before:
                before = now
                self.pulse.progress()
