"""The process that downloads one model with `huggingface_hub`, and reports as JSON lines on its stdout.

A process of its own, because the library's retries and reads cannot be interrupted: the caller kills it at the deadline.
It also reads the library's settings afresh, which the library does once per process. Started by path, so that it needs
nothing of this package.

Messages: `{"progress": [done, total]}` in bytes; `{"trouble": text}`, a retry of the library; then either
`{"folder": path}` or `{"failed": text, "status": code or null, "passing": bool}`.
"""

import io
import json
import logging
import sys
from typing import Any

PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses of a server that may recover soon."""


def send(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Forward(logging.Handler):
    """Forwards the library's warnings, which it writes before each retry."""

    def emit(self, record: logging.LogRecord) -> None:
        send(trouble=" ".join(record.getMessage().split()))


def progress_bar() -> type[Any]:
    """A tqdm class that reports bytes instead of drawing a bar."""
    from tqdm import tqdm

    bars: list[Any] = []
    nowhere = io.StringIO()

    class Reporter(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": nowhere})
            if options.get("unit") == "B":  # the others count files
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self in bars:
                # The library draws one bar for received and one for written bytes; either may stay at 0.
                send(progress=[max(int(each.n) for each in bars), max(int(each.total or 0) for each in bars)])
            return drawn

    return Reporter


def failure(error: BaseException) -> dict[str, object]:
    """One line about the error, and whether another try may help."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    answers = [getattr(each, "response", None) for each in chain]
    status = next((each.status_code for each in answers if each is not None), None)
    if status is not None:
        return {"failed": f"HTTP {status}", "status": status, "passing": status in PASSING_STATUS}
    root = chain[-1]
    # Errors of connections are OSErrors or come from the HTTP client (httpx, httpcore).
    passing = any(isinstance(each, OSError) or type(each).__module__.startswith("http") for each in chain)
    text = " ".join(str(root).split()) or type(root).__name__
    return {"failed": text, "status": None, "passing": passing}


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
    except Exception as error:  # noqa: BLE001 - the caller turns any error into one line
        send(**failure(error))
    else:
        send(folder=folder)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
