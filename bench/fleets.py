"""Which way of routing calls lets a fleet of engines with prefix caches do the least work?

    python bench/fleets.py [--servers 64] [--failures 0.1]

64 simulated vLLM servers on a virtual clock, and the router that runs use (`rollwright.engines.pool.Router`, with each rule of
`policy.routing`). A server has 16 places and a prefix cache of 160,000 tokens that drops what was used least recently; a call
computes the tokens of its prompt that are not cached, then its completion. Episodes have several turns, each prompt continues
the one before; the members of a group share their first prompt, and all groups a system prompt. All arms play the same episodes
with the same lengths.

In the second half of the table, a tenth of the servers die while the run goes on, with all calls under way, and come back
empty later. Their calls are sent again elsewhere.

The **hit rate** is the share of prompt tokens that a cache had. Its bound computes every distinct prefix once in the whole
fleet. The **makespan**'s bound is max(work with that hit rate / episodes at once, longest episode). No rule can do better than either.
All of it is virtual time, so the figures are the same on every machine. Takes about a minute of processor time.
"""

import sys

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.simulation.fleet import plan_episodes, simulate_fleet

SERVERS, GROUPS, MEMBERS = 64, 1_024, 8


def main() -> None:
    options = dict(zip(sys.argv[1::2], map(float, sys.argv[2::2]), strict=True))
    servers, failures = int(options.get("--servers", SERVERS)), options.get("--failures", 0.1)
    episodes = plan_episodes(GROUPS * servers // SERVERS, MEMBERS)
    screen = console()
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{servers} servers, {len(episodes)} episodes", title_justify="left"
    )
    for column in ("routing", "servers that die", "hit rate", "bound", "makespan s", "bound s", "sent again"):
        table.add_column(column, justify="left" if column == "routing" else "right")
    rows = []
    for share in (0.0, failures):
        for name in ("least_loaded", "sticky", "prefix"):
            with screen.status(f"{name}, {share:.0%} die …"):
                row = {"routing": name, **simulate_fleet(name, episodes, servers, share)}
            rows.append(row)
            table.add_row(
                name,
                str(row["deaths"]),
                f"{row['hit_rate']:.3f}",
                f"{row['hit_rate_bound']:.3f}",
                f"{row['makespan']:.0f}",
                f"{row['makespan_bound']:.0f}",
                str(row["sent_again"]),
            )
    screen.print(table)
    write_results("fleets", {"servers": servers, "episodes": len(episodes), "rows": rows})


if __name__ == "__main__":
    main()
