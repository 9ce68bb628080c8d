"""The tree strategy: several answers to a question, each continued with its own environment.

Always true: a tree grows level by level; before a level is sampled, every question's number of answers is fixed, in
the order of the tree, so the same seed gives the same tree. The answers to one question are sampled together. A tree
of width 1 is the chain, turn for turn. No other rollout ever waits for it. A branch policy that asks for the entropy of
questions gets it with the first answer to each, before the number of further ones is fixed; the turn records it, so a
resumed tree is decided from the record.

A `Budget` limits how many branches are *started*; a started branch is played to its end, so every leaf has a real
reward. A question always gets one answer, and more only while the budget has room. A copy of an environment is in the
same state as the original and shares nothing with it; a replayed copy is compared with the original at every step, and
one that differs is discarded and counted.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from inspect import isawaitable
from typing import NamedTuple

from rollwright.agents import OutOfRoom, Phase, Session, SiblingCalls, bounded
from rollwright.aio import together
from rollwright.engines.base import Policy
from rollwright.envs.base import Env, Forkable, Step, can_fork
from rollwright.rollout.branching import TRUNK, Branching, Node
from rollwright.rollout.episode import EpisodeSettings, end_of, too_old
from rollwright.rollout.filters import stops
from rollwright.trajectory import Boundary, Outcome, StopReason, Trajectory, Turn, leaves, path

logger = logging.getLogger(__name__)


class BudgetUnit(StrEnum):
    TOKENS = "tokens"
    """Sampled tokens. The cost of another answer is estimated by the mean answer so far."""
    TURNS = "turns"
    """Generations."""
    TOOL_CALLS = "tool_calls"
    """Steps of environments, replayed ones included."""
    LEAVES = "leaves"
    """Branches, ended or not."""


@dataclass
class Budget:
    """Budget and spending of one tree."""

    limit: int | None = None
    """`None`: the branch policy alone decides."""
    unit: BudgetUnit = BudgetUnit.LEAVES
    tokens: int = 0
    turns: int = 0
    tool_calls: int = 0
    refused: int = 0
    """Answers that a branch policy requested beyond the budget."""

    def spend(self, *, tokens: int = 0, turns: int = 0, tool_calls: int = 0) -> None:
        self.tokens += tokens
        self.turns += turns
        self.tool_calls += tool_calls

    def grant(self, wanted: int, *, leaves: int, unserved: int) -> int:
        """Grants answers for one question out of those wanted, at least one.

        `leaves`: branches so far, with what was granted already. `unserved`: questions that wait for their answers, this one
        included, and answers granted already that are not sampled yet.
        """
        if self.limit is None:
            return wanted
        granted = min(wanted, 1 + max(0, self._room(leaves, unserved)))
        self.refused += wanted - granted
        return granted

    def _room(self, leaves: int, unserved: int) -> int:
        """Answers beyond one for each question."""
        assert self.limit is not None
        match self.unit:
            case BudgetUnit.LEAVES:
                return self.limit - leaves
            case BudgetUnit.TURNS:
                return self.limit - self.turns - unserved
            case BudgetUnit.TOOL_CALLS:
                return self.limit - self.tool_calls - unserved
            case BudgetUnit.TOKENS:
                mean = self.tokens / self.turns if self.turns else 1.0
                return int((self.limit - self.tokens) / max(mean, 1.0)) - unserved


class ForkMode(StrEnum):
    """How a tree copies its environment for another answer."""

    FORK = "fork"
    """The environment copies itself."""
    REPLAY = "replay"
    """A new one is reset to the same level and given the same actions; every observation is compared."""
    ROOT = "root"
    """No copies: only the first question gets several answers, each with a new environment."""


def fork_mode(env: Env, wanted: ForkMode | None) -> ForkMode:
    """The requested mode; `None`: the best one that the environment supports."""
    if wanted is not None:
        return wanted
    return ForkMode.FORK if can_fork(env) else ForkMode.REPLAY


class EnvCopies:
    """The copies of one tree's environment."""

    def __init__(self, mode: ForkMode, make_env: Callable[[], Env], step_timeout: float) -> None:
        self.mode = mode
        self.replayed_steps = 0
        self.mismatches = 0
        self._make_env = make_env
        self._timeout = step_timeout
        self._made: list[Env] = []

    async def make(self, env: Env, trajectory: Trajectory, played: Sequence[Turn], count: int) -> list[Env]:
        """`env` itself and up to `count - 1` copies of it; `played` are the turns that brought it where it is."""
        found = [env]
        while len(found) < count and (copy := await self._copy(env, trajectory, played)) is not None:
            found.append(copy)
        return found

    async def _copy(self, env: Env, trajectory: Trajectory, played: Sequence[Turn]) -> Env | None:
        if self.mode is ForkMode.FORK:
            if not isinstance(env, Forkable) or not can_fork(env):
                raise TypeError(f"{type(env).__name__} cannot be copied; use strategy.fork replay or root")
            copy = env.fork()
            if isawaitable(copy):  # an environment in a box copies files
                copy = await bounded(copy, self._timeout, Boundary.ENVIRONMENT, len(played))
            self._made.append(copy)
            return copy
        if self.mode is ForkMode.ROOT and played:
            return None
        return await self._replay(trajectory, played)

    async def _replay(self, trajectory: Trajectory, played: Sequence[Turn]) -> Env | None:
        env = self._make_env()
        self._made.append(env)
        first = await bounded(env.reset(trajectory.seed), self._timeout, Boundary.ENVIRONMENT, 0)
        same = first.observation == trajectory.observation
        for turn in played:
            if not same:
                break
            step = await bounded(env.step(turn.text), self._timeout, Boundary.ENVIRONMENT, turn.id)
            self.replayed_steps += 1
            same = turn.outcome is not None and _shows(step) == _shows(turn.outcome)
        if same:
            return env
        self.mismatches += 1
        return None

    async def close(self) -> None:
        for env in self._made:
            await bounded(env.close(), self._timeout, Boundary.ENVIRONMENT, 0)
        self._made.clear()


