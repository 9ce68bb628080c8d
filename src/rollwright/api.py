"""Whole jobs in one call: load a configuration, train a model, evaluate a policy.

Each call blocks until the job is done and works beside a running event loop, as in a notebook: the job then runs on a
loop of its own in another thread. Ctrl-C ends the job cleanly; a training can be resumed from its folder.
"""

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollwright.config import build, load
from rollwright.config.resuming import check_resumable
from rollwright.config.run import RunConfig
from rollwright.engines.base import Policy
from rollwright.errors import ConfigError, RollwrightError
from rollwright.run import given
from rollwright.run.checks import check_config
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.run import Run
from rollwright.run.training import MODEL, train_run
from rollwright.trajectory import Trajectory

Result = TypeVar("Result")

Source = RunConfig | Mapping[str, Any] | str | Path
"""A configuration, its content as a mapping, or the path of its YAML file."""

_Z95 = 1.96
"""Standard errors in half of a 95 % interval of a normal distribution."""


def load_config(source: Source, *overrides: str) -> RunConfig:
    """Reads and checks a configuration. `overrides` win over it: `load_config("run.yaml", "seed=7")`."""
    if isinstance(source, RunConfig):
        return build(source.model_dump(mode="json"), overrides) if overrides else source
    if isinstance(source, Mapping):
        return build(source, overrides)
    return load(source, overrides)


@dataclass(frozen=True)
class TagScore:
    """How a policy played the levels of one tag."""

    tag: str
    episodes: int
    reward: float
    """Mean over the episodes."""
    standard_error: float
    """Of the mean; `nan` for a single episode."""
    success: float | None
    """Share of solved levels; `None` where the environment does not say."""
    failed: int
    """Levels without a result because of a failure; they are in no mean."""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean reward, by the normal approximation."""
        half = _Z95 * self.standard_error
        return self.reward - half, self.reward + half


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`: one score for each tag, and the episodes behind them."""

    scores: Mapping[str, TagScore]
    trajectories: Sequence[Trajectory]

    @property
    def reward(self) -> float:
        """Mean over all episodes."""
        return math.fsum(each.reward for each in self.trajectories) / max(1, len(self.trajectories))

    def __str__(self) -> str:
        lines = []
        for score in self.scores.values():
            solved = "" if score.success is None else f", {score.success:.0%} solved"
            failed = f", {score.failed} failed" if score.failed else ""
            lines.append(
                f"{score.tag}: reward {score.reward:.3f} ± {_Z95 * score.standard_error:.3f} over {score.episodes}{solved}{failed}"
            )
        return "\n".join(lines)


def evaluate(
    source: Source | None = None,
    *overrides: str,
    policy: Policy | Mapping[str, Any] | None = None,
    model: str | Path | None = None,
    tags: Sequence[str] | None = None,
    episodes: int | None = None,
    tasks: Any = None,
    agent: Any = None,
    reward: Any = None,
) -> Evaluation:
    """Plays held-out levels greedily and returns the scores by tag.

    `source`: a configuration; unset: every default. `policy`: a policy object, or the settings of one; `model`: short for
    `policy={"kind": "torch", "model": model}`. `tags`, `episodes`: which environments to play, and on how many levels in
    all; unset: as `val_env_manager` says, or those of `train_env_manager`.

    `tasks`, `agent`, `reward`: what `train` takes; all rows are played, or `episodes` of them.
    """
    loaded = load_config(source if source is not None else {})
    _check_given(tasks, agent, reward, tags)
    if tasks is not None:
        content = given.tasks_content(_set_content(loaded), tasks, agent, reward, None)
        content["val_env_manager"] = {"num_env_groups": 1, "tags": [given.TAG]}
        content.pop("train_env_manager", None)
        loaded = build(content, source="evaluate")
        episodes = episodes or given.count_rows(loaded)
    config = _evaluation_config(loaded, policy, model, tags, episodes)
    config = load_config(config, *overrides)
    played = policy if policy is not None and not isinstance(policy, Mapping) else None

    async def play() -> Evaluation:
        async with Run(config, policy=played) as run:
            batch = await run.evaluate(0)
            return _scores(config, batch.trajectories)

    return run_blocking(play)


def _check_given(tasks: Any, agent: Any, reward: Any, tags: Sequence[str] | None) -> None:
    if tasks is None and (agent is not None or reward is not None):
        raise ConfigError("agent, reward: are for `tasks`, which is not given")
    if tasks is not None and tags is not None:
        raise ConfigError("tags: is given beside `tasks`, which are played alone; give one of them")


def _set_content(config: RunConfig) -> dict[str, Any]:
    """The settings that are not left at their defaults."""
    return {**config.model_dump(mode="json", exclude_unset=True), "name": config.name}


def _evaluation_config(
    config: RunConfig,
    policy: Policy | Mapping[str, Any] | None,
    model: str | Path | None,
    tags: Sequence[str] | None,
    episodes: int | None,
) -> RunConfig:
    content = _set_content(config)
    if model is not None:
        if policy is not None:
            raise ConfigError("evaluate: `policy` and `model` both name what plays; give one of them")
        content["policy"] = {"kind": "torch", "model": str(model)}
    elif isinstance(policy, Mapping):
        content["policy"] = dict(policy)
    manager = content.get("val_env_manager") or content.get("train_env_manager") or {}
    chosen = list(tags) if tags is not None else manager.get("tags")
    if not chosen:
        raise ConfigError("evaluate: nothing to play; give `tags`, or a configuration that has some")
    kept = episodes is None and tags is None
    levels = episodes or manager.get("num_env_groups") or len(chosen)
    content["val_env_manager"] = {
        "tags": chosen,
        "num_env_groups": levels,
        **(
            {"num_groups_partition": manager["num_groups_partition"]}
            if kept and manager.get("num_groups_partition")
            else {}
        ),
    }
    content.pop("train_env_manager", None)
    content.pop("training", None)
    return build(content, source="evaluate")


