"""Recipes of tasks: an environment, its version, a seed and an index, from which any node makes the same task.

Invariants: a task follows from its recipe alone, in any process; the seed follows from the peer's key, so a peer can
neither choose easy tasks nor pass off another peer's group as its own; how a task is played is always this node's own
setting: nothing of a recipe but the seed reaches an environment, and nothing is imported or evaluated.
"""

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

import msgspec

import rollwright
from rollwright import rng
from rollwright.envs import registry
from rollwright.envs.base import Env
from rollwright.errors import ConfigError
from rollwright.rollout.episode import EpisodeSettings, level_seed
from rollwright.swarm.refusals import PeerRefusal, PeerRefused

_SETTINGS_DIGITS = 16
"""Hex digits of the digest of an environment's settings: tells settings apart, no security depends on it."""

_MODE = "train"
"""Shared tasks come from the stream of training levels."""


def task_seed(swarm: str, peer: str) -> int:
    """The run seed of a node's training groups."""
    return rng.seed("swarm", swarm, peer)


def task_level(seed: int, index: int) -> int:
    """The seed that the environment is reset with."""
    return level_seed(seed, _MODE, index)


def task_digest(observation: str) -> str:
    """Digest of the first observation: equal if two nodes have the same task."""
    return sha256(observation.encode(errors="replace")).hexdigest()


def env_version(settings: EpisodeSettings) -> str:
    """Identifies the code and the settings that decide which task a seed gives and which reward an action earns."""
    told: tuple[object, ...] = (settings.env_type, settings.env_config, settings.max_steps)
    if settings.rewards is not None:
        told = (*told, settings.rewards.version)
    own = sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()[:_SETTINGS_DIGITS]
    return f"{_maker(settings.env_type)}/{own}"


@cache
def _maker(env_type: str) -> str:
    """The package of an environment, with its version."""
    package = env_type.partition(":")[0] if ":" in env_type else "rollwright"
    package = package.partition(".")[0]
    try:
        return f"{package}-{version(package)}"
    except PackageNotFoundError:  # a module beside the user's program has no version of its own
        return f"{package}-{rollwright.__version__}"


def _make_env(settings: EpisodeSettings) -> Env:
    if settings.env_factory is not None:
        return settings.env_factory()
    return registry.make(settings.env_type, settings.env_config)


LevelOfTag = Callable[[str, int, int], int]
"""The level of a group, by its tag, the seed of the peer's stream and its index there."""


def _level_of(tag: str, seed: int, index: int) -> int:
    return task_level(seed, index)


class TaskBook:
    """The environments that this node plays; it can verify groups of these and refuses all others."""

    def __init__(
        self,
        settings: Mapping[str, EpisodeSettings],
        make_env: Callable[[EpisodeSettings], Env] = _make_env,
        *,
        level_of: LevelOfTag = _level_of,
        unverifiable: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: of each tag's episodes here. `unverifiable`: tags that a peer cannot play again, with the reason; their
        groups are neither shared nor taken."""
        self._settings = dict(settings)
        self._versions = {tag: env_version(each) for tag, each in settings.items()}
        self.make_env = make_env
        self.level_of = level_of
        self.unverifiable = dict(unverifiable or {})

    def version(self, tag: str) -> str:
        return env_version(self.settings(tag))

    def settings(self, tag: str) -> EpisodeSettings:
        if tag not in self._settings:
            known = ", ".join(sorted(self._settings))
            raise ConfigError(f"environment {tag!r} is not one that this node plays; it plays {known}")
        return self._settings[tag]

    def check(self, tag: str, version: str) -> None:
        """Raise `PeerRefused` for an environment that is unknown or another version here."""
        if tag not in self._versions:
            raise PeerRefused(PeerRefusal.UNKNOWN_ENV, f"{tag!r} is not played here")
        if tag in self.unverifiable:
            raise PeerRefused(
                PeerRefusal.UNKNOWN_ENV, f"{tag!r} cannot be verified: {self.unverifiable[tag]}"
            )
        if version != self._versions[tag]:
            raise PeerRefused(
                PeerRefusal.OTHER_ENV_VERSION, f"{tag}: {version!r} there, {self._versions[tag]!r} here"
            )
