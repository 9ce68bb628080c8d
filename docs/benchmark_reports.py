"""How the figures of each benchmark of rollouts and stores are shown: its text, and its tables."""

from collections.abc import Callable, Mapping
from typing import Any

from markdown_tables import promise_table, table

Figures = Mapping[str, Any]
"""What a benchmark has left in its file."""

OVERHEAD = """How much CPU a turn costs beside the engine. Every arm is a client process that plays the same four-turn rollouts
against the same simulated server, which answers at once. *Bare aiohttp* posts the conversation and keeps nothing: it
is the limit. *rollwright* is the whole pipeline, from the store to `get_batch()`; *rollwright, SQLite* is the same with
every turn on disk before it is acted on. The peers are `verifiers` from PyPI in its present and its 0.1 line. Arms take
turns; medians over the repeats. One event loop in one process each, so rollouts per second are those of one core."""

NO_BARRIER = """Whether anything waits that need not. 1,024 FrozenLake environments share a simulated engine of 64 slots whose
completions have heavy-tailed lengths. All arms play the same episodes with the same draws on a virtual clock, so the
figures are exact and the same on every machine. The bound is max(total work / slots, longest episode): no scheduler
can be faster. In the *batch-synchronous* arm all environments wait for the slowest answer of each turn."""

SCALE = """Whether an episode costs more when there are many. Real clock, one process for each size, so many episodes in flight at
all times on a simulated engine with a slot for each, whose speed is set so that about the same number of turns comes due
each second; whoever has played one takes the next. Memory is that of an episode in flight, and of the rollout that waits
behind it. Lag is how late the event loop is for a timer."""

MILLION = """What the finished part of a run costs when it is resumed: a step of a real run, written again under the ids of later
steps until the folder has so many rollouts, then `rollwright resume` for one more step of 1,000, and `rollwright show`. CPU
seconds are those of the whole command; after the moment from which it plays come the step itself and the summary over all
steps, which reads every trajectory. And what a long queue costs: a run that opens so many rollouts ahead of its batches is
interrupted when all are in the store, resumed and interrupted when it plays, and resumed for one batch, after which it ends and
cancels the rest."""

FLEETS = """How well calls are divided among 64 engines. Simulated vLLM servers with prefix caches on a virtual clock, and the router
that runs use: the members of a group share their first prompt, and every turn continues the one before. The bound of the hit
rate computes every distinct prefix once in the whole fleet; that of the makespan divides the work that is left by the episodes
at once. Servers that die lose their caches and their calls, which are sent again elsewhere."""

ENVS = """How fast the environments are, in steps and resets for each second of CPU. `gym_sokoban` from PyPI draws a picture at
every step; the second figure is with the drawing taken out. Answers to `reasoning_gym` are judged in other processes, in
a sandbox, and counted by the clock; their limit is the bare call of `score_answer`, which evaluates some of them in the
process that asks."""

STORE = """How fast the stores are: enqueue, claim, heartbeat, finish, with four workers that each do one thing at a time, next
to the stores of `agentlightning` from PyPI in the same run. SQLite and PostgreSQL flush what is enqueued and what is
finished to disk before they answer; a claim or heartbeat that a power cut takes back is as if it had never been made.
Python's garbage collector is set in every arm as a run sets it, the peer's included. `--only-sqlite` measures the speed
of SQLite beside the peer's memory store alone."""
STORE_POSTGRES = """PostgreSQL with callers that share commits: 4 and 64 of them, beside the peer's memory store in the same
rounds; a rollout among a million waiting and a million held ones; and the size of all tables and indexes while finished
rollouts are deleted. The server has its default settings, but for `autovacuum_naptime=5s` in the last part, and flushes
what is enqueued and finished."""

RECOVERY = """How long it takes until the episodes of a dead worker are played elsewhere, 256 of them in flight, and what is paid for
twice. A killed worker is noticed when its leases end; one that is told to stop hands its episodes back."""

RAY_WORKERS = """Ray actors next to the same number of worker processes, in one run: episodes for each second, at the limit of the
workers and the store; that table is of 2026-11-16, when processes, too, reached the store through the main process. Then
processes with an engine that answers at once (`--processes`), and the processor time of an episode in the main process and in
the workers, on 2026-11-18 beside other programs (load average 13). Such load slows one worker more than two, so the ratio of
rates is flattered; processor time hardly changes. By it, two cores of their own allow 1.9×."""

RENDERING = """What the next prompt costs at turn 128 of an episode of 60,000 tokens, in CPU time: what a session does (the ids of
the turns, joined, and those of the new message), and rendering the whole history again. One pass over the ids is the
limit. The texts are pages of Python's language reference, on which the tokenizer is trained on the spot."""


PROCESSES = 1.8
"""What a second worker process gains at least."""

