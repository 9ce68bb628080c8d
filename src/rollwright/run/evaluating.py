"""Evaluations: a run with nothing but validation levels, several samples of each, and a report at its end.

Always true: an evaluation is played by `play_run` like any other run, into a run folder, and is resumed like any other. Its
report is made from the folder alone, so that a killed and resumed evaluation reports what an undisturbed one does.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from rollwright.config import RunConfig, build
from rollwright.engines.base import Policy
from rollwright.engines.settings import model_name
from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.evaluation.pages import render_html, render_markdown
from rollwright.evaluation.report import EvaluationPlan, FailedSample, PlayedSample, build_report
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.settings import EvaluationConfig
from rollwright.rollout.accounting import same_cause
from rollwright.run.build import SettingsTable
from rollwright.run.build_tasks import TagTasks, open_tag_tasks, record_fingerprints
from rollwright.run.costs import CostLedger, agent_models, check_prices, used_by
from rollwright.run.evaluation_order import apply_order, check_difficulty, write_order
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import RunObserver, play_run
from rollwright.run.retention import replace_durably
from rollwright.run.validations import VALIDATION
from rollwright.trajectory import Trajectory

REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML = "report.json", "report.md", "report.html"
"""Files of an evaluation's folder."""

LEVELS = 100
"""Levels of a tag without rows, unless the settings say how many."""


def settle_evaluation(config: RunConfig) -> RunConfig:
    """The configuration of a run that plays the evaluation: what is left open is decided, what belongs to training is gone."""
    settings = config.evaluation or EvaluationConfig()
    manager = config.val_env_manager or config.train_env_manager
    tags = settings.tags or (manager.tags if manager is not None else [])
    if not tags:
        raise ConfigError(
            "evaluation.tags: nothing to play; name environments or tags of custom_envs with tasks"
        )
    temperature = settings.temperature
    if temperature is None:
        temperature = 0.0 if settings.samples == 1 else config.sampling.temperature
    if settings.samples > 1 and temperature == 0:
        raise ConfigError(
            f"evaluation.samples: {settings.samples} samples at temperature 0 would be the same episode; give a "
            "temperature above 0, or 1 sample"
        )
    content = config.model_dump(mode="json", exclude_unset=True)
    content["name"] = config.name
    for key in (
        "train_env_manager",
        "training",
        "swarm",
        "eval_steps",
        "keep_steps",
        "max_steps",
        "rollout_batch_size",
    ):
        content.pop(key, None)
    content["val_env_manager"] = {"tags": tags, "num_env_groups": len(tags)}
    opened = build(content)
    rows = {tag: len(each.source(VALIDATION)) for tag, each in open_tag_tasks(opened).items()}
    sizes = SettingsTable(opened.model_copy(update={"evaluation": settings})).sizes
    counts = _count_tasks(settings, tags, sizes | rows)
    content["val_env_manager"] = {
        "tags": tags,
        "num_env_groups": sum(counts),
        "num_groups_partition": counts,
        "group_size": settings.samples,
        "min_group_size": 1,
        "temperature": temperature,
        "top_p": config.sampling.top_p if settings.top_p is None else settings.top_p,
    }
    content["evaluation"] = {
        **settings.model_dump(mode="json", exclude_unset=True),
        "tags": tags,
        "tasks": counts,
        "temperature": temperature,
    }
    settled = record_fingerprints(build(content, source="evaluation"))
    check_prices(settled)
    if settings.difficulty:
        check_difficulty(settings.difficulty, _TaskNames(settled, None).tasks)
    return settled


def _count_tasks(settings: EvaluationConfig, tags: list[str], rows: Mapping[str, int]) -> list[int]:
    if isinstance(settings.tasks, list):
        counts = settings.tasks
    elif settings.tasks is None:
        return [rows.get(tag, LEVELS) for tag in tags]
    else:
        if settings.tasks < len(tags):
            raise ConfigError(
                f"evaluation.tasks: {settings.tasks} tasks cannot be split over {len(tags)} tags; at least {len(tags)} are "
                "needed"
            )
        share, rest = divmod(settings.tasks, len(tags))
        counts = [share + (place < rest) for place in range(len(tags))]
    for tag, count in zip(tags, counts, strict=True):
        if count > rows.get(tag, count):
            raise ConfigError(f"evaluation.tasks: {count} tasks of {tag}, which has {rows[tag]} rows")
    return counts


