"""The Python sandbox as a tool.

With state, a rollout keeps one sandbox from its first call to its end, leased from a pool; names live from one call to
the next, and a sandbox that ended (its code crashed, or did not stop in time) is replaced at the next call, which the
model is told. Without state every call gets a new one.
"""

from collections.abc import Sequence
from pathlib import Path

from rollwright.sandbox.client import Sandbox, SandboxError, SandboxFactory
from rollwright.sandbox.protocol import ExecutionResult, SandboxLimits
from rollwright.sandbox.settings import SANDBOXES
from rollwright.tools.context import ToolContext
from rollwright.tools.pool import Key, LeaseOver, Pool
from rollwright.tools.result import ToolFailure
from rollwright.tools.settings import PythonToolConfig
from rollwright.tools.tool import FunctionTool, Tool

_STATE_LOST = "[the interpreter was restarted: variables and files are gone]"
_ENDED_BEFORE = ExecutionResult(
    "", "SystemError: not run: another call of the same turn ended the interpreter", has_ended=True
)
_TIME_BESIDE = 90.0
"""Seconds for starting a sandbox, beside those of the code."""


class PythonSandbox:
    """Gives out the tool; `close` ends all sandboxes."""

    def __init__(
        self,
        settings: PythonToolConfig | None = None,
        *,
        folders: Sequence[Path | str] = (),
    ) -> None:
        """`folders`: what code in a sandbox may read beside the standard library, see `SandboxFactory`."""
        self.settings = settings or PythonToolConfig(kind="python")
        limits = SandboxLimits(seconds=self.settings.seconds, memory=self.settings.memory_mb << 20)
        self._sandboxes: SandboxFactory = SANDBOXES.make(
            self.settings.sandbox, limits, folders=folders, allow_unconfined=self.settings.allow_unconfined
        )
        self.limits = self._sandboxes.limits
        self.pool: Pool[Sandbox] = Pool(self._open, size=self.settings.size, close=_close)

    async def check(self) -> None:
        """Whether this machine can lock code in: a `SandboxError` says what is missing."""
        (await self._sandboxes.open()).close()

    def tool(self, name: str = "python", *, stateful: bool | None = None) -> Tool:
        """The tool for a toolbox. `stateful`: whether a rollout keeps one sandbox; unset: as the settings say."""
        stateful = self.settings.stateful if stateful is None else stateful

        async def python_with_state(code: str, context: ToolContext) -> str:
            """Runs Python code and returns what it prints, and the value of its last line. Variables live on in later
            calls. Only the standard library is there; there is no network.

            Args:
                code: The program.
            """
            try:
                sandbox = await context.lease(self.pool)
                ran = await sandbox.run(code)
            except (SandboxError, LeaseOver):
                return told(_ENDED_BEFORE)
            if ran.has_ended:
                context.give_back(self.pool)
            return told(ran)

        async def python(code: str) -> str:
            """Runs a Python program and returns what it prints, and the value of its last line. Only the standard library
            is there; there is no network.

            Args:
                code: The program.
            """
            lease = await self.pool.acquire()
            try:
                return told(await lease.resource.run(code), has_state=False)
            finally:
                lease.release()

        function = python_with_state if stateful else python
        return FunctionTool(function, name, None, time_limit=self.limits.seconds + _TIME_BESIDE)

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


def told(ran: ExecutionResult, *, has_state: bool = True) -> str:
    """What the model sees of an execution."""
    parts = [ran.output.rstrip("\n"), ran.error, _STATE_LOST if ran.has_ended and has_state else ""]
    return "\n".join(part for part in parts if part) or "[no output]"
