"""Ready-made control flows of a team: a loop with a critic, and a router. Both are async functions over a session.

Always true: an agent that this rollout does not need is not called; an approval ends the loop of this rollout at once;
the critic is not called in the last round, because its verdict could not change anything.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from rollwright.errors import ConfigError
from rollwright.teams.session import Reply, Round, TeamSession

Flow = Callable[[TeamSession], Awaitable[Reply | None]]
"""Calls the agents of a team for one step of the environment; returns the reply whose text is the action, or `None`."""


@dataclass(frozen=True)
class When:
    """Condition under which an agent takes part; by default always."""

    from_step: int = 1
    """The first step of the environment in which it takes part, from 1."""
    first_round: bool = False
    """Whether it takes part in the first round of a loop only."""

    def applies(self, step: int, each: Round) -> bool:
        return step >= self.from_step and not (self.first_round and each.number)


@dataclass(frozen=True)
class CriticLoop:
    """Runs the stages of agents and then the critic, in rounds, until the critic approves."""

    stages: tuple[tuple[str, ...], ...]
    """Agents of one stage do not depend on each other; each stage sees the answers of earlier stages."""
    acts: str
    """Name of the agent whose latest answer is the action."""
    critic: str | None = None
    max_loops: int = 1
    when: Mapping[str, When] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_loops < 1:
            raise ConfigError(f"max_loops: {self.max_loops} is too few; accepted: 1 or more")
        if self.acts not in {agent for stage in self.stages for agent in stage}:
            raise ConfigError(
                f"acts: {self.acts!r} is in no stage of {[list(stage) for stage in self.stages]}"
            )

    @property
    def agents(self) -> list[str]:
        critic = [] if self.critic is None else [self.critic]
        return [*(agent for stage in self.stages for agent in stage), *critic]

    async def __call__(self, s: TeamSession) -> Reply:
        for each in s.loops(self.max_loops):
            for stage in self.stages:
                due = [agent for agent in stage if self.when.get(agent, When()).applies(s.step, each)]
                await s.skip(*(agent for agent in stage if agent not in due))
                if due:
                    await s.gather(*due)
            if self.critic is not None and not each.last and (await s.call(self.critic)).approves:
                s.approve()
        return s.latest(self.acts)


@dataclass(frozen=True)
class Route:
    """The verdict of one agent, the router, decides which of two agents acts.

    A rejection in the last step gives an empty action: the rejected branch would gather information (a search, for
    example) that no later step could use.
    """

    router: str
    approved: str
    """Agent that acts on an approval."""
    rejected: str
    """Agent that acts on a rejection."""

    @property
    def agents(self) -> list[str]:
        return list(dict.fromkeys([self.router, self.rejected, self.approved]))

    async def __call__(self, s: TeamSession) -> Reply | None:
        if (await s.call(self.router)).approves:
            await s.skip(self.rejected)
            return await s.call(self.approved)
        if s.last_step:
            await s.skip(self.rejected, self.approved)
            return None
        reply = await s.call(self.rejected)
        await s.skip(self.approved)
        return reply


def sort_into_stages(depends: Mapping[str, Sequence[str]], where: str) -> tuple[tuple[str, ...], ...]:
    """Topological levels of the agents: each agent in the earliest stage that its dependencies allow, in declared order."""
    for agent, needed in depends.items():
        for other in needed:
            if other not in depends:
                raise ConfigError(
                    f"{where}.{agent}.after: {other!r} is no agent of the loop; there are: {', '.join(depends)}"
                )
    sorter = TopologicalSorter(depends)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"{where}: agents wait for each other: {' -> '.join(error.args[1])}") from None
    found = []
    declared = list(depends)
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=declared.index)
        found.append(tuple(ready))
        sorter.done(*ready)
    return tuple(found)