MOST_GROWTH, SQLITE_GROWTH = 1.3, 1.2
"""What still counts as flat, from the smallest size to the largest."""

LEAST_OCCUPANCY = 0.95
MOST_OVER_BOUND = 1.05
LEAST_ANSWERS = 1_500
"""Answers to basic_arithmetic that are judged in a second, one after the other."""
LEAST_TIMES_FASTER = 30
"""A Sokoban step against that of gym_sokoban."""


def _overhead(figures: Figures) -> list[str]:
    cells = figures["figures"]
    limits = {each["concurrent"]: each["cpu_ms_per_turn"] for each in cells if each["arm"] == "bare aiohttp"}
    rows = [
        (
            f"{each['concurrent']:,}",
            each["arm"],
            f"{each['cpu_ms_per_turn']:.3f}",
            f"{each['cpu_ms_per_turn'] / limit:.2f}" if (limit := limits.get(each["concurrent"])) else "",
            f"{each['rollouts_per_second']:,.0f}",
        )
        for each in cells
    ]
    libraries = ", ".join(dict.fromkeys(each["library"] for each in cells))
    kept = [(each["promise"], each["measured"], each["met"]) for each in figures["targets"]]
    return [
        table(("concurrent", "arm", "CPU ms per turn", "times the limit", "rollouts per second"), rows),
        "",
        f"Versions: {libraries}.",
        "",
        promise_table(kept),
    ]


def _no_barrier(figures: Figures) -> list[str]:
    arms = figures["arms"]
    rows = [
        (each["arm"], f"{each['makespan']:.0f}", f"{each['over_bound']:.3f}", f"{each['occupancy']:.3f}")
        for each in arms
    ]
    ours = [each for each in arms if each["arm"].startswith("rollwright")]
    occupancy, over = min(each["occupancy"] for each in ours), max(each["over_bound"] for each in ours)
    kept = [
        (f"slots in use, at least {LEAST_OCCUPANCY}", f"{occupancy:.3f}", occupancy >= LEAST_OCCUPANCY),
        (f"makespan, at most {MOST_OVER_BOUND}× the bound", f"{over:.3f}×", over <= MOST_OVER_BOUND),
        ("the same transcripts in all arms", "", figures["transcripts_equal"]),
    ]
    return [
        table(("arm", "makespan, virtual s", "times the bound", "slots in use, steady state"), rows),
        "",
        f"{figures['speedup_over_batch_synchronous']:.2f} times as fast as the batch-synchronous loop.",
        "",
        promise_table(kept),
    ]


def _scale(figures: Figures) -> list[str]:
    rows = [
        (
            f"{each['episodes']:,}",
            f"{each['kib_per_episode']:.1f}",
            f"{each['cpu_ms_per_turn']:.2f}",
            f"{each['turns_per_second']:,.0f}",
            f"{each['lag_p99_ms']:,.0f}",
        )
        for each in figures["sizes"]
    ]
    growth = figures["growth"]
    kept = [
        (f"{what} flat: at most {MOST_GROWTH}×", f"{growth[key]:.2f}×", growth[key] <= MOST_GROWTH)
        for what, key in (("memory per episode", "kib_per_episode"), ("CPU per turn", "cpu_ms_per_turn"))
    ]
    heads = ("episodes at once", "KiB per episode", "CPU ms per turn", "turns per second", "lag p99, ms")
    return [table(heads, rows), "", promise_table(kept)]


def _fleets(figures: Figures) -> list[str]:
    rows = [
        (
            f"`{each['routing']}`",
            str(each["deaths"]),
            f"{each['hit_rate']:.3f}",
            f"{each['hit_rate_bound']:.3f}",
            f"{each['makespan']:.0f}",
            f"{each['makespan_bound']:.0f}",
            str(each["sent_again"]),
        )
        for each in figures["rows"]
    ]
    heads = (
        "`policy.routing`",
        "servers that die",
        "hit rate",
        "bound",
        "makespan, s",
        "bound, s",
        "sent again",
    )
    return [table(heads, rows)]


