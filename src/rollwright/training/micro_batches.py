"""Rows as tensors, in micro-batches of bundles with similar length.

Always true: padding is on the right, where a causal model does not attend to it, so plain bundles need no attention mask and
the fast attention kernels apply; in a bundle with branches, a token attends to the tokens of its own row alone. Tokens after
the last trained token of a row are not computed. Only positions whose next token is trained reach the output head, each once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.training.prefixes import Bundle, Joining, Member, bundle, separate
from rollwright.training.rows import NotTrainable, Row
from rollwright.trajectory import MIN_TEMPERATURE, NO_TEMPERATURE, TokenIds

STARTING_COSTS = 64
"""Overhead of one more micro-batch, in padded tokens: on a CPU core, 50 were measured with 0.8 M parameters and 125 with
0.1 M."""


_LOWEST_TEMPERATURE = MIN_TEMPERATURE * (1 - 1e-6)
"""Temperatures are stored as 32-bit floats, in which the lowest one is slightly smaller."""


@dataclass(frozen=True)
class PackedRow:
    """A row as tensors: the input ids and, for each trained token, the inputs of the loss."""

    rollout_id: str
    inputs: Tensor
    """Ids before the last trained token."""
    places: Tensor
    """Positions of the inputs that predict the trained tokens."""
    targets: Tensor
    engine: Tensor
    """Log-probabilities of the engine that sampled."""
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    temperatures: Tensor
    values: Tensor | None = None
    """The critic's values of the states before the trained tokens, before the step; `None` without a critic."""
    returns: Tensor | None = None
    """Targets of these values."""
    group_id: str = ""

    @property
    def length(self) -> int:
        return len(self.inputs)


def pack(row: Row, temperature: float = 1.0) -> PackedRow:
    """Converts a row. `temperature`: for tokens without a recorded one. Raises `NotTrainable` if one is too low."""
    trained = torch.frombuffer(bytearray(row.mask), dtype=torch.uint8).nonzero().squeeze(1)
    ids = torch.frombuffer(row.token_ids, dtype=torch.int32).long()
    return PackedRow(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        inputs=ids[: int(trained[-1])],
        places=trained - 1,
        targets=ids[trained],
        engine=torch.frombuffer(row.logprobs, dtype=torch.float32)[trained],
        advantages=torch.frombuffer(row.advantages, dtype=torch.float32)[trained],
        weights=torch.frombuffer(row.weights, dtype=torch.float32)[trained],
        versions=torch.frombuffer(row.versions, dtype=torch.int32)[trained],
        temperatures=_temperatures(row, trained, temperature),
        values=None if row.values is None else torch.frombuffer(row.values, dtype=torch.float32)[trained],
        returns=None if row.returns is None else torch.frombuffer(row.returns, dtype=torch.float32)[trained],
    )


def _temperatures(row: Row, trained: Tensor, own: float) -> Tensor:
    if row.temperatures is None:
        return torch.full((len(trained),), own)
    told = torch.frombuffer(row.temperatures, dtype=torch.float32)[trained]
    found = torch.where(told == NO_TEMPERATURE, own, told)
    if not bool((found >= _LOWEST_TEMPERATURE).all() & found.isfinite().all()):
        wrong = found[~((found >= _LOWEST_TEMPERATURE) & found.isfinite())][0].item()
        raise NotTrainable(
            f"rollout {row.rollout_id} is not trainable: it was sampled at temperature {wrong:g}; accepted: "
            f"{MIN_TEMPERATURE:g} or more"
        )
    return found


def check_ids(rows: Sequence[PackedRow], vocabulary: int) -> None:
    """Refuses rows with a token id that a model of this vocabulary does not have."""
    for row in rows:
        highest = max(int(row.inputs.max()), int(row.targets.max()))
        if highest >= vocabulary:
            raise ConfigError(
                f"rollout {row.rollout_id}: token id {highest}, but the model has {vocabulary}; "
                "rollouts and trainer need the same model"
            )


