"""Writes the pages that follow from something else: `configuration.md` from the settings models, `benchmarks.md` from
the figures in `bench/results`.

    python docs/generate.py

Both are pure functions of their sources, so a test can tell whether a page is up to date.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollwright.config import RunConfig

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"

Figures = Mapping[str, Any]
"""What a benchmark has left in its file."""


CONFIGURATION = """# Configuration

A run is described by one YAML file. `rollwright run FILE` reads it; each `key.path=value` behind it wins over the
file, and later ones over earlier ones:

```console
$ rollwright run configs/frozen_lake.yaml seed=7 policy.skill=0.9 train_env_manager.group_size=4
```

An unknown key, a number out of range or an unknown tag is refused in one line that names the key and what is
accepted. The configuration as used, with every default filled in, is in the run folder as `config.yaml`, and loads
again. `${path.to.key}` refers to another key. This page is generated from the models in `src/rollwright/config`.

`train_env_manager`, `val_env_manager` or both are needed; everything else has a default.
"""

PLAIN_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}


def configuration() -> str:
    """The page, one table for each section of the configuration."""
    return "\n".join([CONFIGURATION, *dict.fromkeys(_sections(RunConfig, ""))])  # kinds may share a part


def _sections(model: type[BaseModel], path: str, note: str = "") -> Iterator[str]:
    yield _section(model, path, note)
    for name, field in model.model_fields.items():
        nested = _models(field.annotation)
        below = f"{path}.{name}".lstrip(".")
        for each in nested:
            kind = f" with `kind: {_kind(each)}`" if len(nested) > 1 else ""
            yield from _sections(each, below + (".TAG" if get_origin(field.annotation) is dict else ""), kind)


def _section(model: type[BaseModel], path: str, note: str) -> str:
    lines = [f"## `{path}`{note}" if path else "## The run"]
    if model.__doc__:
        lines += ["", _one_line(model.__doc__)]
    rows = []
    for name, field in model.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        nested = _models(field.annotation)
        meaning = _one_line(field.description or "")
        if not meaning and nested:
            meaning = _one_line(nested[0].__doc__ or "") if len(nested) == 1 else "Which policy plays."
        kind = "a section, see below" if nested else _type(field.annotation, field.metadata)
        rows.append((f"`{key}`", kind, _default(field), meaning))
    return "\n".join([*lines, "", _table(("key", "accepts", "default", "meaning"), rows), ""])


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The settings models behind a field, where there are some."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _kind(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])


def _type(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """An annotation in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], [*parts[1:], *limits])
    if origin in (Union, UnionType):
        return " or ".join(_type(part, limits) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin is list:
        return f"list of: {_type(parts[0])}"
    if origin is dict:
        return "keys and values"
    words = [PLAIN_TYPES[annotation], *(_limit(each) for each in limits)]
    return ", ".join(word for word in words if word)


def _limit(limit: Any) -> str:
    match limit:
        case FieldInfo():
            return ", ".join(_limit(each) for each in limit.metadata)
        case annotated_types.Gt():
            return f"above {limit.gt}"
        case annotated_types.Ge():
            return f"{limit.ge} or more"
        case annotated_types.Le():
            return f"{limit.le} or less"
        case _:
            pattern = getattr(limit, "pattern", None)
            return f"as `{pattern}`" if pattern else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return f"`kind: {_kind(type(value))}`" if "kind" in type(value).model_fields else ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _one_line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


BENCHMARKS = """# Benchmarks

Each benchmark is one program under `bench/`. It prints a table and writes its figures to `bench/results`; this page
is generated from those files by `make docs`. A promise that is not kept says so.
"""

OVERHEAD = """How much CPU a turn costs beside the engine. Every arm is a client process that plays the same four-turn rollouts
against the same simulated server, which answers at once. *Bare aiohttp* posts the conversation and keeps nothing: it
is the limit. *rollwright* is the whole pipeline, from the store to `get_batch()`. The peers are `verifiers` from PyPI
in its present and its 0.1 line. *rollwright, SQLite* is the same with every turn durable before it is acted on. Arms take turns; medians over the repeats. One event loop in one process each, so
rollouts per second are those of one core."""

NO_BARRIER = """Whether anything waits that need not. 1,024 FrozenLake environments share a simulated engine of 64 slots whose
completions have heavy-tailed lengths. All arms play the same episodes with the same draws on a virtual clock, so the
figures are exact and the same on every machine. The bound is max(total work / slots, longest episode): no scheduler
can be faster. In the *batch-synchronous* arm all environments wait for the slowest answer of each turn."""

SCALE = """Whether an episode costs more when there are many. Real clock, one process for each size, all episodes in flight at
once on a simulated engine with a slot for each, whose speed is set so that about the same number of turns comes due
each second. Lag is how late the event loop is for a timer."""

ENVS = """How fast the environments are, in steps and resets for each second of CPU (`reasoning_gym`: by the clock, because its
work is done in another process). `gym_sokoban` from PyPI draws a picture at every step; the second figure is with the
drawing taken out."""

STORE = """How fast the stores are: enqueue, claim, heartbeat, finish, with four workers that each do one thing at a time, next
to the stores of `agentlightning` from PyPI in the same run. Every change in SQLite and PostgreSQL is on disk before it
is answered."""

RECOVERY = """How long it takes until the episodes of a dead worker are played elsewhere, 256 of them in flight, and what is paid for
twice. A killed worker is noticed when its leases end; one that is told to stop hands its episodes back."""

RAY_WORKERS = """Ray actors next to the same number of worker processes, in one run: episodes for each second, at the limit of the
workers and the store."""

RENDERING = """What the next prompt costs at turn 128 of an episode of 60,000 tokens, in CPU time: what a session does (the ids of
the turns, joined, and those of the new message), and rendering the whole history again. One pass over the ids is the
limit. The tokenizer is trained on the spot on this documentation."""

TREE = """What a tree gives for the same tokens: groups of eight leaves, as chains or as trees, until the budget is sampled,
with a player that takes the best action with a given probability. Mixed groups have both successes and failures; a
sample is a row with an advantage that is not zero, for each 1,000 sampled tokens. On a virtual clock with keyed draws,
so the figures are exact."""

MOST_GROWTH = 1.3
"""What still counts as flat, from the smallest size to the largest."""

LEAST_OCCUPANCY = 0.95
MOST_OVER_BOUND = 1.05
LEAST_TIMES_FASTER = 30
"""A Sokoban step against that of gym_sokoban."""


def benchmarks(results: Path = RESULTS) -> str:
    """The page, from whatever figures there are."""
    parts = [BENCHMARKS]
    for name, (text, report) in REPORTS.items():
        parts += [f"## {name}", "", text, "", f"`python bench/{name}.py`", ""]
        file = results / f"{name}.json"
        if file.is_file():
            figures = json.loads(file.read_text(encoding="utf-8"))
            parts += [_machine(figures), "", *report(figures), ""]
        else:
            parts += ["There are no figures yet.", ""]
    return "\n".join(parts)


def _machine(figures: Figures) -> str:
    cores, load = figures.get("cores"), figures.get("load_before")
    known = [
        figures.get("date"),
        f"{cores} cores" if cores else None,
        f"Python {figures['python']}" if "python" in figures else None,
        f"load {load:.1f} before it began" if load else None,
    ]
    return f"Measured: {', '.join(each for each in known if each)}."


def _overhead(figures: Figures) -> list[str]:
    cells = figures["figures"]
    rows = [
        (
            f"{each['concurrent']:,}",
            each["arm"],
            f"{each['cpu_ms_per_turn']:.2f}",
            f"{each['rollouts_per_second']:,.0f}",
        )
        for each in cells
    ]
    libraries = ", ".join(dict.fromkeys(each["library"] for each in cells))
    promises = [(each["promise"], each["measured"], each["met"]) for each in figures["targets"]]
    return [
        _table(("concurrent", "arm", "CPU ms per turn", "rollouts per second"), rows),
        "",
        f"Versions: {libraries}.",
        "",
        _promises(promises),
    ]


def _no_barrier(figures: Figures) -> list[str]:
    arms = figures["arms"]
    rows = [
        (each["arm"], f"{each['makespan']:.0f}", f"{each['over_bound']:.3f}", f"{each['occupancy']:.3f}")
        for each in arms
    ]
    ours = [each for each in arms if each["arm"].startswith("rollwright")]
    occupancy, over = min(each["occupancy"] for each in ours), max(each["over_bound"] for each in ours)
    promises = [
        (f"slots in use, at least {LEAST_OCCUPANCY}", f"{occupancy:.3f}", occupancy >= LEAST_OCCUPANCY),
        (f"makespan, at most {MOST_OVER_BOUND}× the bound", f"{over:.3f}×", over <= MOST_OVER_BOUND),
        ("the same transcripts in all arms", "", figures["transcripts_equal"]),
    ]
    return [
        _table(("arm", "makespan, virtual s", "times the bound", "slots in use, steady state"), rows),
        "",
        f"{figures['speedup_over_batch_synchronous']:.2f} times as fast as the batch-synchronous loop.",
        "",
        _promises(promises),
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
    promises = [
        (f"{what} flat: at most {MOST_GROWTH}×", f"{growth[key]:.2f}×", growth[key] <= MOST_GROWTH)
        for what, key in (("memory per episode", "kib_per_episode"), ("CPU per turn", "cpu_ms_per_turn"))
    ]
    heads = ("episodes at once", "KiB per episode", "CPU ms per turn", "turns per second", "lag p99, ms")
    return [_table(heads, rows), "", _promises(promises)]


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
    return [
        _table(("environment", "steps per second", "resets per second"), rows),
        "",
        "Against gym_sokoban:",
        "",
        _table(("environment", "step", "step without pictures", "reset"), against),
        "",
        _promises([(promise, f"{slowest:.0f}×", slowest >= LEAST_TIMES_FASTER)]),
    ]


def _store(figures: Figures) -> list[str]:
    speed = figures["speed"]
    theirs = {name: speed[f"agentlightning {name}"]["rollouts_per_second"] for name in ("memory", "http")}
    rows = [
        (name, f"{each['rollouts_per_second']:,.0f}", f"{each['client_cpu_us_per_rollout']:,.0f}")
        for name, each in speed.items()
    ]
    promises = []
    for ours, peer, least in (("memory", "memory", 10), ("sqlite", "memory", 2), ("http", "http", 10)):
        ratio = speed[ours]["rollouts_per_second"] / theirs[peer]
        promises.append(
            (f"{ours}, at least {least}× the peer's {peer} store", f"{ratio:.1f}×", ratio >= least)
        )
    for name, each in figures["scale"].items():
        promise = f"{name}: an operation among 100,000 rollouts, at most {MOST_GROWTH}× one among 2,000"
        promises.append((promise, f"{each['ratio']:.2f}×", each["ratio"] <= MOST_GROWTH))
    heads = ("store", "rollouts per second", "CPU of the client, µs per rollout")
    return [_table(heads, rows), "", _promises(promises)]


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
        _table(heads, rows),
        "",
        _promises([("recorded turns generated again: 0", str(again), again == 0)]),
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
    return [_table(("workers", "processes, episodes/s", "Ray actors, episodes/s", "ratio"), rows)]


def _rendering(figures: Figures) -> list[str]:
    rows, promises = [], []
    for name, each in figures["formats"].items():
        ours = each["cpu_ms"]["rollwright"]
        rows += [(name, arm, f"{spent:.2f}", f"{spent / ours:.2f}×") for arm, spent in each["cpu_ms"].items()]
        wanted, faster, growth = figures["wanted_ratio"], each["times_faster"], each["growth"]
        promises += [
            (
                f"{name}: at least {wanted:.0f}× as fast as the whole history",
                f"{faster:.0f}×",
                faster >= wanted,
            ),
            (f"{name}: what is added costs no more than early on", f"{growth:.2f}×", growth <= MOST_GROWTH),
        ]
    heads = ("format", "the next prompt by", "CPU ms", "times rollwright's")
    return [_table(heads, rows), "", _promises(promises)]


def _tree(figures: Figures) -> list[str]:
    rows = [
        (
            f"`{each['tag']}`, {each['skill']}",
            each["arm"],
            f"{each['leaves_per_group']:.1f}",
            f"{each['tokens_per_leaf']:.0f}",
            f"{each['tokens_to_chain']:.2f}×",
            f"{each['turns_per_leaf']:.2f}",
            f"{each['arithmetic']:.2f}",
            f"{100 * each['mixed']:.0f} %",
            f"{each['samples_per_1000']:.2f}",
            f"{each['samples_to_chain']:.2f}×",
        )
        for each in figures["arms"]
    ]
    heads = (
        "game, skill",
        "arm",
        "leaves",
        "tokens per leaf",
        "to chain",
        "turns per leaf",
        "by arithmetic",
        "mixed groups",
        "samples per 1,000 tokens",
        "to chain",
    )
    return [_table(heads, rows)]


REPORTS: Mapping[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "overhead": (OVERHEAD, _overhead),
    "no_barrier": (NO_BARRIER, _no_barrier),
    "scale": (SCALE, _scale),
    "envs": (ENVS, _envs),
    "store": (STORE, _store),
    "recovery": (RECOVERY, _recovery),
    "ray_workers": (RAY_WORKERS, _ray_workers),
    "rendering": (RENDERING, _rendering),
    "tree": (TREE, _tree),
}


def _promises(rows: Sequence[tuple[str, str, bool]]) -> str:
    return _table(
        ("promise", "measured", "kept"),
        [(promise, measured, "yes" if kept else "**no**") for promise, measured, kept in rows],
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([each.replace("|", "\\|") for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: Mapping[str, Callable[[], str]] = {"configuration.md": configuration, "benchmarks.md": benchmarks}
"""Every generated page, and what it says now."""


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
