"""An agent on the command line plays a task in the attempt's box.

Always true: the program runs in the box and nowhere else, with a home folder of its own; by default it reaches the gateway of
its attempt and nothing else. A program that ends with another exit code than 0, or takes too long, is a failure of the attempt
and never a reward; one that ran out of room in the sequence ends the episode. The end of its output is what it returns.
"""

import asyncio
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollwright.agents import EpisodeFailure, OutOfRoom, failed, timed_out
from rollwright.agents.terminal import instruction_of
from rollwright.gateway import Access, CaptureRules
from rollwright.rollout.agent_session import AgentSession
from rollwright.rollout.cli_agents.installing import Installation, install
from rollwright.rollout.cli_agents.recipe import (
    HOME,
    MODEL,
    PLACE,
    PROGRAM_FOLDER,
    SIDE_MODEL,
    CliRecipe,
    fill,
)
from rollwright.rollout.command import TASK_FILE, api_variables
from rollwright.sandbox.attempts import current_boxes
from rollwright.sandbox.box import Box, BoxError, BoxNeeds, CommandResult
from rollwright.trajectory import Boundary, ErrorRecord

AGENT_SECONDS = 1800.0
"""Time limit of an agent whose task and settings name none."""

_CANNOT_RUN = {
    126: "cannot be executed in this image",
    127: "was not found, or this image lacks its libraries: it needs those of glibc",
}
_SHOWN = 300
"""Characters of a failed program's last line in the error."""


@dataclass(frozen=True)
class BoxLimits:
    """Limits of a program that plays a task in a box."""

    timeout: float | None
    """Seconds; `None`: those of the task."""
    output_bytes: int


