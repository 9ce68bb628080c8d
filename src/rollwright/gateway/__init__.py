"""An endpoint that speaks the model APIs agents are written for, and records their calls as turns."""

from rollwright.gateway.recorder import CaptureRules, RolloutRecorder
from rollwright.gateway.server import Access, Gateway

__all__ = ["Access", "CaptureRules", "Gateway", "RolloutRecorder"]
