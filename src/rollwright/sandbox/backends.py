"""Which backend runs boxes: the one that is named, or the first of the built-in ones that works on this machine."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollwright.errors import ConfigError
from rollwright.sandbox.box import BoxBackend, BoxError
from rollwright.sandbox.settings import AUTO, BOX_BACKENDS, SANDBOXES

_CHECK_SECONDS = 60.0


def make_backend(name: str, **options: Any) -> BoxBackend:
    """The backend of this name, or of the path `module:name`; nothing is started yet."""
    made = SANDBOXES.make(name, **options)
    if not all(hasattr(made, each) for each in ("start", "find_obstacle", "aclose")):
        raise ConfigError(f"sandbox {name}: has no `start`; it opens Python sandboxes, and no boxes")
    backend: BoxBackend = made
    return backend


async def choose_backend(name: str = AUTO, options: Mapping[str, Any] | None = None) -> BoxBackend:
    """The backend that runs boxes here; a `BoxError` says why none does."""
    if name != AUTO:
        return make_backend(name, **(options or {}))
    why = []
    for each in BOX_BACKENDS:
        backend = make_backend(each)
        obstacle = await check_backend(backend)
        if not obstacle:
            return backend
        await backend.aclose()
        why.append(f"{each}: {obstacle}")
    raise BoxError(f"no backend for boxes runs on this machine: {'; '.join(why)}")


async def check_backend(backend: BoxBackend) -> str:
    """Why a backend does not run here; empty: it does."""
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            return await backend.find_obstacle()
    except TimeoutError:
        return f"gave no answer within {_CHECK_SECONDS:g} s"
    except BoxError as error:
        return str(error)
