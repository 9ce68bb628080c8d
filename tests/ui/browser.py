"""A real browser for tests: Debian's Chromium, driven by ChromeDriver over the WebDriver protocol.

Nothing but the standard library is needed. `why_not` says why there is no browser on this machine; tests are skipped with
it as their reason.
"""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
"""Without a screen, as root, and without any connection of the browser's own."""

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key of an element in WebDriver's answers."""

PATIENCE = 20.0
"""Seconds that a test waits for the page; a busy machine needs a part of it."""


def why_not() -> str | None:
    """Reason why no browser can be started; `None` if one can."""
    if CHROMIUM is None or DRIVER is None:
        return "there is no browser: install Debian's packages chromium and chromium-driver"
    return None


class WrongPage(AssertionError):
    """The page did not become what a test waits for."""


class Browser:
    """One browser window."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._profile = Path(mkdtemp(prefix="rollwright-browser-"))
        assert DRIVER is not None, why_not()
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={self._port}", "--log-level=OFF"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._session = ""
        try:
            self._start(width, height)
        except BaseException:
            self.close()
            raise
        self.shape(width, height, dark=dark)

    def _start(self, width: int, height: int) -> None:
        flags = [*FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
            "unhandledPromptBehavior": "ignore",
        }
        until = time.monotonic() + PATIENCE
        while True:
            try:
                answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        self._session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._session:
            with suppress(OSError, WrongPage):
                self._call("DELETE", self._session)
        self._driver.terminate()
        self._driver.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"content-type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            told = json.load(error)["value"]
            raise WrongPage(f"{told['error']}: {told['message'].splitlines()[0]}") from None

    def shape(self, width: int, height: int, *, dark: bool = False) -> None:
        """Size of the page in CSS pixels, and the colours that the system prefers."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def devtools(self, command: str, parameters: Any) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self._session}/goog/cdp/execute", body)

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The value that a script hands to its last argument, a function."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/async", body)

    def text(self, selector: str = "body") -> str:
        """The visible text of the first element that matches."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText ?? each.textContent)"
        return list(self.run(script, selector))

    def wait(self, script: str, *arguments: Any, seconds: float = PATIENCE) -> Any:
        """Wait until a script returns something true."""
        until = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > until:
                raise WrongPage(f"never true: {script} {arguments}\nthe page:\n{self.text()[:3000]}")
            time.sleep(0.03)
        return found

    def wait_for(self, text: str, selector: str = "body", *, seconds: float = PATIENCE) -> None:
        """Wait until an element shows this text."""
        self.wait(
            "return [...document.querySelectorAll(arguments[0])].some(each => each.innerText.includes(arguments[1]))",
            selector,
            text,
            seconds=seconds,
        )

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches and contains the text, as a user does."""
        found = self.wait(
            "return [...document.querySelectorAll(arguments[0])].find(each => each.innerText.includes(arguments[1]))",
            selector,
            text,
        )
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        self._call("POST", f"{self._session}/element/{found[ELEMENT]}/click")

    def press(self, keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._call("POST", f"{self._session}/actions", body)

    def messages(self) -> list[str]:
        """Errors and warnings of the page since the last call."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [
            f"{each['level']}: {each['message']}" for each in found if each["level"] in ("SEVERE", "WARNING")
        ]

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write a screenshot, of the visible part or of the whole page."""
        taken = self.devtools(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole, **self._clip(whole)}
        )
        file.write_bytes(base64.b64decode(taken["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        self.run("scrollTo(0, 0)")
        size = self.run(
            "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        return {"clip": {"x": 0, "y": 0, "width": size[0], "height": min(size[1], 4000), "scale": 1}}
