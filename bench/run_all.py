"""Every benchmark, one after the other; each prints its table and leaves its figures in `bench/results/`.

make bench
"""

import subprocess
import sys
from pathlib import Path

from rich.rule import Rule

from rollwright.cli.console import console

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "overhead",
    "no_barrier",
    "scale",
    "million",
    "envs",
    "store",
    "store_postgres",
    "objects",
    "recovery",
    "ray_workers",
    "rendering",
    "gateway",
    "trainer",
    "trainer_ranks",
    "prefixes",
    "async_training",
    "tree",
    "tree_signal",
    "tree_prefix",
    "orchestra",
    "tools",
    "boxes",
    "foreign",
    "cli_agents",
    "cli_startup",
    "startup",
    "swarm_scale",
)


def main() -> int:
    screen = console()
    failed = []
    for name in BENCHMARKS:
        screen.print(Rule(name))
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")]).returncode:
            failed.append(name)
    if failed:
        screen.print(f"[red]failed: {', '.join(failed)}[/]")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
