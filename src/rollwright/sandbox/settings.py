"""The plug point of sandboxes."""

from typing import Any

from rollwright.registry import Registry

SANDBOXES: Registry[Any] = Registry(
    "sandboxes",
    "sandbox",
    {"process": "rollwright.sandbox.client:Nursery"},
    protocol="rollwright.sandbox.client:Nursery",
    key="orchestras.TAG.agents.NAME.tools.sandbox",
)
"""Made as `sandboxes(limits, folders=…, allow_unconfined=…)`; has `limits`, `open()` and `close()` as `Nursery` has."""
