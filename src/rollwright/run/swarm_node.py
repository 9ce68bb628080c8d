"""A node of a swarm: a training run whose batches are own groups and groups of peers.

Invariants:
- It is the same run as `rollwright train`: scheduler, filters, store, record, trainer, checkpoints. A peer's groups are
  one more source of a batch and stand in the record with their trajectories, so that a node that is killed anywhere comes
  back to the same weights.
- A foreign group is trained on at most once, and not when it is older than `max_round_lag` rounds. Its age counts from
  the round in which the peer began to play it.
- Identity, seen groups, quarantine and weights are all in the home folder: a restart with the same folder is the same
  node.
- It can run forever: the rounds that it keeps, in memory and in its home, are bounded by `training.keep_steps`, and the
  peers by limits of their own.

The stages of a round are in `rollwright.swarm.node`; this module builds them and gives them to the training loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollwright.config import RunConfig
from rollwright.engines.base import Policy, Renderer
from rollwright.errors import ConfigError
from rollwright.rollout.filters import Catches, build_filters
from rollwright.run.build_swarm import node_config, open_transport, swarm_of, task_book
from rollwright.run.build_training import make_policy, model_name
from rollwright.run.folder import CONFIG, RunFolder, RunReader
from rollwright.run.statistics import batch_row
from rollwright.run.training import Row, TrainingRun
from rollwright.run.training_record import training_rows
from rollwright.swarm.exchange import Exchange
from rollwright.swarm.heartbeat import NodePhase, NodeStatus, Pulse
from rollwright.swarm.identity import IDENTITY_FILE, load_identity
from rollwright.swarm.node import ForeignSelection, RoundCounter, RoundLog, StatusReporter, SwarmRound
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.transports.base import Transport
from rollwright.swarm.verification import tokenizer_digest
from rollwright.trajectory import Floats, TokenIds, floats, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Call = tuple[TokenIds, TokenIds, "asyncio.Future[Floats]"]

PROGRESS_SECONDS = 1.0
"""Between two looks at the engine's counters."""

_PHASES = {
    "rollout": NodePhase.GENERATE,
    "validate": NodePhase.EVALUATE,
    "checkpoint": NodePhase.CHECKPOINT,
}
"""Phases of the heartbeat by the training loop's stages; the other stages are part of training."""

_log = logging.getLogger(__name__)


