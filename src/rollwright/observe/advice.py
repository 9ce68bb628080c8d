"""Advice for a run's bottleneck, given the run's setup. Pure.

Invariants: no setting is recommended that is in effect already. A limiting setting is named with its present value; if
several limit the run equally, all are named, because raising one alone would change nothing.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollwright.config import RunConfig
from rollwright.engines.settings import EnginePolicyConfig


class Cause(StrEnum):
    """Bottleneck of a run. The value is its name for users."""

    ENGINE = "engine-bound"
    """The engine's slots are full."""
    BATCH = "batch too small"
    """Never as many concurrent rollouts as the engine could serve."""
    STRAGGLERS = "waiting for the last rollouts of a batch"
    """Enough rollouts at first, too few until the last ones of a batch end."""
    ENGINE_OR_BATCH = "engine-bound or batch too small"
    """The rollouts wait for the engine, and it is unknown whether it could serve more."""
    ENVIRONMENT = "environment-bound"
    TOOL = "tool-bound"
    """Tools, and free places in their pools."""
    TRANSPORT = "transport-bound"
    """Network between the workers and the engine."""
    STORE = "store-bound"
    """Journal of turns and settings: a disk, a database, or the network to it."""
    AGENT = "agent-bound"
    """The agents' own code, or the process that runs it on one core for all of its episodes."""


class StoreKind(StrEnum):
    MEMORY = "memory"
    FILE = "file"
    """SQLite on a disk of this machine."""
    POSTGRES = "postgres"
    HTTP = "http"
    """Store of another process, behind a server."""

    @classmethod
    def of(cls, address: str | None) -> "StoreKind":
        if address is None or address == "memory":
            return cls.MEMORY
        if address.startswith("postgres"):
            return cls.POSTGRES
        return cls.HTTP if address.startswith(("http://", "https://", "unix:")) else cls.FILE


MANY_WRITERS = 3
"""Worker processes from which a database with concurrent writers pays off."""


MOST_OF = 0.9
"""Share of a limit from which the limit counts as reached: a few rollouts more or less are chance."""


def slots_of_policy(policy: object) -> int | None:
    """Concurrent calls of an engine in the worker's process; `None`: the settings do not say, or `auto` chose them on the
    machine that played."""
    found = getattr(policy, "slots", None) or getattr(policy, "max_batch", None)
    return found if isinstance(found, int) else None


@dataclass(frozen=True)
class RunSetup:
    """Settings of a run that advice depends on."""

    environments: int
    """Concurrent environments: groups times their size."""
    batch_size: int
    max_inflight: int | None = None
    ahead: float = 0.0
    """`async_generation_ratio`."""
    redundancy: int = 0
    trains: bool = True
    """Whether there are training batches that rollouts could run ahead of."""
    processes: int = 1
    """Processes that played."""
    cores: int = 1
    policy: str = "openai"
    """Kind of the policy."""
    slots: int | None = None
    """Configured slots of an engine inside the worker's process."""
    dtype: str | None = None
    replicas: int = 1
    store: StoreKind = StoreKind.FILE
    at_once: int | None = None
    """Most concurrent rollouts; `None` if unknown."""

    @classmethod
    def of(
        cls, config: RunConfig, *, processes: int = 1, cores: int = 1, store: str | None = None
    ) -> "RunSetup":
        """`processes` have played, `cores` are usable, `store` is an address."""
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
            slots=slots_of_policy(policy),
            dtype=getattr(policy, "dtype", None),
            replicas=len(policy.base_urls) if isinstance(policy, EnginePolicyConfig) else 1,
            store=StoreKind.of(store),
        )


def advise(cause: Cause, setup: RunSetup) -> str:
    """One line of advice."""
    match cause:
        case Cause.ENGINE:
            return f"{_faster_engine(setup)}; more rollouts at once would only lengthen its queue"
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
    """Settings to raise for more concurrent rollouts: those that limit them now."""
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
            f"set `max_inflight` (up to {tightest:,.0f}) or play longer: unset, it is tuned while a run plays, and reached "
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
