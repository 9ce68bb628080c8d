"""Models from a hub, by `owner/name`: downloaded once, in pieces that survive whatever happens.

True of it:
- A model's folder appears whole, in one rename, or not at all; files that came half are kept and gone on with, even by
  another process, when the hub still has the same content.
- Every wait has an end: one read takes at most `timeout`, the whole download at most `total_timeout`.
- Offline, no request is made. A model in this cache or in that of `huggingface_hub` is used as it is.
- Only weights in safetensors and the files beside them are taken; nothing that would have to be unpickled.
- A failure is one line that says what to do.
"""

import fcntl
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any

from pydantic import PositiveFloat

from rollwright.errors import ConfigError, RollwrightError
from rollwright.models.cache import cache_folder
from rollwright.models.fetching import Progress, quiet_progress
from rollwright.models.settings import DownloadConfig

TIMEOUT_VARIABLE = "HF_HUB_DOWNLOAD_TIMEOUT"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ENDPOINT_VARIABLE, TOKEN_VARIABLE = "HF_ENDPOINT", "HF_TOKEN"
ENDPOINT = "https://huggingface.co"

WANTED = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Weights, settings, tokenizers, chat templates."""

_BLOCK = 1 << 20
"""Bytes written at a time."""

_LONGEST_PAUSE = 30.0
"""Seconds between two tries: a hub that comes back is not kept waiting."""

_MAX_LISTING = 16 * 1024 * 1024
"""Bytes of the list of a model's files: the largest repositories take some hundred kilobytes."""

_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers of a server that may be well again in a moment."""


class DownloadError(RollwrightError):
    """A model did not come; the message says what to do."""


class DownloadRules(DownloadConfig):
    """The settings of downloads, and the pause between two tries."""

    first_pause: PositiveFloat = 1.0
    """Seconds before the second try; each further wait is twice as long."""

    def in_environment(self, environment: Mapping[str, str] | None = None) -> "DownloadRules":
        """These, with what the user's variables say instead where they say something."""
        environment = os.environ if environment is None else environment
        said = environment.get(TIMEOUT_VARIABLE, "").strip()
        timeout = self.timeout
        if said:
            timeout = float(said) if said.replace(".", "", 1).isdigit() else 0.0
            if timeout <= 0:
                raise ConfigError(
                    f"environment variable {TIMEOUT_VARIABLE}: {said!r} is no time; accepted: seconds, more than 0"
                )
        offline = any(
            environment.get(name, "").lower() in ("1", "true", "yes", "on") for name in OFFLINE_VARIABLES
        )
        return self.model_copy(update={"timeout": timeout, "offline": self.offline or offline})


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model, as the hub lists it."""

    name: str
    size: int | None
    sha256: str | None


_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_name(model: str) -> bool:
    """Whether this is an `owner/name`. What stands in a folder that is here is meant as a path."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model.split("/")[0]).is_dir()


def hub_folder(name: str) -> Path:
    """Where a downloaded model lies."""
    return cache_folder() / "models" / "hub" / name.replace("/", "--")


