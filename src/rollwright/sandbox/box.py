"""The protocol of boxes: a box is a sandbox that belongs to one attempt and runs commands.

Always true of every backend:
- A box has a `BoxLabel` that says whose it is. It ends by `stop`, when its process ends in whatever way, or when its lease is
  not renewed; then its processes, mounts, control groups and files are gone (`rollwright.sandbox.leases`).
- A command that fails is a result, never an exception. `BoxError` means that the box itself cannot do what was asked.
- Files written in a box reach nothing outside it. `get` returns bytes that a hostile program may have written.

What a backend cannot do is in its `features`, and asking for it raises a `BoxError` that names the backends that can.
"""

from abc import abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import msgspec

from rollwright.errors import ConfigError, RollwrightError

HOST_IMAGE = "host"
"""The image that consists of this machine's own programs, read-only, without its files."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BoxError(RollwrightError):
    """A box cannot be started, has ended, or cannot do what was asked; no fault of the command in it."""


class Network(StrEnum):
    """What a box may reach."""

    NONE = "none"
    """Nothing but its own loopback."""
    GATEWAY = "gateway"
    """The gateway of its own attempt, at an address on its loopback."""
    ALLOWLIST = "allowlist"
    """Named hosts, through a proxy on its loopback that the usual variables name."""
    PUBLIC = "public"
    """Every public address; with bubblewrap through such a proxy, too."""


class BoxMount(msgspec.Struct, frozen=True):
    """A folder or socket of this machine that is visible in the box."""

    source: str
    path: str
    read_only: bool = True


class BoxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a box is made of and what it may use."""

    image: str = HOST_IMAGE
    """`host`, the name or digest of an image in the store (`rollwright images`), or a name that the backend knows."""
    folder: str = ""
    """Folder with an unpacked root file system, in place of an image; it is not changed."""
    user: str = ""
    """Name or number of the user that runs commands; empty: the image's own, else root."""
    workdir: str = ""
    """Empty: the image's own, else `/`."""
    environment: Mapping[str, str] = {}
    network: Network = Network.NONE
    allowed_hosts: tuple[str, ...] = ()
    """Hosts of `allowlist`; `*.example.org` stands for all hosts below `example.org`."""
    memory_mb: int = 2048
    cpus: float = 0.0
    """0: no limit."""
    processes: int = 512
    """Processes and threads together."""
    disk_mb: int = 0
    """Bytes that files written in the box may take together; 0: no limit but the machine's disk. With bubblewrap they are
    kept in memory if there is a limit."""
    seconds: float = 600.0
    """Time limit of a command that names none."""
    hostname: str = "box"
    mounts: tuple[BoxMount, ...] = ()
    hosts: tuple[str, ...] = ()
    """Further names under which the box finds itself, and boxes that share its network."""
    network_of: str = ""
    """Id of a running box whose network this one shares, as services of one task do; empty: it has its own."""
    layers: tuple[str, ...] = ()
    """Folders of a snapshot over the image, the latest first; set by `Snapshot.spec`."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "processes", "seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"box: {name} must be more than 0, got {getattr(self, name)}")
        for name in ("cpus", "disk_mb"):
            if getattr(self, name) < 0:
                raise ConfigError(f"box: {name} must not be negative, got {getattr(self, name)}")
        if self.allowed_hosts and self.network is not Network.ALLOWLIST:
            raise ConfigError(f"box: allowed_hosts is for the network allowlist, not for {self.network}")
        for each in self.mounts:
            if not each.path.startswith("/") or each.path.rstrip("/") == "" or ".." in each.path.split("/"):
                raise ConfigError(f"box: a mount needs an absolute path below /, got {each.path!r}")

    def replace(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)

    @property
    def key(self) -> bytes:
        """Equal for specs that make equal boxes."""
        return msgspec.json.encode(self, order="deterministic")


class BoxNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs of the box that it works in, whoever describes the box."""

    mounts: tuple[BoxMount, ...] = ()
    gateway: bool = False
    """Whether it must reach the gateway of its attempt."""
    only_gateway: bool = False
    """Whether it may reach nothing else, whatever the spec allows."""

    def apply(self, spec: BoxSpec) -> BoxSpec:
        network = spec.network
        if self.only_gateway or (self.gateway and network is Network.NONE):
            network = Network.GATEWAY
        return spec.replace(
            mounts=(*spec.mounts, *self.mounts),
            network=network,
            allowed_hosts=spec.allowed_hosts if network is Network.ALLOWLIST else (),
        )


NO_NEEDS = BoxNeeds()


