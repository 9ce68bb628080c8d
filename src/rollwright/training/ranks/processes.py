"""The other ranks as processes on this machine. None of them outlives rank 0."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

from rollwright.training.ranks.group import HOST, PORT, RANK, SECONDS, SIZE, Seat

END_SECONDS = 5.0
"""Seconds for a rank to end after it was told to; then it is killed."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Without these, glibc keeps the memory of gathered weights, and no rank's memory falls by sharding."""


class RankProcesses:
    """Ranks 1 to `size` − 1, started as subprocesses."""

    def __init__(self, leader: Seat) -> None:
        self._ranks: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        for rank in range(1, leader.size):
            words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
            environment = {
                **ALLOCATOR,
                **os.environ,
                "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
                HOST: leader.host,
                PORT: str(leader.port),
                RANK: str(rank),
                SIZE: str(leader.size),
                "LOCAL_RANK": str(rank),
                SECONDS: str(leader.seconds),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "rollwright.training.ranks.follower"],
                env=environment,
                stdin=subprocess.PIPE,  # held open: at its end the rank knows that this process is gone
                stdout=subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
            )
            self._ranks[rank] = (process, words)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, (process, _) in self._ranks.items()}

    def lost(self, seconds: float = 0.0) -> str | None:
        """Why a rank has ended, if one has; waits up to `seconds` for it."""
        end = time.monotonic() + seconds
        while True:
            ended = {
                rank: process.returncode
                for rank, (process, _) in self._ranks.items()
                if process.poll() is not None
            }
            # A rank that only lost the others ended because of another rank.
            for rank in sorted(ended, key=lambda each: (ended[each] == 3, each)):
                return self._describe(rank, ended[rank])
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def _describe(self, rank: int, code: int) -> str:
        if code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        words = self._ranks[rank][1]
        words.seek(0)
        lines = words.read().decode(errors="replace").strip().splitlines()
        said = lines[-1] if lines else f"rank {rank} said nothing"
        return said if said.startswith("rank ") else f"rank {rank} ended with code {code}: {said}"

    def end(self, *, at_once: bool = False) -> None:
        """Ends all ranks: those that were told to stop have a few seconds."""
        until = time.monotonic() + (0 if at_once else END_SECONDS)
        for process, words in self._ranks.values():
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()  # also a process that is stopped
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
            words.close()
        self._ranks.clear()
