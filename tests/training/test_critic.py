"""A value head with GAE: numbers by hand and verl's own, the same gradient however it is computed, and a run that learns."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, RollwrightError
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama
from rollwright.run.build_training import check
from rollwright.training.advantages import GRPO, TokenGAE, make_advantage
from rollwright.training.advantages.values import ValueEstimate
from rollwright.training.critic import explained_variance, value_losses
from rollwright.training.micro_batches import pack
from rollwright.training.ranks.leader import LeadingTrainer, Setup
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import CriticSettings, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import Outcome, Trajectory, Turn, VersionRun, floats, token_ids

Make = Callable[..., Trajectory]

PEERS = dict(numpy.load(Path(__file__).parent / "data" / "peer_losses.npz"))
"""Recorded values of verl's own functions; `bench/losses_peers.py` draws them."""


def turn(number: int, after: int | None, tokens: int, reward: float, **more: Any) -> Turn:
    return Turn(
        id=number,
        after=after,
        extends=after,
        prompt_ids=token_ids([1, 2 + number]),
        sampled_ids=token_ids(range(3, 3 + tokens)),
        logprobs=floats([-3.0] * tokens),
        versions=(VersionRun(0, tokens),),
        outcome=Outcome(observation="", reward=reward),
        **more,
    )


def rollout(name: str, *turns: Turn, group: str = "g") -> Trajectory:
    return Trajectory(name, "a", group, "T", seed=1, turns=list(turns))


def test_gae_by_hand_over_two_turns() -> None:
    played = rollout("r", turn(0, None, 2, 1.0), turn(1, 0, 1, 4.0))
    values = [[[[0.5, 1.0], [2.0]]]]
    found = TokenGAE(discount=0.9, decay=0.5, whiten=False).estimate([[played]], values)
    last = 4.0 - 2.0
    second = (1.0 + 0.9 * 2.0 - 1.0) + 0.9 * 0.5 * last
    first = (0.0 + 0.9 * 1.0 - 0.5) + 0.9 * 0.5 * second
    assert found.advantages == [[[pytest.approx([first, second]), pytest.approx([last])]]]
    assert found.returns == [[[pytest.approx([first + 0.5, second + 1.0]), pytest.approx([4.0])]]]


def test_children_of_a_turn_are_averaged_by_their_multiplicity() -> None:
    tree = rollout("r", turn(0, None, 1, 0.0), turn(1, 0, 1, 1.0, count=3), turn(2, 0, 1, 0.0))
    found = TokenGAE(decay=1.0, whiten=False).estimate([[tree]], [[[[0.5], [0.25], [0.75]]]])
    after = (3 * 0.25 + 0.75) / 4
    later = (3 * (1.0 - 0.25) + (0.0 - 0.75)) / 4
    assert found.advantages == [
        [[pytest.approx([after - 0.5 + later]), pytest.approx([0.75]), pytest.approx([-0.75])]]
    ]


