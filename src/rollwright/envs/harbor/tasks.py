"""Task folders in Harbor's format, and in the older layout of Terminal-Bench, read into frozen records.

A folder is a task if it has `task.toml` (Harbor) or `task.yaml` (Terminal-Bench). Unknown keys are ignored, as Harbor does;
a value of the wrong type or a missing file is an error that names the task and the key. A variable whose whole value is
`${VAR}` or `${VAR:-default}` is taken from this process; one that is not set and has no default is an error when the task is
played.

What a step does not say is the task's; every step of a `HarborTask` is complete.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from rollwright.envs.harbor.compose import COMPOSE_FILES, Healthcheck, Service, find_services
from rollwright.errors import ConfigError

MAIN = "main"
"""The service that the agent works in."""

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*$", re.IGNORECASE)
_UNITS = {"": 1 / (1 << 20), "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}

NetworkMode = Literal["public", "no-network", "allowlist"]


class TaskEnvironment(msgspec.Struct, frozen=True):
    """The `[environment]` of a task, or the one of its verifier."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    allow_internet: bool | None = None
    gpus: int | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: Healthcheck | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []

    @property
    def network(self) -> NetworkMode:
        if self.network_mode is not None:
            return self.network_mode
        return "no-network" if self.allow_internet is False else "public"

    @property
    def memory_limit(self) -> int:
        """Megabytes."""
        return self.memory_mb or (_megabytes(self.memory) if self.memory else 2048)

    @property
    def storage_limit(self) -> int:
        """Megabytes; 0: none."""
        return self.storage_mb or (_megabytes(self.storage) if self.storage else 0)


class TaskPhase(msgspec.Struct, frozen=True):
    """Settings of the agent."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []


class CollectHook(msgspec.Struct, frozen=True):
    """A command that runs in a service when the agent is done, before artifacts are copied."""

    command: str
    service: str = MAIN
    timeout_sec: float = 60.0
    user: str | int | None = None


class VerifierPhase(TaskPhase, frozen=True):
    """Settings of the verifier."""

    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: TaskEnvironment | None = None
    collect: list[CollectHook] = []

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """`None`: not said here."""
        if self.environment_mode is None and self.environment is not None:
            return "separate"
        return self.environment_mode


class Artifact(msgspec.Struct, frozen=True):
    """A file or folder that a separate verifier sees, at the same path."""

    source: str
    exclude: list[str] = []
    service: str | None = None


class _Solution(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class _Step(msgspec.Struct, frozen=True):
    name: str
    agent: TaskPhase = TaskPhase()
    verifier: VerifierPhase = VerifierPhase()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = []


class _File(msgspec.Struct, frozen=True):
    """`task.toml`."""

    environment: TaskEnvironment = TaskEnvironment()
    agent: TaskPhase = TaskPhase()
    verifier: VerifierPhase = VerifierPhase()
    solution: _Solution = _Solution()
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    artifacts: list[str | Artifact] = []
    steps: list[_Step] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


class VerifierBox(msgspec.Struct, frozen=True):
    """The box of a separate verifier."""

    environment: TaskEnvironment
    services: tuple[Service, ...]
    has_tests: bool
    """Whether its image brings the tests, so that they are not copied."""


class TaskStep(msgspec.Struct, frozen=True):
    """One part of a task, with its own instruction and tests; most tasks have one."""

    name: str
    instruction: str
    tests: tuple[str, ...]
    """Folders that are copied to `/tests`, one over the other."""
    solution: str
    """Folder, or script, of the oracle."""
    agent: TaskPhase
    verifier: VerifierPhase
    verifier_box: VerifierBox | None = None
    """`None`: the verifier runs in the agent's box."""
    workdir: str = ""
    """Folder that is copied into the working folder before the step; empty: none."""
    min_reward: dict[str, float] = {}
    """Rewards below which no further step is played."""
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()


class HarborTask(msgspec.Struct, frozen=True):
    """One task folder."""

    name: str
    folder: str
    steps: tuple[TaskStep, ...]
    environment: TaskEnvironment
    solution_env: dict[str, str]
    services: tuple[Service, ...]
    """The main service first."""
    upload: str = ""
    """Folder that is copied into the working folder when the box starts; empty: none."""
    strategy: Literal["mean", "final"] = "mean"
    is_terminal_bench: bool = False

    @property
    def agent(self) -> TaskPhase:
        """The agent's settings in the first step."""
        return self.steps[0].agent


def find_tasks(path: Path) -> list[Path]:
    """The task folders at a path: itself, or all directly below it, by name."""
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a folder; a task folder or a folder of them is accepted")
    if _is_task(path):
        return [path]
    found = sorted(each for each in path.iterdir() if each.is_dir() and _is_task(each))
    if not found:
        raise ConfigError(f"{path}: has no task in it; a task folder has task.toml or task.yaml")
    return found


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def load_task(folder: Path) -> HarborTask:
    """Reads one task folder."""
    if (folder / "task.toml").is_file():
        return _load_harbor(folder)
    return _load_terminal_bench(folder)


