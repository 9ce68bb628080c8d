"""Registry of sandbox backends, and the settings of an attempt's box."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rollwright.registry import Registry
from rollwright.sandbox.box import HOST_IMAGE, BoxSpec, Network
from rollwright.settings import Settings

SANDBOXES: Registry[Any] = Registry(
    "sandboxes",
    "sandbox",
    {
        "process": "rollwright.sandbox.python_box:PythonBackend",
        "bubblewrap": "rollwright.sandbox.bubblewrap:BubblewrapBackend",
        "podman": "rollwright.sandbox.containers:ContainerBackend",
        "docker": "rollwright.sandbox.containers:DockerBackend",
        "kubernetes": "rollwright.sandbox.kubernetes_box:KubernetesBackend",
        "e2b": "rollwright.sandbox.e2b_box:E2BBackend",
    },
    protocol="rollwright.sandbox.box:BoxBackend",
    key="orchestras.TAG.agents.NAME.tools.sandbox",
)
"""A backend of boxes is a `BoxBackend`. One for the tool `python` is called as `backend(limits, folders=…,
allow_unconfined=…)` and has `limits`, `open()` and `close()` like `SandboxFactory`; `process` is both."""

AUTO = "auto"
"""Name that stands for the first of `BOX_BACKENDS` that runs on this machine."""

BOX_BACKENDS = ("bubblewrap", "podman", "docker")
"""Built-in backends that run any program, in the order in which they are tried."""


class BoxConfig(Settings):
    """The box of each attempt at a tag: a sandbox for its tools, rewards and agent. See [boxes](boxes.md)."""

    backend: str = AUTO
    """`auto`: bubblewrap, podman or docker, the first that runs here; a kind, or your own as `module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the backend itself, such as `namespace` of `kubernetes`."""
    image: str = HOST_IMAGE
    """`host`: this machine's programs, read-only, without its files; else an image of `rollwright images`."""
    root_folder: str = ""
    """Folder with an unpacked root file system, in place of an image."""
    user: str = ""
    """User that runs commands. Unset: the image's own, else root."""
    workdir: str = ""
    """Folder in which commands run. Unset: the image's own, else `/`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables."""
    network: Literal["none", "gateway", "allowlist", "public"] = "none"
    """What it may reach: nothing, the gateway of its attempt, `allowed_hosts`, or every public address."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts of the network `allowlist`; `*.example.org` stands for all below `example.org`."""
    memory_mb: PositiveInt = 2048
    """Memory of everything in the box."""
    cpus: NonNegativeFloat = 0.0
    """Cores; 0: no limit."""
    processes: PositiveInt = 512
    """Processes and threads in the box."""
    disk_mb: NonNegativeInt = 0
    """Size of the files that are written in the box; 0: no limit."""
    seconds: PositiveFloat = 600.0
    """Time limit of a command."""
    lease_seconds: Annotated[float, Field(ge=1)] = 30.0
    """A box is removed when its worker has not renewed its lease for so long."""
    warm: NonNegativeInt = 0
    """Boxes that are kept ready in each worker."""

    @model_validator(mode="after")
    def _check(self) -> "BoxConfig":
        if self.allowed_hosts and self.network != "allowlist":
            raise ValueError(f"allowed_hosts: is for the network allowlist, not for {self.network}")
        if self.options and self.backend == AUTO:
            raise ValueError(
                f"options: name the backend that they are for; known: {', '.join(SANDBOXES.names())}"
            )
        return self

    def spec(self) -> BoxSpec:
        return BoxSpec(
            image=self.image,
            folder=self.root_folder,
            user=self.user,
            workdir=self.workdir,
            environment=dict(self.environment),
            network=Network(self.network),
            allowed_hosts=self.allowed_hosts,
            memory_mb=self.memory_mb,
            cpus=self.cpus,
            processes=self.processes,
            disk_mb=self.disk_mb,
            seconds=self.seconds,
        )
