"""Errors that a user can cause or must act on.

Each message is one line: what was wrong, where, and what would be accepted. The command line prints it without a traceback;
a library user catches `RollwrightError`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class RollwrightError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that ends with this error; 2: the user can correct it."""


class ConfigError(RollwrightError):
    """A setting is wrong; the message names the key and what it accepts."""


class RunClosed(RollwrightError):
    """The run was closed by another task while this call waited for it."""


class FormatError(RollwrightError):
    """Bytes from a file or a network do not have the expected format."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file's name to an `OSError` inside the block that has none, as errors on open files do."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise
