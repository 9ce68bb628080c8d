"""The same groups of levels, played by chance, by a simulated engine of middling skill, and by an oracle."""

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.cli.run import execute
from rollwright.cli.tables import percent
from rollwright.config import load
from rollwright.run.folder import RunFolder

ROOT = Path(__file__).parent.parent
PLAYERS = {"random": ["policy.kind=random"], "simulated": [], "oracle": ["policy.kind=oracle"]}


def main() -> None:
    screen = console()
    summaries: dict[str, dict[str, Any]] = {}
    for player, overrides in PLAYERS.items():
        config = load(ROOT / "configs" / "demo.yaml", [f"name=demo-{player}", *overrides])
        folder, config = RunFolder.create(Path("runs"), config)
        summaries[player] = run_async(execute(config, folder, screen, store=folder.store_address(None)))
        if summaries[player]["interrupted"]:
            return
    table = Table(title="the same levels, three players", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("environment", no_wrap=True)
    for player in PLAYERS:
        for figure in (f"{player}:", "reward", "turns"):
            table.add_column(figure, justify="right", no_wrap=True)
    rows = {
        player: {row["tag"]: row for row in summary["results"] if row["mode"] == "train"}
        for player, summary in summaries.items()
    }
    for tag in rows["random"]:
        cells = []
        for player in PLAYERS:
            row = rows[player][tag]
            cells += [percent(row["success"]), f"{row['reward']:.2f}", f"{row['turns']:.1f}"]
        table.add_row(tag, *cells)
    screen.print(table)


if __name__ == "__main__":
    main()
