"""The page's server in a thread, for tests that ask it over HTTP."""

import asyncio
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollwright.ui.server import served


@contextmanager
def serving(places: Sequence[str], *, token: str | None = None, **options: Any) -> Iterator[str]:
    """Serve for the length of the block; yields the address."""
    ready = threading.Event()
    held: dict[str, Any] = {}

    async def main() -> None:
        held.update(loop=asyncio.get_running_loop(), stop=asyncio.Event())
        async with served(places, token=token, **options) as held["url"]:
            ready.set()
            await held["stop"].wait()

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield held["url"]
    finally:
        held["loop"].call_soon_threadsafe(held["stop"].set)
        thread.join()


def get(
    url: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer."""
    request = urllib.request.Request(url, headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers.items())
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers.items())


def ask(url: str, name: str, **given: Any) -> Any:
    """The JSON answer to a question; waits while the log is being indexed."""
    while True:
        status, body, _ = get(f"{url}api/{name}?{urllib.parse.urlencode(given)}")
        if status != 202:
            return json.loads(body)
