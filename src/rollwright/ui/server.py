"""Serves the page until it is stopped.

Invariants: off loopback there is always a token. The server yields to everything else on its machine: it runs at a lower
priority than a trainer beside it.
"""

import asyncio
import contextlib
import ipaddress
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rollwright.http.server import Listener, listening_socket
from rollwright.ui.app import build_app
from rollwright.ui.catalogue import Catalogue

TOKEN_VARIABLE = "ROLLWRIGHT_UI_TOKEN"
"""Environment variable with the token of the page; off loopback one is made if it is not set."""

NICENESS = 10
"""Priority below that of a run on the same machine."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_for(host: str) -> str | None:
    """The token that visitors need; `None` on loopback, where none is set."""
    told = os.environ.get(TOKEN_VARIABLE)
    return told or (None if is_loopback(host) else secrets.token_urlsafe())


@asynccontextmanager
async def served(
    places: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    prices: tuple[float, float] | None = None,
) -> AsyncIterator[str]:
    """Serve the page for the length of the block; yields its address, without the token."""
    bound = listening_socket(host, port)
    port = bound.getsockname()[1]
    app, pages = build_app(Catalogue(places, prices), token=token, port=port)
    server = Listener(app)
    serving = asyncio.create_task(server.serve([bound]), name="ui-server")
    following = asyncio.create_task(pages.episodes.follow(), name="ui-index")
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        server.stop()
        await serving
        await pages.close()


async def serve(
    places: Sequence[str],
    *,
    host: str,
    port: int,
    token: str | None,
    prices: tuple[float, float] | None,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until it is cancelled; `on_ready` gets the address."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    async with served(places, host=host, port=port, token=token, prices=prices) as url:
        on_ready(url)
        await asyncio.Event().wait()