class SwarmNode:
    """`await SwarmNode(config, home).run()`; with a home that exists it continues where that stopped."""

    def __init__(
        self,
        config: RunConfig,
        home: Path,
        *,
        policy: Policy | None = None,
        transport: Transport | None = None,
        store: str | None = None,
        row: Row = batch_row,
        on_round: Callable[[NodeStatus], None] = lambda status: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`policy`, `transport`: instead of those that the settings name. `on_round` is called at every round's end."""
        self.swarm = swarm_of(config)
        self.home = home
        resume = (home / CONFIG).is_file()
        if resume:  # the rollouts in the store carry the name of the first start
            config = config.model_copy(update={"name": RunReader(home).config.name})
        self.identity = load_identity(home / IDENTITY_FILE)
        config = node_config(config, self.identity.peer)
        policy = policy or make_policy(config)
        assert policy is not None, "see `node_config`"
        self._policy = policy
        self._transport = transport
        self._on_round = on_round
        self._clock = clock
        self.exchange: Exchange | None = None
        """Set when the node has joined."""
        self.counter: RoundCounter | None = None
        """Set when the node has joined."""
        self.log = RoundLog(config.name, row)
        folder = RunFolder.reopen(home) if resume else RunFolder.begin(home, config)
        if resume:
            for line in folder.repairs:
                _log.warning("%s", line)
            folder.keep_settings(config)
            self.log.restore(training_rows(RunReader(home)))
        self.pulse = Pulse(home, clock=clock)
        self.training = TrainingRun(
            config,
            folder,
            resume=resume,
            policy=policy,
            store=folder.store_address(store),
            row=self.log.record,
            on_progress=self.pulse.progress,
        )

    async def run(self) -> None:
        """Run rounds until `max_steps`."""
        training = self.training
        self.pulse.enter(NodePhase.START, self.log.round, training.pipeline.done)
        watch = asyncio.create_task(watch_engine(self._policy, training, self.pulse), name="heartbeat")
        try:
            async with self._join() as exchange:
                scorer = await asyncio.to_thread(load_scorer, training, self._policy, self.pulse)
                training.pipeline.on_stage = StageReporter(
                    training, self.log, self.pulse, self._reporter(exchange)
                ).enter
                await training.run(self._round(exchange, scorer))
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            training.folder.finish({"name": training.config.name, "training": training.summary()})
            self.pulse.enter(NodePhase.STOPPED, self.log.round, training.pipeline.done)

    def status(self) -> NodeStatus:
        """The status now, of a node that has joined."""
        if self.exchange is None:
            raise ConfigError("swarm: the node joins when it runs, and has no status before")
        return self._reporter(self.exchange).status(self.training.pipeline.done, self.training.trained or 0)

    @contextlib.asynccontextmanager
    async def _join(self) -> AsyncIterator[Exchange]:
        config = self.training.config
        assert config.train_env_manager is not None, "see `node_config`"
        transport = self._transport or await open_transport(self.swarm, self.identity, clock=self._clock)
        self.exchange = exchange = Exchange(
            self.identity,
            self.swarm.name,
            transport,
            task_book(config),
            self.home,
            settings=self.swarm,
            max_group_size=config.train_env_manager.group_size,
            clock=self._clock,
        )
        try:
            yield exchange
        finally:
            await exchange.close()

    def _round(self, exchange: Exchange, scorer: "PolicyScorer") -> SwarmRound:
        manager = self.training.config.train_env_manager
        self.counter = RoundCounter(exchange, self.log.round)
        return SwarmRound(
            self.counter,
            exchange,
            scorer,
            ForeignSelection(build_filters(manager) if manager else (), Catches(), exchange.counts),
            self.log,
            self.pulse,
            self.swarm.external_groups,
        )

    def _reporter(self, exchange: Exchange) -> StatusReporter:
        return StatusReporter(
            self.home,
            self.identity.peer,
            self.swarm.name,
            self.log,
            exchange,
            self._clock,
            self._on_round,
        )


class StageReporter:
    """Follows the training loop: a heartbeat at every stage, and the status when a round has ended."""

    def __init__(self, training: TrainingRun, log: RoundLog, pulse: Pulse, reporter: StatusReporter) -> None:
        self._training = training
        self._log = log
        self._pulse = pulse
        self._reporter = reporter

    def enter(self, stage: str) -> None:
        done = self._training.pipeline.done
        self._pulse.enter(_PHASES.get(stage, NodePhase.TRAIN), self._log.round, done)
        if stage not in ("rollout", "done"):
            return
        validations = self._training.state.validations
        if validations and validations[-1]["step"] == done:
            self._log.note_evaluation(validations[-1].get("reward"))
        self._reporter.report(done, self._training.trained or 0)


class PolicyScorer:
    """Scores foreign tokens with the node's own policy; a `rollwright.swarm.verification.Scorer`.

    The trainer computes the log-probabilities: it has the weights of the engine, whatever the engine is, and is idle
    between two steps. Calls that arrive while it computes are batched for the next computation.
    """

    def __init__(
        self,
        run: TrainingRun,
        policy: Policy,
        tokenizer: "PreTrainedTokenizerBase",
        on_progress: Callable[[], None],
    ) -> None:
        if policy.renderer is None:
            raise ConfigError(
                "policy: speaks text alone, so it cannot share rollouts; use one with token ids"
            )
        self.renderer: Renderer = policy.renderer
        self.tokenizer = tokenizer_digest(tokenizer)
        self._run = run
        self._tokenizer = tokenizer
        self._marks = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        """Special ids of roles and ends, which no text may introduce."""
        self._on_progress = on_progress
        self._waiting: list[_Call] = []
        self._work: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._run.trainer.version

    def encode(self, text: str) -> TokenIds:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._marks & set(ids):  # plain text for another model may be special tokens of this one
            raise PeerRefused(
                PeerRefusal.CANNOT_CHECK, "its text contains special tokens of this node's model"
            )
        return token_ids([*ids, self.renderer.stop_ids[0]])

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        if not sampled:
            return floats()
        done: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, sampled, done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._compute())
        return await done

    async def _compute(self) -> None:
        while self._waiting:
            calls, self._waiting = self._waiting, []
            try:
                found = await self._run.logprobs([(prompt, sampled) for prompt, sampled, _ in calls])
            except Exception as error:  # noqa: BLE001 - every caller gets the error and ends its own group
                for _, _, done in calls:
                    if not done.done():
                        done.set_exception(error)
                continue
            self._on_progress()
            for (_, _, done), own in zip(calls, found, strict=True):
                if not done.done():  # the check was cancelled meanwhile
                    done.set_result(own)


def load_scorer(training: TrainingRun, policy: Policy, pulse: Pulse) -> PolicyScorer:
    """Blocks while the tokenizer loads."""
    from rollwright.models.loading import load_tokenizer

    return PolicyScorer(training, policy, load_tokenizer(model_name(training.config)), pulse.progress)


async def watch_engine(policy: Policy, training: TrainingRun, pulse: Pulse) -> None:
    """Beat whenever the engine made progress inside an episode; runs until it is cancelled."""
    before: object = None
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        counters = getattr(policy, "counters", None)
        local = training.local
        now = (
            getattr(counters, "steps", None),
            None if local is None else local.activity.total().turns,
        )
        if now != before:
            before = now
            pulse.progress()
