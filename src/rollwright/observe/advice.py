"""What to change about what holds a run up, given how the run is set up. Pure.

True of it: nothing is recommended that is set already. Where a setting limits the run, its present value stands beside
it; where several limit it alike, all are named, because raising one alone would change nothing.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollwright.config import RunConfig
from rollwright.engines.settings import EnginePolicyConfig


class Cause(StrEnum):
    """What holds a run up. The value is what people are told."""

    ENGINE = "engine-bound"
    """The engine's slots are full."""
    BATCH = "batch too small"
    """Never as many rollouts at once as the engine could serve."""
    STRAGGLERS = "waiting for the last rollouts of a batch"
    """Enough rollouts at first, too few until the last ones of a batch have ended."""
    ENGINE_OR_BATCH = "engine-bound or batch too small"
    """The rollouts wait for the engine, and nothing shows whether it could serve more."""
    ENVIRONMENT = "environment-bound"
    TOOL = "tool-bound"
    """Tools, and places in their pools."""
    TRANSPORT = "transport-bound"
    """The way to the engine and back."""
    STORE = "store-bound"
    """The journal of turns and the settings: a disk, a database, or the way to them."""
    AGENT = "agent-bound"
    """The agents' own code, or the process that runs it: one core for all of its episodes."""


class StoreKind(StrEnum):
    MEMORY = "memory"
    FILE = "file"
    """SQLite on a disk of this machine."""
    POSTGRES = "postgres"
    HTTP = "http"
    """Another process's, by its server."""

    @classmethod
    def of(cls, address: str | None) -> "StoreKind":
        if address is None or address == "memory":
            return cls.MEMORY
        if address.startswith("postgres"):
            return cls.POSTGRES
        return cls.HTTP if address.startswith(("http://", "https://", "unix:")) else cls.FILE


MANY_WRITERS = 3
"""Worker processes from which a database that lets several write at once is worth its trouble."""


MOST_OF = 0.9
"""Share of a limit that must have been reached for it to be what limits: a few rollouts more or less are chance."""


@dataclass(frozen=True)
class RunSetup:
    """How a run is set up, as far as advice depends on it."""

    environments: int
    """That can be played at once: groups times their size."""
    batch_size: int
    max_inflight: int | None = None
    ahead: float = 0.0
    """`async_generation_ratio`."""
    redundancy: int = 0
    trains: bool = True
    """Whether there are training batches, which rollouts could run ahead of."""
    processes: int = 1
    """That played."""
    cores: int = 1
    policy: str = "openai"
    """Its kind."""
    slots: int | None = None
    """Of an engine in the worker's process, as it is set."""
    dtype: str | None = None
    replicas: int = 1
    store: StoreKind = StoreKind.FILE
    at_once: int | None = None
    """Rollouts that were played at once, at most; `None`: not known."""

    @classmethod
    def of(
        cls, config: RunConfig, *, processes: int = 1, cores: int = 1, store: str | None = None
    ) -> "RunSetup":
        """`processes`: that played. `cores`: that may be used. `store`: its address."""
        manager = config.train_env_manager or config.val_env_manager
        policy: Any = config.policy
        return cls(
            environments=manager.num_envs if manager is not None else 1,
            batch_size=config.batch_size if config.train_env_manager is not None else 0,
            max_inflight=config.max_inflight,
            ahead=config.async_generation_ratio,
            redundancy=0 if manager is None else manager.group_size_redundancy,
            trains=config.train_env_manager is not None,
            processes=max(1, processes),
            cores=cores,
            policy=policy.kind,
            slots=getattr(policy, "slots", None) or getattr(policy, "max_batch", None),
            dtype=getattr(policy, "dtype", None),
            replicas=len(policy.base_urls) if isinstance(policy, EnginePolicyConfig) else 1,
            store=StoreKind.of(store),
        )


def advise(cause: Cause, setup: RunSetup) -> str:
    """What to change, in one line."""
    match cause:
        case Cause.ENGINE:
            return f"{_faster_engine(setup)}; more rollouts at once would only lengthen its line"
        case Cause.BATCH:
            return f"play more rollouts at once: {more_rollouts(setup)}"
        case Cause.STRAGGLERS:
            return " or ".join([*_run_ahead(setup), _redundant(setup)])
        case Cause.ENGINE_OR_BATCH:
            return (
                f"play more rollouts at once ({more_rollouts(setup)}): if tokens/s rise, the batch was too small; "
                "or say how many calls the engine serves at once, with `--slots`"
            )
        case Cause.ENVIRONMENT:
            where = "" if setup.processes > 1 else " or run a blocking environment in processes (`--workers`)"
            return f"make `step` and `reset` faster{where}; {_meanwhile(setup)}"
        case Cause.TOOL:
            return (
                "make the tool faster, raise its concurrency limit or its pool, or give it a shorter time limit; "
                f"{_meanwhile(setup)}"
            )
        case Cause.TRANSPORT:
            return "move the workers nearer to the engine, or put a faster network between them"
        case Cause.STORE:
            return _faster_store(setup)
        case Cause.AGENT:
            return _more_processes(setup)


