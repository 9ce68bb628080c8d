"""Models from a hub, by `owner/name`: downloaded by `huggingface_hub` into its cache, within a deadline.

Invariants:
- A model counts as present when the library's cache has all its files. A cut connection is resumed; files that arrived
  whole are kept, whatever happens to the process.
- Every wait ends: a connection is opened again after `timeout` seconds without a byte, and the whole download takes at most
  `total_timeout`, the library's own retries included.
- Offline, no request is made.
- Only weights in safetensors and the files beside them are downloaded; nothing that would have to be unpickled. Weights
  are compared with the checksum that the hub names.
- A failure is one line that says what to do. The access token is that of `hf auth login` or `HF_TOKEN`.
"""

import json
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from pydantic import PositiveFloat

from rollwright.errors import ConfigError, RollwrightError
from rollwright.models import hub_process
from rollwright.models.catalogue import Progress, quiet_progress
from rollwright.models.settings import DownloadConfig

TIMEOUT_VARIABLE = "HF_HUB_DOWNLOAD_TIMEOUT"
METADATA_TIMEOUT_VARIABLE = "HF_HUB_ETAG_TIMEOUT"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ENDPOINT_VARIABLE, TOKEN_VARIABLE = "HF_ENDPOINT", "HF_TOKEN"
ENDPOINT = "https://huggingface.co"
REVISION = "main"

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Weights, settings, tokenizers, chat templates."""

UNWANTED = ("*/*",)
"""Folders of a repository hold other formats of the same model."""

PARTIAL = ".incomplete"
"""Suffix of files that the library is still writing."""

SILENCE_SLACK = 15.0
"""Seconds beyond `timeout` without any message after which the downloading process counts as stuck: it has to start, and
the library pauses up to 8 s before a retry."""

_LONGEST_PAUSE = 30.0
"""Longest wait in seconds between two tries, so that a recovered hub is noticed soon."""

_BLOCK = 1 << 20
"""Bytes hashed at a time."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class DownloadError(RollwrightError):
    """A model could not be downloaded; the message says what to do."""


class DownloadRules(DownloadConfig):
    """The settings of downloads, and the pause between two tries."""

    first_pause: PositiveFloat = 1.0
    """Seconds before the second try; each further wait is twice as long."""

    def in_environment(self, environment: Mapping[str, str] | None = None) -> "DownloadRules":
        """These rules, overridden by the user's environment variables."""
        environment = os.environ if environment is None else environment
        said = environment.get(TIMEOUT_VARIABLE, "").strip()
        timeout = self.timeout
        if said:
            timeout = float(said) if said.replace(".", "", 1).isdigit() else 0.0
            if timeout <= 0:
                raise ConfigError(
                    f"environment variable {TIMEOUT_VARIABLE}: {said!r} is not a time; accepted: seconds, more than 0"
                )
        offline = any(
            environment.get(name, "").lower() in ("1", "true", "yes", "on") for name in OFFLINE_VARIABLES
        )
        return self.model_copy(update={"timeout": timeout, "offline": self.offline or offline})


_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_name(model: str) -> bool:
    """Whether this is an `owner/name`. A name whose first part is a folder here is meant as a path."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model.split("/")[0]).is_dir()


def hub_cache() -> Path:
    """The cache of `huggingface_hub`, by the variables that the library reads."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or default)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def local_copy(name: str, revision: str = REVISION) -> Path | None:
    """The model's folder in the cache, if it is complete; no request is made."""
    if not (hub_cache() / f"models--{name.replace('/', '--')}").is_dir() or not _library_is_installed():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=hub_cache(),
            local_files_only=True,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except (LocalEntryNotFoundError, OSError):
        return None
    snapshot = Path(folder)
    complete = (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors"))
    return snapshot if complete else None


def download(
    name: str,
    rules: DownloadRules | None = None,
    on_progress: Progress = quiet_progress,
    on_trouble: Callable[[str], None] = lambda trouble: None,
) -> Path:
    """The model's folder; downloaded when it is not on this machine. `on_trouble` is called for every retry."""
    rules = (rules or DownloadRules()).in_environment()
    if (found := local_copy(name)) is not None:
        return found
    if rules.offline:
        raise DownloadError(
            f"model {name}: is not on this machine, and offline mode is on; unset {OFFLINE_VARIABLES[0]}, "
            f"copy the model into the cache {hub_cache()}, or name a folder as the model"
        )
    if not _library_is_installed():
        raise DownloadError(f"model {name}: its download needs huggingface_hub; install rollwright[engines]")
    folder = _Download(name, rules, on_progress, on_trouble).run()
    _check_weights(name, folder)
    return folder


def _library_is_installed() -> bool:
    return find_spec("huggingface_hub") is not None


class _Download:
    """One download: tries of the downloading process until one succeeds or the deadline passes."""

    def __init__(
        self, name: str, rules: DownloadRules, on_progress: Progress, on_trouble: Callable[[str], None]
    ) -> None:
        self._name = name
        self._rules = rules
        self._progress = on_progress
        self._trouble = on_trouble
        self._deadline = time.monotonic() + rules.total_timeout
        endpoint = (os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT).rstrip("/")
        self._host = urllib.parse.urlsplit(endpoint).netloc
        self._received = 0
        """Bytes of the model that are on this machine."""

    def run(self) -> Path:
        """Try until a download succeeds. Only consecutive tries without a new byte count against `retries`."""
        fruitless = 0
        while True:
            before = self._received
            result = self._try()
            if "folder" in result:
                return Path(result["folder"])
            reason = str(result["failed"])
            if not result["passing"]:
                raise self._refusal(reason, result["status"])
            fruitless = 1 if self._received > before else fruitless + 1
            if fruitless > self._rules.retries:
                raise self._failure(f"{fruitless} tries in a row failed, the last: {reason}")
            pause = min(_LONGEST_PAUSE, self._rules.first_pause * 2 ** (fruitless - 1))
            self._trouble(
                f"{self._host}: {reason}; asked again in {pause:g} s, {self._rules.retries + 1 - fruitless} times more"
            )
            if pause >= self._left():
                raise self._failure(f"{reason}; not done in {self._rules.total_timeout:g} s")
            time.sleep(pause)

    def _try(self) -> dict[str, Any]:
        """Run the downloading process once; return its result."""
        seconds = str(max(1, math.ceil(self._rules.timeout)))  # the library reads whole seconds
        arguments = {
            "name": self._name,
            "revision": REVISION,
            "timeout": self._rules.timeout,
            "wanted": WANTED,
            "unwanted": UNWANTED,
        }
        child = subprocess.Popen(
            [sys.executable, "-P", hub_process.__file__, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "HF_HUB_DISABLE_TELEMETRY": "1",  # no request but those of the download
                **os.environ,
                TIMEOUT_VARIABLE: seconds,
                METADATA_TIMEOUT_VARIABLE: seconds,
            },
        )
        try:
            return self._follow(child)
        finally:
            partial = _open_partial_files(child.pid)
            child.kill()
            child.wait()
            for file in partial:  # the killed process cannot remove them, and no later one would use them
                file.unlink(missing_ok=True)

    def _follow(self, child: "subprocess.Popen[str]") -> dict[str, Any]:
        assert child.stdout is not None
        last_line = ""
        for line in self._lines(child.stdout):
            try:
                message: dict[str, Any] = json.loads(line)
            except ValueError:
                last_line = line.strip() or last_line
                continue
            if "progress" in message:
                done, total = message["progress"]
                self._received = max(self._received, done)
                self._progress("download", done, total or None)
            elif "trouble" in message:
                self._trouble(f"{self._host}: {message['trouble']}")
            else:
                return message
        silent = child.poll() is None
        why = f"timed out: no data for {self._silence:g} s" if silent else last_line or "it was killed"
        return {"failed": why, "status": None, "passing": True}

    def _lines(self, output: IO[str]) -> Iterator[str]:
        """Yield lines until the output ends or is silent for too long; raise at the deadline."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, name="hub-download", daemon=True).start()
        while True:
            left = self._left()
            try:
                line = lines.get(timeout=min(self._silence, left))
            except queue.Empty:
                if left > self._silence:
                    return
                continue  # the deadline has passed: `_left` raises
            if line is None:
                return
            yield line

    @property
    def _silence(self) -> float:
        return self._rules.timeout + SILENCE_SLACK

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._failure(f"not done in {self._rules.total_timeout:g} s")
        return left

    def _failure(self, why: str) -> DownloadError:
        kept = " (complete files are kept)" if self._received else ""
        return DownloadError(
            f"model {self._name}: is no folder here, and its download from {self._host} failed: {why}{kept}. Check the "
            f"network, allow more with {TIMEOUT_VARIABLE} or downloads.total_timeout, or name a folder or `smollm2` as "
            "the model"
        )

    def _refusal(self, reason: str, status: int | None) -> DownloadError:
        if status in (401, 403):
            return DownloadError(
                f"model {self._name}: {self._host} asks for an account (HTTP {status}); accept the model's terms there "
                f"and run `hf auth login` or set {TOKEN_VARIABLE}, or check the name"
            )
        if status == 404:
            return DownloadError(
                f"model {self._name}: is no folder here ({Path(self._name).absolute()}), and {self._host} has no such "
                "model; check the name"
            )
        if status is not None:
            return DownloadError(f"model {self._name}: {self._host} answered HTTP {status}; try later")
        return DownloadError(f"model {self._name}: its download from {self._host} failed: {reason}")


def _open_partial_files(pid: int) -> list[Path]:
    import psutil

    try:
        return [Path(each.path) for each in psutil.Process(pid).open_files() if each.path.endswith(PARTIAL)]
    except psutil.Error:  # the process has exited and removed them itself
        return []


def _check_weights(name: str, folder: Path) -> None:
    """Compare the weights with their checksums: the cache names a large file after its SHA-256."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise DownloadError(f"model {name}: has no weights in safetensors; choose another model")
    for file in weights:
        blob = file.resolve()
        if _SHA256.match(blob.name) and _digest(blob) != blob.name:
            blob.unlink()
            file.unlink(missing_ok=True)
            raise DownloadError(f"model {name}: {file.name} arrived damaged and was removed; try again")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        total = sha256()
        while block := content.read(_BLOCK):
            total.update(block)
    return total.hexdigest()
