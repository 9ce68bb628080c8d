"""Adapter for Inspect's tasks: their solver plays a sample through the run's gateway, their scorer is the reward.

A level is a sample: the seed modulo the number of samples. Whatever Inspect reports as an error of the sample (a solver that
raises, a sandbox that cannot start, a scorer that fails) is a failure of the attempt.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.envs.foreign import PROGRAMS, ForeignEpisodeEnv, ForeignPackage
from rollwright.errors import ConfigError

PACKAGE = ForeignPackage(
    "inspect_ai", PROGRAMS / "inspect_task.py", ("inspect-ai==0.3.285", "openai>=2.45,<4")
)


class InspectTask(ForeignEpisodeEnv):
    """One sample of a task."""

    episodes_per_process = 1

    def __init__(
        self,
        task: str,
        *,
        args: Mapping[str, Any] | None = None,
        scorer: str | None = None,
        success_at: float = 1.0,
    ) -> None:
        """`task`: `FILE.py@TASK`, or `PACKAGE/TASK` of a package that its interpreter has. `args`: of the task's function.
        `scorer`: the score that is the reward, where there are several; unset, the first. `success_at`: reward from which on
        a sample counts as solved."""
        file, at, name = task.partition("@")
        if file.endswith(".py"):
            if not Path(file).is_file():
                raise ConfigError(f"there is no file {file}")
            task = f"{Path(file).absolute()}{at}{name}"
        options = {"task": task, "args": dict(args or {}), "scorer": scorer}
        said = PACKAGE.describe(options)
        super().__init__(PACKAGE, options, success_at=success_at)
        self.samples: int = said["samples"]
        """Samples of the task; levels beyond begin again."""
