"""Training on several ranks against one: real processes, gloo and FSDP2 on a CPU."""

import json
import os
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import RollwrightError
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.rng import generator
from rollwright.training.advantages import GRPO
from rollwright.training.model import TrainedModel
from rollwright.training.ranks.commands import decode_rows, encode_rows
from rollwright.training.ranks.dealing import deal, imbalance
from rollwright.training.ranks.group import SETUP, Seat, connect
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Outcome, Trajectory, Turn, VersionRun, floats, token_ids

LEARNING_RATE = 1e-3
VOCABULARY = 24


def save_model(folder: Path, **more: Any) -> str:
    tiny_llama(VOCABULARY, hidden_size=32, layers=2, initializer_range=0.3, seed=3, **more).save_pretrained(
        folder
    )
    return str(folder)


def batch(number: int, groups: int = 2, members: int = 4) -> list[Row]:
    """Rows of chains with 1 to 5 turns, of log-probabilities near those of a random model."""

    def chain(group: int, member: int) -> Trajectory:
        dice = generator("ranks", number, group, member)
        turns = []
        for place in range(dice.randint(1, 5)):
            sampled = token_ids(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 6)))
            turns.append(
                Turn(
                    id=place,
                    after=place - 1 if place else None,
                    extends=place - 1 if place else None,
                    prompt_ids=token_ids(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 8))),
                    sampled_ids=sampled,
                    logprobs=floats(-3.2 + dice.random() / 2 for _ in sampled),
                    versions=(VersionRun(0, len(sampled)),),
                    outcome=Outcome(observation="", reward=dice.random()),
                )
            )
        return Trajectory(f"{number}-{group}-{member}", "a", f"{number}-{group}", "T", seed=1, turns=turns)

    return build_rows(
        [[chain(group, member) for member in range(members)] for group in range(groups)], GRPO()
    )


def settings(**more: Any) -> TrainerSettings:
    given = {"learning_rate": LEARNING_RATE, "device": "cpu", "max_logprob_gap": 50.0, "rank_timeout": 60.0}
    return TrainerSettings(**{**given, **more})


def trainer(model: str, **more: Any) -> Any:
    """On one rank, or on `processes` of them."""
    made = settings(**more)
    if made.processes > 1:
        return LeadingTrainer(Setup(model=model, settings=made, total_updates=10, seed=5))
    return Trainer(load_model(model), made, total_updates=10, seed=5)


