"""The page's server: read-only JSON over runs, and the built front end beside it.

Invariants:
- Every request but GET and HEAD is refused; nothing is ever written.
- Where there is a token, nothing is answered without it. Without one, only requests that name this machine as their host
  are answered, so that no other site's page can reach the server through the user's browser.
- Every answer passes through `Redaction`, and carries a content security policy under which no text can become code.
- A run that is damaged or cannot be read is an answer that says so.
"""

import hmac
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollwright.addresses import redacted
from rollwright.errors import RollwrightError
from rollwright.observe.played_setup import store_of
from rollwright.store.api import Store
from rollwright.store.opening import open_store, sqlite_path
from rollwright.ui.catalogue import Catalogue, Source
from rollwright.ui.episode_index import EpisodeQuery
from rollwright.ui.episodes import Episodes, NoSuchEpisode, NotIndexed, call, indexed_share
from rollwright.ui.folder_source import FolderSource
from rollwright.ui.redaction import Redaction
from rollwright.ui.store_view import look_into

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content security policy: own files alone, no inline code, no markup from strings."""

HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)

ASSETS = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Files of the front end; `make ui` builds them."""

COOKIE = "rollwright_ui"

STORE_SECONDS = 1.0
"""Time between two looks into the store of a run that is playing, however many pages are open."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class Pages:
    """The endpoints."""

    def __init__(self, catalogue: Catalogue, redaction: Redaction) -> None:
        self.catalogue = catalogue
        self.episodes = Episodes(catalogue)
        self._redaction = redaction
        self._stores: dict[str, Store] = {}
        """Stores of run folders that are being written."""
        self._looks: dict[str, tuple[float, Any]] = {}
        """Last look into each of them, and when it was taken."""

    def routes(self) -> list[Route]:
        answers: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "runs": self._runs,
            "run": self._overview,
            "live": self._live,
            "episodes": self._list,
            "episode": self._episode,
            "tokens": self._tokens,
            "forest": self._forest,
            "group": self._group,
            "pairs": self._pairs,
            "training": self._of_folder("training_view"),
            "swarm": self._of_folder("swarm_view"),
            "evaluation": self._of_folder("evaluation_view"),
        }
        return [Route(f"/api/{name}", self._endpoint(answer)) for name, answer in answers.items()]

    def _endpoint(
        self, answer: Callable[[Request], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return self._json(await answer(request))
            except NotIndexed:
                source = self._source(request)
                return self._json({"indexing": indexed_share(source)}, 202)
            except NoSuchEpisode as error:
                return self._json({"error": str(error)}, 404)
            except (RollwrightError, OSError, msgspec.MsgspecError) as error:
                return self._json({"error": " ".join(str(error).split())}, 422)

        return endpoint

    def _json(self, content: Any, status: int = 200) -> Response:
        encoded = self._redaction.clean(msgspec.json.encode(content))
        return Response(encoded, status, media_type="application/json")

    def _source(self, request: Request) -> Source:
        name = request.query_params.get("run", "")
        source = self.catalogue.find(name)
        if source is None:
            raise NoSuchEpisode(f"{name[:200]}: there is no such run here")
        return source

    async def _runs(self, request: Request) -> Any:
        cards = []
        for source in self.catalogue.sources():
            try:
                cards.append(await call(source.card))
            except (RollwrightError, OSError, ValueError, TypeError, KeyError) as error:
                cards.append(_broken(source, error))
        return {"runs": cards, "notes": self.catalogue.missing()}

    async def _overview(self, request: Request) -> Any:
        source = self._source(request)
        return await call(source.overview)

    async def _live(self, request: Request) -> Any:
        source = self._source(request)
        await self.episodes.watch(source)
        told = await call(source.live_view)
        if isinstance(source, FolderSource) and told["snapshot"] is not None:
            told["store"] = await self._look_into_store(source)
        return told

    async def _look_into_store(self, source: FolderSource) -> Any:
        """Workers and leases of a run that is being written."""
        address, now = store_of(source.path), time.monotonic()
        if address == "memory":
            return None
        if not is_near(address, source.path):
            return {
                "problem": f"the store is elsewhere; `rollwright ui {redacted(address)}` shows its workers"
            }
        taken, look = self._looks.get(source.name, (float("-inf"), None))
        if now - taken < STORE_SECONDS:
            return look
        try:
            if source.name not in self._stores:
                self._stores[source.name] = await open_store(address, must_exist=True, patience=1.0)
            look = await look_into(self._stores[source.name])
        except RollwrightError as error:
            look = {"problem": f"the store cannot be read: {error}"}
        self._looks[source.name] = (now, look)
        return look

    async def _list(self, request: Request) -> Any:
        given = dict(request.query_params)
        given.pop("run", None)
        return await self.episodes.list(self._source(request), query_of(given))

    async def _episode(self, request: Request) -> Any:
        asked = request.query_params
        return await self.episodes.show(
            self._source(request),
            asked.get("rollout", ""),
            _whole(asked.get("from"), 0),
            _whole(asked.get("count"), 50),
        )

    async def _tokens(self, request: Request) -> Any:
        asked = request.query_params
        turn = _whole(asked.get("turn"), 0)
        return await self.episodes.tokens(self._source(request), asked.get("rollout", ""), turn)

    async def _forest(self, request: Request) -> Any:
        return await self.episodes.forest(self._source(request), request.query_params.get("rollout", ""))

    async def _group(self, request: Request) -> Any:
        return await self.episodes.group(self._source(request), request.query_params.get("group", ""))

    async def _pairs(self, request: Request) -> Any:
        return await self.episodes.pairs(self._source(request))

    def _of_folder(self, method: str) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Any:
            source = self._source(request)
            if not isinstance(source, FolderSource):
                raise NoSuchEpisode(f"{source.name}: is a store; only run folders have this view")
            return await call(getattr(source, method))

        return answer

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()
        for source in self.catalogue.sources():
            await call(source.close)


def is_near(address: str, folder: Path) -> bool:
    """Whether the store of a run folder is in the folder or on this machine. The page connects to no other one that a folder
    names: folders come from anywhere, and the connection would carry this user's token."""
    file = sqlite_path(address)
    if file is not None:
        return file.resolve().is_relative_to(folder.resolve())
    return (urlsplit(address).hostname or "") in LOOPBACK


