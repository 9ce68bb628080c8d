"""Registry of sandbox backends."""

from typing import Any

from rollwright.registry import Registry

SANDBOXES: Registry[Any] = Registry(
    "sandboxes",
    "sandbox",
    {"process": "rollwright.sandbox.client:SandboxFactory"},
    protocol="rollwright.sandbox.client:SandboxFactory",
    key="orchestras.TAG.agents.NAME.tools.sandbox",
)
"""A backend is called as `backend(limits, folders=…, allow_unconfined=…)` and has `limits`, `open()` and `close()` like
`SandboxFactory`."""
