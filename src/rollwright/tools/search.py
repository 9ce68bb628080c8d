"""Text search as a tool: a BM25 index in this process, or a search server over HTTP.

Both return the best passages, numbered, with their titles. A search server accepts a POST of
`{"query": ..., "count": ...}` and responds with `{"results": [{"title", "text", "score"}, ...]}`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from rollwright.errors import ConfigError
from rollwright.http import HttpClient, HttpFault, Url
from rollwright.tools.result import ToolFailure
from rollwright.tools.tool import FunctionTool, Tool

DEFAULT_COUNT = 3
"""Number of passages unless the model asks for another."""
MAX_COUNT = 20
_PASSAGE = 2000
"""Characters of one passage that the model sees."""
_MAX_ANSWER = 32 * 1024 * 1024
"""Largest response of a search server in bytes: `MAX_COUNT` passages of a megabyte each, with room for the rest."""

_TRIES = 3
_FIRST_WAIT = 0.5
"""Seconds before the first retry; doubled for each further one."""
_KEEP_ALIVE = 4.0
"""Seconds; common servers close idle connections after 5 s, and closing first avoids requests on a closing one."""
_RETRIED = (429, 500, 502, 503, 504)
"""Status codes of temporary errors, which are retried."""


class Passage(msgspec.Struct, frozen=True):
    """One search result."""

    text: str
    title: str = ""
    score: float = 0.0


class SearchResponse(msgspec.Struct, frozen=True):
    """Response of a search server."""

    results: tuple[Passage, ...]


class Searcher(Protocol):
    """A search backend."""

    async def search(self, query: str, count: int) -> Sequence[Passage]:
        """The best `count` passages, best first."""
        ...


class Bm25Index:
    """BM25 index in memory. The same query gives the same passages in any process."""

    def __init__(self, passages: Iterable[Passage | str]) -> None:
        import bm25s  # type: ignore[import-untyped]

        self.passages = [each if isinstance(each, Passage) else Passage(each) for each in passages]
        if not self.passages:
            raise ConfigError("a search index needs at least one passage")
        self._tokenizer: Any = bm25s.tokenization.Tokenizer(stopwords="en")
        self._index: Any = bm25s.BM25()
        texts = [f"{each.title}\n{each.text}" for each in self.passages]
        self._index.index(self._tokenizer.tokenize(texts, show_progress=False), show_progress=False)

    async def search(self, query: str, count: int) -> Sequence[Passage]:
        return await asyncio.to_thread(self.find, query, count)

    def find(self, query: str, count: int) -> list[Passage]:
        """The best passages, best first; a passage that shares no word with the query is never returned."""
        words = self._tokenizer.tokenize([query], update_vocab=False, show_progress=False)
        if not words[0]:
            return []
        found, scores = self._index.retrieve(words, k=min(count, len(self.passages)), show_progress=False)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [msgspec.structs.replace(self.passages[at], score=score) for at, score in pairs if score > 0]


class HttpSearch:
    """Client of a search server. Temporary errors are retried; an unreachable server fails the attempt, because an empty
    result would teach the model that no passage exists."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, timeout: float = 30.0) -> None:
        try:
            self._url = Url.parse(url)
        except ValueError as error:
            raise ConfigError(
                f"search: the address is not a URL like http://127.0.0.1:8900/search: {error}"
            ) from None
        sent = {"Content-Type": "application/json", **(headers or {})}
        self._client = HttpClient(sent, keep_alive=_KEEP_ALIVE, max_answer=_MAX_ANSWER)
        self._timeout = timeout

    async def search(self, query: str, count: int) -> Sequence[Passage]:
        request = msgspec.json.encode({"query": query, "count": count})
        wait = _FIRST_WAIT
        for tries_left in reversed(range(_TRIES)):
            try:
                answer = await self._client.request("POST", self._url, request, self._timeout)
            except HttpFault as fault:
                if not tries_left:
                    raise ToolFailure(f"search at {self._url}: {fault}") from fault
            else:
                if answer.status == 200:
                    return self._results(answer.body, count)
                if answer.status not in _RETRIED or not tries_left:
                    raise ToolFailure(f"search at {self._url}: HTTP {answer.status}: {answer.reason}")
            await asyncio.sleep(wait)
            wait *= 2
        raise AssertionError("the last try returns or raises")

    def _results(self, body: bytes, count: int) -> Sequence[Passage]:
        try:
            return msgspec.json.decode(body, type=SearchResponse).results[:count]
        except msgspec.MsgspecError as error:
            raise ToolFailure(f"search at {self._url}: malformed response: {error}") from error

    async def close(self) -> None:
        await self._client.close()


def search_tool(searcher: Searcher, name: str = "search", *, concurrency: int | None = None) -> Tool:
    """Creates the search tool of a backend."""

    async def search(query: str, count: int = DEFAULT_COUNT) -> str:
        """Searches for passages of text.

        Args:
            query: What to look for, in a few words.
            count: How many passages to return.
        """
        found = await searcher.search(query, min(max(count, 1), MAX_COUNT))
        return (
            "\n\n".join(_format_passage(at, each) for at, each in enumerate(found, start=1))
            or "Nothing was found."
        )

    return FunctionTool(search, name, None, concurrency=concurrency)


def _format_passage(at: int, passage: Passage) -> str:
    title = f" {passage.title}\n" if passage.title else " "
    return f"[{at}]{title}{passage.text[:_PASSAGE]}"
