"""Questions and scores of reasoning-gym, computed by sandboxed judges that never evaluate an answer as code."""

from rollwright.envs.scoring.protocol import Entry, Score
from rollwright.envs.scoring.service import ScoringService, shared

__all__ = ["Entry", "Score", "ScoringService", "shared"]
