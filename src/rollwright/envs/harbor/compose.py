"""Services of a task's compose file: the agent works in `main`, others run beside it.

`$VAR`, `${VAR}` and `${VAR:-default}` are filled in from this process, `$$` is a dollar sign, as compose does; Harbor's own
variables for the image and the folder of the task stand for these. Keys that a box has no use for (ports, volumes,
`depends_on`) are ignored.
"""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollwright.errors import ConfigError

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")
_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-?+])([^}]*))?\})")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|us|h|m|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Healthcheck(msgspec.Struct, frozen=True):
    """A command that succeeds when an environment or a service is ready."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class Service(msgspec.Struct, frozen=True):
    """A service of a compose file, or the only one of a task without such a file."""

    name: str
    image: str = ""
    build: str = ""
    """Folder with the Dockerfile; empty: `image` is used."""
    dockerfile: str = "Dockerfile"
    entrypoint: tuple[str, ...] | None = None
    """`None`: the image's."""
    command: tuple[str, ...] | None = None
    """`None`: the image's."""
    environment: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    healthcheck: Healthcheck | None = None

    def words(self, entrypoint: tuple[str, ...], command: tuple[str, ...]) -> tuple[str, ...]:
        """The program that it runs; the arguments are those of the image."""
        if self.entrypoint is not None:
            return (*self.entrypoint, *(self.command or ()))
        return (*entrypoint, *(command if self.command is None else self.command))


def find_services(folder: Path, image: str) -> tuple[Service, ...]:
    """The services of the compose file in a folder, the agent's own first; without a file, one from the image or Dockerfile."""
    main = Service("main", image=image, build="" if image else str(folder))
    file = next((folder / name for name in COMPOSE_FILES if (folder / name).is_file()), None)
    if file is None:
        if not (folder / "Dockerfile").is_file() and not image:
            raise ConfigError(f"{folder}: needs a Dockerfile, a compose file or environment.docker_image")
        return (main,)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    found = content.get("services") if isinstance(content, Mapping) else None
    if not isinstance(found, Mapping) or not all(isinstance(each, Mapping | None) for each in found.values()):
        raise ConfigError(f"{file}: services: a mapping of services is accepted")
    services = {name: _service(folder, name, given or {}, f"{file}: {name}") for name, given in found.items()}
    own = services.pop("main", None) or services.pop("client", None) or main
    if not own.image and not own.build:
        own = msgspec.structs.replace(own, image=main.image, build=main.build)
    return (own, *services.values())


def _service(folder: Path, name: str, given: Mapping[str, Any], where: str) -> Service:
    build = given.get("build")
    context = build.get("context", ".") if isinstance(build, Mapping) else build
    # Harbor's own variables in compose files stand for the image and folder of the task.
    is_own = isinstance(context, str) and "${" in context
    image = str(given.get("image") or "")
    return Service(
        name,
        image="" if "${" in image or build is not None else image,
        build="" if build is None else str(folder if is_own else (folder / str(context)).resolve()),
        dockerfile=str(build.get("dockerfile", "Dockerfile")) if isinstance(build, Mapping) else "Dockerfile",
        entrypoint=_words(given.get("entrypoint")),
        command=_words(given.get("command")),
        environment=_variables(given.get("environment") or {}),
        workdir=interpolate(str(given.get("working_dir") or "")),
        user=interpolate(str(given.get("user") or "")),
        healthcheck=_healthcheck(given.get("healthcheck"), where),
    )


def _words(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return tuple(shlex.split(interpolate(given)))
    return tuple(interpolate(str(each)) for each in given)


def _variables(given: Any) -> dict[str, str]:
    if isinstance(given, list):  # a name without a value is taken from this process
        pairs = [str(each).partition("=") for each in given]
        given = {name: value if equal else os.environ.get(name, "") for name, equal, value in pairs}
    return {
        str(key): "" if value is None else interpolate(_plain(value)) for key, value in dict(given).items()
    }


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _healthcheck(given: Any, where: str) -> Healthcheck | None:
    if not isinstance(given, Mapping) or given.get("disable"):
        return None
    test = given.get("test") or ["NONE"]
    if isinstance(test, str):
        command = interpolate(test)
    elif test[0] == "NONE":
        return None
    else:
        words = [interpolate(str(each)) for each in test[1:]]
        command = " ".join(words) if test[0] == "CMD-SHELL" else shlex.join(words)
    return Healthcheck(
        command,
        interval_sec=_duration(given.get("interval", "30s"), where),
        timeout_sec=_duration(given.get("timeout", "30s"), where),
        start_period_sec=_duration(given.get("start_period", "0s"), where),
        start_interval_sec=_duration(given.get("start_interval", "5s"), where),
        retries=int(given.get("retries", 3)),
    )


def _duration(given: Any, where: str) -> float:
    found = _DURATION.findall(str(given))
    if not found:
        raise ConfigError(f"{where}: a duration such as 5s or 1m30s is accepted, got {given!r}")
    return sum(float(number) * _SECONDS[unit] for number, unit in found)


def interpolate(text: str) -> str:
    """A text of a compose file with its variables filled in; one that is not set is empty."""

    def fill(found: re.Match[str]) -> str:
        dollar, plain, name, operator, other = found.groups()
        if dollar:
            return "$"
        value = os.environ.get(plain or name)
        is_set = bool(value) if operator and operator.startswith(":") else value is not None
        if operator and operator.endswith("+"):
            return other if is_set else ""
        return (value or "") if is_set else (other or "") if operator and operator.endswith("-") else ""

    return _VARIABLE.sub(fill, text)
