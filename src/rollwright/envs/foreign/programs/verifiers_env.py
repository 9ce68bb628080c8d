"""Environments of verifiers (v1), played by its own rollout: its tasks, agents, hooks and scoring, unmodified.

One environment serves all episodes of this process, with one interception server and one set of shared tool servers. How the
model is reached is the way:

- `direct`: the `null` harness is played here and asks the run without HTTP;
- `gateway`: the `null` harness plays verifiers' own chat loop in this process, through the interception server and the
  run's gateway;
- `program`: every harness as it is shipped, which starts a program for each rollout.

A task is chosen by the level: its index in the task set is the level modulo the number of tasks.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import env as env_module
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.session import hook_boundary
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)
from verifiers_playing import MODEL, PLAYING, PlayedEpisode, PlayingServer

DIRECT, CHAT = "verifiers_direct_harness", "verifiers_chat_harness"
"""Harnesses of this folder, by the ids that verifiers loads them by."""

DEFAULT_TASKS = 1000
"""Tasks of a task set without an end."""


class Unplayable(Exception):
    """The user's settings name no environment that can be played."""

    is_settings = True


class EpisodeFailed(Exception):
    """verifiers reports an error, so there is no reward."""


class TasksetEpisodes:
    """All episodes of one environment in this process."""

    def __init__(self, environment: Any, num_tasks: int | None) -> None:
        self._env = environment
        self._tasks: list[Any] = []
        self._endless = not environment.taskset.bounded
        self._num_tasks = num_tasks or DEFAULT_TASKS
        self._more: Iterator[Any] = itertools.islice(
            iter(environment.taskset), self._num_tasks if self._endless else num_tasks
        )
        self._serving = contextlib.AsyncExitStack()

    async def start(self) -> None:
        await self._serving.enter_async_context(self._env.serving())

    async def close(self) -> None:
        await self._serving.aclose()

    async def reset(self, seed: int) -> dict[str, Any]:
        task = self._task(seed)
        told = task.data.model_dump(mode="json", exclude_none=True)
        return {"observation": task.data.prompt_text, "task": told}

    async def play(self, seed: int, base_url: str, api_key: str, ask: Any) -> dict[str, Any]:
        playing = PlayedEpisode(ask, base_url, api_key)
        PLAYING.set(playing)
        episode = await self._env.run_episode(self._task(seed), ModelContext(MODEL, playing.client()))
        if not episode.ok:
            raise EpisodeFailed(_reason(episode))
        return _result(episode)

    def _task(self, seed: int) -> Any:
        if self._endless:  # tasks are made as they are asked for
            index = seed % self._num_tasks
            self._tasks.extend(itertools.islice(self._more, max(0, index + 1 - len(self._tasks))))
            return self._tasks[index]
        if not self._tasks:
            self._tasks.extend(self._more)
        if not self._tasks:
            raise Unplayable(f"{self._env.config.taskset.id} has no tasks")
        return self._tasks[seed % len(self._tasks)]


async def make(**options: Any) -> TasksetEpisodes:
    environment = _load(options)
    env_module.make_interception = _make_interception
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    episodes = TasksetEpisodes(environment, options["num_tasks"])
    await episodes.start()
    return episodes


def describe(**options: Any) -> dict[str, Any]:
    """The way it is played, and whether its tasks need a container."""
    environment = _load(options)
    harnesses = {name: each.config.id for name, each in environment._harnesses.items()}
    way = {DIRECT: "direct", CHAT: "gateway"}.get(next(iter(harnesses.values())), "program")
    return {"way": way, "harnesses": harnesses, "needs_gateway": way != "direct"}


def _make_interception(config: Any, *, requires_tunnel: bool, state_service_secrets: Any = ()) -> Any:
    return PlayingServer(None, requires_tunnel, state_service_secrets)


def _load(options: dict[str, Any]) -> Any:
    """The environment of these options, on the way that they ask for and that it allows."""
    if options["path"]:
        sys.path.insert(0, options["path"])
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [options["path"], os.environ.get("PYTHONPATH")])
        )
    try:
        data = _config(options, None)
        environment = load_environment(resolve_env_config(data))
        way, why = _choose_way(options, environment)
        if way == "program":
            return environment
        if why:
            raise Unplayable(f"way: {options['way']} cannot be taken: {why}; accepted: auto, program")
        return load_environment(resolve_env_config(_config(options, DIRECT if way == "direct" else CHAT)))
    except Unplayable:
        raise
    except Exception as error:
        raise Unplayable(_one_line(error)) from error


