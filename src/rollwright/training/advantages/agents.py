"""Agent-wise advantages: each agent of a team is compared with itself, over the group."""

from dataclasses import dataclass
from typing import Literal

from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    centred,
    nothing,
    with_penalties,
)


@dataclass(frozen=True)
class AgentWise:
    """GRPO with statistics for each agent of each group: agents called rarely and often are not mixed."""

    std: bool = True
    per: Literal["call", "trajectory"] = "call"
    """What is counted: every call of the agent, as Dr.MAS does, or each trajectory it took part in once."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        found: TurnAdvantages = []
        for group, kept in zip(groups, admitted(groups), strict=True):
            rewards: dict[str, list[tuple[int, float]]] = {}
            """Of each agent: in which trajectory, with what reward; one entry for each thing counted."""
            for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True)):
                if not counts:
                    continue
                agents = [turn.agent for turn in trajectory.turns]
                for agent in agents if self.per == "call" else dict.fromkeys(agents):
                    rewards.setdefault(agent, []).append((place, trajectory.reward))
            values: dict[tuple[str, int], float] = {}
            for agent, entries in rewards.items():
                compared = centred([reward for _, reward in entries], std=self.std)
                for (place, _), value in zip(entries, compared, strict=True):
                    values[agent, place] = value
            found.append(
                [
                    with_penalties(trajectory, [values[turn.agent, place] for turn in trajectory.turns])
                    if counts
                    else nothing(trajectory)
                    for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
                ]
            )
        return found
