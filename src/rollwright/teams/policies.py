"""Routing of agents to policies: one shared engine, one engine for each agent, or adapters on a shared engine.

Always true: to the rest of the run this is one policy, the run's own. Staleness is counted from its version, and weight
updates go to it alone. Agents with another policy are not trained by this run.
"""

from collections.abc import Mapping

from rollwright.engines.base import (
    Capabilities,
    Generation,
    Policy,
    Probed,
    Prompt,
    Renderer,
    Sampling,
    Updatable,
    UpdateMode,
    Weights,
    constrains_output,
)
from rollwright.errors import ConfigError
from rollwright.teams.segments import with_segment_cache


class TeamPolicies:
    """The run's policy, and the policies of agents that have a different one."""

    def __init__(
        self,
        own: Policy,
        by_agent: Mapping[str, Policy] | None = None,
        *,
        by_name: Mapping[str, Policy] | None = None,
        segment_cache: bool = False,
    ) -> None:
        """`by_agent`: policies by agent id (`team/agent`); several agents may share one. `by_name`: those that rules of the
        gateway name."""
        self._own = own
        self._by_name = dict(by_name or {})
        others = (*(by_agent or {}).values(), *self._by_name.values())
        self._all = [own, *(each for each in others if each is not own)]
        self._all = list({id(each): each for each in self._all}.values())
        asked = {id(each): with_segment_cache(each) if segment_cache else each for each in self._all}
        self._default = asked[id(own)]
        self._by_agent = {agent: asked[id(each)] for agent, each in (by_agent or {}).items()}

    def of_agent(self, agent: str) -> Policy:
        return self._by_agent.get(agent, self._default)

    def named(self, name: str) -> Policy:
        if name not in self._by_name:
            raise ConfigError(f"policies: no {name!r} was built for the gateway's rules")
        return self._by_name[name]

    @property
    def constrains_output(self) -> bool:
        return constrains_output(self._own)

    @property
    def renderer(self) -> Renderer | None:
        return self._default.renderer

    @property
    def version(self) -> int:
        return self._own.version

    @property
    def pressure(self) -> int:
        return sum(each.pressure for each in self._all)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        return await self._own.generate(prompt, sampling)

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        if not isinstance(self._own, Updatable):
            raise ConfigError(f"policy: {type(self._own).__name__} takes no new weights")
        await self._own.update_weights(weights, mode)

    async def probe(self) -> Capabilities:
        """Probes every engine, so that an unreachable one fails before the start; returns the capabilities of the run's own."""
        found: Capabilities | None = None
        for each in self._all:
            if isinstance(each, Probed):
                capabilities = await each.probe()
                found = capabilities if each is self._own else found
        exact = self._own.renderer is not None
        return found or Capabilities(type(self._own).__name__, token_ids=exact, logprobs=exact)

    async def close(self) -> None:
        for each in self._all:
            await each.close()