def scoring_row(prompt: TokenIds, sampled: TokenIds, temperature: float) -> PackedRow:
    """A prompt and the ids that follow it, to be scored and not trained on."""
    ids = torch.frombuffer(prompt + sampled, dtype=torch.int32).long()
    nothing = torch.zeros(len(sampled))
    return PackedRow(
        rollout_id="",
        inputs=ids[:-1],
        places=torch.arange(len(prompt) - 1, len(ids) - 1),
        targets=ids[len(prompt) :],
        engine=nothing,
        advantages=nothing,
        weights=nothing,
        versions=torch.zeros(len(sampled), dtype=torch.int32),
        temperatures=torch.full((len(sampled),), temperature),
    )


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partitions rows into micro-batches, longest first, with the least padding, `STARTING_COSTS` included.

    A micro-batch has at most `budget` tokens with padding, unless a single row is longer. Rows of equal length keep their
    order, so the plan is deterministic.
    """
    # Dynamic programming over the rows sorted by length: the best partition from each start to the end.
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    costs = [0] * (len(order) + 1)
    """Cost of the best partition of all rows from each position on."""
    ends = [0] * len(order)
    for start in reversed(range(len(order))):
        longest = lengths[order[start]]
        last = min(start + max(budget // longest, 1), len(order))
        costs[start], ends[start] = min(
            (longest * (end - start) + STARTING_COSTS + costs[end], end) for end in range(start + 1, last + 1)
        )
    found, start = [], 0
    while start < len(order):
        found.append(order[start : ends[start]])
        start = ends[start]
    return found


def bundle_rows(
    packed: Sequence[PackedRow], chosen: Sequence[int], budget: int, tokens_per_pair: float | None
) -> list[Bundle]:
    """Bundles of the chosen rows. `tokens_per_pair`: see `Joining`; `None`: every row alone."""
    if tokens_per_pair is None:
        found = separate([packed[row].length for row in chosen])
    else:
        found = bundle([packed[row].inputs.numpy() for row in chosen], Joining(budget, tokens_per_pair))
    return [
        replace(each, members=tuple(Member(chosen[row], shared) for row, shared in each.members))
        for each in found
    ]


def plan_bundles(bundles: Sequence[Bundle], budget: int) -> list[list[Bundle]]:
    """Partitions bundles into micro-batches. Plain ones, which need no attention mask, stay among themselves."""
    found = []
    for plain in (True, False):
        alike = [each for each in bundles if each.plain is plain]
        found += [
            [alike[place] for place in chosen] for chosen in plan([each.length for each in alike], budget)
        ]
    return found


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together; the trained tokens of all rows are concatenated."""

    rows: Sequence[int]
    """Indices of these rows in the batch."""
    inputs: Tensor
    """Shape: bundles × longest bundle."""
    places: Tensor
    """Positions of the predecessors of trained tokens in the flattened `inputs`, each once."""
    targets: Tensor
    engine: Tensor
    advantages: Tensor
    temperatures: Tensor | float = 1.0
    """One for each of `places`; a number if it is the same for all, which is cheaper."""
    mask: Tensor | None = None
    """Whether each token attends to each other one; `None`: to all before it."""
    positions: Tensor | None = None
    """Position of each token in its row; `None`: the position in the sequence."""
    choices: Tensor | None = None
    """For each trained token, the index of its predecessor in `places`; `None`: no two tokens have the same one."""
    computed: int = 0
    """Number of tokens without padding."""
    values: Tensor | None = None
    """The critic's values of the states before the trained tokens, before the step; `None` without a critic."""
    returns: Tensor | None = None
    """Targets of these values."""

    @property
    def tokens(self) -> int:
        """Number of tokens with padding."""
        return self.inputs.numel()


def collate(packed: Sequence[PackedRow], bundles: Sequence[Bundle], device: torch.device) -> MicroBatch:
    width = max(each.length for each in bundles)
    inputs = torch.zeros(len(bundles), width, dtype=torch.long)
    branched = not all(each.plain for each in bundles)
    positions = torch.zeros_like(inputs) if branched else None
    mask = torch.eye(width, dtype=torch.bool).repeat(len(bundles), 1, 1, 1) if branched else None
    places = []
    for number, each in enumerate(bundles):
        path, used = torch.empty(0, dtype=torch.long), 0
        for row, shared in each.members:
            own = packed[row].inputs[shared:]
            new = slice(used, used + len(own))
            if mask is not None and positions is not None:
                positions[number, new] = torch.arange(shared, shared + len(own))
                mask[number, 0, new, path[:shared]] = True
                mask[number, 0, new, new] = torch.ones(len(own), len(own), dtype=torch.bool).tril()
            inputs[number, new] = own
            path = torch.cat((path[:shared], torch.arange(used, used + len(own))))
            used += len(own)
            places.append(path[packed[row].places] + width * number)
    rows = [member.row for each in bundles for member in each.members]
    chosen = [packed[row] for row in rows]
    at, choices, temperatures = _unique(torch.cat(places), torch.cat([row.temperatures for row in chosen]))
    return MicroBatch(
        rows=rows,
        inputs=inputs.to(device),
        places=at.to(device),
        targets=torch.cat([row.targets for row in chosen]).to(device),
        engine=torch.cat([row.engine for row in chosen]).to(device),
        advantages=torch.cat([row.advantages for row in chosen]).to(device),
        temperatures=temperatures if isinstance(temperatures, float) else temperatures.to(device),
        mask=None if mask is None else mask.to(device),
        positions=None if positions is None else positions.to(device),
        choices=None if choices is None else choices.to(device),
        computed=sum(each.length for each in bundles),
        values=_joined([row.values for row in chosen], device),
        returns=_joined([row.returns for row in chosen], device),
    )


def _joined(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known).to(device) if len(known) == len(parts) else None


def _unique(places: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
    """Each place once, with its temperature, and for each token the index of its place. Branches that follow the same prefix
    are drawn from the same distribution, which is then computed once."""
    first = float(temperatures[0])
    same = bool((temperatures == first).all())
    if len(torch.unique(places)) == len(places):
        return places, None, first if same else temperatures
    if same:
        found, choices = torch.unique(places, return_inverse=True)
        return found, choices, first
    pairs = torch.stack((places.double(), temperatures.double()), dim=1)
    distinct, choices = torch.unique(pairs, dim=0, return_inverse=True)
    return distinct[:, 0].long(), choices, distinct[:, 1].float()
