"""Registry of sandbox backends."""

from typing import Any

from rollwright.registry import Registry

SANDBOXES: Registry[Any] = Registry(
    "sandboxes",
    "sandbox",
    {
        "process": "rollwright.sandbox.python_box:PythonBackend",
        "bubblewrap": "rollwright.sandbox.bubblewrap:BubblewrapBackend",
    },
    protocol="rollwright.sandbox.box:BoxBackend",
    key="orchestras.TAG.agents.NAME.tools.sandbox",
)
"""A backend of boxes is a `BoxBackend`. One for the tool `python` is called as `backend(limits, folders=…,
allow_unconfined=…)` and has `limits`, `open()` and `close()` like `SandboxFactory`; `process` is both."""

AUTO = "auto"
"""Name that stands for the first of `BOX_BACKENDS` that runs on this machine."""

BOX_BACKENDS = ("bubblewrap",)
"""Built-in backends that run any program, in the order in which they are tried."""
