"""The Python sandbox as a tool.

With state, a rollout leases one sandbox from a pool from its first call to its end. Variables persist between calls; a
sandbox that ended (its code crashed, or exceeded its time limit) is replaced at the next call, and the result tells the
model. Without state every call gets a new sandbox.
"""

from collections.abc import Sequence
from pathlib import Path

from rollwright.sandbox.client import Sandbox, SandboxError, SandboxFactory
from rollwright.sandbox.protocol import ExecutionResult, SandboxLimits
from rollwright.sandbox.settings import SANDBOXES
from rollwright.tools.context import ToolContext
from rollwright.tools.pool import Key, LeaseEnded, Pool
from rollwright.tools.result import ToolFailure
from rollwright.tools.settings import PythonToolConfig
from rollwright.tools.tool import FunctionTool, Tool

_STATE_LOST = "[the interpreter was restarted: variables and files are gone]"
_ENDED_BY_SIBLING = ExecutionResult(
    "", "SystemError: not run: another call of the same turn ended the interpreter", has_ended=True
)
_START_SECONDS = 90.0
"""Time for starting a sandbox, in addition to the time limit of the code."""


class PythonSandbox:
    """Pool of sandboxes and the tool that uses it; `close` ends all sandboxes."""

    def __init__(
        self,
        settings: PythonToolConfig | None = None,
        *,
        folders: Sequence[Path | str] = (),
    ) -> None:
        """`folders`: directories that code may read beside the standard library, see `SandboxFactory`."""
        self.settings = settings or PythonToolConfig(kind="python")
        limits = SandboxLimits(seconds=self.settings.seconds, memory=self.settings.memory_mb << 20)
        self._sandboxes: SandboxFactory = SANDBOXES.make(
            self.settings.sandbox, limits, folders=folders, allow_unconfined=self.settings.allow_unconfined
        )
        self.limits = self._sandboxes.limits
        self.pool: Pool[Sandbox] = Pool(self._open, size=self.settings.size, close=_close)

    async def check(self) -> None:
        """Raises a `SandboxError` that names the missing feature if this machine cannot confine code."""
        (await self._sandboxes.open()).close()

    def tool(self, name: str = "python", *, stateful: bool | None = None) -> Tool:
        """Creates the tool. `stateful`: whether a rollout keeps one sandbox; `None`: as in the settings."""
        stateful = self.settings.stateful if stateful is None else stateful

        async def python_with_state(code: str, context: ToolContext) -> str:
            """Runs Python code and returns what it prints, and the value of its last line. Variables live on in later
            calls. Only the standard library is there; there is no network.

            Args:
                code: The program.
            """
            try:
                sandbox = await context.lease(self.pool)
                result = await sandbox.run(code)
            except (SandboxError, LeaseEnded):
                return format_result(_ENDED_BY_SIBLING)
            if result.has_ended:
                context.release(self.pool)
            return format_result(result)

        async def python(code: str) -> str:
            """Runs a Python program and returns what it prints, and the value of its last line. Only the standard library
            is there; there is no network.

            Args:
                code: The program.
            """
            lease = await self.pool.acquire()
            try:
                return format_result(await lease.resource.run(code), has_state=False)
            finally:
                lease.release()

        function = python_with_state if stateful else python
        return FunctionTool(function, name, None, time_limit=self.limits.seconds + _START_SECONDS)

    async def close(self) -> None:
        await self.pool.close()
        self._sandboxes.close()

    async def _open(self, key: Key) -> Sandbox:
        try:
            return await self._sandboxes.open()
        except SandboxError as error:
            raise ToolFailure(str(error)) from error


async def _close(sandbox: Sandbox) -> None:
    sandbox.close()


def format_result(result: ExecutionResult, *, has_state: bool = True) -> str:
    """The text that the model sees of an execution."""
    parts = [result.output.rstrip("\n"), result.error, _STATE_LOST if result.has_ended and has_state else ""]
    return "\n".join(part for part in parts if part) or "[no output]"