class BoxLabel(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a box. Boxes are found by it, and never by a name that others could use."""

    rollout_id: str = ""
    attempt_id: str = ""
    worker: str = ""
    lease_seconds: float = 30.0
    """A box whose lease was not renewed for so long is removed."""

    @property
    def is_assigned(self) -> bool:
        """Whether it names an owner; a box without one was started ahead."""
        return bool(self.rollout_id or self.attempt_id or self.worker)


class CommandResult(msgspec.Struct, frozen=True):
    """How a command ended, and what it wrote."""

    exit_code: int
    """128 + N for a command that was ended by signal N, as a shell says it."""
    stdout: str = ""
    stderr: str = ""
    is_late: bool = False
    """Whether the time limit ended it."""
    dropped: int = 0
    """Bytes in the middle of the output that were not kept."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.is_late


class BoxCommand(msgspec.Struct, frozen=True, kw_only=True):
    """One command to be run in a box."""

    command: str | list[str]
    """Words, or a text for the box's shell."""
    seconds: float | None = None
    """Time limit; unset: that of the box."""
    user: str | None = None
    """Unset, here and below: the box's own."""
    environment: Mapping[str, str] = {}
    """Added to the box's own."""
    workdir: str | None = None
    stdin: bytes = b""
    max_output: int = 1 << 20
    """Bytes that are kept of the output, and as many of the errors."""

    def __post_init__(self) -> None:
        words = [self.command] if isinstance(self.command, str) else self.command
        if not words or not all(isinstance(each, str) and "\0" not in each for each in words):
            raise BoxError("a command is a text or a list of words, without NUL characters")


class RunsCommands(Protocol):
    """Base of all boxes: `run`, in front of what a backend does with the command."""

    async def run(
        self,
        command: str | list[str],
        *,
        seconds: float | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        max_output: int = 1 << 20,
    ) -> CommandResult:
        """Runs a command to its end; a text is given to `bash -c`, or to `sh -c` where there is no bash."""
        return await self.execute(
            BoxCommand(
                command=command,
                seconds=seconds,
                user=user,
                environment=environment or {},
                workdir=workdir,
                stdin=stdin,
                max_output=max_output,
            )
        )

    @abstractmethod
    async def execute(self, command: BoxCommand) -> CommandResult: ...


class Feature(StrEnum):
    """What not every backend can do."""

    COMMANDS = "commands"
    """Runs any program, not only Python code."""
    FORK = "fork"
    SNAPSHOT = "snapshot"
    IMAGES = "images"
    GATEWAY = "gateway"
    NETWORK = "network"
    """Reaches other hosts where its spec allows it."""
    MOUNTS = "mounts"
    REMOTE = "remote"
    """Its boxes take no memory and no cores of this machine."""


class Snapshot(Protocol):
    """The files of a box at one moment."""

    @property
    def spec(self) -> BoxSpec:
        """Starts a box with these files."""
        ...

    async def delete(self) -> None: ...


class Box(RunsCommands, Protocol):
    """One running box. Commands may run at the same time."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> BoxSpec: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def gateway_url(self) -> str:
        """Address of the gateway inside the box, without a path; empty: it has none."""
        ...

    async def put(self, source: bytes | Path, path: str) -> None:
        """Writes a file, or copies a file or the content of a folder of this machine, to `path` in the box."""
        ...

    async def get(self, path: str, into: Path | None = None) -> bytes:
        """The bytes of a file; with `into`, copies a file or the content of a folder to that path of this machine."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def fork(self) -> "Box":
        """Another box with the same files. Processes are not copied: `fork_note` says so when there are any."""
        ...

    async def fork_note(self) -> str:
        """What a fork made now would lack; empty: nothing."""
        ...

    async def stop(self) -> None:
        """Ends the box with everything in it; without effect if it has ended."""
        ...


@runtime_checkable
class AssignableBox(Protocol):
    """A box that can be started ahead, and given to an attempt later; otherwise like any `Box`."""

    async def assign(self, label: BoxLabel, gateway: str) -> None:
        """Gives the box its owner, and the ways out that its spec allows."""
        ...


@runtime_checkable
class SwitchableBox(Protocol):
    """A box whose network can be changed while it runs; otherwise like any `Box`."""

    async def change_network(self, network: Network, allowed_hosts: tuple[str, ...] = ()) -> None:
        """Closes the ways out that it has, and opens others; commands that run keep their environment variables."""
        ...


class BoxBackend(Protocol):
    """Starts boxes of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> frozenset[Feature]: ...

    async def find_obstacle(self) -> str:
        """Why boxes cannot run on this machine, in one line that says what to do; empty: they can."""
        ...

    async def start(self, spec: BoxSpec, label: BoxLabel, *, gateway: str = "") -> Box:
        """Starts a box. `gateway`: URL of the attempt's gateway, for the network `gateway`."""
        ...

    async def aclose(self) -> None:
        """Ends all boxes that it has started."""
        ...
