"""The process that downloads one model with `huggingface_hub`, and reports as JSON lines on its stdout.

A process of its own, because the library's retries and reads cannot be interrupted: the caller kills it at the deadline.
It also reads the library's settings afresh, which the library does once per process. Started by path, so that it needs
nothing of this package.

Messages: `{"progress": [done, total]}` in bytes; `{"trouble": text}`, a retry of the library; then either
`{"folder": path}` or `{"failed": text, "status": code or null, "passing": bool}`.
"""

import json
import logging
import os
import sys
from typing import Any

PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
"""HTTP answers of a server that may recover in a moment."""


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Forward(logging.Handler):
    """Forwards the library's warnings, which it writes before each retry."""

    def emit(self, record: logging.LogRecord) -> None:
        say(trouble=" ".join(record.getMessage().split()))


def progress_bar() -> type[Any]:
    """A tqdm class that reports bytes instead of drawing a bar."""
    from tqdm import tqdm

    bars: list[Any] = []

    class Reporter(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": open(os.devnull, "w")})
            if options.get("unit") == "B":  # the others count files
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self in bars:
                # The library has one bar for received and one for written bytes; either may stay at 0.
                say(progress=[max(int(each.n) for each in bars), max(int(each.total or 0) for each in bars)])
            return drawn

    return Reporter


def failure(error: BaseException) -> dict[str, object]:
    """The error that is at the root of what the library raised."""
    root = error
    while root.__cause__ is not None and getattr(root, "response", None) is None:
        root = root.__cause__
    status = getattr(getattr(root, "response", None), "status_code", None)
    text = f"HTTP {status}" if status else " ".join(str(root).split()) or type(root).__name__
    known = isinstance(root, OSError) or type(root).__module__.split(".")[0].startswith("http")
    passing = known if status is None else status in PASSING_STATUS
    return {"failed": text, "status": status, "passing": passing}


def main(name: str, revision: str, timeout: float, wanted: list[str], unwanted: list[str]) -> None:
    from huggingface_hub import snapshot_download

    library = logging.getLogger("huggingface_hub")
    library.handlers, library.propagate = [_Forward()], False
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            etag_timeout=timeout,
            tqdm_class=progress_bar(),
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller makes one line of it
        say(**failure(error))
    else:
        say(folder=folder)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
