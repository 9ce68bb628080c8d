"""How much processor time the command line takes to answer, beside a bare interpreter and the command of a peer.

    python bench/cli_startup.py

Each answer is a process of its own; its time is what the kernel counted for it, user and system together, so another
program on the machine moves the figures less than it would move seconds on a clock. Commands take turns, and one start of
each comes first and is not counted, because it may compile modules.
"""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from venvs import peer_python

PEER = "verifiers==0.4.0"

ROUNDS = 9

LIMIT = 0.35
"""Seconds of processor time in which a command should have answered."""

CONFIG = """
name: lake
policy: {kind: oracle}
train_env_manager: {num_env_groups: 4, group_size: 4, tags: [FrozenLake]}
"""

OURS = {
    "rollwright --help": ["--help"],
    "rollwright --version": ["--version"],
    "rollwright envs": ["envs"],
    "rollwright show RUN": ["show", "runs/lake"],
    "rollwright run, unknown key": ["run", "lake.yaml", "polcy.kind=oracle"],
    "rollwright run, wrong value": ["run", "lake.yaml", "max_steps=many"],
    "rollwright run, unknown tag": ["run", "lake.yaml", "train_env_manager.tags=[FrozenLak]"],
    "rollwright run, missing file": ["run", "none.yaml"],
}
"""By name: the words, in a folder with a configuration and a small run of it."""

COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Modules are compiled once, as those of an installed package are."""

BARE, PEER_HELP = "python -c pass", "vf-eval --help"


def cpu_seconds(command: list[str], folder: Path) -> float:
    """Processor time of one process and of those that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=COMPILED)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr.strip()[-300:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, peer: Path) -> dict[str, float]:
    """The median of each command, by name."""
    command = [sys.executable, "-m", "rollwright"]
    (folder / "lake.yaml").write_text(CONFIG, encoding="utf-8")
    subprocess.run([*command, "run", "lake.yaml"], cwd=folder, check=True, capture_output=True)
    commands = {
        BARE: [sys.executable, "-c", "pass"],
        PEER_HELP: [str(peer.with_name("vf-eval")), "--help"],
        **{name: [*command, *words] for name, words in OURS.items()},
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(ROUNDS + 1):
        for name, words in commands.items():
            seconds = cpu_seconds(words, folder)
            if number:
                taken[name].append(seconds)
    return {name: round(statistics.median(each), 4) for name, each in taken.items()}


def main() -> int:
    screen = console()
    load = os.getloadavg()[0]
    peer = peer_python("verifiers-cli", [PEER], screen)
    with TemporaryDirectory() as folder:
        medians = measure(Path(folder), peer)
    title = f"processor time of one answer, median of {ROUNDS}; limit {LIMIT} s"
    table = Table("command", "CPU s", "of the limit", "of vf-eval --help", title=title, title_justify="left")
    for name, seconds in medians.items():
        of_limit = f"{seconds / LIMIT:.0%}" if name in OURS else "–"
        table.add_row(name, f"{seconds:.3f}", of_limit, f"{seconds / medians[PEER_HELP]:.2f}")
    screen.print(table)
    figures = {
        "load_before": round(load, 2),
        "peer": PEER,
        "rounds": ROUNDS,
        "limit": LIMIT,
        "cpu_seconds": medians,
    }
    write_results("cli_startup", figures)
    slow = [name for name in OURS if medians[name] > LIMIT]
    if slow:
        screen.print(f"[red]above the limit: {', '.join(slow)}[/]")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
