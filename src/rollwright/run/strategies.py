"""From a strategy's configuration to the strategy."""

from rollwright.config.strategy import (
    BranchConfig,
    FixedBranchConfig,
    OwnBranchConfig,
    RandomBranchConfig,
    StrategyConfig,
    TreeStrategyConfig,
    UncertaintyBranchConfig,
)
from rollwright.rollout.branching import Branching, FixedFanOut, OwnBranching, RandomExpansion, Uncertainty
from rollwright.rollout.budget import BudgetUnit
from rollwright.rollout.episode import CHAIN, Strategy
from rollwright.rollout.forking import ForkMode
from rollwright.rollout.tree import Tree


def build_strategy(config: StrategyConfig) -> Strategy:
    if not isinstance(config, TreeStrategyConfig):
        return CHAIN
    return Tree(
        _branching(config.branch, config.width, config.depth),
        config.budget,
        BudgetUnit(config.unit),
        None if config.fork == "auto" else ForkMode(config.fork),
    )


def _branching(config: BranchConfig, width: int, depth: int) -> Branching:
    match config:
        case FixedBranchConfig():
            return FixedFanOut(width, depth)
        case RandomBranchConfig():
            return RandomExpansion(config.chains, config.nodes, config.rounds, depth)
        case UncertaintyBranchConfig():
            return Uncertainty(width, depth, config.threshold, config.change)
        case OwnBranchConfig():
            return OwnBranching(config.function, width)
