"""Prompt in, sampled tokens out: engines over HTTP, simulated engines, and players that look at the board."""

from rollwright.policies.base import (
    EngineError,
    Generation,
    Playable,
    Policy,
    Prompt,
    RateLimited,
    Renderer,
    Sampling,
)

__all__ = [
    "EngineError",
    "Generation",
    "Playable",
    "Policy",
    "Prompt",
    "RateLimited",
    "Renderer",
    "Sampling",
]
