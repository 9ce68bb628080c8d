"""Ranks that torchrun has started: this process finds its place in the environment.

Always true: rank 0 is the run; the other processes make its calls and end with it. torchrun's own store is used only to tell
them where rank 0 is. torchrun replaces lost ranks, not rank 0: it ends all processes and, with `--max-restarts`, starts them
again; the run then goes on from its folder.
"""

import os
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rollwright.errors import ConfigError
from rollwright.training.ranks.follower import follow
from rollwright.training.ranks.group import HOST, PORT, RANK, SIZE, Seat, Store, connect

RUN_ID, RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun alone, unlike the variables of a rank that a run started by itself."""
WHERE = "rollwright/rank0"
START_SECONDS = 600.0
"""Time for rank 0 to read its settings and start."""


def is_under_torchrun() -> bool:
    return RUN_ID in os.environ and RANK in os.environ


def torchrun_rank() -> int:
    return int(os.environ[RANK])


def torchrun_size() -> int:
    return int(os.environ[SIZE])


def restart_count() -> int:
    """How often torchrun has restarted the processes."""
    return int(os.environ.get(RESTARTS, "0"))


def marker(runs: Path) -> Path:
    """File that names the run folder of this torchrun, for its next start."""
    name = "".join(each if each.isalnum() or each in "-_" else "_" for each in os.environ[RUN_ID])
    return runs / f".torchrun-{name}"


def _agent() -> Store:
    """The store of torchrun itself."""
    host, port = os.environ[HOST], int(os.environ[PORT])
    limit = timedelta(seconds=START_SECONDS)
    return TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)


def _key() -> str:
    return f"{WHERE}/{restart_count()}"


class TorchrunRanks:
    """The other ranks, from rank 0's side: told where it is, and otherwise torchrun's."""

    def __init__(self, leader: Seat) -> None:
        if leader.size != torchrun_size():
            raise ConfigError(
                f"training.processes: is {leader.size}, and torchrun started {torchrun_size()}; leave it out"
            )
        self._store = _agent()
        self._store.set(_key(), f"{leader.host} {leader.port} {leader.seconds}")

    def lost(self, seconds: float = 0.0) -> str | None:
        """Unknown here: torchrun ends all processes."""
        return None

    def end(self, *, at_once: bool = False) -> None:
        """Nothing: they end when they are told to stop, or by torchrun."""


def leader_host() -> str:
    """Address by which the other ranks reach rank 0, which runs where torchrun's store is."""
    return os.environ[HOST]


def follow_torchrun() -> None:
    """Makes the calls of rank 0 until it is told to stop; of the other ranks."""
    store = _agent()
    store.wait([_key()], timedelta(seconds=START_SECONDS))
    host, port, seconds = store.get(_key()).decode().split()
    seat = Seat(torchrun_rank(), torchrun_size(), host, int(port), float(seconds))
    follow(seat, connect(seat))
