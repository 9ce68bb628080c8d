"""Policies: prompt in, sampled tokens out. Clients of inference engines over HTTP, and a model in this process."""

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