def local_copy(name: str) -> Path | None:
    """The model on this machine, in this cache or in that of `huggingface_hub`; no request is made."""
    if (ours := hub_folder(name)).is_dir():
        return ours
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    theirs = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        snapshot = theirs / "snapshots" / (theirs / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    whole = (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors"))
    return snapshot if whole else None


def download(
    name: str,
    rules: DownloadRules | None = None,
    on_progress: Progress = quiet_progress,
    on_trouble: Callable[[str], None] = lambda trouble: None,
) -> Path:
    """The model's folder; downloaded when it is not on this machine. `on_trouble` is told of every try that failed and is
    made again."""
    rules = (rules or DownloadRules()).in_environment()
    if (found := local_copy(name)) is not None:
        return found
    if rules.offline:
        raise DownloadError(
            f"model {name}: is not on this machine, and offline mode is on; unset {OFFLINE_VARIABLES[0]}, "
            f"copy the model's folder to {hub_folder(name)}, or name a folder as the model"
        )
    folder = hub_folder(name)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    fetch = _Fetch(name, rules, on_progress, on_trouble)
    with fetch.alone(partial):
        if folder.is_dir():  # another process was faster
            return folder
        revision, files = fetch.listing()
        for file in files:
            fetch.file(file, revision, partial / file.name)
        shutil.rmtree(partial / ".state", ignore_errors=True)
        partial.rename(folder)
    return folder


class _Fetch:
    """One download, with its deadline."""

    def __init__(
        self, name: str, rules: DownloadRules, on_progress: Progress, on_trouble: Callable[[str], None]
    ) -> None:
        self._name = name
        self._rules = rules
        self._progress = on_progress
        self._trouble = on_trouble
        self._deadline = time.monotonic() + rules.total_timeout
        self._endpoint = (os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT).rstrip("/")
        self._came = 0

    @contextmanager
    def alone(self, partial: Path) -> Iterator[None]:
        """One process at a time writes; the others wait and find the result."""
        with partial.with_name(f"{partial.name}.lock").open("wb") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    self._pause(0.2, "another process downloads it")
            yield

    def listing(self) -> tuple[str, list[RemoteFile]]:
        """The revision that is the newest now, and its files: all come from this one."""

        def read() -> tuple[str, list[RemoteFile]]:
            with self._open(
                f"{self._endpoint}/api/models/{self._name}/revision/main?blobs=true", {}
            ) as answer:
                told = answer.read(_MAX_LISTING + 1)
            if len(told) > _MAX_LISTING:
                raise DownloadError(
                    f"model {self._name}: the hub's list of files is longer than {_MAX_LISTING:,} bytes"
                )
            content: Any = json.loads(told)
            return str(content["sha"]), [_remote(each) for each in content["siblings"]]

        revision, files = self._trying(read, lambda: 0)
        wanted = [each for each in files if each.name.endswith(WANTED) and "/" not in each.name]
        if not any(each.name.endswith(".safetensors") for each in wanted):
            raise DownloadError(f"model {self._name}: has no weights in safetensors; choose another model")
        return revision, wanted

    def file(self, remote: RemoteFile, revision: str, place: Path) -> None:
        url = f"{self._endpoint}/{self._name}/resolve/{revision}/{urllib.parse.quote(remote.name)}"
        state = place.parent / ".state" / remote.name
        state.parent.mkdir(exist_ok=True)
        if state.is_file() and state.read_text(encoding="utf-8") != revision:
            place.unlink(missing_ok=True)  # of another revision
        state.write_text(revision, encoding="utf-8")

        def size() -> int:
            return place.stat().st_size if place.exists() else 0

        def go_on() -> None:
            if remote.size is not None and size() == remote.size:
                return
            answer = self._open(url, {"Range": f"bytes={size()}-"} if size() else {})
            mode = "ab" if answer.status == 206 else "wb"  # a server that knows no ranges sends it all again
            with answer, place.open(mode) as to:
                self._copy(answer, to, remote)
            if remote.size is not None and size() < remote.size:
                raise OSError(f"the connection was cut after {size():,} of {remote.size:,} bytes")

        self._trying(go_on, size)
        if remote.sha256 is not None and _digest(place) != remote.sha256:
            place.unlink()
            raise DownloadError(f"model {self._name}: {remote.name} came damaged and was removed; try again")

    def _copy(self, answer: HTTPResponse, to: IO[bytes], remote: RemoteFile) -> None:
        while block := answer.read1(_BLOCK):
            to.write(block)
            to.flush()  # what came is kept, whatever comes next
            self._came += len(block)
            self._progress(f"download: {remote.name}", to.tell(), remote.size)
            self._left()

    def _open(self, url: str, headers: Mapping[str, str]) -> HTTPResponse:
        request = urllib.request.Request(url, headers={"User-Agent": "rollwright", **headers})
        if token := os.environ.get(TOKEN_VARIABLE):
            # not taken along to the server that the hub may send on to
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=min(self._rules.timeout, self._left()))
        return answer

    def _trying(self, action: Callable[[], Any], progress: Callable[[], int]) -> Any:
        """Until it works. Tries that bring something do not count; those that bring nothing are `retries` at most."""
        fruitless, before = 0, progress()
        while True:
            try:
                return action()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 416:  # what is here already is no beginning of what is there
                    raise DownloadError(
                        f"model {self._name}: the hub's file has changed; remove {hub_folder(self._name).parent} "
                        "and try again"
                    ) from error
                if error.code not in _PASSING:
                    raise self._refused(error) from error
                reason = f"HTTP {error.code}"
            except (OSError, HTTPException, ValueError) as error:
                reason = str(getattr(error, "reason", None) or error) or type(error).__name__
            now = progress()
            fruitless = 1 if now > before else fruitless + 1
            before = now
            if fruitless > self._rules.retries:
                raise self._gave_up(f"{fruitless} tries in a row failed, the last: {reason}")
            pause = min(_LONGEST_PAUSE, self._rules.first_pause * 2 ** (fruitless - 1))
            self._trouble(
                f"{self._host}: {reason}; asked again in {pause:g} s, {self._rules.retries + 1 - fruitless} times more"
            )
            self._pause(pause, reason)

    def _pause(self, seconds: float, reason: str) -> None:
        if time.monotonic() + seconds >= self._deadline:
            raise self._gave_up(f"{reason}; not done in {self._rules.total_timeout:g} s")
        time.sleep(seconds)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._gave_up(f"not done in {self._rules.total_timeout:g} s")
        return left

    @property
    def _host(self) -> str:
        return urllib.parse.urlsplit(self._endpoint).netloc

    def _gave_up(self, why: str) -> DownloadError:
        host = self._host
        kept = (
            f" ({self._came / 1e6:,.1f} MB came and are kept; the next try goes on from there)"
            if self._came
            else ""
        )
        return DownloadError(
            f"model {self._name}: is no folder here, and its download from {host} failed: {why}{kept}. Check the network, allow more with "
            f"{TIMEOUT_VARIABLE} or downloads.total_timeout, or name a folder or `smollm2` as the model"
        )

    def _refused(self, error: urllib.error.HTTPError) -> DownloadError:
        host = self._host
        if error.code in (401, 403):
            return DownloadError(
                f"model {self._name}: {host} asks for an account (HTTP {error.code}); accept the model's terms there and "
                f"set {TOKEN_VARIABLE}, or check the name"
            )
        if error.code == 404:
            return DownloadError(
                f"model {self._name}: is no folder here ({Path(self._name).absolute()}), and {host} has no such model; "
                "check the name"
            )
        return DownloadError(f"model {self._name}: {host} answered HTTP {error.code}; try later")


def _remote(row: Mapping[str, Any]) -> RemoteFile:
    large = row.get("lfs") or {}
    return RemoteFile(str(row["rfilename"]), large.get("size") or row.get("size"), large.get("sha256"))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        total = sha256()
        while block := content.read(_BLOCK):
            total.update(block)
    return total.hexdigest()