def _scores(config: RunConfig, trajectories: Sequence[Trajectory]) -> Evaluation:
    manager = config.val_env_manager
    assert manager is not None, "made by `_evaluation_config`"
    scores: dict[str, TagScore] = {}
    for tag, levels in zip(manager.tags, manager.partition, strict=True):
        played = [each for each in trajectories if each.tag == tag]
        rewards = [each.reward for each in played]
        mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
        spread = math.fsum((each - mean) ** 2 for each in rewards)
        error = math.sqrt(spread / (len(rewards) - 1) / len(rewards)) if len(rewards) > 1 else math.nan
        judged = [share for each in played if (share := each.success_share) is not None]
        scores[tag] = TagScore(
            tag=tag,
            episodes=len(played),
            reward=mean,
            standard_error=error,
            success=math.fsum(judged) / len(judged) if judged else None,
            failed=levels - len(played),
        )
    return Evaluation(scores, trajectories)


@dataclass(frozen=True)
class TrainingResult:
    """The result of `train`."""

    folder: Path
    """The run folder: batches, checkpoints, metrics, and the model."""
    model: Path
    """The trained weights with their tokenizer; `policy.model` takes this folder."""
    summary: Mapping[str, Any]
    """Steps, tokens, the ledger of rollouts, and validations; also in the folder."""

    @property
    def validations(self) -> Sequence[Mapping[str, Any]]:
        """Step, reward and success of each validation, in order."""
        return list(self.summary["training"].get("validations") or ())


def train(
    source: Source | None = None,
    *overrides: str,
    policy: Policy | None = None,
    model: str | Path | None = None,
    tags: Sequence[str] | None = None,
    steps: int | None = None,
    runs: str | Path = "runs",
    resume: str | Path | None = None,
    store: str | None = None,
    tasks: Any = None,
    agent: Any = None,
    reward: Any = None,
    held_out: float | str | Path | None = None,
) -> TrainingResult:
    """Trains a model on the episodes that it plays, into a new folder of `runs`.

    `source`: a configuration with a `training` part; unset: every default. `model`: short for
    `policy={"kind": "torch", "model": model}`; `tags`: the environments to train on; `steps`: short for `max_steps`.
    `policy`: a policy object to train, instead of the configured one. `resume`: the folder of a training that was
    interrupted; it continues with its own settings, and `overrides` may change those that do not change what is played.

    `tasks`: rows to train on, for one epoch unless `steps` says otherwise: a file, `module:function`, a dataset, an iterable
    of mappings, or a function that gives one. `agent`: plays a row: a function `(task, session)`, `module:function`, the
    words of a command, or `remote`; unset: the chat agent. `reward`: one or several functions, kinds or settings; unset:
    the number that the agent returns. `held_out`: rows for validation, a share of `tasks` or another file.
    """
    if resume is not None:
        if any(each is not None for each in (source, model, tags, tasks, agent, reward, held_out)):
            raise ConfigError(
                "train: `resume` continues with the run's own settings; give only overrides beside it"
            )
        folder, config = _reopen(Path(resume), _with_steps(overrides, steps))
    else:
        loaded = load_config(source if source is not None else {})
        _check_given(tasks, agent, reward, tags)
        content = _training_content(loaded, model, tags)
        if tasks is not None:
            content = given.tasks_content(content, tasks, agent, reward, held_out)
            content = given.add_training(content if steps is None else {**content, "max_steps": steps})
        config = load_config(load_config(content), *_with_steps(overrides, steps))
        check_config(config)
        folder, config = RunFolder.create(Path(runs), config)
    summary = run_blocking(
        lambda: train_run(config, folder, policy=policy, store=store, resume=resume is not None)
    )
    if summary["interrupted"]:
        raise RollwrightError(f"interrupted: continue with rollwright.train(resume={str(folder.path)!r})")
    return TrainingResult(folder.path, folder.path / MODEL, summary)


def _with_steps(overrides: Sequence[str], steps: int | None) -> tuple[str, ...]:
    return (*overrides, *(() if steps is None else (f"max_steps={steps}",)))


def _training_content(
    config: RunConfig, model: str | Path | None, tags: Sequence[str] | None
) -> dict[str, Any]:
    content = _set_content(config)
    content.setdefault("training", {})
    if model is not None:
        content["policy"] = {"kind": "torch", "model": str(model)}
    if tags is not None:
        manager = content.get("train_env_manager") or {"num_env_groups": 8 * len(tags), "group_size": 8}
        content["train_env_manager"] = {**manager, "tags": list(tags)}
    return content


def _reopen(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, RunConfig]:
    reader = RunReader(path)
    config = load_config(reader.config, *overrides)
    check_resumable(reader.config, config)
    folder = RunFolder.reopen(path)
    if overrides:
        folder.keep_settings(config)
    return folder, config


def run_blocking(job: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs a coroutine to its end, whether or not an event loop runs in this thread already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job())
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollwright") as thread:
        return thread.submit(lambda: asyncio.run(job())).result()