def _envs(figures: Figures) -> list[str]:
    rows = [
        (f"`{tag}`", f"{each['steps_per_second']:,.0f}", f"{each['resets_per_second']:,.0f}")
        for tag, each in figures["rollwright"].items()
    ]
    against = [
        (f"`{tag}`", f"{each['step']:.0f}×", f"{each['step_without_pictures']:.1f}×", f"{each['reset']:.0f}×")
        for tag, each in figures["times_faster"].items()
    ]
    slowest = min(each["step"] for each in figures["times_faster"].values())
    promise = f"a Sokoban step, at least {LEAST_TIMES_FASTER}× as fast"
    scoring = [
        (
            name,
            f"{each['steps_per_second']:,.0f}",
            f"{each['steps_per_second_at_once']:,.0f}",
            f"{each['resets_per_second']:,.0f}",
            f"{(bare := figures['scoring_bare'][name]['steps_per_second']):,.0f}",
            f"{max(each['steps_per_second'], each['steps_per_second_at_once']) / bare:.2%}",
        )
        for name, each in figures["scoring"].items()
    ]
    answers = figures["scoring"]["basic_arithmetic"]["steps_per_second"]
    at_once = f"answers per second, {figures['scoring_at_once']} at once"
    heads = ("dataset", "answers per second", at_once, "resets per second", "the bare call", "share of it")
    return [
        table(("environment", "steps per second", "resets per second"), rows),
        "",
        "Against gym_sokoban:",
        "",
        table(("environment", "step", "step without pictures", "reset"), against),
        "",
        "Answers to reasoning-gym:",
        "",
        table(heads, scoring),
        "",
        promise_table(
            [
                (promise, f"{slowest:.0f}×", slowest >= LEAST_TIMES_FASTER),
                (
                    f"answers to basic_arithmetic, at least {LEAST_ANSWERS:,} per second",
                    f"{answers:,.0f}",
                    answers >= LEAST_ANSWERS,
                ),
            ]
        ),
    ]


def _store(figures: Figures) -> list[str]:
    speed = figures["speed"]
    theirs = {name: speed[f"agentlightning {name}"]["rollouts_per_second"] for name in ("memory", "http")}
    rows = [
        (name, f"{each['rollouts_per_second']:,.0f}", f"{each['client_cpu_us_per_rollout']:,.0f}")
        for name, each in speed.items()
    ]
    kept = []
    for ours, peer, least in (("memory", "memory", 10), ("sqlite", "memory", 2), ("http", "http", 10)):
        ratio = speed[ours]["rollouts_per_second"] / theirs[peer]
        kept.append((f"{ours}, at least {least}× the peer's {peer} store", f"{ratio:.1f}×", ratio >= least))
    for name, each in figures["scale"].items():
        most = SQLITE_GROWTH if name == "sqlite" else MOST_GROWTH
        promise = f"{name}: an operation among 100,000 rollouts, at most {most}× one among 2,000"
        kept.append((promise, f"{each['ratio']:.2f}×", each["ratio"] <= most))
    heads = ("store", "rollouts per second", "CPU of the client, µs per rollout")
    return [table(heads, rows), "", promise_table(kept)]


def _store_postgres(figures: Figures) -> list[str]:
    speed = figures["speed"]
    names = {"peer": "agentlightning memory, 4 callers"}
    for callers in ("4", "64"):
        names |= {
            callers: f"postgres, {callers} callers",
            f"{callers}, bare": f"bare statements, {callers} callers",
        }
    rows = [(names[name], f"{rate:,.0f}") for name, rate in speed["rollouts_per_second"].items()]
    kept = [
        (
            f"{each['promise']}, at {'least' if each['least'] else 'most'} {each['wanted']:,g}",
            f"{each['measured']:,.0f}" if each["wanted"] > 100 else f"{each['measured']:.2f}×",
            each["kept"],
        )
        for each in figures["promises"]
    ]
    sizes = figures["retention"]
    bare = (
        f" The bare statements for 4 callers reached {speed['bare_against_peer']:.2f}× the peer's memory store."
        if "bare_against_peer" in speed
        else ""
    )
    return [
        table(("store", "rollouts per second"), rows),
        "",
        "Load of the machine before each part: "
        + ", ".join(f"{name} {load:.1f}" for name, load in figures["loads"].items())
        + f". One flush of the disk took {speed['flush_us']:,.0f} µs. A rollout took {figures['scale']['us_among_few']:,.0f} µs"
        f" among 2,000 others, {figures['scale']['us_among_many']:,.0f} µs among {figures['scale']['many']:,}."
        f"{bare} In {sizes['played']:,} rollouts, of which {sizes['kept']:,} finished ones were kept, the tables and indexes took"
        f" {min(sizes['megabytes']):,.0f} to {max(sizes['megabytes']):,.0f} MB, and {sizes['megabytes'][-1]:,.0f} MB at the end.",
        "",
        promise_table(kept),
    ]


def _recovery(figures: Figures) -> list[str]:
    rows = [
        (
            each["how"],
            f"{each['claimed_seconds']:.2f}",
            f"{each['asking_seconds']:.2f}",
            str(each["lost_generations"]),
            "–" if each["recorded_generated_again"] is None else str(each["recorded_generated_again"]),
        )
        for each in figures["cases"]
    ]
    heads = (
        "how the worker goes",
        "all claimed, s",
        "all running, s",
        "generations lost",
        "recorded turns paid again",
    )
    again = sum(each["recorded_generated_again"] or 0 for each in figures["cases"])
    return [
        table(heads, rows),
        "",
        promise_table([("recorded turns generated again: 0", str(again), again == 0)]),
    ]


