"""Curriculum: chooses the level of an environment by the mean reward of recent groups. Pure.

A tag with levels is played as `TAG@LEVEL`, so that a group, its metrics and other nodes that verify it contain the level. A
level ends when the mean reward of its last groups is high enough, or too low; groups of a level that has ended do not
count.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from rollwright.rollout.settings import CURRICULA, CurriculumConfig


def level_tag(tag: str, level: int) -> str:
    return f"{tag}@{level}"


class LevelSampler(Protocol):
    """Chooses the level that each group is played at. Made as `sampler(settings, tags, **options)`: the settings of the
    curriculum, and the tags that have levels."""

    @property
    def levels(self) -> Mapping[str, int]:
        """Current level of each tag."""
        ...

    def tag(self, tag: str) -> str:
        """The tag to play for a slot of this tag, as `level_tag` writes it."""
        ...

    def observe(self, played: str, reward: float) -> None:
        """A group of `played` was handed out, with this mean reward."""
        ...

    def state(self) -> dict[str, Any]:
        """The whole state as plain data, for the record."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a recorded state."""
        ...


def make_curriculum(settings: CurriculumConfig, tags: Iterable[str]) -> LevelSampler:
    """The curriculum that the settings name, in its initial state."""
    return cast(LevelSampler, CURRICULA.make(settings.name, settings, list(tags), **settings.options))


class Curriculum:
    """Raises a tag's level at a high mean reward, and lowers it at a low one."""

    def __init__(self, rules: CurriculumConfig, tags: Iterable[str]) -> None:
        """`tags`: those that have levels; others are played as they are."""
        self._rules = rules
        self._levels = dict.fromkeys(tags, 0)
        self._recent: dict[str, deque[float]] = {tag: deque(maxlen=rules.window) for tag in self._levels}

    @property
    def levels(self) -> Mapping[str, int]:
        """Current level of each tag."""
        return self._levels

    def tag(self, tag: str) -> str:
        """Tag and level to play for a slot of this tag."""
        return level_tag(tag, self._levels[tag]) if tag in self._levels else tag

    def observe(self, played: str, reward: float) -> None:
        """A group of `played` was handed out, with this mean reward."""
        tag = played.rpartition("@")[0]
        if tag not in self._levels or played != self.tag(tag):
            return
        recent = self._recent[tag]
        recent.append(reward)
        if len(recent) < self._rules.window:
            return
        mean = sum(recent) / len(recent)
        step = (mean >= self._rules.raise_at) - (mean < self._rules.lower_at)
        level = min(max(self._levels[tag] + step, 0), self._rules.levels - 1)
        if level != self._levels[tag]:
            self._levels[tag] = level
            recent.clear()

    def state(self) -> dict[str, Any]:
        """As plain data, for the record."""
        return {tag: [level, list(self._recent[tag])] for tag, level in self._levels.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a recorded state; tags that no longer exist are ignored."""
        for tag, (level, recent) in state.items():
            if tag in self._levels:
                self._levels[tag] = min(int(level), self._rules.levels - 1)
                self._recent[tag] = deque(map(float, recent), maxlen=self._rules.window)
