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
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from rollwright.config import build, load
from rollwright.config.resuming import check_resumable
from rollwright.config.run import RunConfig
from rollwright.engines.base import Policy
from rollwright.errors import ConfigError, RollwrightError
from rollwright.run import given
from rollwright.run.checks import check_config
from rollwright.run.evaluating import evaluate_run, settle_evaluation
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.training import MODEL
from rollwright.run.training_job import train_run
from rollwright.trajectory import Trajectory

Result = TypeVar("Result")

Source = RunConfig | Mapping[str, Any] | str | Path
"""A configuration, its content as a mapping, or the path of its YAML file."""


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
    """Mean over the tasks."""
    standard_error: float
    """Of the mean, with the task as its unit; `nan` for a single task."""
    success: float | None
    """Share of solved levels; `None` where the environment does not say."""
    failed: int
    """Episodes without a result because of a failure; they are in no mean."""
    interval: tuple[float, float]
    """95 % interval of the mean reward, with the task as its unit; `nan` for a single task."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`: the report, one score for each tag, and the episodes behind them."""

    scores: Mapping[str, TagScore]
    trajectories: Sequence[Trajectory]
    report: Mapping[str, Any]
    """Everything that `report.json` has: pass@k, intervals, breakdowns, failures, cost."""
    folder: Path | None = None
    """The run folder with the report; `None` if it was not to be kept."""

    @property
    def reward(self) -> float:
        """Mean over all episodes."""
        return math.fsum(each.reward for each in self.trajectories) / max(1, len(self.trajectories))

    def __str__(self) -> str:
        lines = []
        for score in self.scores.values():
            solved = "" if score.success is None else f", {score.success:.0%} solved"
            failed = f", {score.failed} failed" if score.failed else ""
            half = (score.interval[1] - score.interval[0]) / 2
            lines.append(
                f"{score.tag}: reward {score.reward:.3f} ± {half:.3f} over {score.episodes}{solved}{failed}"
            )
        return "\n".join(lines)


def evaluate(
    source: Source | None = None,
    *overrides: str,
    policy: Policy | Mapping[str, Any] | None = None,
    model: str | Path | None = None,
    tags: Sequence[str] | None = None,
    episodes: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    runs: str | Path | None = None,
    tasks: Any = None,
    agent: Any = None,
    reward: Any = None,
) -> Evaluation:
    """Plays held-out levels or rows and returns the report, with the scores by tag.

    `source`: a configuration; unset: every default. `policy`: a policy object, or the settings of one; `model`: short for
    `policy={"kind": "torch", "model": model}`. `tags`, `episodes`: which environments to play, and how many tasks of them in
    all; unset: as `evaluation` says, or `val_env_manager`, or those of `train_env_manager`. `samples`: episodes of each task;
    `temperature`: unset, 0 with one sample. `runs`: folder for the run folder with the report; unset: nothing is kept.

    `tasks`, `agent`, `reward`: what `train` takes; all rows are played, or `episodes` of them.
    """
    loaded = load_config(source if source is not None else {})
    _check_given(tasks, agent, reward, tags)
    if tasks is not None:
        content = given.tasks_content(_set_content(loaded), tasks, agent, reward, None)
        content["val_env_manager"] = {"num_env_groups": 1, "tags": [given.TAG]}
        content.pop("train_env_manager", None)
        loaded = build(content, source="evaluate")
        episodes, tags = episodes or given.count_rows(loaded), [given.TAG]
    played = policy if policy is not None and not isinstance(policy, Mapping) else None
    content = _evaluation_content(loaded, policy, model, tags, episodes, samples, temperature)
    if played is not None or runs is None:
        content["evaluation"]["cache"] = False  # nothing tells what a policy object would answer
    config = settle_evaluation(build(content, overrides, source="evaluate"))
    name = None if played is None else type(played).__name__

    def play(place: Path) -> Evaluation:
        folder, named = RunFolder.create(place, config)
        summary, report = run_blocking(lambda: evaluate_run(named, folder, policy=played, model=name))
        if summary["interrupted"] and summary["stopped"] is None:
            raise RollwrightError("interrupted: continue with `rollwright resume`" if runs else "interrupted")
        trajectories = sorted(RunReader(folder.path).trajectories(), key=_in_order)
        return Evaluation(_scores(report), trajectories, report, None if runs is None else folder.path)

    if runs is not None:
        return play(Path(runs))
    with TemporaryDirectory(prefix="rollwright-") as place:
        return play(Path(place))


def _in_order(trajectory: Trajectory) -> tuple[int, str]:
    return int(trajectory.group_id.rpartition("-g")[2]), trajectory.rollout_id


def _check_given(tasks: Any, agent: Any, reward: Any, tags: Sequence[str] | None) -> None:
    if tasks is None and (agent is not None or reward is not None):
        raise ConfigError("agent, reward: are for `tasks`, which is not given")
    if tasks is not None and tags is not None:
        raise ConfigError("tags: is given beside `tasks`, which are played alone; give one of them")


def _set_content(config: RunConfig) -> dict[str, Any]:
    """The settings that are not left at their defaults."""
    return {**config.model_dump(mode="json", exclude_unset=True), "name": config.name}


def _evaluation_content(
    config: RunConfig,
    policy: Policy | Mapping[str, Any] | None,
    model: str | Path | None,
    tags: Sequence[str] | None,
    episodes: int | None,
    samples: int | None,
    temperature: float | None,
) -> dict[str, Any]:
    content = _set_content(config)
    if model is not None:
        if policy is not None:
            raise ConfigError("evaluate: `policy` and `model` both name what plays; give one of them")
        content["policy"] = {"kind": "torch", "model": str(model)}
    elif isinstance(policy, Mapping):
        content["policy"] = dict(policy)
    settings = dict(content.get("evaluation") or {})
    manager = content.get("val_env_manager") or content.get("train_env_manager") or {}
    chosen = list(tags) if tags is not None else settings.get("tags") or manager.get("tags")
    if not chosen:
        raise ConfigError("evaluate: nothing to play; give `tags`, or a configuration that has some")
    if tags is not None:
        settings.pop("tasks", None)
    elif episodes is None and "tasks" not in settings and config.val_env_manager is not None:
        settings["tasks"] = config.val_env_manager.partition
    asked = {"tags": chosen, "tasks": episodes, "samples": samples, "temperature": temperature}
    content["evaluation"] = {**settings, **{key: value for key, value in asked.items() if value is not None}}
    return content


def _scores(report: Mapping[str, Any]) -> dict[str, TagScore]:
    return {tag: _score(tag, each) for tag, each in report["tags"].items()}


def _score(tag: str, result: Mapping[str, Any]) -> TagScore:
    reward, success = result["reward"], result["success"]
    sure = reward is not None and reward["low"] is not None
    return TagScore(
        tag=tag,
        episodes=result["episodes"],
        reward=math.nan if reward is None else reward["value"],
        standard_error=reward["error"] if sure else math.nan,
        success=None if success is None else success["value"],
        failed=result["failed"],
        interval=(reward["low"], reward["high"]) if sure else (math.nan, math.nan),
    )


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
        why = summary["stopped"] or "interrupted"
        raise RollwrightError(f"{why}: continue with rollwright.train(resume={str(folder.path)!r})")
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
