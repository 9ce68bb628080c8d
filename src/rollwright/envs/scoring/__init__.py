"""Questions and scores of reasoning-gym, made by judges in sandboxes that evaluate nothing of an answer."""

from rollwright.envs.scoring.protocol import Entry, Score
from rollwright.envs.scoring.service import ScoringService, shared

__all__ = ["Entry", "Score", "ScoringService", "shared"]
