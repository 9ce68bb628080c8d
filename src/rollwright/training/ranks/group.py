"""The process group of a trainer's ranks: who they are, how they meet, and when they take each other for lost."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]

from rollwright.errors import RollwrightError

HOST, PORT, RANK, SIZE = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"
"""Environment variables by which ranks find each other, as torchrun names them."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Network interface of gloo."""
SECONDS = "ROLLWRIGHT_RANK_TIMEOUT"
LOOPBACK = "127.0.0.1"
"""Host of ranks that rank 0 starts on its own machine."""
SETUP = "setup"
"""Key of what the other ranks need to build their trainers."""

_LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket")
"""Words in the errors of a communication that failed, in lower case."""


class RanksLost(RollwrightError):
    """A rank died, or did not answer within the time limit."""


@dataclass(frozen=True)
class Seat:
    """Place of this process among the ranks."""

    rank: int
    size: int
    host: str
    port: int
    seconds: float

    @classmethod
    def from_environment(cls, seconds: float = 300.0) -> "Seat":
        read = os.environ
        limit = float(read.get(SECONDS, seconds))
        return cls(int(read[RANK]), int(read[SIZE]), read[HOST], int(read[PORT]), limit)

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.seconds)


def ready_key(rank: int) -> str:
    return f"ready/{rank}"


def serve(host: str, size: int) -> TCPStore:
    """A new store, served by this process."""
    return TCPStore(host, 0, size, True, wait_for_workers=False)


def connect(seat: Seat) -> Store:
    """The store that another process serves."""
    return TCPStore(seat.host, seat.port, seat.size, False, timeout=seat.limit, wait_for_workers=False)


def join(store: Store, seat: Seat) -> None:
    """Forms the process group; returns when all ranks are in it."""
    if INTERFACE not in os.environ and (found := interface_to(seat.host)) is not None:
        os.environ[INTERFACE] = found
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=seat.rank,
        world_size=seat.size,
        timeout=seat.limit,
    )


def interface_to(host: str) -> str | None:
    """Name of this machine's network interface on the way to `host`; `None` if it cannot be told.

    Gloo would take the address that the machine's own name stands for, which often is not that of any network of the ranks.
    """
    import psutil

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    return None


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_loss(error: BaseException) -> bool:
    """Whether the error says that a communication failed."""
    kinds: tuple[Any, ...] = (
        dist.DistError,
        dist.DistNetworkError,
        dist.DistStoreError,
        dist.DistBackendError,
    )
    return isinstance(error, kinds) or any(word in str(error).lower() for word in _LOST)