async def evaluate_run(
    config: RunConfig,
    folder: RunFolder,
    *,
    store: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    policy: Policy | None = None,
    resume: bool = False,
    observer: RunObserver | None = None,
    model: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play a settled evaluation, or the rest of one; returns the run's summary and the report, which are also in the folder.

    `model`: name in the report of a policy that the configuration does not describe.
    """
    if config.evaluation is not None and config.evaluation.difficulty:
        write_order(config, folder.path, _TaskNames(config, None).tasks)
    summary = await play_run(
        config,
        folder,
        store=store,
        workers=workers,
        ray=ray,
        policy=policy,
        resume=resume,
        observer=observer,
    )
    return summary, write_report(folder.path, config, model)


def write_report(path: Path, config: RunConfig, model: str | None = None) -> dict[str, Any]:
    """Make the report of an evaluation's folder, and write it as JSON, Markdown and HTML."""
    report = read_evaluation(path, config)
    if model is not None:
        report |= {"model": {"name": model, "kind": "object"}, "simulated": False}
    replace_durably(
        path / REPORT_JSON, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    replace_durably(path / REPORT_MARKDOWN, render_markdown(report))
    replace_durably(path / REPORT_HTML, render_html(report))
    return report


def load_report(path: Path) -> dict[str, Any]:
    """The report of an evaluation: of its folder, or of its `report.json`."""
    file = path / REPORT_JSON if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RollwrightError(
            f"{file}: there is no report; an evaluation has one: `rollwright eval`, or `rollwright resume` of one that was stopped"
        ) from None
    except ValueError as error:
        raise FormatError(f"{file}: is no report of an evaluation: {error}") from error
    if not isinstance(report, dict) or not str(report.get("schema", "")).startswith("rollwright.evaluation/"):
        raise FormatError(f"{file}: is no report of an evaluation; one has a `schema`")
    return report


def read_evaluation(path: Path, config: RunConfig) -> dict[str, Any]:
    """The report, from what the folder has."""
    settings, manager = config.evaluation, config.val_env_manager
    if settings is None or manager is None:
        raise RollwrightError(f"{path}: is no evaluation; `rollwright eval` makes one")
    names = _TaskNames(config, path)
    reader = RunReader(path)
    samples, costs = [], CostLedger()
    models = agent_models(config)
    for trajectory in reader.trajectories():
        samples.append(names.sample(trajectory))
        costs.add(used_by(trajectory, trajectory.tag, models), 0.0, trajectory.tag)
    failed = [names.failed(row["rollout_id"], row["reason"]) for row in reader.failures()]
    plan = StoppingPlan.make(
        manager.num_env_groups, settings.half_width, first=settings.first_look, confidence=settings.confidence
    )
    planned = EvaluationPlan(
        settings.samples, settings.ks, plan, config.seed, names.tasks, names.meta, settings.by, names.order
    )
    delivered = any(row["mode"] == VALIDATION for row in reader.metrics())
    played = {each.place for each in samples} | {each.place for each in failed}
    report = build_report(
        describe(config),
        planned,
        samples,
        failed,
        stopped_early=delivered and len(played) < manager.num_env_groups,
    )
    sums = costs.sums(config.prices)
    return {**report, "cost": {key: sums[key] for key in ("total", "by", "entries")}}


def describe(config: RunConfig) -> dict[str, Any]:
    """What is evaluated: the model, how it is sampled, the seed."""
    manager = config.val_env_manager
    assert manager is not None
    return {
        "model": {"name": model_name(config.policy), "kind": config.policy.kind},
        "simulated": config.plays_simulated,
        "sampling": {
            "temperature": manager.temperature,
            "top_p": manager.top_p,
            "stop": list(config.sampling.stop),
        },
        "seed": config.seed,
    }


class _TaskNames:
    """Names the tasks of an evaluation, by their content."""

    def __init__(self, config: RunConfig, folder: Path | None) -> None:
        """`folder`: of the evaluation, whose order is taken; `None`: the order without earlier results."""
        manager = config.val_env_manager
        assert manager is not None
        self._rows: dict[str, TagTasks] = open_tag_tasks(config)
        table = SettingsTable(config)
        slot_tags = manager.slot_tags()
        played = apply_order(slot_tags, table.level_of(VALIDATION, slot_tags), folder)
        self.order = played.order
        self._environments = {tag: self._environment(config, tag) for tag in manager.tags}
        self.meta: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.tasks = [(tag, self._name(tag, level)) for tag, level in played.levels]

    def _environment(self, config: RunConfig, tag: str) -> str:
        custom = config.custom_envs.get(tag)
        told = None if custom is None else (custom.env_type, custom.env_config, custom.max_steps)
        return _short_digest(told)

    def _name(self, tag: str, level: int) -> str:
        if tag not in self._rows:
            return f"level {level} of {self._environments[tag]}"
        row = self._rows[tag].source(VALIDATION).row(level)
        name = f"row {_short_digest(row)}"
        self.meta[tag, name] = row
        return name

    def sample(self, trajectory: Trajectory) -> PlayedSample:
        place, member = _place_of(trajectory.rollout_id)
        tag, task = self.tasks[place]
        return PlayedSample(
            tag=tag,
            task=task,
            place=place,
            member=member,
            reward=trajectory.reward,
            success=trajectory.success_share,
            answer=_answer(trajectory),
            turns=len(trajectory.turns),
            tokens=trajectory.sampled_tokens,
            stop=str(trajectory.stop),
            components=trajectory.components,
        )

    def failed(self, rollout_id: str, reason: str) -> FailedSample:
        place, member = _place_of(rollout_id)
        tag, task = self.tasks[place]
        return FailedSample(tag, task, place, member, same_cause(reason))


def _place_of(rollout_id: str) -> tuple[int, int]:
    group, _, member = rollout_id.rpartition("-m")
    return int(group.rpartition("-g")[2]), int(member)


def _answer(trajectory: Trajectory) -> str | None:
    """The answer of an episode that is one: what its agent returned, or the only turn's action or text."""
    if trajectory.returned is not None:
        return trajectory.returned
    if len(trajectory.turns) != 1:
        return None
    turn = trajectory.turns[0]
    action = None if turn.outcome is None else turn.outcome.action
    return (turn.text if action is None else action).strip()


def _short_digest(data: Any) -> str:
    encoded = msgspec.json.encode(data, order="deterministic", enc_hook=str)
    return blake2b(encoded, digest_size=6).hexdigest()
