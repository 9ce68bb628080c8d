"""How much better than expected each turn was: pure functions over groups of trajectories."""

from rollwright.training.advantages.agents import AgentWise
from rollwright.training.advantages.base import Advantage, Groups, TurnAdvantages, admitted, left_out
from rollwright.training.advantages.episodes import GRPO, RLOO, DrGRPO, ReinforcePlusPlus
from rollwright.training.advantages.names import make_advantage
from rollwright.training.advantages.paths import PathGRPO, TreeGRPO
from rollwright.training.advantages.steps import GAE, GiGPO
from rollwright.training.advantages.tree import SegmentValue, TurnTree
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
    "SegmentValue",
    "TreeGRPO",
    "TurnAdvantages",
    "TurnTree",
    "admitted",
    "left_out",
    "make_advantage",
]
