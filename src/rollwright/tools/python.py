"""The Python sandbox as a tool.

With state, a rollout keeps one sandbox from its first call to its end, leased from a pool; names live from one call to
the next, and a sandbox that ended (its code crashed, or did not stop in time) is replaced at the next call, which the
model is told. Without state every call gets a new one.
"""

from collections.abc import Sequence
from pathlib import Path

from rollwright.sandbox.client import Nursery, Sandbox, SandboxError
from rollwright.sandbox.limits import SandboxLimits
from rollwright.sandbox.messages import Ran
from rollwright.tools.context import ToolContext
from rollwright.tools.pool import Key, LeaseOver, Pool
from rollwright.tools.result import ToolFailure
from rollwright.tools.tool import FunctionTool, Tool

_STATE_LOST = "[the interpreter was restarted: variables and files are gone]"
_ENDED_BEFORE = Ran(
    "", "SystemError: not run: another call of the same turn ended the interpreter", has_ended=True
)
_TIME_BESIDE = 90.0
"""Seconds for starting a sandbox, beside those of the code."""


class PythonSandbox:
    """Gives out the tool; `close` ends all sandboxes."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        size: int = 64,
        folders: Sequence[Path | str] = (),
        allow_unconfined: bool = False,
    ) -> None:
        """At most `size` sandboxes at a time; the others wait. For the rest see `Nursery`."""
        self._nursery = Nursery(limits, folders=folders, allow_unconfined=allow_unconfined)
        self.limits = self._nursery.limits
        self.pool: Pool[Sandbox] = Pool(self._open, size=size, close=_close)

    async def check(self) -> None:
        """Whether this machine can lock code in: a `SandboxError` says what is missing."""
        (await self._nursery.open()).close()

    def tool(self, name: str = "python", *, stateful: bool = True) -> Tool:
        """The tool for a toolbox."""

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
        self._nursery.close()

    async def _open(self, key: Key) -> Sandbox:
        try:
            return await self._nursery.open()
        except SandboxError as error:
            raise ToolFailure(str(error)) from error


async def _close(sandbox: Sandbox) -> None:
    sandbox.close()


def told(ran: Ran, *, has_state: bool = True) -> str:
    """What the model sees of an execution."""
    parts = [ran.output.rstrip("\n"), ran.error, _STATE_LOST if ran.has_ended and has_state else ""]
    return "\n".join(part for part in parts if part) or "[no output]"
