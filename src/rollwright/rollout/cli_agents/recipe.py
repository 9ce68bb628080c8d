"""A recipe: all that is known about one agent on the command line, as plain data.

Texts of a recipe may have placeholders, written as in a shell: `$base_url` (address of the model's API, which ends in `/v1`),
`$root_url` (the same without the version), `$api_key`, `$model` (the name that is trained), `$side_model` (a name for calls
beside the task, which are not trained), `$home` (the agent's own home folder) and `$program_folder` (where it is installed,
in the box). `$$` is a dollar sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Literal

from rollwright.errors import ConfigError
from rollwright.gateway import CaptureRules
from rollwright.gateway.settings import CallRule

MODEL, SIDE_MODEL = "policy", "side"
"""Names under which an agent asks for the model: for its work, and for calls beside it, such as titles."""

PLACE = "/opt/rollwright"
"""Folder in a box that holds the installed agent and its home; the same in every box, so that prompts are the same, too."""

HOME = f"{PLACE}/home"
PROGRAM_FOLDER = f"{PLACE}/agent"


@dataclass(frozen=True)
class Packages:
    """What is installed, with exact versions."""

    source: Literal["npm", "pip"]
    names: tuple[str, ...]
    """Requirements in the words of the source: `name@1.2.3` or `name==1.2.3`."""
    runtime: Literal["", "node", "python"] = ""
    """Interpreter of this machine that is installed beside them, for boxes that have none."""


@dataclass(frozen=True)
class CliRecipe:
    """One agent on the command line."""

    name: str
    packages: Packages | None
    """`None`: the program is in the box's image."""
    command: tuple[str, ...]
    """Program and arguments. The first word with a slash in it is a path below the installed folder, with `*` as a wildcard."""
    instruction: Literal["stdin", "argument"] = "stdin"
    """How the program is told what to do; an argument comes last."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that are written into its home before it starts, by their path below the home."""
    side_calls: tuple[CallRule, ...] = (CallRule(model=SIDE_MODEL),)
    """Calls beside the task, which are answered and not trained."""
    strip: tuple[str, ...] = ()
    """Regular expressions for what changes from call to call or from rollout to rollout in its system prompts and means
    nothing to the model; it is taken out, so that prompts extend each other."""

    def rules(self, given: CaptureRules) -> CaptureRules:
        """The rules of a run with those of the recipe behind them."""
        return given.model_copy(
            update={"calls": (*given.calls, *self.side_calls), "strip": (*given.strip, *self.strip)}
        )


def fill(text: str, values: Mapping[str, str], where: str) -> str:
    """The text with its placeholders filled in."""
    try:
        return Template(text).substitute(values)
    except (KeyError, ValueError) as error:
        known = ", ".join(f"${each}" for each in sorted(values))
        raise ConfigError(f"{where}: unknown placeholder {error}; accepted: {known}, and $$") from None
