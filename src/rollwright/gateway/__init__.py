"""An endpoint that speaks the model APIs agents are written for, and records their calls as turns."""

from rollwright.gateway.recorder import RolloutRecorder
from rollwright.gateway.server import Access, Gateway
from rollwright.gateway.settings import CaptureRules

__all__ = ["Access", "CaptureRules", "Gateway", "RolloutRecorder"]
