"""Prompt in, sampled tokens out: engines over HTTP, simulated engines, and players that look at the board."""

from rollwright.engines.base import (
    Capabilities,
    EngineError,
    Generation,
    Parsed,
    Playable,
    Policy,
    Probed,
    Prompt,
    RateLimited,
    Renderer,
    Sampling,
    ToolSpec,
    Updatable,
    UpdateMode,
    Weights,
)

__all__ = [
    "Capabilities",
    "EngineError",
    "Generation",
    "Parsed",
    "Playable",
    "Policy",
    "Probed",
    "Prompt",
    "RateLimited",
    "Renderer",
    "Sampling",
    "ToolSpec",
    "Updatable",
    "UpdateMode",
    "Weights",
]
