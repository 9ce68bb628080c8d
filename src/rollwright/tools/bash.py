"""A shell in the attempt's box as a tool."""

from rollwright.sandbox.box import BoxError
from rollwright.tools.context import ToolContext
from rollwright.tools.result import ToolFailure
from rollwright.tools.settings import BashToolConfig
from rollwright.tools.tool import FunctionTool, Tool

_START_SECONDS = 600.0
"""Time for waiting for a box and starting it, in addition to the time limit of the command."""


def bash_tool(settings: BashToolConfig | None = None) -> Tool:
    """A tool that runs commands in the box of the attempt (`custom_envs.TAG.box`)."""
    settings = settings or BashToolConfig(kind="bash")

    async def bash(command: str, context: ToolContext) -> str:
        """Runs a command in a Linux shell and returns its output. Files stay from one command to the next.

        Args:
            command: The command, for bash.
        """
        try:
            box = await context.box()
            result = await box.run(command, seconds=settings.seconds, max_output=2 * settings.max_output)
        except BoxError as error:
            raise ToolFailure(str(error)) from error
        texts = [each.rstrip("\n") for each in (result.stdout, result.stderr) if each.strip()]
        if result.is_late:
            texts.append(f"[stopped after {settings.seconds:g} s]")
        elif result.exit_code:
            texts.append(f"[exit code {result.exit_code}]")
        return "\n".join(texts) or "[no output]"

    return FunctionTool(
        bash, None, None, time_limit=settings.seconds + _START_SECONDS, max_length=settings.max_output
    )
