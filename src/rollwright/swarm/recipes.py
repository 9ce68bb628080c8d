"""Tasks that two nodes agree on without sending them: an environment, its version, a seed and an index.

True of it: the task follows from the recipe alone, in any process; which tasks a peer may share follows from its key,
so it can neither choose easy ones nor pass off another's group as its own; and how a task is played is always this
node's own setting: nothing in a recipe is imported, evaluated or given to an environment but the seed.
"""

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

import msgspec

import rollwright
from rollwright import draws
from rollwright.envs import registry
from rollwright.envs.base import Env
from rollwright.errors import ConfigError
from rollwright.rollout.episode import EpisodeSettings, level_seed
from rollwright.swarm.refusals import PeerRefusal, PeerRefused

_SETTINGS_DIGITS = 16
"""Of the digest of an environment's settings: tells settings apart, and is not there to withstand anybody."""

_MODE = "train"
"""Tasks that are shared come from the stream of levels that nodes train on."""


def task_seed(swarm: str, peer: str) -> int:
    """The run seed that a node plays its training groups with."""
    return draws.seed("swarm", swarm, peer)


def task_level(seed: int, index: int) -> int:
    """What the environment is reset with."""
    return level_seed(seed, _MODE, index)


def task_digest(observation: str) -> str:
    """Tells whether two nodes see the same task."""
    return sha256(observation.encode(errors="replace")).hexdigest()


def env_version(settings: EpisodeSettings) -> str:
    """Whatever decides which task a seed gives and what an action earns: who makes it, and with which settings."""
    told = (settings.env_type, settings.env_config, settings.max_steps)
    own = sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()[:_SETTINGS_DIGITS]
    return f"{_maker(settings.env_type)}/{own}"


@cache
def _maker(env_type: str) -> str:
    """The package that an environment comes from, and its version."""
    package = env_type.partition(":")[0] if ":" in env_type else "rollwright"
    package = package.partition(".")[0]
    try:
        return f"{package}-{version(package)}"
    except PackageNotFoundError:  # a module beside the user's program has no version of its own
        return f"{package}-{rollwright.__version__}"


def _made(settings: EpisodeSettings) -> Env:
    return registry.make(settings.env_type, settings.env_config)


class TaskBook:
    """The environments that this node plays: it can check groups of these, and takes no others."""

    def __init__(
        self, settings: Mapping[str, EpisodeSettings], make_env: Callable[[EpisodeSettings], Env] = _made
    ) -> None:
        """`settings`: how each tag is played here."""
        self._settings = dict(settings)
        self._versions = {tag: env_version(each) for tag, each in settings.items()}
        self.make_env = make_env

    def version(self, tag: str) -> str:
        return env_version(self.settings(tag))

    def settings(self, tag: str) -> EpisodeSettings:
        if tag not in self._settings:
            known = ", ".join(sorted(self._settings))
            raise ConfigError(f"environment {tag!r} is not one that this node plays; it plays {known}")
        return self._settings[tag]

    def check(self, tag: str, version: str) -> None:
        """Raises `PeerRefused` for an environment that is not the same here."""
        if tag not in self._versions:
            raise PeerRefused(PeerRefusal.UNKNOWN_ENV, f"{tag!r} is not played here")
        if version != self._versions[tag]:
            raise PeerRefused(
                PeerRefusal.OTHER_ENV_VERSION, f"{tag}: {version!r} there, {self._versions[tag]!r} here"
            )
