"""How the figures of the benchmarks of engines, training, tools and teams are shown."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from markdown_tables import promise_table, table

Figures = Mapping[str, Any]

SATURATION = """How busy episodes keep a real engine: SmolLM2 on vLLM (CPU build, float32), four-turn episodes against a bare load
generator that sends the same requests at the same concurrency. The arms take turns."""

GATEWAY = """What recording an agent at the API costs: agents of the openai SDK play rollouts of four turns, 64 and 256 at a time, in
front of an engine that answers at once. CPU time is that of the gateway's process; opening and ending a rollout are counted
apart. The arms take turns in the same run. At rLLM's gateway, ending is fetching the traces; the litellm proxy knows no
rollouts and records nothing."""

TRAINER = """Tokens for each CPU second of a training step on the same rows: ours, a plain loop that pads to the longest row, TRL's
`GRPOTrainer`, and the limit (forward and backward passes over perfectly packed rows, nothing else)."""

RANKS = """One step on 1, 2 and 4 ranks with FSDP2 over gloo, on the rows of the benchmark above: tokens of the episodes per CPU second
of all ranks together, the share of the step in which ranks wait for each other, and the bytes of one step that rank 0 receives
when weights are gathered and sends when gradients are reduced. In theory, with weights gathered once for an update, each is
(N − 1) / N of all weights. All ranks share the cores that are named below, so the figures show what communication costs, not
speed. `every pass` gathers layer by layer in every forward and backward pass, for models that do not fit one rank; its waiting
is inside of torch's collectives and not counted.

*TRL*: its `GRPOTrainer` under accelerate with as many processes (DDP over gloo, gradients reduced once in a step), the same rows,
an equal number on each process, from the rows to the changed weights without TRL's generation and scoring. Its rows are padded
and share no prefixes. Both trainers are run in turn, several times, every second time in the opposite order; *to TRL* is the
median over these rounds. The last table is the rise of rank 0's memory while a checkpoint is written on 4 ranks."""

PREFIXES = """One batch through the trainer with every row by itself, and with rows that share a prefix joined so that it is
computed once: CPU seconds of one thread for the gradient, and for a whole step with the optimiser. *Apart* is the distance of
the two gradients, relative to their norm."""

ASYNC_TRAINING = """Asynchronous over synchronous training: the real loop on a virtual clock with the simulated engine and a simulated
training step, heavy-tailed episodes, equal work. The limit is (rollout with its barrier + training) / max(rollout with
the engine always full, training). *Ahead* is `async_generation_ratio`."""

ORCHESTRA = """A team for each sample against the same team played batch by batch, on a virtual clock with a simulated engine of 64
slots; the transcripts of both are the same. The limit is max(total work / slots, longest sample). Medians over the
seeds."""

TOOLS = """Eight calls of one turn side by side and one after the other (each waits 20 ms), handing a pooled resource from one
rollout to the next, and running a line of Python in the sandbox: a new one for each, of which two are started ahead, one that
keeps its state, and a plain process without any confinement."""

SWARM_SHARING = """What sharing costs: each of the nodes announces its groups and pulls four of 25 KB, against an all-gather over
hivemind's own nodes in the same run."""

SWARM = """Sharing rollouts in miniature: eight nodes with a Llama of 60,000 parameters each, I own and J foreign groups in a round
(I/J), alone, and with a node that poisons its groups, believed and checked; *one silent* is the same swarm when that node
shares nothing. Exchange, checking, advantages and trainer are
those of a node. The reward is that of the nodes' own rollouts, summed over the rounds, in means over paired seeds with
Student's intervals at 95 %."""

LEAST_SHARE = 0.95


def _prefixes(figures: Figures) -> list[str]:
    rows = [
        (
            name,
            f"{each['rows']:,}",
            f"{each['tokens_apart']:,}",
            f"{each['tokens_joined']:,}",
            f"{each['fewer_tokens']:.1f}×",
            f"{each['seconds_apart']:.2f}",
            f"{each['seconds_joined']:.2f}",
            f"{each['faster']:.1f}×",
            f"{each['step_apart']:.2f}",
            f"{each['step_joined']:.2f}",
            f"{each['faster_step']:.1f}×",
            f"{each['gradient_difference']:.0e}",
        )
        for name, each in figures["batches"].items()
    ]
    heads = (
        "batch",
        "rows",
        "tokens",
        "joined",
        "",
        "gradient, s",
        "joined",
        "",
        "step, s",
        "joined",
        "",
        "apart",
    )
    return [table(heads, rows)]


