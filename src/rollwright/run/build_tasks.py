"""From a configuration to the task rows of its tags: which rows each mode plays, and in which order.

Always true: the row of a group follows from the run's seed, the tag and the group's index alone, so every process and
every resumed run finds the same one. A run plays the rows that it was begun with: their fingerprint stands in its settings,
and other rows are refused.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from rollwright import rng
from rollwright.cache import cache_folder
from rollwright.config import RunConfig
from rollwright.envs.base import Env
from rollwright.errors import ConfigError
from rollwright.rollout.episode import level_seed
from rollwright.rollout.groups import LevelFunction
from rollwright.rollout.settings import CustomEnvConfig
from rollwright.run.validations import VALIDATION
from rollwright.tasks import TaskError, TaskSource, draw_of, epoch_row, open_tasks, split
from rollwright.tasks.env import TaskEnv, check_template, default_template


@dataclass(frozen=True)
class TagTasks:
    """The rows of one tag."""

    train: TaskSource
    """All rows where none are held out."""
    held_out: TaskSource | None
    fingerprint: str
    """Of both."""
    template: str

    def source(self, mode: str) -> TaskSource:
        """The rows that a mode plays; a tag without held-out rows validates on all of them."""
        return self.held_out if mode == VALIDATION and self.held_out is not None else self.train

    def make_env(self, mode: str) -> Env:
        return TaskEnv(self.source(mode), self.template)


def add_module_folder(config: RunConfig) -> None:
    """Lets the modules of the configuration's folder be imported; behind all others, so that they hide none."""
    if config.folder is not None and config.folder not in sys.path:
        sys.path.append(config.folder)


def open_tag_tasks(config: RunConfig) -> dict[str, TagTasks]:
    """The tasks of all tags that have some; a `ConfigError` names the key, the file and the row that is wrong."""
    add_module_folder(config)
    found: dict[str, TagTasks] = {}
    for tag in config.tags:
        custom = config.custom_envs.get(tag)
        if custom is None or custom.tasks is None:
            continue
        where = f"custom_envs.{tag}"
        try:
            found[tag] = _open(config, custom, custom.tasks)
        except TaskError as error:
            raise ConfigError(f"{where}.tasks: {error}") from error
        _check_validation(config, tag, found[tag])
    return found


def record_fingerprints(config: RunConfig) -> RunConfig:
    """The configuration with the fingerprints of its tasks; rows that are not those recorded before are refused."""
    tasks = open_tag_tasks(config)
    if not tasks:
        return config
    custom = {
        tag: each.model_copy(update={"tasks_fingerprint": tasks[tag].fingerprint}) if tag in tasks else each
        for tag, each in config.custom_envs.items()
    }
    return config.model_copy(update={"custom_envs": custom})


def level_function(
    tasks: dict[str, TagTasks],
    mode: str,
    run_seed: int,
    slot_tags: Sequence[str] | None,
    *,
    by_tag: bool = False,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> LevelFunction:
    """The level of each group: of a tag with tasks, a row's number. Training draws rows in shuffled epochs; validation plays
    them in the order of the file.

    `slot_tags`: `None` in a swarm, whose nodes find the row of a peer's group by its index without knowing the peer's tags:
    a node with several tags passes over the rows whose turn comes with another tag.
    `by_tag`: for an evaluation, whose levels of a tag do not depend on the other tags, and whose rows are shuffled, because
    it may play only the first of them. `sizes`: levels of tags that have so many and no more.
    """

    def level(tag: str, index: int) -> int:
        if by_tag and slot_tags is not None:
            draw = draw_of(index, tag, slot_tags)
            if tag in sizes:
                return epoch_row(run_seed, tag, draw, sizes[tag])
            if tag not in tasks:
                return rng.seed(run_seed, "level", mode, tag, draw)
            return epoch_row(run_seed, tag, draw, len(tasks[tag].source(mode)))
        if tag not in tasks:
            return level_seed(run_seed, mode, index)
        draw = index if slot_tags is None else draw_of(index, tag, slot_tags)
        rows = len(tasks[tag].source(mode))
        return draw % rows if mode == VALIDATION else epoch_row(run_seed, tag, draw, rows)

    return level


def _open(config: RunConfig, custom: CustomEnvConfig, name: str) -> TagTasks:
    open_named = partial(open_tasks, folder=Path(config.folder or "."), cache=cache_folder())
    train, held_out = open_named(name), None
    fingerprint = train.fingerprint
    if isinstance(custom.held_out, str):
        held_out = open_named(custom.held_out)
        fingerprint = f"{fingerprint}+{held_out.fingerprint}"
    if custom.tasks_fingerprint not in (None, fingerprint):
        raise TaskError(
            f"the rows of {name} are not those that the run was begun with; put them back, or start another run"
        )
    if isinstance(custom.held_out, float):
        train, held_out = split(train, custom.held_out, name)
    template = custom.template
    if template is None:  # an agent of one's own reads the row itself
        template = "" if custom.agent is not None else default_template(train.row(0), name)
    check_template(template, train.row(0), name)
    if held_out is not None:
        check_template(template, held_out.row(0), f"{name}, held out")
    return TagTasks(train, held_out, fingerprint, template)


def _check_validation(config: RunConfig, tag: str, tasks: TagTasks) -> None:
    train, val = config.train_env_manager, config.val_env_manager
    if val is None or tag not in val.tags:
        return
    if tasks.held_out is None and train is not None and tag in train.tags:
        raise ConfigError(
            f"custom_envs.{tag}.held_out: is needed, because val_env_manager plays the tag too; give a share such as 0.1, or "
            "another file"
        )
    groups, rows = val.slot_tags().count(tag), len(tasks.source(VALIDATION))
    if groups > rows:
        raise ConfigError(
            f"val_env_manager.num_env_groups: {groups} groups of {tag} are more than its {rows} rows for validation; at most "
            f"{rows} are accepted"
        )