def _ray_workers(figures: Figures) -> list[str]:
    rows = [
        (
            str(each["workers"]),
            f"{each['processes']['episodes_per_second']:,.0f}",
            f"{each['actors']['episodes_per_second']:,.0f}",
            f"{each['ratio']:.2f}",
        )
        for each in figures["workers"]
    ]
    found = [table(("workers", "processes, episodes/s", "Ray actors, episodes/s", "ratio"), rows)]
    if at_once := figures.get("no_engine"):
        cpu = [
            (
                str(each["workers"]),
                f"{each['episodes_per_second']:,.0f}",
                f"{each['main_cpu_ms']:.2f}",
                f"{each['worker_cpu_ms']:.2f}",
            )
            for each in at_once
        ]
        heads = (
            "workers, engine at once",
            "episodes/s",
            "CPU ms per episode, main process",
            "CPU ms per episode, workers",
        )
        one, two = at_once[0], at_once[1]
        ratio = two["episodes_per_second"] / one["episodes_per_second"]
        feeds = two["worker_cpu_ms"] / two["main_cpu_ms"]
        kept = [
            (f"two processes play {PROCESSES:g}× as much as one", f"{ratio:.2f}×", ratio >= PROCESSES),
        ]
        found += [
            "",
            table(heads, cpu),
            "",
            promise_table(kept),
            "",
            f"By processor time for each episode, one main process can feed {feeds:.0f} workers that have a core each.",
        ]
    return found


def _million(figures: Figures) -> list[str]:
    rows = [
        (
            f"{each['rollouts']:,}",
            f"{each['disk_mb']:,.0f}",
            f"{each['resume']['plays_cpu_seconds']:.1f}",
            f"{each['resume']['cpu_seconds']:.1f}",
            f"{each['resume']['mib']:,.0f}",
            f"{each['show']['cpu_seconds']:.1f}",
        )
        for each in figures["sizes"]
    ]
    heads = (
        "finished rollouts",
        "disk, MB",
        "`resume` plays after, CPU s",
        "`resume` in all, CPU s",
        "its peak, MiB",
        "`show`, CPU s",
    )
    most, last = figures["most_seconds"], figures["sizes"][-1]
    spent = last["resume"]["plays_cpu_seconds"]
    queued = [
        (
            f"{each['rollouts']:,}",
            f"{each['open']['until_cpu_seconds']:.1f}",
            f"{each['resume']['until_cpu_seconds']:.1f}",
            f"{each['end']['cpu_seconds']:.1f}",
            f"{max(each[name]['mib'] for name in ('open', 'resume', 'end')):,.0f}",
        )
        for each in figures.get("queued", ())
    ]
    queue_heads = (
        "queued rollouts",
        "all open after, CPU s",
        "`resume` plays after, CPU s",
        "`resume`, a batch, and the end, CPU s",
        "peak, MiB",
    )
    return [
        table(heads, rows),
        "",
        *((table(queue_heads, queued), "") if queued else ()),
        promise_table(
            [
                (
                    f"plays again within {most:.0f} s after {last['rollouts']:,} rollouts",
                    f"{spent:.1f} s",
                    spent <= most,
                )
            ]
        ),
    ]


def _rendering(figures: Figures) -> list[str]:
    rows, kept = [], []
    for name, each in figures["formats"].items():
        ours = each["cpu_ms"]["rollwright"]
        rows += [(name, arm, f"{spent:.2f}", f"{spent / ours:.2f}×") for arm, spent in each["cpu_ms"].items()]
        wanted, faster, growth = figures["wanted_ratio"], each["times_faster"], each["growth"]
        kept += [
            (
                f"{name}: at least {wanted:.0f}× as fast as the whole history",
                f"{faster:.0f}×",
                faster >= wanted,
            ),
            (f"{name}: what is added costs no more than early on", f"{growth:.2f}×", growth <= MOST_GROWTH),
        ]
    heads = ("format", "the next prompt by", "CPU ms", "times rollwright's")
    return [table(heads, rows), "", promise_table(kept)]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "overhead": (OVERHEAD, _overhead),
    "no_barrier": (NO_BARRIER, _no_barrier),
    "scale": (SCALE, _scale),
    "million": (MILLION, _million),
    "fleets": (FLEETS, _fleets),
    "envs": (ENVS, _envs),
    "store": (STORE, _store),
    "store_postgres": (STORE_POSTGRES, _store_postgres),
    "recovery": (RECOVERY, _recovery),
    "ray_workers": (RAY_WORKERS, _ray_workers),
    "rendering": (RENDERING, _rendering),
}
