"""Task folders in Harbor's format, and in the older layout of Terminal-Bench, read into frozen records.

A folder is a task if it has `task.toml` (Harbor) or `task.yaml` (Terminal-Bench). Unknown keys are ignored, as Harbor does;
a value of the wrong type or a missing file is an error that names the task and the key. `${VAR}` and `${VAR:-default}` in
environment variables are taken from this process; one that is not set and has no default is an error when the task is played.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from rollwright.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*$", re.IGNORECASE)
_UNITS = {"": 1 / (1 << 20), "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}

NetworkMode = Literal["public", "no-network", "allowlist"]


class Healthcheck(msgspec.Struct, frozen=True):
    """A command that succeeds when the environment is ready."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    retries: int = 3


class TaskPhase(msgspec.Struct, frozen=True):
    """Settings of the agent or the verifier."""

    timeout_sec: float | None = None
    user: str | int | None = None
    env: dict[str, str] = {}
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []
    environment_mode: Literal["shared", "separate"] = "shared"


class TaskEnvironment(msgspec.Struct, frozen=True):
    """The `[environment]` of a task."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    allow_internet: bool | None = None
    gpus: int = 0
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


class _Solution(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class _Step(msgspec.Struct, frozen=True):
    name: str


class _File(msgspec.Struct, frozen=True):
    """`task.toml`."""

    environment: TaskEnvironment = TaskEnvironment()
    agent: TaskPhase = TaskPhase()
    verifier: TaskPhase = TaskPhase()
    solution: _Solution = _Solution()
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    artifacts: list[Any] = []
    steps: list[_Step] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


class TaskStep(msgspec.Struct, frozen=True):
    """One part of a task, with its own instruction and tests; most tasks have one."""

    name: str
    instruction: str
    folder: str
    """Has `tests/` and `solution/`."""


class Service(msgspec.Struct, frozen=True):
    """A service of a compose file; the agent works in `main`."""

    name: str
    image: str = ""
    build: str = ""
    """Folder with the Dockerfile; empty: `image` is used."""
    dockerfile: str = "Dockerfile"
    command: str | list[str] = ""
    environment: dict[str, str] = {}
    workdir: str = ""
    user: str = ""


class HarborTask(msgspec.Struct, frozen=True):
    """One task folder."""

    name: str
    folder: str
    steps: tuple[TaskStep, ...]
    environment: TaskEnvironment
    agent: TaskPhase
    verifier: TaskPhase
    solution_env: dict[str, str]
    services: tuple[Service, ...]
    """The main service first."""
    artifacts: tuple[str, ...] = ()
    strategy: Literal["mean", "final"] = "mean"
    is_terminal_bench: bool = False

    @property
    def memory_mb(self) -> int:
        given = self.environment
        return given.memory_mb or (_megabytes(given.memory) if given.memory else 2048)

    @property
    def storage_mb(self) -> int:
        return self.environment.storage_mb or (
            _megabytes(self.environment.storage) if self.environment.storage else 0
        )


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
    try:
        content = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        file = msgspec.convert(content, _File, strict=False)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{folder / 'task.toml'}: {_reason(error)}") from error
    if file.environment.gpus:
        raise ConfigError(f"{folder / 'task.toml'}: environment.gpus: boxes have no GPU; accepted: 0")
    names = [each.name for each in file.steps]
    places = [(name, folder / "steps" / name) for name in names] or [("", folder)]
    steps = tuple(TaskStep(name, _instruction(place), str(place)) for name, place in places)
    return HarborTask(
        name=str(file.task.get("name") or folder.name),
        folder=str(folder),
        steps=steps,
        environment=file.environment,
        agent=file.agent,
        verifier=file.verifier,
        solution_env=file.solution.env,
        services=_services(folder / "environment", file.environment),
        artifacts=tuple(_artifact(each) for each in file.artifacts),
        strategy=file.multi_step_reward_strategy,
    )


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
    environment = TaskEnvironment()
    services = _services(folder, environment)
    return HarborTask(
        name=folder.name,
        folder=str(folder),
        steps=(TaskStep("", instruction.strip(), str(folder)),),
        environment=environment,
        agent=TaskPhase(timeout_sec=content.get("max_agent_timeout_sec")),
        verifier=TaskPhase(timeout_sec=content.get("max_test_timeout_sec")),
        solution_env={},
        # Its compose files name the agent's service `client`.
        services=tuple(
            msgspec.structs.replace(each, name="main") if each.name == "client" else each for each in services
        ),
        is_terminal_bench=True,
    )


def _instruction(folder: Path) -> str:
    try:
        return (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / 'instruction.md'}: {_reason(error)}") from error


def _artifact(given: Any) -> str:
    return str(given.get("source", "")) if isinstance(given, Mapping) else str(given)


def _services(folder: Path, environment: TaskEnvironment) -> tuple[Service, ...]:
    """The services of the compose file, the agent's own first; without a file, one from the image or Dockerfile."""
    has_dockerfile = (folder / "Dockerfile").is_file()
    main = Service(
        "main", image=environment.docker_image or "", build="" if environment.docker_image else str(folder)
    )
    file = next(
        (
            folder / name
            for name in ("docker-compose.yaml", "docker-compose.yml")
            if (folder / name).is_file()
        ),
        None,
    )
    if file is None:
        if not has_dockerfile and not environment.docker_image:
            raise ConfigError(f"{folder}: needs a Dockerfile, a compose file or environment.docker_image")
        return (main,)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {_reason(error)}") from error
    found = content.get("services") or {}
    if not isinstance(found, Mapping) or not all(isinstance(each, Mapping | None) for each in found.values()):
        raise ConfigError(f"{file}: services: a mapping of services is accepted")
    services = {name: _service(folder, name, given or {}) for name, given in found.items()}
    own = services.pop("main", None) or services.pop("client", None) or main
    if not own.image and not own.build:
        own = msgspec.structs.replace(own, image=main.image, build=main.build)
    return (own, *services.values())


