"""Questions and scores of reasoning-gym, made in a process of their own that answers cannot leave."""

from rollwright.envs.scoring.messages import Entry, Score
from rollwright.envs.scoring.service import ScoringService, shared

__all__ = ["Entry", "Score", "ScoringService", "shared"]
