"""The tree strategy: several answers to a question, each played on with an environment of its own.

Always true: a tree grows level by level; before a level is sampled, every question's number of answers is fixed, in
the order of the tree, so the same seed gives the same tree. The answers to one question are asked for together. A tree
of width 1 is the chain, turn for turn. No other rollout ever waits for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollwright.agents import OutOfRoom, Phase, Session, bounded, together
from rollwright.envs.base import Env
from rollwright.policies.base import Policy
from rollwright.rollout.branching import TRUNK, Branching, Node
from rollwright.rollout.budget import Budget, BudgetUnit
from rollwright.rollout.episode import EpisodeSettings, end_of, too_old
from rollwright.rollout.filters import stops
from rollwright.rollout.forking import EnvCopies, ForkMode, fork_mode
from rollwright.trajectory import Boundary, StopReason, Turn, leaves, path

COPIED_BY = "tree_by_"
"""Metric of a tree with several leaves: 1 for the `ForkMode` that its environments were copied by."""


class Branch(NamedTuple):
    """One path of the tree, up to where it has come."""

    env: Env
    label: int
    turn: Turn | None = None
    """Its last decision; `None`: before the first."""
    end: StopReason | None = None
    """`None` while it goes on."""


@dataclass(frozen=True)
class Tree:
    branching: Branching
    budget: int | None = None
    unit: BudgetUnit = BudgetUnit.LEAVES
    fork: ForkMode | None = None
    """`None`: `fork()` where the environment has it, else replay."""

    async def play(
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
                grown = await growth.level(live, depth, len(ends))
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

    tree: Tree
    session: Session
    settings: EpisodeSettings
    copies: EnvCopies
    budget: Budget
    merged: int = 0
    """Answers that came out the same as a sibling."""

    async def level(self, live: Sequence[Branch], depth: int, ended: int) -> list[Branch]:
        """The branches that come of the live ones by one more turn each, in the order of the tree."""
        asked = [self._labels(branch, depth) for branch in live]
        granted: list[Sequence[int]] = []
        for place, labels in enumerate(asked):
            given = sum(map(len, granted))
            count = self.budget.grant(
                len(labels), leaves=ended + given + len(live) - place, unserved=given + len(live) - place
            )
            granted.append(labels[:count])
        replayed = self.copies.replayed_steps
        grown = await together(
            self._grow(branch, labels) for branch, labels in zip(live, granted, strict=True)
        )
        self.budget.spend(tool_calls=self.copies.replayed_steps - replayed)
        return [branch for branches in grown for branch in branches]

    def _labels(self, branch: Branch, depth: int) -> Sequence[int]:
        turns = self.session.trajectory.turns
        turn = branch.turn
        before = None if turn is None or turn.after is None else turns[turn.after]
        return self.tree.branching.labels(Node(depth, branch.label, self.session.key, turn, before))

    async def _grow(self, branch: Branch, labels: Sequence[int]) -> list[Branch]:
        session, settings = self.session, self.settings
        trajectory, last = session.trajectory, branch.turn
        played = [] if last is None else path(trajectory.turns, last.id)
        with session.waiting(Phase.ENVIRONMENT, "copy"):
            envs = await self.copies.copies(branch.env, trajectory, played, len(labels))
        try:
            messages, continues = settings.agent.ask(session, branch.env, last)
            turns = await session.generate_siblings(
                messages, len(envs), continues=continues, after=last, env=branch.env
            )
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
        """Leaves the tree's figures in the trajectory."""
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


def _stop(ends: Sequence[StopReason]) -> StopReason:
    """What the tree as a whole ended by: the environment, if every branch did; else the first other reason."""
    others = [end for end in ends if end is not StopReason.TERMINATED]
    return others[0] if others else StopReason.TERMINATED
