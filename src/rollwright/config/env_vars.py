"""Settings from environment variables: above the file, below the command line.

`ROLLWRIGHT__POLICY__SKILL=0.9` is `policy.skill=0.9`: two underscores stand for a dot. Parts in capitals are lowercased,
others are taken unchanged, so that a tag can be named. Variables of other tools, such as the Hugging Face hub's, work, too.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "ROLLWRIGHT__"

_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class EnvironmentSetting:
    """One setting from an environment variable."""

    variable: str
    key: str
    """Dotted path."""
    value: str

    @property
    def override(self) -> str:
        return f"{self.key}={self.value}"


def environment_settings(
    content: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> list[EnvironmentSetting]:
    """Settings from the variables for a file with this content; `ROLLWRIGHT__` variables come last, and win."""
    environment = os.environ if environment is None else environment
    return [*_usual(content, environment), *_own(environment)]


def _own(environment: Mapping[str, str]) -> list[EnvironmentSetting]:
    return [
        EnvironmentSetting(name, ".".join(_part(each) for each in name[len(PREFIX) :].split("__")), value)
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX) and name != PREFIX
    ]


def _part(name: str) -> str:
    return name.lower() if name.isupper() else name


def _usual(content: Mapping[str, Any], environment: Mapping[str, str]) -> list[EnvironmentSetting]:
    found = []
    if environment.get("CPU_ONLY", "").strip().lower() not in _FALSE:
        policy = content.get("policy")
        if isinstance(policy, Mapping) and policy.get("kind") == "torch":
            found.append(EnvironmentSetting("CPU_ONLY", "policy.device", "cpu"))
        if isinstance(content.get("training"), Mapping):
            found.append(EnvironmentSetting("CPU_ONLY", "training.device", "cpu"))
    if environment.get("HF_HUB_DOWNLOAD_TIMEOUT"):
        seconds = environment["HF_HUB_DOWNLOAD_TIMEOUT"]
        found.append(EnvironmentSetting("HF_HUB_DOWNLOAD_TIMEOUT", "downloads.timeout", seconds))
    if environment.get("HF_HUB_OFFLINE", "").strip().lower() not in _FALSE:
        found.append(EnvironmentSetting("HF_HUB_OFFLINE", "downloads.offline", "true"))
    return found