def more_rollouts(setup: RunSetup) -> str:
    """What to raise so that more rollouts are played at once: whatever limits them now."""
    limits: dict[str, float] = {
        f"`num_env_groups` or `group_size` (now {setup.environments:,} environments)": setup.environments
    }
    if setup.max_inflight is not None:
        limits[f"`max_inflight` (now {setup.max_inflight:,})"] = setup.max_inflight
    if setup.trains:
        ratio = (
            "let rollouts run ahead of training with `async_generation_ratio`"
            if setup.ahead == 0
            else f"`async_generation_ratio` (now {setup.ahead:g})"
        )
        size = f"`rollout_batch_size` (now {setup.batch_size:,})"
        both = f"{size}, or {ratio}" if setup.ahead == 0 else f"{size} or {ratio}"
        limits[both] = setup.batch_size * (1 + setup.ahead)
    tightest = min(limits.values())
    if setup.max_inflight is None and setup.at_once is not None and setup.at_once < MOST_OF * tightest:
        return (
            f"set `max_inflight` (up to {tightest:,.0f}) or play longer: unset, it is found while a run plays, and came to "
            f"{setup.at_once:,} here"
        )
    return "raise " + ", and ".join(name for name, limit in limits.items() if limit <= tightest)


def _run_ahead(setup: RunSetup) -> list[str]:
    if not setup.trains:
        return []
    if setup.ahead == 0:
        return ["let rollouts run ahead of training with `async_generation_ratio`"]
    return [
        f"let rollouts run further ahead of training: raise `async_generation_ratio` (now {setup.ahead:g})"
    ]


def _redundant(setup: RunSetup) -> str:
    if setup.redundancy == 0:
        return "open redundant rollouts (`group_size_redundancy`) and stop waiting for the slowest"
    return f"raise `group_size_redundancy` (now {setup.redundancy})"


def _meanwhile(setup: RunSetup) -> str:
    return f"until then, more rollouts at once keep the engine busy meanwhile: {more_rollouts(setup)}"


def _faster_engine(setup: RunSetup) -> str:
    fewer = "ask for fewer tokens (`max_tokens_per_step`)"
    if setup.policy == "simulated":
        return f"raise `policy.slots` (now {setup.slots}) or `policy.tokens_per_second`, or {fewer}"
    if setup.policy == "torch":
        lighter = "compute in bfloat16 (`policy.dtype`), " if setup.dtype == "float32" else ""
        return f"use a faster device or a smaller model, {lighter}raise `policy.max_batch` (now {setup.slots}), or {fewer}"
    replicas = f"add engine replicas (`policy.base_urls`, now {setup.replicas})"
    if setup.policy == "openai":
        replicas = "add engine replicas behind its address"
    return f"{replicas} or slots, use a smaller or quantised model, or {fewer}"


def _faster_store(setup: RunSetup) -> str:
    match setup.store:
        case StoreKind.FILE:
            writers = (
                "; with so many worker processes PostgreSQL, which several can write to at once, is faster"
                if setup.processes >= MANY_WRITERS
                else ""
            )
            return (
                "every turn waits until it is on this machine's disk: put the store on a faster or less busy disk "
                f"(`--store`), or keep it in memory where the run need not be resumed (`--store memory`){writers}"
            )
        case StoreKind.POSTGRES:
            return "move the workers nearer to the database, or give it a faster disk"
        case StoreKind.HTTP:
            return "move the workers nearer to the store's server, or give it a faster disk"
        case StoreKind.MEMORY:
            return (
                "the process that holds the store is busy: play in fewer worker processes, or on more cores"
            )


def _more_processes(setup: RunSetup) -> str:
    blocking = "keep blocking calls out of async code"
    if setup.processes < setup.cores:
        return f"spread the episodes over more processes (`--workers {setup.cores}`, now {setup.processes}), and {blocking}"
    return f"make the agents' own code faster, and {blocking}; all {setup.cores} cores have a process already"
