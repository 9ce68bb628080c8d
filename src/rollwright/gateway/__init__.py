"""An endpoint that speaks the model APIs agents are written for, and records their calls as turns."""

from rollwright.gateway.captured import CapturedRollout
from rollwright.gateway.server import Access, Gateway
from rollwright.gateway.settings import CaptureRules

__all__ = ["Access", "CaptureRules", "CapturedRollout", "Gateway"]
