"""Environments of other packages, in processes of their own and, where dependencies clash, in virtual environments of their
own: one process each for environments that are stepped, a shared one for packages that play whole episodes."""

from rollwright.envs.foreign.connection import ForeignReply
from rollwright.envs.foreign.env import ForeignEnv
from rollwright.envs.foreign.episodes import ForeignEpisodeEnv
from rollwright.envs.foreign.package import PROGRAMS, ForeignPackage

__all__ = ["PROGRAMS", "ForeignEnv", "ForeignEpisodeEnv", "ForeignPackage", "ForeignReply"]
