"""An OpenEnv environment through its own client: at an address, or served in this process from a folder or package.

A folder as `openenv init` makes it, or a package, is served by uvicorn in a thread of this process, so that every environment
has a server of its own and one that hangs holds up no other.
"""

import importlib
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from typing import Any

from openenv.core.generic_client import GenericEnvClient

_START_SECONDS = 60.0


class UnknownServer(Exception):
    """The user's settings name no environment."""

    is_settings = True


class Client:
    """One session with a server."""

    def __init__(self, place: str, timeout: float) -> None:
        self._url = place if _is_url(place) else _serve(place)
        self._client = GenericEnvClient(base_url=self._url, message_timeout_s=timeout).sync()
        self._client.connect()

    def reset(self, seed: int, options: dict[str, Any]) -> dict[str, Any]:
        return _reply(self._client.reset(seed=seed, **options))

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return _reply(self._client.step(action))


def make(place: str, timeout: float) -> Client:
    return Client(place, timeout)


def describe(place: str, timeout: float) -> dict[str, Any]:
    """The schema of the server's actions."""
    url = place if _is_url(place) else _serve(place)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=timeout) as answer:
            schema = json.load(answer)
        return {"action": schema["action"], "observation": schema.get("observation", {})}
    except (OSError, ValueError, KeyError) as error:
        raise UnknownServer(f"{place}: no OpenEnv server answers there: {error}") from error


def _reply(result: Any) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": bool(result.done)}


def _is_url(place: str) -> bool:
    return place.startswith(("http://", "https://", "ws://", "wss://"))


def _serve(place: str) -> str:
    import uvicorn

    app = _load_app(place)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="on", ws_ping_interval=None)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    end = time.monotonic() + _START_SECONDS
    while not server.started:
        if time.monotonic() > end:
            raise RuntimeError(f"{place}: its server did not start within {_START_SECONDS:g} s")
        time.sleep(0.005)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _load_app(place: str) -> Any:
    """The ASGI application of a folder (as a package of that name) or of an installed package."""
    name = place
    if os.path.isdir(place):
        folder = os.path.abspath(place)
        sys.path.insert(0, os.path.dirname(folder))
        name = os.path.basename(folder)
    try:
        module = importlib.import_module(f"{name}.server.app")
        return module.app
    except (ImportError, AttributeError) as error:
        raise UnknownServer(f"{place}: {name}.server.app:app cannot be imported: {error}") from error
