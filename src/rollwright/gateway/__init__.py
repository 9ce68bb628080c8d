"""An endpoint that speaks the model APIs agents are written for, and records their calls as turns."""

from rollwright.gateway.captured import CapturedRollout, CaptureRules
from rollwright.gateway.server import Access, Gateway

__all__ = ["Access", "CaptureRules", "CapturedRollout", "Gateway"]
