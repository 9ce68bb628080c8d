"""Copies of an environment in the middle of an episode.

Always true: a copy stands where the original stands and shares nothing with it; where that cannot be had, none is given.
A replayed copy is compared with the original at every step, and one that came another way is thrown away and counted.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from rollwright.agents import bounded
from rollwright.envs.base import Env, Forkable, Step, can_fork
from rollwright.trajectory import Boundary, Outcome, Trajectory, Turn


class ForkMode(StrEnum):
    """How a tree gets another environment for another answer."""

    FORK = "fork"
    """The environment copies itself."""
    REPLAY = "replay"
    """A new one is reset to the same level and given the same actions; every observation is compared."""
    ROOT = "root"
    """Not at all: only the first question gets several answers, each with an environment of its own."""


def fork_mode(env: Env, wanted: ForkMode | None) -> ForkMode:
    """The mode asked for; `None`: the best that the environment offers."""
    if wanted is not None:
        return wanted
    return ForkMode.FORK if can_fork(env) else ForkMode.REPLAY


class EnvCopies:
    """One tree's environments beside its first one."""

    def __init__(self, mode: ForkMode, make_env: Callable[[], Env], step_timeout: float) -> None:
        self.mode = mode
        self.replayed_steps = 0
        self.mismatches = 0
        self._make_env = make_env
        self._timeout = step_timeout
        self._made: list[Env] = []

    async def copies(self, env: Env, trajectory: Trajectory, played: Sequence[Turn], count: int) -> list[Env]:
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
    """What a copy must have in common with the original."""
    return (answer.observation, float(answer.reward), bool(answer.terminated), bool(answer.truncated))
