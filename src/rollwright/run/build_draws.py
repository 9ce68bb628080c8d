"""What the training groups of a run play: in order, or by a curriculum and a task sampler, whose draws are recorded."""

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.rollout.curriculum import LevelSampler
from rollwright.rollout.draws import OrderedLevel, RecordedDraws, TaskSampler
from rollwright.rollout.episode import read_episode
from rollwright.rollout.groups import Draw, LevelFunction
from rollwright.rollout.settings import TASK_SAMPLERS, TrainEnvManagerConfig
from rollwright.rollout.stream import CompletionsRead, rollout_ids
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.retention import own_index
from rollwright.store.api import Store

TRAIN = "train"


def make_task_sampler(manager: TrainEnvManagerConfig) -> TaskSampler | None:
    """The task sampler that the settings name, in its initial state; `None`: levels are played in order."""
    settings = manager.task_sampler
    if settings is None:
        return None
    sampler: TaskSampler = TASK_SAMPLERS.make(settings.name, settings, manager.group_size, **settings.options)
    return sampler


def check_task_sampler(config: RunConfig) -> None:
    """Raises an error if the run cannot have the task sampler that its settings name."""
    manager = config.train_env_manager
    if manager is None or manager.task_sampler is None:
        return
    if config.swarm is not None:
        raise ConfigError(
            "train_env_manager.task_sampler: the nodes of a swarm verify that levels are played in order; leave it out"
        )
    make_task_sampler(manager)


def build_draws(
    config: RunConfig,
    curriculum: LevelSampler | None,
    level_of: LevelFunction,
    ordered: OrderedLevel,
    folder: RunFolder | None,
) -> RecordedDraws | None:
    """Draws of the training stream; `None` if what a group plays follows from its index."""
    manager = config.train_env_manager
    if manager is None or (curriculum is None and manager.task_sampler is None):
        return None
    sampler = make_task_sampler(manager)
    return RecordedDraws(
        config.seed,
        manager.group_size,
        level_of,
        tag_of=str if curriculum is None else curriculum.tag,
        sampler=sampler,
        ordered=None if sampler is None else ordered,
        write=None if folder is None else folder.add_draw,
    )


async def restore_draws(
    draws: RecordedDraws, config: RunConfig, store: Store, folder: RunFolder, log: CompletionsRead
) -> None:
    """Repeats the recorded draws. Groups whose draws were lost with a damaged line play what their rollouts say."""
    draws.restore(RunReader(folder.path).draws())
    manager = config.train_env_manager
    assert manager is not None
    for rollout_id in await rollout_ids(store, f"{config.name}.{TRAIN}-", TRAIN, log):
        index = own_index(config.name, rollout_id.rpartition("-m")[0])
        if index is None or draws.knows(index):
            continue
        rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is not None:
            episode = read_episode(rollout.input)
            draws.add(index, Draw(episode.tag, episode.seed, manager.group_size))
