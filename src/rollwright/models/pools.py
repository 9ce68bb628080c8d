"""Which model of the pools fits the machine: needs and free memory in, a choice with its reasons out.

True of it: the same seed, pools, needs and free memory give the same choice; nothing is chosen that is not expected to
fit with some room to spare; every candidate is named with the reason why it was taken or left.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollwright.draws import digest
from rollwright.errors import ConfigError
from rollwright.hardware.memory import gigabytes

ROOM = 0.9
"""Share of the free memory that a choice may need: others run here, too, and the estimate is one."""


@dataclass(frozen=True)
class ModelChoice:
    """A model, and why it."""

    model: str
    pool: str
    need: int
    """Bytes, as estimated."""
    reasons: tuple[str, ...]
    """One for each candidate, in the order of the pools, and what was decided at the end."""


def choose_model(
    pools: Mapping[str, Sequence[str]],
    need: Callable[[str], int | None],
    free: int | None,
    seed: int,
    *,
    below: int | None = None,
) -> ModelChoice:
    """Of the first pool that has models which fit, one drawn by the seed. `below`: only what needs less than this."""
    reasons: list[str] = []
    for pool, models in pools.items():
        fitting: dict[str, int] = {}
        for model in models:
            bytes_needed = need(model)
            why = _too_much(bytes_needed, free, below)
            needs = "an unknown size" if bytes_needed is None else gigabytes(bytes_needed)
            reasons.append(f"{model}: needs {needs}{f', {why}' if why else ''}")
            if why is None and bytes_needed is not None:
                fitting[model] = bytes_needed
        if fitting:
            names = sorted(fitting)
            model = names[digest(seed, "model pool", pool, *names) % len(names)]
            told = "what is free cannot be told" if free is None else f"{gigabytes(free)} are free"
            reasons.append(f"chosen: {model} of {pool}, by seed {seed} from {len(names)} that fit; {told}")
            return ModelChoice(model, pool, fitting[model], tuple(reasons))
    raise ConfigError(
        f"policy.model: no model of {', '.join(pools)} fits ({'; '.join(reasons)}; "
        f"{'unknown' if free is None else gigabytes(free)} free); free some memory, make "
        "training.tokens_per_micro_batch or sequence_length smaller, use training.lora, or add a smaller model such as "
        "`smollm2` to the pool"
    )


def _too_much(need: int | None, free: int | None, below: int | None) -> str | None:
    """Why it is left, or `None`."""
    if need is None:
        return "so it is left; fetch it first, then its files tell"
    if below is not None and need >= below:
        return "no less than what ran out of memory"
    if free is not None and need > ROOM * free:
        return f"more than {ROOM:.0%} of what is free"
    return None