def largest_difference(first: Any, second: Any) -> float:
    """Between the weights of two trainers."""
    one, other = first.weights().tensors, second.weights().tensors
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 8))
def test_every_item_is_dealt_once_and_no_rank_has_much_more_than_it_must(
    costs: list[int], ranks: int
) -> None:
    dealt = deal(costs, ranks)
    assert sorted(item for items in dealt for item in items) == list(range(len(costs)))
    loads = [sum(costs[item] for item in items) for items in dealt]
    least = max([*costs, -(-sum(costs) // ranks)], default=0)
    assert max(loads) <= least + max(costs, default=0)
    assert deal(costs, ranks) == dealt
    assert imbalance(costs, dealt) >= -1e-9


def test_imbalance_is_the_excess_of_the_most_loaded_rank() -> None:
    assert imbalance([6, 2, 2, 2], [[0], [1, 2, 3]]) == 0
    assert imbalance([9, 3], [[0], [1]]) == pytest.approx(0.5)
    assert imbalance([], [[], []]) == 0


def test_rows_arrive_as_they_were_sent() -> None:
    rows = batch(1)
    assert decode_rows(encode_rows(rows)) == rows
    assert isinstance(decode_rows(encode_rows(rows))[0].token_ids, array)


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_rank_0_chooses_the_data_type_of_all_ranks(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """Else ranks on other machines would measure theirs and might choose another one."""
    monkeypatch.setattr("rollwright.training.ranks.leader.choose_dtype", lambda wanted: chosen)
    sent: list[str] = []

    class Sent(Exception):
        pass

    def start(seat: Seat) -> Any:
        sent.append(json.loads(connect(seat).get(SETUP))["settings"]["dtype"])
        raise Sent

    with pytest.raises(Sent):
        LeadingTrainer(Setup("no model is loaded", settings(processes=2, dtype="auto")), start)
    assert sent == [chosen]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    """Trainers that are closed at the end."""
    made: list[Any] = []
    yield made
    for each in made:
        each.close()


def test_two_ranks_train_what_one_does_and_a_checkpoint_goes_from_one_number_to_another(
    model: str, tmp_path: Path, ends: list[Any]
) -> None:
    lora: dict[str, Any] = {"lora": {"rank": 4}, "loss": {"name": "gspo", "kl_coefficient": 0.05}}
    for number, more in enumerate(({"loss": {"kl_coefficient": 0.1}, "epochs": 2}, lora)):
        one, two = trainer(model, **more), trainer(model, processes=2, **more)
        ends.append(two)
        for step in range(2):
            expected, found = one.step(batch(step)), two.step(batch(step))
            assert (found.skipped, found.updates, found.tokens) == (None, expected.updates, expected.tokens)
            assert found.loss == pytest.approx(expected.loss, abs=1e-6)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert found.divergence == pytest.approx(expected.divergence, abs=1e-6)
            assert (found.ranks, sorted(found.rank_memory_mb)) == (2, [0, 1])
            assert 0 <= found.rank_imbalance < 0.5
        assert largest_difference(one, two) < LEARNING_RATE / 10
        place = tmp_path / f"{number}"
        two.save(place, {"step": 2})
        alone = trainer(model, **more)
        assert alone.restore(place) == {"step": 2}
        assert largest_difference(alone, two) == 0
        two.close()
        one.step(batch(5)), alone.step(batch(5))
        assert largest_difference(alone, one) < LEARNING_RATE / 10


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_activations_that_are_computed_again_change_no_weight(model: str, more: dict[str, Any]) -> None:
    kept, again = trainer(model, **more), trainer(model, activation_checkpointing=True, **more)
    for step in range(2):
        assert again.step(batch(step)).loss == pytest.approx(kept.step(batch(step)).loss, abs=1e-7)
    assert largest_difference(kept, again) < LEARNING_RATE / 1000
    assert largest_difference(kept, trainer(model, **more)) > LEARNING_RATE / 10, "both have learned"


@pytest.mark.parametrize(
    "more", [{"gather": "every_pass", "activation_checkpointing": True}, {"sharding": "replicate"}]
)
def test_ways_to_spare_memory_on_ranks_change_no_weight(
    model: str, ends: list[Any], more: dict[str, Any]
) -> None:
    one, two = trainer(model), trainer(model, processes=2, **more)
    ends.append(two)
    for step in range(2):
        one.step(batch(step)), two.step(batch(step))
    assert largest_difference(one, two) < LEARNING_RATE / 10


def test_skips_are_those_of_one_rank(model: str, ends: list[Any]) -> None:
    one, two = (
        trainer(model, processes=count, max_logprob_gap=1e-6, max_skips_in_a_row=2) for count in (1, 2)
    )
    ends.append(two)
    assert two.step([]).skipped == one.step([]).skipped
    assert two.step(batch(0)).skipped == one.step(batch(0)).skipped is not None
    for each in (one, two):
        with pytest.raises(RollwrightError, match="log-probability gap"):
            each.step(batch(0))
    assert two.version == one.version == 0


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_replaced_and_nothing_is_trained_twice(
    model: str, tmp_path: Path, ends: list[Any], sent: signal.Signals
) -> None:
    one, two = trainer(model), trainer(model, processes=2, rank_timeout=10.0)
    ends.append(two)
    for each in (one, two):
        each.step(batch(0))
    two.save(tmp_path / "checkpoint", {})
    for each in (one, two):
        each.step(batch(1))
    lost = two.others.pids[1]
    os.kill(lost, sent)
    for each in (one, two):
        each.step(batch(2))
    assert two.others.pids[1] != lost
    assert (two.version, two.updates) == (one.version, one.updates) == (3, 3)
    assert largest_difference(one, two) < LEARNING_RATE / 10
    assert not os.path.exists(f"/proc/{lost}") or sent is signal.SIGKILL


def test_ranks_that_are_lost_again_and_again_end_the_training_in_one_line(
    model: str, ends: list[Any]
) -> None:
    two = trainer(model, processes=2, rank_restarts=0)
    ends.append(two)
    os.kill(two.others.pids[1], signal.SIGKILL)
    with pytest.raises(RollwrightError, match=r"rank 1 was killed by SIGKILL; .*rollwright resume"):
        two.step(batch(0))


def test_a_lack_of_memory_on_one_rank_halves_the_micro_batches_of_all(
    model: str, ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = trainer(model), trainer(model, processes=2)
    ends.append(two)
    plain, calls = TrainedModel.logprobs, iter([True])

    def short(self: TrainedModel, *given: Any, **more: Any) -> Any:
        if self.ranks.size > 1 and next(calls, False):
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")
        return plain(self, *given, **more)

    monkeypatch.setattr(TrainedModel, "logprobs", short)  # on rank 0 alone
    for step in range(2):
        one.step(batch(step)), two.step(batch(step))
    assert two.version == 2
    assert largest_difference(one, two) < LEARNING_RATE / 10


torch.set_num_threads(1)
