"""Rows that share a prefix: every row is there whole, the prefix is computed once, and the gradient is the same."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.models.tiny import tiny_llama
from rollwright.training.advantages import RLOO, TurnTree
from rollwright.training.branch_attention import tokens_per_pair
from rollwright.training.gradients import add_gradients
from rollwright.training.micro_batches import bundle_rows, collate, pack, plan_bundles
from rollwright.training.model import TrainedModel
from rollwright.training.prefixes import Bundle, Joining, bundle
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import LoraSettings, LossSettings, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Trajectory, VersionRun, floats, token_ids

VOCABULARY = 24
FREE = Joining(budget=10_000, tokens_per_pair=0.0)
"""Joins whatever shares a token."""


def arrays(rows: Sequence[Sequence[int]]) -> list[Any]:
    return [numpy.array(row, dtype=numpy.int64) for row in rows]


def walked(found: Bundle, rows: Sequence[Sequence[int]]) -> tuple[dict[int, list[int]], int]:
    """Each row of a bundle, read from the one before it as its members say, and the number of tokens on the way."""
    read: dict[int, list[int]] = {}
    before: list[int] = []
    tokens = 0
    for row, shared in found.members:
        own = list(rows[row][shared:])
        before = before[:shared] + own
        read[row] = before
        tokens += len(own)
    return read, tokens


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12),
    budget=st.integers(1, 60),
    cost=st.sampled_from([0.0, 0.02, 0.2, 9.0]),
)
def test_every_row_is_in_one_bundle_and_can_be_read_from_it(
    rows: list[list[int]], budget: int, cost: float
) -> None:
    found = bundle(arrays(rows), Joining(budget, cost))
    assert sorted(member.row for each in found for member in each.members) == list(range(len(rows)))
    for each in found:
        read, tokens = walked(each, rows)
        assert read == {row: rows[row] for row in read}
        assert tokens == each.length
        longest = max(read.values(), key=len)
        assert each.plain == all(longest[: len(row)] == row for row in read.values())
        assert each.length <= max(budget, len(longest))
    assert sum(each.length for each in found) <= sum(map(len, rows))


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
def test_where_attention_is_free_every_prefix_stands_once(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[:size]) for row in rows for size in range(1, len(row) + 1)}
    assert sum(each.length for each in bundle(arrays(rows), FREE)) == len(prefixes)


def test_rows_are_joined_only_where_the_attention_costs_less_than_the_tokens() -> None:
    rows = arrays([[1, 2, *range(3, 30)], [1, 2, *range(40, 70)]])
    assert [each.length for each in bundle(rows, Joining(1000, 0.1))] == [32, 29], (
        "two tokens are not worth it"
    )
    long = arrays([[*range(50), 90], [*range(50), 91]])
    assert [each.length for each in bundle(long, Joining(1000, 0.1))] == [52]


def same_prompts(chain: Callable[..., Trajectory]) -> list[list[Trajectory]]:
    """Groups whose members have the prompt in common, and some the first answer too."""
    groups = []
    for number in range(3):
        first = chain(f"g{number}", [0.0, 1.0], group=f"g{number}")
        members = [first]
        for member in range(1, 4):
            other = chain(f"g{number}m{member}", [0.0, float(member % 2)], group=f"g{number}")
            shared = (
                (first.turns[0].prompt_ids + token_ids(range(10)))
                if member < 3
                else first.turns[0].prompt_ids
            )
            turns = [msgspec.structs.replace(other.turns[0], prompt_ids=shared), *other.turns[1:]]
            members.append(msgspec.structs.replace(other, turns=turns))
        groups.append(members)
    return groups


def gradient(
    model: Any, rows: Sequence[Row], loss: LossSettings, *, share: bool, budget: int = 2048
) -> tuple[dict[str, torch.Tensor], Any]:
    trained = TrainedModel(model, TrainerSettings(device="cpu", share_prefixes=share, loss=loss))
    trained.module.zero_grad(set_to_none=True)
    tally = add_gradients(trained, [pack(row) for row in rows], loss, tokens_per_micro_batch=budget)
    return {name: each.grad.clone() for name, each in trained.trained_parameters().items()}, tally


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    apart = sum(float((one[name] - two[name]).double().square().sum()) for name in one)
    return (apart / sum(float(each.double().square().sum()) for each in one.values())) ** 0.5


@pytest.mark.parametrize("view", ["paths", "turns"])
@pytest.mark.parametrize("budget", [2048, 40])
@pytest.mark.parametrize(
    "loss", [LossSettings(), LossSettings(entropy_coefficient=0.1)], ids=["plain", "with entropy"]
)
def test_the_gradient_is_that_of_the_rows_one_by_one(
    chain: Callable[..., Trajectory], model: Any, view: Any, budget: int, loss: LossSettings
) -> None:
    rows = build_rows(same_prompts(chain), RLOO(), view=view)
    apart, alone = gradient(model, rows, loss, share=False, budget=budget)
    joined, together = gradient(model, rows, loss, share=True, budget=budget)
    assert distance(apart, joined) < 1e-5
    assert together.computed < alone.computed
    assert together.computed + together.shared == alone.computed
    assert together.tokens == alone.tokens
    for name in alone.sums:
        assert together.sums[name] == pytest.approx(alone.sums[name], rel=1e-4, abs=1e-4)


def test_the_gradient_of_a_tree_is_the_same_and_its_trunk_is_computed_once(
    forest: Callable[..., Trajectory], model: Any
) -> None:
    links = [(None, 0.0), (0, 0.0), (0, 1.0), (1, 1.0), (1, 0.0), (2, 1.0), (2, 0.0)]
    rows = build_rows([[forest("r", links)]], TurnTree())
    apart, alone = gradient(model, rows, LossSettings(), share=False)
    joined, together = gradient(model, rows, LossSettings(), share=True)
    assert distance(apart, joined) < 1e-5
    assert together.micro_batches == 1
    assert together.computed < alone.computed


def test_tokens_of_one_place_keep_their_own_temperatures(
    chain: Callable[..., Trajectory], model: Any
) -> None:
    rows = build_rows(same_prompts(chain), RLOO())
    warm = [
        msgspec.structs.replace(row, temperatures=floats([0.5 + 0.25 * (place % 3)] * len(row.mask)))
        for place, row in enumerate(rows)
    ]
    apart, _ = gradient(model, warm, LossSettings(), share=False)
    joined, _ = gradient(model, warm, LossSettings(), share=True)
    assert distance(apart, joined) < 1e-5
    plain, _ = gradient(model, rows, LossSettings(), share=True)
    assert distance(apart, plain) > 0.01


@pytest.mark.parametrize(
    "more",
    [
        {"lora": LoraSettings(rank=2), "loss": LossSettings(kl_coefficient=0.1)},
        {"epochs": 2, "mini_batches": 2, "loss": LossSettings(ratio="proximal", kl_coefficient=0.1)},
    ],
    ids=["adapters", "several updates"],
)
def test_whole_steps_give_the_same_weights(chain: Callable[..., Trajectory], more: dict[str, Any]) -> None:
    rows = build_rows(same_prompts(chain), RLOO())
    found = []
    for share in (False, True):
        model = tiny_llama(VOCABULARY, hidden_size=32, layers=2, initializer_range=0.3, seed=3)
        given = {"max_logprob_gap": 99.0, "learning_rate": 1e-3, "device": "cpu", **more}
        trainer = Trainer(model, TrainerSettings(share_prefixes=share, **given))
        reports = [trainer.step(rows) for _ in range(2)]
        tensors = trainer.weights().tensors
        assert tensors is not None
        found.append((tensors, reports[-1]))
    (apart, alone), (joined, together) = found
    assert distance(apart, joined) < 1e-5
    assert together.loss == pytest.approx(alone.loss, rel=1e-4, abs=1e-6)
    assert together.computed_tokens + together.shared_tokens == alone.computed_tokens
    assert together.shared_tokens > 0


def test_rows_that_share_nothing_go_through_the_model_as_they_are(chain: Callable[..., Trajectory]) -> None:
    rows = [pack(row) for row in build_rows([[chain("a", [1.0]), chain("b", [0.0, 1.0])]], RLOO())]
    assert rows[0].inputs[0] != rows[1].inputs[0]
    apart = plan_bundles(bundle_rows(rows, range(len(rows)), 2048, None), 2048)
    joined = plan_bundles(bundle_rows(rows, range(len(rows)), 2048, 1 / 128), 2048)
    assert [[each.members for each in batch] for batch in joined] == [
        [each.members for each in batch] for batch in apart
    ]
    for batch in joined:
        made = collate(rows, batch, torch.device("cpu"))
        assert made.mask is None
        assert made.positions is None
        assert made.choices is None


def test_prompts_that_are_equal_need_no_mask(chain: Callable[..., Trajectory]) -> None:
    """Many answers of one token to one question: one plain sequence, and its distribution is computed once."""
    one = chain("a", [1.0])
    group = []
    for place in range(5):
        turn = msgspec.structs.replace(
            one.turns[0],
            sampled_ids=token_ids([place]),
            logprobs=floats([-1.0]),
            versions=(VersionRun(0, 1),),
            completion_tokens=1,
        )
        group.append(msgspec.structs.replace(one, rollout_id=f"r{place}", turns=[turn]))
    rows = [pack(row) for row in build_rows([group], RLOO())]
    [found] = bundle_rows(rows, range(5), 2048, 1 / 128)
    made = collate(rows, [found], torch.device("cpu"))
    assert found.plain
    assert made.mask is None
    assert made.choices is not None
    assert len(made.places) == 1
    assert sorted(made.targets.tolist()) == list(range(5))


class Deaf(torch.nn.Module):
    """A model whose attention does not hear the mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        return self.model(input_ids=input_ids)


def test_a_model_that_computes_branches_wrongly_is_noticed_and_computes_every_row(model: Any) -> None:
    assert tokens_per_pair(model) == 1 / (4 * 32)
    deaf: Any = Deaf(model)
    assert tokens_per_pair(deaf) is None


def test_a_model_whose_layers_look_at_a_part_of_the_row_computes_every_row(model: Any) -> None:
    model.config.sliding_window = 4096
    assert tokens_per_pair(model) is None
    model.config.sliding_window = None
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert tokens_per_pair(model) is None


def test_log_probabilities_of_sequences_are_the_same(model: Any) -> None:
    prompt = token_ids(range(12))
    asked = [(prompt, token_ids([place, 3, place + 1])) for place in range(6)]
    apart, joined = (
        Trainer(model, TrainerSettings(device="cpu", share_prefixes=share)).logprobs(asked)
        for share in (False, True)
    )
    for one, two in zip(apart, joined, strict=True):
        assert list(two) == pytest.approx(list(one), abs=1e-5)
