"""Today's Python sandbox as a backend of boxes: a box with one Python interpreter and no other program.

Its commands are `python -c CODE` and `python -` with the code as input. Variables live on from one command to the next, and
files are in `/tmp`. It needs no image, no bubblewrap and no rights. A box ends with the process that started it.
"""

import ast
import asyncio
import base64
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from rollwright.sandbox.box import (
    HOST_IMAGE,
    BoxCommand,
    BoxError,
    BoxLabel,
    BoxSpec,
    CommandResult,
    Feature,
    Network,
    RunsCommands,
    Snapshot,
)
from rollwright.sandbox.client import AHEAD, Sandbox, SandboxError, SandboxFactory
from rollwright.sandbox.protocol import SandboxLimits

_MAX_OUTPUT = 2 << 20
"""Characters of one command's output; also the largest file that `get` brings, as base64."""

_COMMANDS = "python -c CODE, or python - with the code as input"


class PythonBackend(SandboxFactory):
    """Starts Python sandboxes; as a `SandboxFactory` it also opens them for the tool `python`."""

    name = "process"
    features: frozenset[Feature] = frozenset()

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        folders: Sequence[Path | str] = (),
        allow_unconfined: bool = False,
    ) -> None:
        super().__init__(limits, folders=folders, allow_unconfined=allow_unconfined, ahead=AHEAD)
        self._boxes: set[PythonBox] = set()

    async def find_obstacle(self) -> str:
        try:
            (await self.open()).close()
        except SandboxError as error:
            return str(error)
        return ""

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "") -> "PythonBox":
        refused = {
            "image": spec.image != HOST_IMAGE,
            "folder": bool(spec.folder),
            "network": spec.network is not Network.NONE,
            "mounts": bool(spec.mounts),
            "user": spec.user not in ("", "nobody"),
        }
        for name, is_set in refused.items():
            if is_set:
                raise BoxError(
                    f"box: {name}: the backend process runs Python code only; bubblewrap and podman have it"
                )
        limits = SandboxLimits(
            seconds=spec.seconds,
            memory=spec.memory_mb << 20,
            disk=(spec.disk_mb or 64) << 20,
            threads=spec.processes,
            output=_MAX_OUTPUT,
        )
        try:
            sandbox = await self.open(limits)
        except SandboxError as error:
            raise BoxError(str(error)) from error
        box = PythonBox(sandbox, spec)
        self._boxes.add(box)
        return box

    async def aclose(self) -> None:
        for each in self._boxes:
            await each.stop()
        self._boxes.clear()
        self.close()


class PythonBox(RunsCommands):
    """One Python sandbox as a box."""

    gateway_url = ""

    def __init__(self, sandbox: Sandbox, spec: BoxSpec) -> None:
        self._sandbox = sandbox
        self.spec = spec
        self.id = f"process-{secrets.token_hex(6)}"

    @property
    def has_ended(self) -> bool:
        return self._sandbox.has_ended

    async def execute(self, command: BoxCommand) -> CommandResult:
        if command.user or command.environment or command.workdir:
            raise BoxError(
                "box: the backend process has one user, no environment and one folder; leave them out"
            )
        return await self._evaluate(_code_of(command), command.seconds, command.max_output)

    async def _evaluate(self, code: str, seconds: float | None, max_output: int) -> CommandResult:
        began = time.monotonic()
        try:
            result = await self._sandbox.run(code, seconds)
        except SandboxError as error:
            raise BoxError("the box has ended") from error
        kept, dropped = result.output[:max_output], max(0, len(result.output) - max_output)
        return CommandResult(
            1 if result.error else 0, kept, result.error, result.is_late, dropped, time.monotonic() - began
        )

    async def put(self, source: bytes | Path, path: str) -> None:
        for target, content in await asyncio.to_thread(_files_of, source, path):
            text = base64.b64encode(content).decode()
            code = (
                f"import base64 as _b, os as _o\n_o.makedirs(_o.path.dirname({target!r}), exist_ok=True)\n"
                f"with open({target!r}, 'wb') as _f: _f.write(_b.b64decode({text!r}))\n"
            )
            result = await self._evaluate(code, None, 4096)
            if not result.ok:
                raise BoxError(f"{target}: could not be written: {result.stderr.strip().splitlines()[-1]}")

    async def get(self, path: str, into: Path | None = None) -> bytes:
        code = f"import base64 as _b\nwith open({path!r}, 'rb') as _f: _g = _b.b64encode(_f.read()).decode()\n_g\n"
        result = await self._evaluate(code, None, _MAX_OUTPUT)
        if not result.ok or result.dropped:
            why = result.stderr.strip().splitlines()[-1] if result.stderr else "is too large"
            raise BoxError(f"{path}: {why}")
        try:
            content = base64.b64decode(ast.literal_eval(result.stdout.strip()), validate=True)
        except (ValueError, SyntaxError) as error:
            raise BoxError(f"{path}: could not be read") from error
        if into is None:
            return content
        await asyncio.to_thread(_write_file, content, into, Path(path).name)
        return b""

    async def snapshot(self) -> Snapshot:
        raise BoxError("box: the backend process cannot make a snapshot; bubblewrap can")

    async def fork(self) -> "PythonBox":
        raise BoxError("box: the backend process cannot fork; bubblewrap can")

    async def fork_note(self) -> str:
        return "the backend process cannot fork"

    async def stop(self) -> None:
        self._sandbox.close()


def _files_of(source: bytes | Path, path: str) -> list[tuple[str, bytes]]:
    """Paths in the box and contents of the files that `source` stands for."""
    if isinstance(source, bytes):
        return [(path, source)]
    if not source.is_dir():
        return [(path, source.read_bytes())]
    files = sorted(each for each in source.rglob("*") if each.is_file())
    return [
        (f"{path.rstrip('/')}/{each.relative_to(source).as_posix()}", each.read_bytes()) for each in files
    ]


def _write_file(content: bytes, into: Path, name: str) -> None:
    (into / name if into.is_dir() else into).write_bytes(content)


def _code_of(command: BoxCommand) -> str:
    words = [] if isinstance(command.command, str) else command.command
    if len(words) == 3 and words[0] in ("python", "python3") and words[1] == "-c":
        return words[2]
    if len(words) == 2 and words[0] in ("python", "python3") and words[1] == "-":
        return command.stdin.decode(errors="replace")
    raise BoxError(f"box: the backend process runs Python code only; accepted: {_COMMANDS}")