def query_of(given: dict[str, str]) -> EpisodeQuery:
    """The query of a request; raises a `MsgspecError` for a value that does not fit."""
    kept = {name: value for name, value in given.items() if value != ""}
    query = msgspec.convert(kept, EpisodeQuery, strict=False)
    return msgspec.structs.replace(query, limit=max(1, min(query.limit, 200)), offset=max(0, query.offset))


def _whole(given: str | None, default: int) -> int:
    return int(given) if given is not None and given.lstrip("-").isdigit() and len(given) < 12 else default


def _broken(source: Source, error: Exception) -> dict[str, Any]:
    """Line of a run that cannot be read at all."""
    return {
        "id": source.name,
        "name": source.name,
        "kind": source.kind,
        "state": "unknown",
        "error": f"cannot be read: {error}",
        "problems": 1,
        "rewards": [],
        "tags": [],
        "progress": {"steps": 0, "most_steps": None, "share": None, "seconds_left": None},
    }


class Guard:
    """Lets only the right requests through, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, *, token: str | None, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"{COOKIE}_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        request = Request(scope)
        refusal = self._refusal(request)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return Response("read only\n", 405, {"allow": "GET, HEAD"})
        if self._token is None:
            host = request.headers.get("host", "").rpartition(":")
            name = host[0] if host[2].isdigit() else request.headers.get("host", "")
            return None if name in LOOPBACK else Response("not this host\n", 421)
        given = request.query_params.get("token")
        if given is not None:
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return Response("wrong token\n", 403)
            rest = urlencode([each for each in request.query_params.multi_items() if each[0] != "token"])
            answer = RedirectResponse(request.url.path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        known = request.cookies.get(self._cookie) or request.headers.get("authorization", "").removeprefix(
            "Bearer "
        )
        if not hmac.compare_digest(known.encode(), self._token.encode()):
            return Response("a token is needed: open the address with ?token=…\n", 401)
        return None


def build_app(catalogue: Catalogue, *, token: str | None, port: int) -> tuple[ASGIApp, Pages]:
    """The ASGI app, and its endpoints, whose `episodes.follow` has to run beside it."""
    pages = Pages(catalogue, Redaction([token] if token else ()))
    folder = files("rollwright.ui") / "static"
    assets = {name: (folder / name).read_bytes() for name in ASSETS}

    def asset(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return Response(assets[name], headers={"content-type": ASSETS[name]})

        return answer

    routes = [Route("/", asset("index.html")), *(Route(f"/{name}", asset(name)) for name in ASSETS)]
    app = Starlette(routes=[*routes, *pages.routes()])
    app.router.redirect_slashes = False
    return Guard(app, token=token, port=port), pages