def test_a_turn_outside_the_loss_is_part_of_the_environment() -> None:
    whole = rollout("r", turn(0, None, 1, 0.0), turn(1, 0, 2, 2.0), turn(2, 1, 1, 1.0))
    found = TokenGAE(decay=0.5, whiten=False).estimate([[whole]], [[[[0.5], [], [0.25]]]])
    last = 1.0 - 0.25
    assert found.advantages == [
        [[pytest.approx([2.0 + 0.25 - 0.5 + 0.5 * last]), [0.0, 0.0], pytest.approx([last])]]
    ]
    assert found.returns[0][0][1] == [0.0, 0.0]


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(-2, 2), st.lists(st.floats(-2, 2), min_size=4, max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_with_decay_1_a_return_is_the_sum_of_later_rewards_whatever_the_values(
    drawn: list[tuple[int, float, list[float]]],
) -> None:
    turns = [
        turn(place, place - 1 if place else None, tokens, reward)
        for place, (tokens, reward, _) in enumerate(drawn)
    ]
    values = [[[own[:tokens] for tokens, _, own in drawn]]]
    found = TokenGAE(decay=1.0, whiten=False).estimate([[rollout("r", *turns)]], values).returns[0][0]
    for place, (tokens, _, _) in enumerate(drawn):
        later = sum(reward for _, reward, _ in drawn[place:])
        assert found[place] == pytest.approx([later] * tokens, abs=1e-9)


def chains_of(number: int) -> tuple[list[list[Trajectory]], list[list[list[list[float]]]]]:
    """A recorded batch as chains, each run of the mask a turn with its reward at the last token; and the values of its turns."""
    found, values = [], []
    for row, mask in enumerate(PEERS["mask"][number] > 0):
        ends = [place for place, counts in enumerate(mask) if counts and not [*mask, False][place + 1]]
        starts = [place for place, counts in enumerate(mask) if counts and not (place and mask[place - 1])]
        rewards = PEERS["advantage turn_rewards"][number][row]
        turns = [
            turn(place, place - 1 if place else None, end - start + 1, float(rewards[end]))
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        found.append(rollout(f"r{row}", *turns))
        own = PEERS["values"][number][row].astype(float)
        values.append([own[start : end + 1].tolist() for start, end in zip(starts, ends, strict=True)])
    return [found], [values]


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_advantages_and_returns_equal_verls(discount: float) -> None:
    for number, mask in enumerate(PEERS["mask"] > 0):
        groups, values = chains_of(number)
        found = TokenGAE(discount=discount).estimate(groups, values)
        for name, ours in (("gae", found.advantages), ("gae returns", found.returns)):
            flat = [each for group in ours for own in group for tokens in own for each in tokens]
            expected = PEERS[f"advantage {name} {discount}"][number][mask]
            assert flat == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_value_loss_and_its_gradient_equal_verls() -> None:
    clipped = 0
    for number, mask in enumerate(PEERS["mask"] > 0):
        moved = torch.tensor(PEERS["critic moved"][number][mask], dtype=torch.float64).requires_grad_()
        old = torch.tensor(PEERS["values"][number][mask], dtype=torch.float64)
        returns = torch.tensor(PEERS["advantage gae returns 1.0"][number][mask])
        found = value_losses(moved, old, returns, 0.2)
        loss = found.losses.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        assert moved.grad is not None
        assert float(loss.detach()) == pytest.approx(float(PEERS["critic loss"][number]), abs=1e-6)
        assert moved.grad.tolist() == pytest.approx(PEERS["critic gradient"][number][mask].tolist(), abs=1e-6)
        clipped += int(found.clipped.sum())
    assert clipped > 3


def test_values_explain_returns_as_far_as_they_equal_them(chain: Make) -> None:
    row = build_rows([[chain("a", [0.0, 1.0, 2.0])]], GRPO())[0]
    lifted = [float(place) for place in range(len(row.mask))]

    def explained(values: list[float]) -> float | None:
        from msgspec.structs import replace

        return explained_variance([pack(replace(row, values=floats(values), returns=floats(lifted)))])

    assert explained(lifted) == pytest.approx(1.0)
    assert explained([7.0] * len(lifted)) == pytest.approx(0.0)
    assert explained_variance([pack(row)]) is None


def settings(**more: Any) -> TrainerSettings:
    plain = {"learning_rate": 1e-3, "device": "cpu", "max_logprob_gap": 50.0, "critic": CriticSettings()}
    return TrainerSettings(**{**plain, **more})


def trained(more: dict[str, Any], groups: list[list[Trajectory]], steps: int = 2) -> Trainer:
    """After some steps on the same groups, so that values are not 0."""
    made = Trainer(
        tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=3), settings(**more), seed=5
    )
    for _ in range(steps):
        report = made.step(valued(made, groups))
        assert (report.skipped, report.updates) == (None, made.settings.updates_per_step)
    return made


def valued(trainer: Any, groups: list[list[Trajectory]]) -> list[Row]:
    return build_rows(groups, TokenGAE(), values=trainer.values)


def difference(first: Any, second: Any) -> float:
    """Between all trained parameters of two trainers, value head included."""
    one, other = first._parameters, second._parameters
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture
def groups(forest: Make) -> list[list[Trajectory]]:
    """Trees, chains, and a history that is cut, so that a rollout has several rows."""
    return [
        [
            forest("a", [(None, 0.0), (0, 1.0), (0, 0.25)]),
            forest("b", [(None, 0.5), (0, 0.0)], windowed=True),
            forest("c", [(None, 1.0)]),
        ],
        [forest("d", [(None, 0.0), (0, 0.5)], group="h"), forest("e", [(None, 0.25)], group="h")],
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"share_prefixes": False},
        {"tokens_per_micro_batch": 1},
        {"tokens_per_micro_batch": 30},
    ],
)
@pytest.mark.parametrize("also", [{}, {"critic": CriticSettings(trunk=False, clip=None)}, {"epochs": 2}])
def test_neither_shared_prefixes_nor_micro_batches_change_what_is_learned(
    groups: list[list[Trajectory]], more: dict[str, Any], also: dict[str, Any]
) -> None:
    assert difference(trained(also, groups), trained(also | more, groups)) < 1e-5


def test_a_value_is_that_of_the_tokens_before_it_alone(groups: list[list[Trajectory]]) -> None:
    made = trained({}, groups)
    rows = build_rows(groups, GRPO())
    for row, own in zip(rows, made.values(rows), strict=True):
        ids = torch.tensor([list(row.token_ids)])
        assert made._model.value_head is not None
        states = made._model.base.model(input_ids=ids).last_hidden_state[0]
        expected = made._model.value_head(states).squeeze(-1).tolist()
        for place, counts in enumerate(row.mask):
            assert own[place] == pytest.approx(expected[place - 1] if counts else 0.0, abs=1e-5)
        assert any(own)