def _service(folder: Path, name: str, given: Mapping[str, Any]) -> Service:
    build = given.get("build")
    context = build.get("context", ".") if isinstance(build, Mapping) else build
    variables = given.get("environment") or {}
    if isinstance(variables, list):
        variables = dict(str(each).partition("=")[::2] for each in variables)
    # Harbor's own variables in compose files stand for the image and folder of the task.
    is_own = isinstance(context, str) and "${" in context
    return Service(
        name,
        image=""
        if "${" in str(given.get("image") or "")
        else str(given.get("image") or "")
        if build is None
        else "",
        build="" if build is None else str(folder if is_own else (folder / str(context)).resolve()),
        dockerfile=str(build.get("dockerfile", "Dockerfile")) if isinstance(build, Mapping) else "Dockerfile",
        command=given.get("command") or "",
        environment={str(key): "" if value is None else str(value) for key, value in variables.items()},
        workdir=str(given.get("working_dir") or ""),
        user=str(given.get("user") or ""),
    )


def substitute(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Environment variables with `${VAR}` and `${VAR:-default}` filled in from this process."""

    def fill(found: re.Match[str]) -> str:
        name, default = found.groups()
        value = os.environ.get(name) or default
        if value is None:
            raise ConfigError(f"{where}: the environment variable {name} is needed and not set")
        return value

    return {key: _VARIABLE.sub(fill, value) for key, value in variables.items()}


def _megabytes(text: str) -> int:
    found = _SIZE.match(text)
    if found is None:
        raise ConfigError(f"a size such as 2G or 512M is accepted, got {text!r}")
    return max(1, int(float(found.group(1)) * _UNITS[found.group(2).upper()]))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).replace("`", "").replace(" - at $.", ", at ").splitlines()[0]
