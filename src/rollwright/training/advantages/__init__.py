"""Advantage estimators: pure functions from groups of trajectories to one number for each turn."""

from rollwright.training.advantages.base import (
    Advantage,
    Groups,
    Remembering,
    TokenAdvantages,
    TurnAdvantages,
    admitted,
    left_out,
    make_advantage,
    turn_means,
)
from rollwright.training.advantages.episodes import GRPO, RLOO, AgentWise, DrGRPO, ReinforcePlusPlus
from rollwright.training.advantages.paths import PathGRPO, TreeGRPO
from rollwright.training.advantages.steps import GAE, GiGPO
from rollwright.training.advantages.tokens import ReinforcePlusPlusTokens
from rollwright.training.advantages.tree import SegmentValue, TurnTree
from rollwright.training.advantages.values import TokenGAE, ValueBased, ValueEstimate
from rollwright.training.settings import ADVANTAGES

__all__ = [
    "ADVANTAGES",
    "GAE",
    "GRPO",
    "RLOO",
    "Advantage",
    "AgentWise",
    "DrGRPO",
    "GiGPO",
    "Groups",
    "PathGRPO",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusTokens",
    "Remembering",
    "SegmentValue",
    "TokenAdvantages",
    "TokenGAE",
    "TreeGRPO",
    "TurnAdvantages",
    "TurnTree",
    "ValueBased",
    "ValueEstimate",
    "admitted",
    "left_out",
    "make_advantage",
    "turn_means",
]
