"""An endpoint that speaks the model APIs agents are written for, and records their calls as turns."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.gateway.recorder import RolloutRecorder
    from rollwright.gateway.server import Access, Gateway
    from rollwright.gateway.settings import CaptureRules

__all__ = ["Access", "CaptureRules", "Gateway", "RolloutRecorder"]

__getattr__ = lazy_names(
    __name__,
    {
        "Access": "server",
        "CaptureRules": "settings",
        "Gateway": "server",
        "RolloutRecorder": "recorder",
    },
)
