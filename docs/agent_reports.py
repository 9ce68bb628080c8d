"""How the figures of the benchmarks of boxes, other packages' environments and the command line are shown."""

from collections.abc import Callable, Mapping
from typing import Any

from markdown_tables import table

Figures = Mapping[str, Any]

STARTUP = """How long it takes from nothing to the first generated token, part by part, each start a process of its own: Python
itself; the modules of `rollwright run`; torch; transformers and the policy; the tokenizer and renderer; the weights; one
token. Before a cold start the kernel drops what it keeps of files; a warm one follows another. Medians.
`rollwright doctor --startup bench/results/startup.json` compares a start on your machine with these."""

BOXES = """What a box costs on every backend that runs here: start, run, fork, stop and eight at once, beside a bare `bwrap` over an
overlay that is mounted for it and a bare `podman run`, in turns in the same run; then 64 boxes at once. Times on the clock: other
work on the machine shows. `overhead` is a start less the bare arm of the same round."""

CLI_AGENTS = """How much processor time the gateway takes for a call of Claude Code. Its own request, which was recorded from the
program in a box, is filled up by notes of a user to 20,000 tokens; then each call brings one tool's answer of 10 lines more, 40
calls in a rollout. The gateway is a process of its own, whose CPU time counts whole, its HTTP server included; the policy answers
at once, in the format of Qwen3 and the vocabulary of SmolLM2. Beside it the same calls with a prompt of one line and one tool, and
what rendering and tokenizing the new messages alone takes. Medians; the arms take turns."""

CLI_STARTUP = """How much processor time one answer of the command line takes, user and system together, each a process of its own:
help, a list, a look at a small run, and wrong settings, which are told before anything else is loaded. Beside it a bare
interpreter, and the help page of the peer's command. Medians; commands take turns."""

FOREIGN = """\
Rollouts per second of one of verifiers' environments: by its own runner and by the tag `verifiers:`, four turns each, against
the same simulated server, which answers at once, with verifiers in the same interpreter. The native runner's harness is a loop
in its process, the lightest that its contract allows; the shipped `null` harness starts a program for each answer, and 256
of those do not fit on this machine. CPU is that of all processes of an arm, without the server. Arms take turns; medians."""


def _startup(figures: Figures) -> list[str]:
    cold, warm = figures["cold"], figures["warm"]
    parts = [(part.replace("_", " "), cold and cold[part], seconds) for part, seconds in warm.items()]
    parts.append(("in all", cold and sum(cold.values()), sum(warm.values())))
    rows = [(part, "–" if slow is None else f"{slow:.2f}", f"{fast:.2f}") for part, slow, fast in parts]
    totals = figures["warm_totals"]
    spread = f"Warm starts took {totals[0]:.1f} to {totals[-1]:.1f} s"
    if figures["cold_totals"]:
        spread += f", cold ones {figures['cold_totals'][0]:.1f} to {figures['cold_totals'][-1]:.1f} s"
    else:
        spread += "; cold ones could not be made, because this needs root"
    return [table(("part", "cold, s", "warm, s"), rows), "", f"Model: {figures['model']}. {spread}."]


def _boxes(figures: Figures) -> list[str]:
    rows = [
        (backend, name, f"{each['median']:.0f}", f"{each['lower quartile']:.0f}")
        for backend, taken in figures["milliseconds"].items()
        for name, each in taken.items()
    ]
    many = (
        f"{figures['boxes_at_once']} boxes at once: {figures['memory_of_each_mb']} MB in each, "
        f"{figures['memory_of_its_processes_with_the_holder_mb']} MB with the process that guards it; a command waited "
        f"{figures['median_wait_for_a_command_s']} s in the median and {figures['longest_wait_for_a_command_s']} s at most. "
        f"The load of the machine was {figures['load_of_the_machine']}, on {figures['cores']} cores."
    )
    missing = [f"`{name}` did not run there: {why}" for name, why in figures["does_not_run_here"].items()]
    return [table(("backend", "what", "median, ms", "lower quartile, ms"), rows), "", many, *missing]


def _cli_agents(figures: Figures) -> list[str]:
    own, whole = figures["own_prompt_tokens"], figures["prompt_tokens"]
    rows = [
        (f"first call, {whole:,} tokens to tokenize", f"{figures['first_call_ms']:.1f}"),
        (f"later call, {whole:,} tokens and more before it", f"{figures['call_ms']:.2f}"),
        (f"later call, Claude Code's own {own:,} tokens before it", f"{figures['own_prompt_call_ms']:.2f}"),
        ("later call, a short prompt", f"{figures['short_prompt_call_ms']:.2f}"),
        ("rendering and tokenizing the new messages alone", f"{figures['tokenizing_the_new_ms']:.2f}"),
    ]
    prefix = figures["call_ms"] - figures["short_prompt_call_ms"]
    verdict = (
        f"Beyond tokenizing what is new: {figures['added_ms']:.2f} ms a call, with a goal of {figures['goal_ms']:g} ms; "
        f"{prefix:.2f} ms of it are for the long prompt, the rest any call takes. Load of the machine: {figures['load']}."
    )
    return [table(("what", "CPU, ms"), rows), "", verdict]


def _foreign(figures: Figures) -> list[str]:
    rows = [
        (
            each["arm"],
            str(each["concurrent"]),
            f"{each['rollouts_per_second']:.1f}",
            f"{each['cpu_ms_per_rollout']:.1f}",
        )
        for each in figures["figures"]
    ]
    promised, times = figures["promised_times"], figures["times"]
    kept = ", ".join(f"{name} {value:.1f}" for name, value in times.items())
    return [
        table(("arm", "at a time", "rollouts per second", "CPU ms per rollout"), rows),
        "",
        f"Promised: {promised:g} times the native runner's rollouts per second; measured: {kept} times.",
    ]


def _cli_startup(figures: Figures) -> list[str]:
    limit, medians = figures["limit"], figures["cpu_seconds"]
    peer = medians["vf-eval --help"]
    rows = [
        (
            name,
            f"{seconds:.3f}",
            f"{seconds / limit:.0%}" if name.startswith("rollwright") else "–",
            f"{seconds / peer:.2f}",
        )
        for name, seconds in medians.items()
    ]
    heads = ("command", "CPU s", f"of the limit, {limit:g} s", "of the peer's help")
    return [table(heads, rows), "", f"Peer: {figures['peer']}. Median of {figures['rounds']}."]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "boxes": (BOXES, _boxes),
    "foreign": (FOREIGN, _foreign),
    "cli_agents": (CLI_AGENTS, _cli_agents),
    "cli_startup": (CLI_STARTUP, _cli_startup),
    "startup": (STARTUP, _startup),
}
