"""Policies: inference engines over HTTP, a torch model in this process, and chat templates rendered to token ids."""

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