def _saturation(figures: Figures) -> list[str]:
    rows = [
        (
            each["name"],
            f"{each['tokens_per_second']:.1f}",
            f"{each['requests']}",
            f"{100 * each['cache_hit_rate']:.0f} %",
        )
        for each in figures["arms"]
    ]
    share, least = figures["share"], figures["target"]
    return [
        table(("arm", "tokens per second", "requests", "prefix-cache hits"), rows),
        "",
        promise_table(
            [(f"share of the load generator's speed, at least {least}", f"{share:.3f}", share >= least)]
        ),
    ]


def _gateway(figures: Figures) -> list[str]:
    rows, promises = [], []
    for name, each in figures["arms"].items():
        counted = list(each["agents"].values())
        calls = [f"{some['cpu_ms_per_call']:.2f}" for some in counted]
        ends = f"{counted[-1]['cpu_ms_per_open']:.2f}", f"{counted[-1]['cpu_ms_per_end']:.2f}"
        shown = (*calls, *ends) if counted[0]["cpu_ms_per_call"] else ("–",) * 4
        rows.append((name, f"{each['latency_ms']:.2f}", *shown))
        most = max(some["cpu_ms_per_call"] for some in counted)
        if (limit := figures["cpu_limits_ms"].get(name)) is not None:
            promises.append((f"{name}: CPU at most {limit:g} ms per call", f"{most:.2f} ms", most <= limit))
        if (limit := figures["latency_limits_ms"].get(name)) is not None:
            alone = each["latency_ms"]
            promises.append(
                (f"{name}: latency alone at most {limit:g} ms", f"{alone:.2f} ms", alone <= limit)
            )
    heads = (
        "arm",
        "latency of one agent alone, ms",
        "CPU ms per call, 64 agents",
        "256 agents",
        "open",
        "end",
    )
    flush = (
        f"One flush of the disk took {figures['flush_ms']:.2f} ms in between, which a durable turn waits for."
    )
    return [table(heads, rows), "", flush, "", promise_table(promises)]


def _trainer(figures: Figures) -> list[str]:
    rows = [
        (
            f"{each['parameters']:,}",
            f"{each['rollwright_tokens_per_second']:,.0f}",
            f"{each['plain_tokens_per_second']:,.0f}",
            f"{each['trl_tokens_per_second']:,.0f}",
            f"{each['limit_tokens_per_second']:,.0f}",
            f"{each['over_plain']:.2f}×",
            f"{each['over_trl']:.2f}×",
            f"{100 * each['padding_share']:.0f} % ({100 * each['plain_padding_share']:.0f} %)",
        )
        for each in figures["models"].values()
    ]
    heads = (
        "parameters",
        "rollwright",
        "plain loop",
        "TRL",
        "limit",
        "to plain",
        "to TRL",
        "padding (plain)",
    )
    return [table(heads, rows)]


def _trainer_ranks(figures: Figures) -> list[str]:
    rows = [
        (
            f"{each['processes']:.0f}",
            name.split()[1].replace("_", " "),
            f"{figures['tokens'] / each['cpu_seconds']:,.0f}",
            f"{100 * each['waiting_share']:.0f} %" if "once" in name else "–",
            f"{each['gathered_bytes'] / 1e6:.2f}",
            f"{each['reduced_bytes'] / 1e6:.2f}",
            f"{4e-6 * figures['parameters'] * (each['processes'] - 1) / each['processes']:.2f}",
        )
        for name, each in figures["ranks"].items()
    ]
    heads = ("processes", "gather", "tokens / CPU s", "waiting", "gathered, MB", "reduced, MB", "theory, MB")
    beside = [
        (
            count,
            f"{figures['tokens'] / figures['ranks'][f'{count} once']['cpu_seconds']:,.0f}",
            f"{figures['tokens'] / each['cpu_seconds']:,.0f}",
            f"{median(each['over_trl']):.2f}×",
            f"{min(each['over_trl']):.2f}–{max(each['over_trl']):.2f}×",
        )
        for count, each in figures["trl"].items()
    ]
    saved = [
        (layout, f"{each['state_mb']:.0f}", f"{each['rise_mb']:.1f}")
        for layout, each in figures["checkpoints"].items()
    ]
    return [
        table(heads, rows),
        "",
        table(("processes", "rollwright, tokens / CPU s", "TRL", "to TRL", "in single rounds"), beside),
        "",
        table(("checkpoint", "state, MB", "rise of rank 0, MB"), saved),
    ]


def _async_training(figures: Figures) -> list[str]:
    rows = [
        (
            f"{each['ratio']:g}",
            f"{each['ahead']}",
            f"{each['speedup']:.2f}×",
            f"{each['limit']:.2f}×",
            f"{each['share']:.3f}",
            f"{each['oldest']}",
            f"{each['length_ratio']:.3f}",
        )
        for each in figures["arms"]
    ]
    best = {each["ratio"]: 0.0 for each in figures["arms"]}
    for each in figures["arms"]:
        best[each["ratio"]] = max(best[each["ratio"]], each["share"])
    heads = (
        "training / rollout",
        "ahead",
        "faster than sync",
        "limit",
        "share of the limit",
        "oldest token",
        "length trained / generated",
    )
    kept = [
        (
            f"share of the limit at {ratio:g}, at least {LEAST_SHARE}, with the best `ahead`",
            f"{share:.3f}",
            share >= LEAST_SHARE,
        )
        for ratio, share in best.items()
    ]
    kept.append(("no token older than the bound", "", figures["bound_kept"]))
    return [table(heads, rows), "", promise_table(kept)]


