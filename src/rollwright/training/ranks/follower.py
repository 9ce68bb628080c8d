"""A rank other than 0: makes the calls of rank 0 on its own trainer until it is told to stop.

    python -m rollwright.training.ranks.follower

Always true: it ends when rank 0 does, or cannot be reached, and at the first error; its last line on standard error says why.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rollwright.errors import FormatError, RollwrightError
from rollwright.training.checkpoints import CheckpointManifest
from rollwright.training.ranks.collective import Ranks
from rollwright.training.ranks.commands import Channel, decode_rows
from rollwright.training.ranks.group import (
    LOOPBACK,
    SETUP,
    Seat,
    Store,
    connect,
    is_loss,
    join,
    leave,
    ready_key,
)
from rollwright.training.settings import TrainerSettings
from rollwright.trajectory import token_ids

if TYPE_CHECKING:
    from rollwright.training.trainer import Trainer

LOST, FAILED = 3, 1
"""Exit codes: the other ranks were lost, or this one had an error."""


def follow(seat: Seat, store: Store, wanted: Callable[[], bool] = lambda: True) -> None:
    """Builds the trainer that rank 0 describes, and makes its calls."""
    from rollwright.models import load_model
    from rollwright.training.trainer import Trainer

    if seat.host != LOOPBACK:
        _end_without_leader(seat)
    store.wait([SETUP], seat.limit)
    setup = json.loads(store.get(SETUP))
    model = load_model(setup["model"])
    # Ranks wait for each other only after what takes long is done: loading is not bound by their time limit.
    store.set(ready_key(seat.rank), "1")
    join(store, seat)
    try:
        trainer = Trainer(
            model,
            TrainerSettings.model_validate(setup["settings"]),
            total_updates=setup["total_updates"],
            temperature=setup["temperature"],
            seed=setup["seed"],
            ranks=Ranks(seat.rank, seat.size),
        )
        channel = Channel(store)
        while True:
            kind, content = channel.receive(wanted)
            if kind == "stop":
                return
            make_call(trainer, kind, content)
    finally:
        leave()


def make_call(trainer: "Trainer", kind: str, content: bytes) -> None:
    match kind:
        case "step":
            trainer.step(decode_rows(content))
        case "logprobs":
            pairs = msgspec.msgpack.decode(content)
            trainer.logprobs([(token_ids(prompt), token_ids(sampled)) for prompt, sampled in pairs])
        case "values":
            trainer.values(decode_rows(content))
        case "weights":
            trainer.weights()
        case "adapter":
            trainer.export_adapter(Path())
        case "save":
            trainer.save(Path(content.decode()), {})
        case "restore":
            names = msgspec.msgpack.decode(content)
            single = {entry: torch.tensor(value) for entry, value in names["single"].items()}
            trainer.take(
                dict.fromkeys(names["parameters"]),
                {**dict.fromkeys(names["moments"]), **single},
                names["state"],
            )
        case "restore_shards":
            names = msgspec.msgpack.decode(content)
            manifest = CheckpointManifest(
                Path(names["place"]), names["sharded"], names["state"], {}, names["sums"]
            )
            # All ranks have found the same damage, and rank 0 restores an earlier checkpoint.
            with suppress(FormatError):
                trainer.take_shards(Path(names["folder"]), manifest)
        case _:
            raise RollwrightError(f"rank: unknown call {kind!r}")


def _end_without_leader(seat: Seat) -> None:
    """Ends this process when rank 0 cannot be reached for the time limit: a network that is cut closes no connection."""

    def watch() -> None:
        while True:
            time.sleep(max(seat.seconds / 4, 1.0))
            try:
                connect(seat)
            except RuntimeError:
                print(
                    f"rank {seat.rank}: rank 0 at {seat.host} was not there for {seat.seconds:g} s",
                    file=sys.stderr,
                )
                os._exit(LOST)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its standard input does, which rank 0 holds open."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(LOST)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which tells the others
    seat = Seat.from_environment()
    _end_with_parent()
    try:
        follow(seat, connect(seat))
    except RollwrightError as error:
        print(f"rank {seat.rank}: {error}", file=sys.stderr)
        return FAILED
    except RuntimeError as error:
        if not is_loss(error):
            raise
        print(f"rank {seat.rank}: lost the other ranks", file=sys.stderr)
        return LOST
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a communication that failed may have left threads that never end
