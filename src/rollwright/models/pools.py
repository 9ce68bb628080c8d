"""The choice of a model from the pools: memory needs and free memory in, a choice with its reasons out. Pure.

Invariants: the same seed, pools, needs and free memory give the same choice; a chosen model is expected to fit with room to
spare; every candidate is listed with the reason why it was taken or left.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollwright.errors import ConfigError
from rollwright.hardware.memory import gigabytes
from rollwright.models.memory_needs import MemoryNeed
from rollwright.rng import digest

ROOM = 0.9
"""Share of the free memory that a choice may need: other processes run here too, and needs are estimates."""


@dataclass(frozen=True)
class ModelChoice:
    """A chosen model with the reasons."""

    model: str
    pool: str
    need: int
    """Estimated minimum in bytes."""
    reasons: tuple[str, ...]
    """One line for each candidate, in the order of the pools, and the decision at the end."""


def choose_model(
    pools: Mapping[str, Sequence[str]],
    need: Callable[[str], MemoryNeed | None],
    free: int | None,
    seed: int,
    *,
    below: int | None = None,
    out_of_reach: Collection[str] = (),
) -> ModelChoice:
    """Choose from the first pool with models that fit, by the seed. `below`: only models that need less than this.
    `out_of_reach`: models that are not on this machine and cannot be fetched now."""
    reasons: list[str] = []
    for pool, models in pools.items():
        fitting: dict[str, MemoryNeed] = {}
        for model in models:
            needed = need(model)
            why = "is not on this machine, and cannot be fetched now" if model in out_of_reach else None
            why = why or _too_much(needed, free, below)
            reasons.append(f"{model}: {_told(needed)}{f'; {why}' if why else ''}")
            if why is None and needed is not None:
                fitting[model] = needed
        if fitting:
            names = sorted(fitting)
            model = names[digest(seed, "model pool", pool, *names) % len(names)]
            told = "what is free cannot be told" if free is None else f"{gigabytes(free)} are free"
            reasons.append(
                f"chosen: {model} of {pool}, by seed {seed} from {len(names)} that fit; {told}"
                f"{_calls(fitting[model], free)}"
            )
            return ModelChoice(model, pool, fitting[model].total, tuple(reasons))
    away = "; fetch one while there is a network: `rollwright model fetch smollm2`" if out_of_reach else ""
    raise ConfigError(
        f"policy.model: no model of {', '.join(pools)} fits ({'; '.join(reasons)}; "
        f"{'unknown' if free is None else gigabytes(free)} free); free some memory, make "
        "training.tokens_per_micro_batch or sequence_length smaller, use training.lora, or add a smaller model such as "
        f"`smollm2` to the pool{away}"
    )


def _told(need: MemoryNeed | None) -> str:
    return "its size is not known" if need is None else f"needs {gigabytes(need.total)}"


def _calls(need: MemoryNeed, free: int | None) -> str:
    if free is None:
        return ""
    return f", enough to serve {need.calls(int(ROOM * free)):,} calls of full length at once"


def _too_much(need: MemoryNeed | None, free: int | None, below: int | None) -> str | None:
    """The reason to leave a model, or `None`."""
    if need is None:
        return "so it is left; fetch it first, then its files tell"
    if below is not None and need.total >= below:
        return "no less than what ran out of memory"
    if free is not None and need.total > ROOM * free:
        return f"more than {ROOM:.0%} of what is free"
    return None
