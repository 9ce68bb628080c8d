"""Turn, trajectory, sample: the one structure that every other box reads or writes."""

from rollwright.trajectory.forest import (
    Message,
    Trajectory,
    check,
    children,
    full_prompt,
    leaves,
    merge,
    path,
    sequence,
    split,
)
from rollwright.trajectory.samples import NO_VERSION, Sample, Span, samples, turn_samples, turn_weights
from rollwright.trajectory.tokens import Floats, TokenIds, floats, token_ids
from rollwright.trajectory.turn import (
    Boundary,
    ErrorRecord,
    FinishReason,
    Outcome,
    StopReason,
    Turn,
    VersionRun,
    expand_versions,
)

__all__ = [
    "NO_VERSION",
    "Boundary",
    "ErrorRecord",
    "FinishReason",
    "Floats",
    "Message",
    "Outcome",
    "Sample",
    "Span",
    "StopReason",
    "TokenIds",
    "Trajectory",
    "Turn",
    "VersionRun",
    "check",
    "children",
    "expand_versions",
    "floats",
    "full_prompt",
    "leaves",
    "merge",
    "path",
    "samples",
    "sequence",
    "split",
    "token_ids",
    "turn_samples",
    "turn_weights",
]