def _config(options: dict[str, Any], null: str | None) -> dict[str, Any]:
    """The configuration of the environment. `null`: the harness that plays in place of `null`."""
    given = dict(options["env"])
    ident = options["id"]
    data = {**given, "taskset": {**options["taskset"], "id": ident}}
    fields = env_config_type(ident, given.get("id") or "").model_fields
    for name, field in fields.items():
        if isinstance(field.default, AgentConfig):
            data[name] = _seat(field.default, dict(given.get(name) or {}), options, null)
    return data


def _seat(default: Any, given: dict[str, Any], options: dict[str, Any], null: str | None) -> dict[str, Any]:
    """One agent's settings: the user's, those of the environment's author, and those of a run on this machine."""
    seat = dict(given)
    harness = seat.get("harness") or options["harness"]
    if harness is None and default.harness is None:
        own = default_harness_id(options["id"])
        harness = "null" if own == "bash" else own  # `bash` runs the model's commands on this machine
    if harness is not None:
        harness = {"id": harness} if isinstance(harness, str) else dict(harness)
        if null is not None and harness.get("id") == "null":
            harness["id"] = null
        seat["harness"] = harness
    elif null is not None and default.harness.id == "null":
        seat["harness"] = {**default.harness.model_dump(exclude_unset=True), "id": null}
    if options["runtime"] is not None:
        seat.setdefault("runtime", options["runtime"])
    elif default.runtime.type == "prime":  # verifiers' default, a service that needs an account
        seat.setdefault("runtime", {"type": "subprocess"})
    seat.setdefault("max_turns", default.max_turns or options["max_turns"])
    return seat


def _choose_way(options: dict[str, Any], environment: Any) -> tuple[str, str]:
    """The way, and why the one that is asked for cannot be taken."""
    asked = options["way"]
    others = sorted({each.config.id for each in environment._harnesses.values()} - {"null"})
    if asked == "program" or (others and asked == "auto"):
        return "program", ""
    if others:
        return asked, f"its harness is {others[0]}, which is a program of its own"
    own = [name for name, each in environment._agent_specs.items() if each.client is not None]
    why = f"its agent {own[0]} has a client of its own" if own else _looks_at_calls(environment)
    if asked == "auto":
        return ("gateway" if why else "direct"), ""
    return asked, why if asked == "direct" else ""


def _looks_at_calls(environment: Any) -> str:
    """Whether tasks look at single requests and responses; empty: they do not."""
    task = next(iter(environment.taskset), None)
    if task is None:
        return ""
    hooks = [*discover_decorated(task, "intercept")]
    hooks += [each for each in task.hooks("stop") if hook_boundary(each, allow_trace=True) is not vf.Trace]
    return f"its tasks look at single requests or responses ({hooks[0].__name__})" if hooks else ""


def _reason(episode: Any) -> str:
    """The error that ended an episode."""
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if not errors:
        return "it ended without a result and without an error"
    head, found, trace = errors[0].message.partition("Traceback (most recent call last)")
    # Of a program's traceback the last line says what was wrong.
    return _one_line(f"{errors[0].type}: {head}{trace.strip().splitlines()[-1] if found else ''}")


def _result(episode: Any) -> dict[str, Any]:
    """The reward: that of the only trace, or the mean over those of trainable agents."""
    traces = [each for each in episode.traces if each.agent is None or each.agent.trainable] or episode.traces
    several = len(traces) > 1
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for place, trace in enumerate(traces):
        before = f"{trace.agent.name}.{place}." if several else ""
        unscored = [name for name, each in trace.rewards.items() if each is None]
        if unscored:
            raise EpisodeFailed(f"scoring did not end: no value of {', '.join(unscored)}")
        components.update({before + name: each.score for name, each in trace.rewards.items()})
        metrics.update({before + name: each for name, each in trace.metrics.items() if each is not None})
        if trace.stop_condition is not None:
            metrics[f"{before}stop_{trace.stop_condition}"] = 1.0
    reward = sum(each.reward for each in traces) / len(traces)
    return {"reward": reward, "components": components, "metrics": metrics}


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:500]
