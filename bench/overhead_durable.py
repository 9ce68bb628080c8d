"""Ours with the store that `rollwright run` uses: a SQLite file, every turn durable before it is acted on."""

from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from overhead_episode import Order, allow_open_files, report
from overhead_rollwright import run

if __name__ == "__main__":
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    with TemporaryDirectory() as folder:
        report(uvloop.run(run(order, str(Path(folder) / "store.db"))))