def test_the_head_alone_learns_while_it_warms_up_and_without_the_trunk(
    groups: list[list[Trajectory]],
) -> None:
    fresh = trained({}, groups, steps=0).weights().tensors
    warm = trained({"critic": CriticSettings(warmup_steps=2)}, groups)
    assert all(torch.equal(fresh[name], each) for name, each in warm.weights().tensors.items())
    assert warm._model.value_head is not None
    assert float(warm._model.value_head.weight.abs().max()) > 0
    warm.step(valued(warm, groups))
    assert not all(torch.equal(fresh[name], each) for name, each in warm.weights().tensors.items())


def test_the_critic_comes_to_predict_returns(groups: list[list[Trajectory]]) -> None:
    made = trained({"critic": CriticSettings(clip=None, warmup_steps=99)}, groups, steps=0)
    reports = [made.step(valued(made, groups)) for _ in range(60)]
    assert reports[0].value_loss is not None
    assert reports[-1].value_loss is not None
    assert reports[-1].value_loss < reports[0].value_loss / 4
    assert reports[-1].value_explained is not None
    assert reports[-1].value_explained > 0.5


def test_a_critic_that_is_saved_and_restored_goes_on_bit_for_bit(
    groups: list[list[Trajectory]], tmp_path: Path
) -> None:
    made = trained({}, groups)
    made.save(tmp_path / "saved", {})
    again = trained({}, groups, steps=0)
    again.restore(tmp_path / "saved")
    for each in (made, again):
        each.step(valued(each, groups))
    assert difference(made, again) == 0
    with pytest.raises(RollwrightError, match="the same `lora` and `critic`"):
        trained({"critic": None}, [], steps=0).restore(tmp_path / "saved")


@pytest.mark.parametrize("more", [{}, {"gather": "every_pass"}, {"lora": {"rank": 4}}])
def test_two_ranks_train_the_same_critic_as_one(
    groups: list[list[Trajectory]], tmp_path: Path, more: dict[str, Any]
) -> None:
    tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=3).save_pretrained(
        tmp_path / "model"
    )
    one = Trainer(load_model(str(tmp_path / "model")), settings(**more), seed=5)
    two = LeadingTrainer(
        Setup(str(tmp_path / "model"), settings(processes=2, rank_timeout=60.0, **more), seed=5)
    )
    try:
        for _ in range(2):
            expected, found = (each.step(valued(each, groups)) for each in (one, two))
            assert found.value_loss == pytest.approx(expected.value_loss, abs=1e-6)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        two.save(tmp_path / "saved", {})
        two.restore(tmp_path / "saved")
        alone = Trainer(load_model(str(tmp_path / "model")), settings(**more), seed=5)
        alone.restore(tmp_path / "saved")
        assert difference(alone, one) < 1e-4
        rows = build_rows(groups, GRPO())
        for first, second in zip(two.values(rows), alone.values(rows), strict=True):
            assert list(first) == pytest.approx(list(second), abs=1e-6)
    finally:
        two.close()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


def test_a_critic_without_gae_and_gae_without_a_critic_are_refused(tiny: Any, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"training\.critic: is needed by the advantage `gae`"):
        check(tiny.configuration(model, "training.advantage=gae"))
    with pytest.raises(ConfigError, match=r"training\.critic: the advantage `rloo` uses no values"):
        check(tiny.configuration(model, "training.critic={}", "training.advantage=rloo"))
    with pytest.raises(ConfigError, match="coefficient"):
        check(tiny.configuration(model, "training.critic.coefficient=-1", "training.advantage=gae"))


class Halved(TokenGAE):
    def estimate(self, groups: Any, values: Any) -> ValueEstimate:
        found = super().estimate(groups, values)
        return ValueEstimate(found.advantages, [[each[:1] for each in group] for group in found.returns])


def test_an_advantage_of_ones_own_may_use_values_and_an_error_in_it_names_it(
    groups: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    advantage = make_advantage("mine:Halved", decay=0.5)
    made = trained({}, groups, steps=0)
    with pytest.raises(RollwrightError, match=r"advantage mine:Halved: .*"):
        build_rows(groups, advantage, values=made.values)


async def test_a_run_with_a_critic_learns_and_goes_on_after_a_stop(tiny: Any, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    config = tiny.configuration(
        model,
        "training.learning_rate=0.02",
        "training.advantage=gae",
        "training.critic={learning_rate_factor: 1.0}",
        max_steps=16,
        train_env_manager={"num_env_groups": 8, "group_size": 4, "tags": ["OddBytes"]},
    )
    run = await tiny.train(tmp_path / "runs", config, model)
    import json

    lines = (run.folder.path / "training" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    rewards = [row["reward"] for row in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert steps[-1]["value_loss"] < steps[0]["value_loss"]
