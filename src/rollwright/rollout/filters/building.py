"""From a configuration to the filters that it names."""

from rollwright.config import EnvManagerConfig
from rollwright.config.filters import (
    AccuracyBandConfig,
    AnyFilterConfig,
    DuplicateConfig,
    FormatErrorConfig,
    NoTrainableTokenConfig,
    OverlongConfig,
    RepetitionConfig,
    VoidTurnConfig,
    ZeroVarianceConfig,
)
from rollwright.rollout.filters.base import Action, Filter, Test
from rollwright.rollout.filters.catching import (
    AccuracyBand,
    Duplicate,
    FormatError,
    NoTrainableToken,
    Overlong,
    Repetition,
    VoidTurn,
    ZeroVariance,
)
from rollwright.rollout.filters.own import group_filter


def build_filters(manager: EnvManagerConfig) -> tuple[Filter, ...]:
    """In the order of the configuration; `group_filter` comes last."""
    filters = [Filter(_test(each), Action(each.action), each.baseline) for each in manager.filters]
    if manager.group_filter is not None:
        filters.append(group_filter(manager.group_filter))
    return tuple(filters)


def _test(config: AnyFilterConfig) -> Test:
    match config:
        case VoidTurnConfig():
            return VoidTurn()
        case FormatErrorConfig():
            return FormatError()
        case RepetitionConfig():
            return Repetition(config.ratio, config.shortest)
        case OverlongConfig():
            return Overlong(config.limit, config.slack, config.cost)
        case NoTrainableTokenConfig():
            return NoTrainableToken()
        case DuplicateConfig():
            return Duplicate()
        case ZeroVarianceConfig():
            return ZeroVariance(config.tolerance)
        case AccuracyBandConfig():
            return AccuracyBand(config.low, config.high)