def _shows(answer: Step | Outcome) -> tuple[str, float, bool, bool]:
    """The fields in which a copy must equal the original."""
    return (answer.observation, float(answer.reward), bool(answer.terminated), bool(answer.truncated))


COPIED_BY = "tree_by_"
"""Metric of a tree with several leaves: 1 for the `ForkMode` that its environments were copied by."""


class Branch(NamedTuple):
    """One path of the tree, up to its last turn."""

    env: Env
    label: int
    turn: Turn | None = None
    """Its last decision; `None`: before the first."""
    end: StopReason | None = None
    """Stop reason; `None` while the branch is active."""


@dataclass(frozen=True)
class TreeStrategy:
    branching: Branching
    budget: int | None = None
    unit: BudgetUnit = BudgetUnit.LEAVES
    fork: ForkMode | None = None
    """`None`: `fork()` where the environment has it, else replay."""

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: EpisodeSettings,
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        copies = EnvCopies(fork_mode(env, self.fork), make_env, settings.limits.step_timeout)
        growth = _Growth(self, session, settings, copies, Budget(self.budget, self.unit))
        live = [Branch(env, TRUNK)]
        ends: list[StopReason] = []
        try:
            for depth in range(settings.max_steps):
                if too_old(session.trajectory, policy.version, settings.max_staleness):
                    return StopReason.STALE
                grown = await growth.grow_level(live, depth, len(ends))
                ends += [branch.end for branch in grown if branch.end is not None]
                live = [branch for branch in grown if branch.end is None]
                if not live:
                    break
        finally:
            await copies.close()
        growth.report()
        return _stop(ends + [StopReason.MAX_STEPS] * len(live))


