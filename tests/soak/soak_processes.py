"""Processes that are killed without mercy and started again at once, forked from one that has imported everything.

Otherwise most of a soak would be imports. No process outlives the soak: they are killed by the id that they were given.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

PRELOADED = [
    "rollwright.cli.main",
    "rollwright.cli.queue",
    "rollwright.cli.run_execution",
    "rollwright.engines.openai",
    "rollwright.store.http.server",
    "rollwright.store.http.client",
    "rollwright.store.sql.sqlite",
    "rollwright.store.sql.postgres",
    "uvloop",
    "soak_engine",
]


def fork_context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_command(folder: Path, words: list[str], output: Path) -> None:
    """What a process does that is to be the command `rollwright WORDS`."""
    os.chdir(folder)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["COLUMNS"] = "200"
    sys.argv = ["rollwright", *words]
    from rollwright.cli.main import main

    main()


class Role:
    """A part of a run that is started again whenever it is gone."""

    def __init__(
        self, name: str, start: Callable[[int], tuple[Callable[..., None], tuple[Any, ...]]]
    ) -> None:
        """`start`: what the process does and with what, by how often there was one before."""
        self.name = name
        self._start = start
        self._process: Any = None
        self.lives = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def code(self) -> int | None:
        """With which the last one ended; `None`: it runs, or there was none."""
        return None if self._process is None else self._process.exitcode

    def start(self) -> None:
        target, arguments = self._start(self.lives)
        self._process = fork_context().Process(target=target, args=arguments, name=self.name)
        self._process.start()
        self.lives += 1

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def kill_child(self) -> bool:
        """One of the worker processes that it has started itself, if there is one."""
        children = self._children()
        if children:
            os.kill(children[0], signal.SIGKILL)
        return bool(children)

    def _children(self) -> list[int]:
        found = Path(f"/proc/{self._process.pid}/task").glob("*/children") if self._process else ()
        return [int(pid) for file in found for pid in file.read_text().split()]
