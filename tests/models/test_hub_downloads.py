"""Row E5: downloads against a real server on this machine, which stalls, cuts, refuses and changes as told."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollwright.errors import ConfigError
from rollwright.models import hub as hub_module
from rollwright.models.hub import DownloadError, DownloadRules, download, local_copy

NAME = "owner/tiny"
SHA = "a" * 40
"""Of the revision."""
BLOCK = 10 << 20
"""Bytes that the library writes at once: a connection that is cut loses less than one block."""
WEIGHTS = bytes(range(256)) * (1 << 16) + b"the end"
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "evil.bin": b"pickle"}
STALL_SECONDS = 8.0

QUICK = DownloadRules(timeout=1.0, total_timeout=120.0, retries=2, first_pause=0.01)


class Hub(ThreadingHTTPServer):
    """Speaks as much of a hub's language as a download needs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[tuple[str, str | None]] = []
        """Paths and ranges, in order."""
        self.fail_with: list[int] = []
        """Codes of the next answers."""
        self.cut_after: list[int] = []
        """Bytes after which the next answers with weights break off."""
        self.stall = False
        """Whether weights never come."""
        self.endless = False
        """Whether the description of the model never ends."""
        self.ranges = True
        self.sha256 = sha256(WEIGHTS).hexdigest()
        self.told: list[str | None] = []
        """The tokens that were shown to it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server
        path = urlsplit(self.path).path
        hub.asked.append((f"{self.command} {path}", self.headers.get("Range")))
        hub.told.append(self.headers.get("Authorization"))
        if hub.fail_with:
            self.send_error(hub.fail_with.pop(0))
        elif path == f"/api/models/{NAME}/revision/main" and hub.endless:
            self._send_endlessly()
        elif path == f"/api/models/{NAME}/revision/main":
            rows = [{"rfilename": each} for each in FILES]
            self._send(json.dumps({"id": NAME, "sha": SHA, "siblings": rows}).encode())
        elif path == f"/api/models/{NAME}/tree/{SHA}":
            self._send(json.dumps([self._entry(each) for each in FILES]).encode())
        elif path.startswith(f"/{NAME}/resolve/{SHA}/"):
            self._file(path.rpartition("/")[2], with_body=with_body)
        else:
            self.send_error(404)

    def _entry(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40}
        if name == "model.safetensors":
            row["lfs"] = {"oid": self.server.sha256, "size": len(WEIGHTS), "pointerSize": 130}
        return row

    def _file(self, name: str, *, with_body: bool) -> None:
        hub, content = self.server, FILES[name]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        whole = not (hub.ranges and start)
        start = 0 if whole else start
        self.send_response(200 if whole else 206)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{hub.sha256 if content is WEIGHTS else name}"')
        if not whole:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        if content is not WEIGHTS:
            self.wfile.write(content[start:])
            return
        if hub.stall:
            time.sleep(STALL_SECONDS)
            return
        until = start + hub.cut_after.pop(0) if hub.cut_after else len(content)
        self.wfile.write(content[start:until])

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_endlessly(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in (
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_HUB_DOWNLOAD_TIMEOUT",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def weight_ranges(hub: Hub) -> list[str | None]:
    return [
        asked for path, asked in hub.asked if path.startswith("GET") and path.endswith("model.safetensors")
    ]


def test_a_model_comes_whole_and_once_and_without_what_would_be_unpickled(hub: Hub) -> None:
    folder = download(NAME, QUICK)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }
    asked = len(hub.asked)
    assert download(NAME, QUICK) == folder
    assert len(hub.asked) == asked


def test_a_cut_connection_is_gone_on_with_where_it_broke(hub: Hub) -> None:
    hub.cut_after = [BLOCK + 100_000, 1000]
    assert (download(NAME, QUICK) / "model.safetensors").read_bytes() == WEIGHTS
    assert weight_ranges(hub) == [None, *[f"bytes={BLOCK}-"] * 2]


def test_files_that_came_whole_survive_the_process_and_are_not_paid_twice(hub: Hub, tmp_path: Path) -> None:
    hub.stall = True
    with pytest.raises(DownloadError, match=r"not done in 5 s"):
        download(NAME, QUICK.model_copy(update={"total_timeout": 5.0}))
    assert local_copy(NAME) is None, "half a model is none"
    assert not list(tmp_path.rglob("*.incomplete")), "nothing is left that nobody will use"
    hub.stall = False
    assert (download(NAME, QUICK) / "model.safetensors").read_bytes() == WEIGHTS
    assert [path for path, _ in hub.asked].count(f"GET /{NAME}/resolve/{SHA}/config.json") == 1


def test_a_server_without_ranges_sends_it_all_again(hub: Hub) -> None:
    hub.ranges = False
    hub.cut_after = [BLOCK + 100_000]
    assert (download(NAME, QUICK) / "model.safetensors").read_bytes() == WEIGHTS


def test_passing_failures_are_tried_again_and_others_are_not(hub: Hub) -> None:
    hub.fail_with = [503, 503]
    download(NAME, QUICK)
    hub.fail_with = [500] * 9
    with pytest.raises(
        DownloadError, match=r"3 tries in a row failed, the last: HTTP 500.*HF_HUB_DOWNLOAD_TIMEOUT"
    ):
        download("owner/other", QUICK)
    assert len(hub.fail_with) == 6
    hub.fail_with = [401]
    with pytest.raises(DownloadError, match=r"asks for an account .*`hf auth login` or set HF_TOKEN"):
        download("owner/other", QUICK)
    hub.fail_with = []
    with pytest.raises(DownloadError, match="has no such model; check the name"):
        download("owner/other", QUICK)


def test_a_server_that_stalls_is_left_at_the_deadline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.stall = True
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    told: list[str] = []
    with pytest.raises(DownloadError, match=r"not done in 6 s"):
        download(NAME, QUICK.model_copy(update={"total_timeout": 6.0}), on_trouble=told.append)
    assert any("timed out" in each for each in told), "the connection was made anew after the timeout"


def test_a_process_that_says_nothing_is_a_failed_try(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.endless = True
    monkeypatch.setattr(hub_module, "SILENCE_SLACK", 2.0)
    with pytest.raises(DownloadError, match=r"2 tries in a row failed, the last: timed out: no data for 3 s"):
        download(NAME, QUICK.model_copy(update={"retries": 1}))


def test_damaged_weights_are_not_kept(hub: Hub) -> None:
    hub.sha256 = "0" * 64
    with pytest.raises(DownloadError, match=r"model\.safetensors arrived damaged and was removed"):
        download(NAME, QUICK)
    assert local_copy(NAME) is None
    hub.sha256 = sha256(WEIGHTS).hexdigest()
    download(NAME, QUICK)


def test_offline_makes_no_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline mode is on; unset HF_HUB_OFFLINE, copy"):
        download(NAME, QUICK)
    assert not hub.asked


def test_what_another_tool_has_downloaded_is_used(hub: Hub, tmp_path: Path) -> None:
    theirs = tmp_path / "hf" / "hub" / "models--owner--tiny"
    snapshot = theirs / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (theirs / "refs").mkdir()
    (theirs / "refs" / "main").write_text("abc")
    assert local_copy(NAME) is None
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(FILES[name])
    assert download(NAME, QUICK) == snapshot
    assert not hub.asked


def test_the_timeout_is_120_seconds_unless_the_variable_says_otherwise() -> None:
    assert DownloadRules().in_environment({}).timeout == 120
    assert DownloadRules().in_environment({"HF_HUB_DOWNLOAD_TIMEOUT": "7"}).timeout == 7
    for wrong in ("soon", "-1", "0"):
        with pytest.raises(ConfigError, match="environment variable HF_HUB_DOWNLOAD_TIMEOUT"):
            DownloadRules(timeout=9).in_environment({"HF_HUB_DOWNLOAD_TIMEOUT": wrong})


def test_a_try_that_failed_is_told_when_it_failed(hub: Hub) -> None:
    said: list[str] = []
    missing = QUICK.model_copy(update={"retries": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(DownloadError, match="is no folder here, and its download from"):
            download(NAME, missing, on_trouble=said.append)
    assert len(said) == 1
    assert "asked again in" in said[0]


def test_a_token_is_shown_to_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    download(NAME, QUICK)
    assert set(hub.told) == {"Bearer secret"}


def test_the_token_of_a_login_is_shown_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("of-the-login")
    download(NAME, QUICK)
    assert set(hub.told) == {"Bearer of-the-login"}


def test_progress_counts_the_bytes_that_came(hub: Hub) -> None:
    told: list[tuple[str, int, int | None]] = []
    download(NAME, QUICK, on_progress=lambda *each: told.append(each))
    assert told[-1][1] == told[-1][2] == len(WEIGHTS) + len(FILES["config.json"])