def _orchestra(figures: Figures) -> list[str]:
    rows, kept = [], []
    for each in figures["cells"]:
        rows.append(
            (
                f"{each['team']}, {each['batch']}, {each['approval']:g}",
                f"{each['ratio']:.2f}× ± {each['ratio_spread']:.2f}",
                f"{each['limit_ratio']:.2f}×",
                f"{each['p50']:.0f} / {each['p95']:.0f}",
                f"{each['barrier_p50']:.0f} / {each['barrier_p95']:.0f}",
                f"{each['occupancy']:.2f} / {each['barrier_occupancy']:.2f}",
                f"{each['cpu_ms_per_sample']:.2f}",
            )
        )
        name = f"{each['team']}, batch {each['batch']}, approval {each['approval']:g}: at least {each['target']:g}×"
        kept.append((name, f"{each['ratio']:.2f}×", each["ratio"] >= each["target"]))
    kept.append(
        (
            f"own work, less than {100 * figures['overhead_target']:g} % of the time",
            f"{100 * figures['overhead']:.2f} %",
            figures["overhead"] < figures["overhead_target"],
        )
    )
    heads = (
        "team, batch, approval",
        "to batch by batch",
        "limit",
        "latency p50 / p95, s",
        "batch by batch",
        "slots in use, both",
        "CPU ms per sample",
    )
    return [table(heads, rows), "", promise_table(kept)]


def _tools(figures: Figures) -> list[str]:
    waits = [
        (
            what,
            f"{figures[key]['ours']:.1f}",
            f"{figures[key]['baseline']:.1f}",
            f"{figures[key]['limit']:.1f}",
        )
        for what, key in (
            ("async functions", "wait_async"),
            ("plain functions, in threads", "wait_in_thread"),
        )
    ]
    done = figures["executions"]
    runs = [
        (what, f"{done[key]:,.0f}", f"{done[f'{key}_cpu_ms']:.2f}" if f"{key}_cpu_ms" in done else "–")
        for what, key in (
            ("a new sandbox", "fresh"),
            ("new ones, four at a time", "fresh_side_by_side"),
            ("a sandbox that keeps its state", "persistent"),
            ("a plain process", "plain_process"),
            ("a process under bwrap", "bwrap"),
        )
        if key in done
    ]
    hand_over = figures["hand_over"]
    return [
        table(("eight calls of 20 ms", "side by side, ms", "one after the other, ms", "limit, ms"), waits),
        "",
        f"A resource is handed over in {hand_over['ours']:.0f} µs; through a bare queue in {hand_over['baseline']:.0f} µs.",
        "",
        table(("Python", "executions per second", "ms of CPU each"), runs),
        "",
        f"An idle sandbox takes {done['idle_kib'] / 1024:.1f} MiB, shared pages divided by those who share them.",
    ]


def _swarm_sharing(figures: Figures) -> list[str]:
    rows = [
        (
            count,
            f"{each['announce_and_pull']['median_ms']:.0f}",
            f"{each['announce_and_pull']['received_kb']:.0f}",
            f"{each['all_gather']['median_ms']:.0f}",
            f"{each['all_gather']['received_kb']:.0f}",
        )
        for count, each in figures["nodes"].items()
    ]
    heads = ("nodes", "announce and pull, ms", "received, KB", "all-gather, ms", "received, KB")
    return [table(heads, rows)]


def _identical(checked: Mapping[str, Any]) -> str:
    same, seeds = sum(gain == 0 for gain in checked["by_seed"]), len(checked["by_seed"])
    told = (
        f"With the poisoner checked, {same} of {seeds} seeds have exactly the reward of the swarm without it."
    )
    if same == seeds:
        return told
    return (
        f"{told} In the others some groups were refused as near duplicates, or for their tokens, in one swarm and not in the"
        " other."
    )