@dataclass(frozen=True)
class CliAgent:
    """Plays tasks by a recipe."""

    recipe: CliRecipe
    limits: BoxLimits
    arguments: tuple[str, ...] = ()
    """Further words behind those of the recipe."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables, which win over those of the recipe."""
    prompt: str | None = None
    """How the task is told, with its fields in braces; `None`: its instruction."""
    only_gateway: bool = True

    @property
    def box_needs(self) -> BoxNeeds:
        mounts = () if self.recipe.packages is None else (Installation.of(self.recipe).mount,)
        return BoxNeeds(mounts=mounts, gateway=True, only_gateway=self.only_gateway)

    def rules(self, given: CaptureRules) -> CaptureRules:
        """The rules of the run with those of the recipe."""
        return self.recipe.rules(given)

    async def prepare(self) -> None:
        """Installs the program on this machine, unless it is there."""
        await asyncio.to_thread(install, self.recipe)

    async def __call__(self, task: Any, session: AgentSession) -> str:
        """Runs the program to its end; returns the end of its output."""
        told = instruction_of(task) if self.prompt is None else self.prompt.format_map(task)
        values = _values(await _box_access(session))
        environment = {
            "HOME": HOME,
            **self._filled(self.recipe.environment, values),
            **self.environment,
        }
        files = {f"{HOME}/{name}": text for name, text in self._filled(self.recipe.files, values).items()}
        await _write_files(files)
        words = [*self._program(values), *self.arguments]
        by_argument = self.recipe.instruction == "argument"
        return await run_in_box(
            [*words, told] if by_argument else words,
            b"" if by_argument else told.encode(),
            environment,
            self.limits,
            session,
            name=self.recipe.name,
        )

    def _program(self, values: Mapping[str, str]) -> list[str]:
        first, *rest = (fill(word, values, self.recipe.name) for word in self.recipe.command)
        if self.recipe.packages is not None and "/" in first and not first.startswith("/"):
            first = Installation.of(self.recipe).program(first)
        return [first, *rest]

    def _filled(self, texts: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
        return {name: fill(text, values, f"{self.recipe.name}: {name}") for name, text in texts.items()}


@dataclass(frozen=True)
class BoxCommandAgent:
    """Plays tasks by a command of one's own in the box. Words that name files in `folder` are copied into the box."""

    command: tuple[str, ...]
    limits: BoxLimits
    folder: Path
    box_needs = BoxNeeds(gateway=True)

    async def __call__(self, task: Any, session: AgentSession) -> str:
        access = await _box_access(session)
        box = await session.box()
        words = []
        for word in self.command:
            file = self.folder / word
            if "/" not in word and file.is_file():
                word = f"{HOME}/{word}"
                await box.put(file, word)
            words.append(word)
        await _write_files({f"{HOME}/{TASK_FILE}": msgspec.json.encode(task, enc_hook=str).decode()})
        environment = {"HOME": HOME, "ROLLWRIGHT_TASK": f"{HOME}/{TASK_FILE}", **api_variables(access)}
        return await run_in_box(
            words, b"", environment, self.limits, session, name=os.path.basename(words[0])
        )


async def run_in_box(
    words: list[str],
    stdin: bytes,
    environment: Mapping[str, str],
    limits: BoxLimits,
    session: AgentSession,
    *,
    name: str,
) -> str:
    """Runs a program that plays the task in the attempt's box; returns the end of its output."""
    boxes, box = current_boxes(), await session.box()
    seconds = limits.timeout or boxes.agent_seconds or AGENT_SECONDS
    try:
        # Of the output `run` keeps the begin and the end, half of each.
        result = await box.run(
            words,
            seconds=seconds,
            user=boxes.agent_user,
            environment=environment,
            stdin=stdin,
            max_output=2 * limits.output_bytes,
        )
    except BoxError as error:
        raise failed(Boundary.AGENT, error, len(session.trajectory.turns)) from error
    if result.ok:
        return result.stdout.strip()[-limits.output_bytes :]
    recorder, turns = session.recorder, len(session.trajectory.turns)
    if recorder is not None and recorder.out_of_room:
        raise OutOfRoom(f"{name} ended with {result.exit_code} when a prompt did not fit")
    if result.is_late:
        message = f"{name} did not end within {seconds:g} s{_last_line(result)}"
        raise timed_out(Boundary.AGENT, message, turns)
    why = _CANNOT_RUN.get(result.exit_code, "") if not turns else ""
    message = f"{name}: exit code {result.exit_code}{f' ({why})' if why else ''}{_last_line(result)}"
    raise EpisodeFailure(ErrorRecord(Boundary.AGENT, "command", message, turns))


async def _box_access(session: AgentSession) -> Access:
    try:
        return await session.box_access()
    except BoxError as error:
        raise failed(Boundary.AGENT, error, 0) from error


async def _write_files(files: Mapping[str, str]) -> None:
    """Makes the home folder of an agent with these files in it."""
    box: Box = await current_boxes().box()
    try:
        for path, text in files.items():
            await box.put(text.encode(), path)
        # The image says which user runs it, and nobody else is in the box.
        made = await box.run(f"mkdir -p {HOME} && chmod -R a+rwX {HOME}", user="0")
    except BoxError as error:
        raise failed(Boundary.AGENT, error, 0) from error
    if not made.ok:
        told = BoxError(f"{PLACE}: {made.stderr.strip()[-_SHOWN:]}")
        raise failed(Boundary.AGENT, told, 0) from told


def _values(access: Access) -> dict[str, str]:
    return {
        "base_url": access.base_url,
        "root_url": access.base_url.removesuffix("/v1"),
        "api_key": access.api_key,
        "model": MODEL,
        "side_model": SIDE_MODEL,
        "home": HOME,
        "program_folder": PROGRAM_FOLDER,
    }


def _last_line(result: CommandResult) -> str:
    """The last line that names an error, else the last one, for an error line."""
    for text in (result.stderr, result.stdout):
        if lines := [each.strip() for each in text.splitlines() if each.strip()]:
            named = [each for each in lines if "error" in each.lower()]
            return f": {(named or lines)[-1][:_SHOWN]}"
    return ""