@dataclass
class _Growth:
    """One tree while it grows."""

    tree: TreeStrategy
    session: Session
    settings: EpisodeSettings
    copies: EnvCopies
    budget: Budget
    merged: int = 0
    """Answers identical to a sibling."""

    async def grow_level(self, live: Sequence[Branch], depth: int, ended: int) -> list[Branch]:
        """Grows each live branch by one turn; returns the branches, in the order of the tree."""
        asks = getattr(self.tree.branching, "asks_entropy", None)
        if asks is None or not asks(depth):
            return await self._answer_level(live, [None] * len(live), depth, ended)
        begun: list[SiblingCalls | None] = []
        try:
            # One by one in the order of the tree, so that turns of equal trees have equal numbers; sampled together.
            begun += [self._calls(branch, notes_entropy=True) for branch in live]
            await together(each.begin() for each in begun if each is not None)
            if any(each is not None and each.entropy is None for each in begun):
                _tell_missing_entropy(type(self.session.policy_of("agent")).__name__)
            return await self._answer_level(live, begun, depth, ended)
        finally:
            for each in begun:
                if each is not None:
                    each.close()

    async def _answer_level(
        self, live: Sequence[Branch], begun: Sequence[SiblingCalls | None], depth: int, ended: int
    ) -> list[Branch]:
        asked = self.tree.branching.level(
            [self._node(branch, depth, calls) for branch, calls in zip(live, begun, strict=True)]
        )
        granted: list[Sequence[int]] = []
        for place, labels in enumerate(asked):
            given = sum(map(len, granted))
            count = self.budget.grant(
                len(labels), leaves=ended + given + len(live) - place, unserved=given + len(live) - place
            )
            granted.append(labels[:count])
        replayed = self.copies.replayed_steps
        grown = await together(
            self._grow(branch, labels, calls)
            for branch, labels, calls in zip(live, granted, begun, strict=True)
        )
        self.budget.spend(tool_calls=self.copies.replayed_steps - replayed)
        return [branch for branches in grown for branch in branches]

    def _calls(self, branch: Branch, *, notes_entropy: bool = False) -> SiblingCalls | None:
        """The answers to the branch's next question, none of them sampled yet; `None`: there is no room for one."""
        try:
            messages, continues = self.settings.agent.ask(self.session, branch.env, branch.turn)
        except OutOfRoom:
            return None
        return self.session.siblings(
            messages, continues=continues, after=branch.turn, env=branch.env, notes_entropy=notes_entropy
        )

    def _node(self, branch: Branch, depth: int, calls: SiblingCalls | None) -> Node:
        turns = self.session.trajectory.turns
        turn = branch.turn
        before = None if turn is None or turn.after is None else turns[turn.after]
        entropy = None if calls is None else calls.entropy
        return Node(depth, branch.label, self.session.key, turn, before, entropy)

    async def _grow(self, branch: Branch, labels: Sequence[int], begun: SiblingCalls | None) -> list[Branch]:
        """Grows a branch by the answers to its next question, some of which may be sampled already."""
        session, last = self.session, branch.turn
        trajectory = session.trajectory
        played = [] if last is None else path(trajectory.turns, last.id)
        with session.waiting(Phase.ENVIRONMENT, "copy"):
            envs = await self.copies.make(branch.env, trajectory, played, len(labels))
        calls = begun or self._calls(branch)
        try:
            if calls is None:
                raise OutOfRoom
            turns = await calls.finish(len(envs))
        except OutOfRoom:
            return [branch._replace(end=StopReason.MAX_LENGTH)]
        self.merged += len(envs) - len(turns)
        self.budget.spend(
            tokens=sum(turn.completion_tokens * turn.count for turn in turns),
            turns=len(envs),
            tool_calls=len(turns),
        )
        return await together(
            self._step(turn, env, label) for turn, env, label in zip(turns, envs, labels, strict=False)
        )

    async def _step(self, turn: Turn, env: Env, label: int) -> Branch:
        limit = self.settings.limits.step_timeout
        with self.session.waiting(Phase.ENVIRONMENT, "step", agent=turn.agent):
            step = await bounded(env.step(turn.text), limit, Boundary.ENVIRONMENT, turn.id + 1)
        seen = self.session.observe(turn, step)
        end = end_of(seen)
        if end is None and stops(self.settings.filters, seen):
            end = StopReason.FILTERED
        return Branch(env, label, seen, end)

    def report(self) -> None:
        """Writes the tree's figures into the trajectory's metrics."""
        turns = self.session.trajectory.turns
        tokens = [turn.completion_tokens for turn in turns]
        paths = [sum(tokens[each.id] for each in path(turns, leaf)) for leaf in leaves(turns)]
        figures = {
            f"{COPIED_BY}{self.copies.mode}": len(paths) > 1,
            "tree_leaves": len(paths),
            "tree_tokens_saved": sum(paths) - sum(tokens),
            "tree_merged": self.merged,
            "tree_refused": self.budget.refused,
            "tree_replayed_steps": self.copies.replayed_steps,
            "tree_replay_mismatches": self.copies.mismatches,
        }
        metrics = self.session.trajectory.metrics
        metrics.update({name: float(value) for name, value in figures.items() if value})


@cache
def _tell_missing_entropy(policy: str) -> None:
    """Says once for each kind of policy that questions are judged by the turns before them."""
    logger.warning(
        "strategy.branch uncertainty: %s tells no likeliest tokens; the -log p of the turn before a question counts instead of "
        "the question's entropy",
        policy,
    )


def _stop(ends: Sequence[StopReason]) -> StopReason:
    """The stop reason of the whole tree: the environment, if it ended every branch; else the first other reason."""
    others = [end for end in ends if end is not StopReason.TERMINATED]
    return others[0] if others else StopReason.TERMINATED
