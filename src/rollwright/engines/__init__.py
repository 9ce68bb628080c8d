"""Policies: inference engines over HTTP, a torch model in this process, and chat templates rendered to token ids."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "Capabilities": "base",
        "EngineError": "base",
        "Generation": "base",
        "Parsed": "base",
        "Playable": "base",
        "Policy": "base",
        "Probed": "base",
        "Prompt": "base",
        "RateLimited": "base",
        "Renderer": "base",
        "Sampling": "base",
        "ToolSpec": "base",
        "Updatable": "base",
        "UpdateMode": "base",
        "Weights": "base",
    },
)