def _swarm(figures: Figures) -> list[str]:
    rows = [
        (
            each["name"],
            f"{each['cumulative']:.2f}",
            f"{each['low']:.2f} … {each['high']:.2f}",
            f"{100 * each['accuracy']:.0f} %",
            f"{each['foreign_groups']:.0f}",
        )
        for each in figures["arms"]
    ]
    pairs = [
        (
            f"{each['arm']} against {each['base']}",
            f"{100 * each['gain']:+.1f} %",
            f"{100 * each['low']:+.1f} … {100 * each['high']:+.1f} %",
        )
        for each in figures["comparisons"]
    ]
    by_pair = {(each["arm"], each["base"]): each for each in figures["comparisons"]}
    gain, alone = by_pair["4/4", "4/0"], by_pair["4/4", "8/0"]
    checked = by_pair["4/4, poison checked", "4/4, one silent"]
    targets = figures["targets"]
    ends = f"{100 * checked['low']:+.1f} … {100 * checked['high']:+.1f} %"
    most = 100 * targets["most_loss"]
    return [
        f"{figures['seeds']} seeds, {figures['rounds']} rounds, {figures['cpu_seconds'] / 60:.0f} CPU minutes.",
        "",
        table(
            ("arm", "cumulative reward", "95 %", "final greedy accuracy", "foreign groups trained on"), rows
        ),
        "",
        table(("compared on the same seeds", "more reward", "95 %"), pairs),
        "",
        promise_table(
            [
                (
                    f"4/4 brings at least {targets['least_gain']:g} times the reward of 4/0",
                    f"{1 + gain['gain']:.2f}",
                    targets["kept"]["gain"],
                ),
                (
                    "poison that is checked changes nothing against the same swarm without it: the interval holds 0 and "
                    f"lies within ±{most:.0f} %",
                    ends,
                    targets["kept"]["protected"],
                ),
            ]
        ),
        "",
        _identical(checked),
        "",
        f"Not reproduced: the authors of SAPO publish +{100 * targets['paper_gain']:.0f} % for 4/4 against 8/0 (Qwen2.5-0.5B,"
        f" 2,000 rounds, one run); here it is {100 * alone['gain']:+.1f} %. The figures depend on how much the base model knows"
        " (300 batches of examples); in pilots the gain of 4/4 over 4/0 was +19, +5 and +24 % after 300 batches (seeds 0 to 2),"
        " +12 and 0 % after 600 (seeds 0 and 1), and +12, +11 and +13 % after 1,500 (seeds 0 to 2).",
        "",
        "![mean reward by round, and the comparisons](../bench/results/swarm.png)",
    ]


AGENTS = """What it costs to train an agent as it is: SmolLM2 (135 M parameters, all weights, in process) learns to say the larger of two
numbers, as the chat agent and through OpenAI's SDK, with the same words, rows and draws (`examples/train_own_agent`). Held-out
questions are answered greedily, every 4 steps; the first of these validations that is 30 points above the one before training
counts. Validation's own CPU time is left out. Part of the gain is format: the base model explains before it answers, and has no
room left for a number. The wording was chosen among several by short trials: where the base model answers with a number at
once (36 to 55 % right), one run rose from 36 to 74 % in 20 steps, and wordings with a bare pair of numbers ended at 53 %, with
the first number said always."""


def _agents(figures: Figures) -> list[str]:
    rows = [
        (
            each["arm"],
            f"{each['reached']} of {each['seeds']}",
            *(
                "–" if each[name] is None else f"{each[name]:,.0f}"
                for name in ("steps", "tokens", "cpu_seconds")
            ),
            f"{each['cpu_per_step']:.2f}",
            f"{100 * each['before']:.0f} %",
            f"{100 * each['after']:.0f} %",
            f"{each['most_cpu_seconds']:.0f}",
        )
        for each in figures["arms"]
    ]
    heads = (
        "arm",
        "seeds with +30 points",
        "steps to them",
        "sampled tokens",
        "CPU seconds",
        "CPU seconds per step",
        "before",
        "after 16 steps",
        "most CPU seconds of a run",
    )
    by_arm = {each["arm"]: each["cpu_per_step"] for each in figures["arms"]}
    more = 100 * (by_arm["sdk"] / by_arm["chat"] - 1)
    return [
        "Means over the seeds; the machine was busy with other work, which CPU seconds show less than the clock does.",
        "",
        table(heads, rows),
        "",
        f"A step through the SDK takes {more:+.1f} % CPU time, over all runs.",
        "",
        "![held-out reward by tokens and by CPU seconds](../bench/results/own_agents.png)",
    ]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "saturation": (SATURATION, _saturation),
    "gateway": (GATEWAY, _gateway),
    "prefixes": (PREFIXES, _prefixes),
    "trainer": (TRAINER, _trainer),
    "trainer_ranks": (RANKS, _trainer_ranks),
    "async_training": (ASYNC_TRAINING, _async_training),
    "orchestra": (ORCHESTRA, _orchestra),
    "tools": (TOOLS, _tools),
    "swarm_sharing": (SWARM_SHARING, _swarm_sharing),
    "swarm": (SWARM, _swarm),
    "own_agents": (AGENTS, _agents),
}