def _load_harbor(folder: Path) -> HarborTask:
    where = folder / "task.toml"
    try:
        content = tomllib.loads(where.read_text(encoding="utf-8"))
        file = msgspec.convert(content, _File, strict=False)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {_reason(error)}") from error
    environment = file.environment
    for key, is_set, accepted in (
        ("gpus", environment.gpus, "boxes have no GPU; accepted: 0"),
        ("os", environment.os.lower() != "linux", "boxes run Linux; accepted: linux"),
        ("mcp_servers", environment.mcp_servers, "they are not started here; accepted: none"),
    ):
        if is_set:
            raise ConfigError(f"{where}: environment.{key}: {accepted}")
    place = folder / "environment"
    services = find_services(place, environment.docker_image or "")
    has_own_files = bool(environment.docker_image) and not any(
        (place / name).exists() for name in ("Dockerfile", *COMPOSE_FILES)
    )
    steps = [_Step(name="")] if not file.steps else file.steps
    return HarborTask(
        name=str(file.task.get("name") or folder.name),
        folder=str(folder),
        steps=tuple(_complete(folder, file, each) for each in steps),
        environment=environment,
        solution_env=file.solution.env,
        services=services,
        upload=str(place) if has_own_files and place.is_dir() and any(place.iterdir()) else "",
        strategy=file.multi_step_reward_strategy,
    )


def _complete(folder: Path, file: _File, step: _Step) -> TaskStep:
    """A step with what it takes from the task; a task without steps is one of them."""
    place = folder / "steps" / step.name if step.name else folder
    shared, own = folder / "tests", place / "tests"
    tests = [each for each in dict.fromkeys((shared, own)) if each.is_dir()]
    solution = place / "solution" if (place / "solution").is_dir() else folder / "solution"
    workdir = place / "workdir" if step.name else None
    given = step.verifier if step.name else file.verifier
    verifier = msgspec.structs.replace(
        given,
        **_phase(given, file.verifier),
        env={**file.verifier.env, **given.env},
        collect=list(file.verifier.collect) + (list(given.collect) if step.name else []),
    )
    mode = given.mode or file.verifier.mode or "shared"
    agent = step.agent if step.name else file.agent
    least = step.min_reward
    return TaskStep(
        name=step.name,
        instruction=_instruction(place),
        tests=tuple(map(str, tests)),
        solution=str(solution),
        agent=msgspec.structs.replace(agent, **_phase(agent, file.agent)),
        verifier=verifier,
        verifier_box=_verifier_box(folder, file, step, own) if mode == "separate" else None,
        workdir=str(workdir) if workdir is not None and workdir.is_dir() else "",
        min_reward={"reward": least} if isinstance(least, float | int) else least or {},
        healthcheck=step.healthcheck,
        artifacts=tuple(
            Artifact(each) if isinstance(each, str) else each for each in (*file.artifacts, *step.artifacts)
        ),
    )


def _phase(own: TaskPhase, task: TaskPhase) -> dict[str, Any]:
    """What a step's phase takes from the task's."""
    network = own if own.network_mode is not None else task
    return {
        "timeout_sec": task.timeout_sec if own.timeout_sec is None else own.timeout_sec,
        "user": task.user if own.user is None else own.user,
        "network_mode": network.network_mode,
        "allowed_hosts": network.allowed_hosts,
    }


def _verifier_box(folder: Path, file: _File, step: _Step, own_tests: Path) -> VerifierBox:
    """The first that names an image or has a Dockerfile in its tests wins; without one, it is the task's own image."""
    chosen = step.verifier.environment or file.verifier.environment or file.environment
    for environment, tests in (
        (step.verifier.environment, own_tests),
        (file.verifier.environment, folder / "tests"),
    ):
        image = "" if environment is None else environment.docker_image or ""
        if image or any((tests / name).is_file() for name in ("Dockerfile", COMPOSE_FILES[0])):
            return VerifierBox(chosen, find_services(tests, image), has_tests=True)
    services = find_services(folder / "environment", file.environment.docker_image or "")
    return VerifierBox(chosen, services, has_tests=False)


def _load_terminal_bench(folder: Path) -> HarborTask:
    try:
        content = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder / 'task.yaml'}: {_reason(error)}") from error
    instruction = content.get("instruction")
    if instruction is None and content.get("descriptions"):
        instruction = content["descriptions"][0].get("description")
    if not isinstance(instruction, str):
        raise ConfigError(f"{folder / 'task.yaml'}: instruction: a text is needed")
    step = TaskStep(
        name="",
        instruction=instruction.strip(),
        tests=(str(folder / "tests"),) if (folder / "tests").is_dir() else (),
        solution=str(folder / "solution.sh"),
        agent=TaskPhase(timeout_sec=content.get("max_agent_timeout_sec")),
        verifier=VerifierPhase(timeout_sec=content.get("max_test_timeout_sec")),
    )
    return HarborTask(
        name=folder.name,
        folder=str(folder),
        steps=(step,),
        environment=TaskEnvironment(),
        solution_env={},
        # Its compose files name the agent's service `client`.
        services=tuple(
            msgspec.structs.replace(each, name=MAIN) if each.name == "client" else each
            for each in find_services(folder, "")
        ),
        is_terminal_bench=True,
    )


def _instruction(folder: Path) -> str:
    try:
        return (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / 'instruction.md'}: {_reason(error)}") from error


def substitute(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Environment variables with `${VAR}` and `${VAR:-default}` filled in from this process."""
    found = {}
    for key, value in variables.items():
        match = _VARIABLE.fullmatch(value)
        if match is None:
            found[key] = value
            continue
        name, default = match.groups()
        filled = os.environ.get(name, default)
        if filled is None:
            raise ConfigError(f"{where}: the environment variable {name} is needed and not set")
        found[key] = filled
    return found


def _megabytes(text: str) -> int:
    found = _SIZE.match(text)
    if found is None:
        raise ConfigError(f"a size such as 2G or 512M is accepted, got {text!r}")
    return max(1, int(float(found.group(1)) * _UNITS[found.group(2).upper()]))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).replace("`", "").replace(" - at $.", ", at ").splitlines()[0]
