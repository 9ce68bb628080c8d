"""Advantages by the name that a configuration gives them."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rollwright.errors import ConfigError
from rollwright.training.advantages.agents import AgentWise
from rollwright.training.advantages.base import Advantage
from rollwright.training.advantages.episodes import GRPO, RLOO, DrGRPO, ReinforcePlusPlus
from rollwright.training.advantages.paths import PathGRPO, TreeGRPO
from rollwright.training.advantages.steps import GiGPO
from rollwright.training.advantages.tree import SegmentValue, Tree

ADVANTAGES: Mapping[str, Callable[..., Advantage]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "gigpo": GiGPO,
    "agent_wise": AgentWise,
    "tree": Tree,
    "path_grpo": PathGRPO,
    "tree_grpo": TreeGRPO,
    "segment_value": SegmentValue,
}
"""GAE is not among them: it needs a function that estimates values, which no configuration file can name."""


def make_advantage(name: str, **options: Any) -> Advantage:
    """The advantage called `name`, with its options."""
    if name not in ADVANTAGES:
        raise ConfigError(f"advantage: unknown `{name}`; known: {', '.join(ADVANTAGES)}")
    kind = ADVANTAGES[name]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"advantage {name}: unknown option `{option}`; known: {', '.join(known) or 'none'}"
            )
    return kind(**options)
