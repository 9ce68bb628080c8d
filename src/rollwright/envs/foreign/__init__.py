"""Environments of other packages, each in a process of its own and, where dependencies clash, in a virtual environment of
its own."""

from rollwright.envs.foreign.connection import ForeignReply
from rollwright.envs.foreign.env import ForeignEnv
from rollwright.envs.foreign.package import PROGRAMS, ForeignPackage

__all__ = ["PROGRAMS", "ForeignEnv", "ForeignPackage", "ForeignReply"]
