"""Steps of a real model: gradients, what is skipped, what stops, and what is reported."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollwright.errors import ConfigError
from rollwright.models import weights_checksum
from rollwright.training import gradients, trainer
from rollwright.training import model as model_module
from rollwright.training.advantages import GRPO, RLOO, TurnTree
from rollwright.training.gradients import add_gradients
from rollwright.training.losses import token_coefficients
from rollwright.training.micro_batches import pack
from rollwright.training.model import TrainedModel
from rollwright.training.report import Skip
from rollwright.training.rows import Row, build_rows
from rollwright.training.settings import Aggregation, LoraSettings, LossSettings, Ratio, TrainerSettings
from rollwright.training.trainer import Trainer, TrainingStopped
from rollwright.trajectory import Outcome, Trajectory, Turn, VersionRun, floats, token_ids

Make = Callable[..., Trajectory]
Score = Callable[..., list[Row]]

EVERYTHING = LossSettings(
    aggregation=Aggregation.SEQUENCE_MEAN, clip_high=0.3, kl_coefficient=0.05, entropy_coefficient=0.01
)
ROOMY = 10_000
"""Tokens, or nats: more than any test has."""


@pytest.fixture
def rows(chain: Make) -> list[Row]:
    """Two groups of four chains of different lengths."""
    groups = [
        [
            chain(
                f"{group}{member}",
                [0.0] * (member + 1) + [float((member + group) % 3 == 0)],
                group=str(group),
            )
            for member in range(4)
        ]
        for group in range(2)
    ]
    return build_rows(groups, GRPO())


def settings(**more: Any) -> TrainerSettings:
    return TrainerSettings(**{"learning_rate": 1e-2, "device": "cpu", **more})


def gradient(
    model: Any, rows: Sequence[Row], loss: LossSettings, budget: int = ROOMY
) -> dict[str, torch.Tensor]:
    wrapped = TrainedModel(model, settings(loss=loss))
    model.zero_grad()
    packed = [pack(row) for row in rows]
    reference = None
    if loss.kl_coefficient:
        reference = gradients.logprobs_of_rows(wrapped.reference_logprobs, packed, wrapped.device, ROOMY)
        reference = [own - 0.1 for own in reference]  # a base model that differs
    before = gradients.BeforeStep(reference=reference)
    add_gradients(wrapped, packed, loss, tokens_per_micro_batch=budget, before=before)
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def plain_gradient(model: Any, rows: Sequence[Row], loss: LossSettings) -> dict[str, torch.Tensor]:
    """The same by the book: one row at a time, whole vocabulary at every place, one token after the other."""
    model.zero_grad()
    everything = token_coefficients([pack(row) for row in rows], loss)
    for row, coefficients in zip(rows, everything, strict=True):
        ids = torch.tensor([list(row.token_ids)])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
        trained = [place for place, counts in enumerate(row.mask) if counts]
        total = torch.zeros(())
        for coefficient, place in zip(coefficients, trained, strict=True):
            own = logprobs[place - 1]
            new = own[row.token_ids[place]]
            ratio = torch.exp(new - row.logprobs[place])
            kept = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
            token = -torch.minimum(ratio * row.advantages[place], kept * row.advantages[place])
            if loss.kl_coefficient:
                difference = new.detach() - 0.1 - new
                token = token + loss.kl_coefficient * (torch.exp(difference) - difference - 1)
            token = token + loss.entropy_coefficient * (own.exp() * own).sum()
            total = total + coefficient * token
        total.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 1e-3
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("loss", [LossSettings(), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("budget", [1, 60, ROOMY])
def test_the_gradient_of_a_batch_is_that_of_its_samples_one_by_one(
    model: Any, rows: list[Row], scored: Score, loss: LossSettings, budget: int
) -> None:
    near = [
        msgspec.structs.replace(
            row, logprobs=floats(each + 0.15 * (-1) ** place for place, each in enumerate(row.logprobs))
        )
        for row in scored(rows, model)
    ]
    assert_same(gradient(model, near, loss, budget), plain_gradient(model, near, loss))


@pytest.mark.parametrize("view", ["paths", "turns"])
def test_the_loss_over_a_tree_counts_every_turn_once_with_its_weight(
    model: Any, forest: Make, scored: Score, view: Any
) -> None:
    tree = forest("a", [(None, 0.0), (0, 1.0), (0, 0.0), (1, 0.5), (1, 0.0), (2, 0.0)])
    other = forest("b", [(None, 0.25), (0, 0.0)])
    groups = [[tree, other]]
    advantages = TurnTree()(groups)[0]
    # Node by node: every turn is a row of its own with the whole prompt before it.
    total, tokens = torch.zeros(()), 0.0
    model.zero_grad()
    weights = {"a": [1, 0.5, 0.5, 0.25, 0.25, 0.5], "b": [1, 1]}
    for trajectory, own in zip(groups[0], advantages, strict=True):
        for row, advantage, weight in zip(
            build_rows([[trajectory]], RLOO(), view="turns"), own, weights[trajectory.rollout_id], strict=True
        ):
            ids = torch.tensor([list(row.token_ids)])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
            for place, counts in enumerate(row.mask):
                if counts:
                    new = logprobs[place - 1, row.token_ids[place]]
                    total = total - weight * advantage * torch.exp(new - new.detach())
                    tokens += weight
    (total / tokens).backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    on_policy = scored(build_rows(groups, TurnTree(), view=view), model)
    assert_same(gradient(model, on_policy, LossSettings()), expected)


def test_rows_without_advantage_are_not_computed_and_still_count(
    model: Any, rows: list[Row], scored: Score
) -> None:
    idle = [
        msgspec.structs.replace(row, rollout_id="x", advantages=floats([0.0]) * len(row.mask))
        for row in rows[:2]
    ]
    batch = scored([*rows, *idle], model)
    assert_same(gradient(model, batch, LossSettings()), plain_gradient(model, batch, LossSettings()))
    report = Trainer(model, settings()).step(batch)
    assert report.rows_without_gradient == 2
    assert report.computed_tokens == sum(pack(row).length for row in batch[: len(rows)])


def test_a_step_makes_what_was_good_likelier(model: Any, rows: list[Row], scored: Score) -> None:
    learner = Trainer(model, settings())
    before = scored(rows, model)
    report = learner.step(before)
    after = scored(rows, model)
    gain = sum(
        (new - old) * advantage
        for one, two in zip(before, after, strict=True)
        for old, new, advantage in zip(one.logprobs, two.logprobs, one.advantages, strict=True)
    )
    assert report.skipped is None
    assert learner.version == report.version == 1
    assert gain > 0


def test_who_is_rewarded_for_one_token_learns_to_say_it(model: Any) -> None:
    learner = Trainer(model, settings(learning_rate=5e-3, loss=LossSettings(clip_high=0.3)))
    dice = torch.Generator().manual_seed(0)
    prompt = token_ids([1, 2, 3])
    successes = []
    for step in range(25):
        with torch.no_grad():
            every = torch.log_softmax(model(input_ids=torch.tensor([list(prompt)])).logits[0, -1], dim=-1)
        drawn = torch.multinomial(every.exp(), 32, replacement=True, generator=dice).tolist()
        group = [
            Trajectory(
                f"{step}-{member}",
                "a",
                str(step),
                "bandit",
                seed=step,
                success=token == 7,
                turns=[
                    Turn(
                        id=0,
                        after=None,
                        extends=None,
                        prompt_ids=prompt,
                        sampled_ids=token_ids([token]),
                        logprobs=floats([float(every[token])]),
                        versions=(VersionRun(learner.version, 1),),
                        outcome=Outcome(observation="", reward=float(token == 7)),
                    )
                ],
            )
            for member, token in enumerate(drawn)
        ]
        report = learner.step(build_rows([group], GRPO()))
        assert report.skipped in (None, Skip.NO_ADVANTAGE)
        successes.append(report.success or 0.0)
    assert successes[0] < 0.3
    assert successes[-1] > 0.9


def test_a_mini_batch_without_any_advantage_is_no_update(model: Any, rows: list[Row], scored: Score) -> None:
    batch = scored(rows, model)[:4]
    idle = [msgspec.structs.replace(row, advantages=floats([0.0]) * len(row.mask)) for row in batch[1:]]
    learner = Trainer(model, settings(mini_batches=4))
    report = learner.step([batch[0], *idle])
    assert (report.updates, learner.updates, learner.version) == (1, 1, 1)


def test_a_report_tells_what_happened(model: Any, rows: list[Row], scored: Score) -> None:
    batch = scored(rows, model)
    report = Trainer(model, settings(warmup_updates=2)).step(batch)
    trained = sum(sum(row.mask) for row in batch)
    assert report.updates == 1
    assert (report.rows, report.rollouts, report.tokens) == (8, 8, trained)
    assert report.reward == pytest.approx(sum(row.reward for row in batch) / 8)
    assert report.gap == pytest.approx(0, abs=1e-5)
    assert report.gap_k3 == pytest.approx(0, abs=1e-5)
    assert report.ratio == pytest.approx(1, abs=1e-5)
    assert report.clip_share == 0
    assert 0 < report.entropy < 3.2  # the logarithm of 24
    assert report.staleness == {0: trained}
    assert report.learning_rate == 0.5e-2
    assert report.grad_norm > 0
    assert report.seconds > 0
    figures = report.figures()
    assert figures["staleness/0"] == trained
    assert figures["tokens_per_second"] == report.tokens_per_second
    assert "divergence" not in figures


def test_staleness_is_counted_token_by_token(model: Any, chain: Make, scored: Score) -> None:
    learner = Trainer(model, settings())
    pair = [chain("a", [1.0], version=0), chain("b", [0.0], version=0)]
    learner.step(scored(build_rows([pair], RLOO()), model))
    mixed = [chain("c", [1.0], version=0), chain("d", [0.0], version=1)]
    report = learner.step(scored(build_rows([mixed], RLOO()), model))
    assert report.staleness == {0: len(mixed[1].turns[0].sampled_ids), 1: len(mixed[0].turns[0].sampled_ids)}


def test_log_probabilities_are_those_at_the_temperature_of_the_rollouts(
    model: Any, rows: list[Row], scored: Score
) -> None:
    batch = scored(rows, model, 0.7)
    assert Trainer(model, settings(), temperature=0.7).step(batch).gap == pytest.approx(0, abs=1e-5)
    gap = Trainer(model, settings(learning_rate=0.0, max_logprob_gap=ROOMY)).step(batch).gap
    assert gap is not None
    assert gap > 0.05


def test_a_second_update_starts_from_the_first(model: Any, rows: list[Row], scored: Score) -> None:
    learner = Trainer(model, settings(epochs=2, mini_batches=2))
    report = learner.step(scored(rows, model))
    assert (report.updates, learner.updates, learner.version) == (4, 4, 1)
    assert report.ratio_max > 1.001


def test_the_proximal_policy_is_the_one_before_the_step(model: Any, rows: list[Row], scored: Score) -> None:
    loss = LossSettings(ratio=Ratio.PROXIMAL)
    off = [
        msgspec.structs.replace(row, logprobs=floats(each - 0.3 for each in row.logprobs))
        for row in scored(rows, model)
    ]
    once = Trainer(model, settings(loss=loss)).step(off)
    assert once.ratio == 1.0
    assert once.gap == pytest.approx(0.3, abs=1e-4)
    more = Trainer(model, settings(loss=loss, epochs=2)).step(scored(rows, model))
    assert more.ratio_max > 1.001


def test_a_divergence_from_the_base_model_is_reported(model: Any, rows: list[Row], scored: Score) -> None:
    learner = Trainer(model, settings(loss=LossSettings(kl_coefficient=0.1)))
    assert learner.step(scored(rows, model)).divergence == pytest.approx(0, abs=1e-5)
    later = learner.step(scored(rows, model)).divergence
    assert later is not None
    assert later > 1e-4


IN_BFLOAT16 = """
import torch
from rollwright.models.tiny import tiny_llama
from rollwright.training.micro_batches import MicroBatch
from rollwright.training.model import TrainedModel
from rollwright.training.settings import TrainerSettings

torch.set_num_threads(1)
ids = torch.arange(12)
batch = MicroBatch([0], ids[:-1].unsqueeze(0), torch.arange(11), ids[1:], torch.zeros(11), torch.zeros(11))
found = []
for dtype in ("float32", "bfloat16"):
    model = tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3)
    new, _ = TrainedModel(model, TrainerSettings(dtype=dtype, device="cpu")).logprobs(batch)
    new.sum().backward()
    found.append((new.detach(), model.model.embed_tokens.weight.grad))
for one, two in zip(*found):
    difference = float((one - two).norm() / one.norm())
    assert two.dtype == torch.float32
    assert 0 < difference < 0.05, difference
"""


def test_bfloat16_comes_close_to_float32() -> None:
    kernels_that_work_anywhere = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(
        [sys.executable, "-c", IN_BFLOAT16], env=kernels_that_work_anywhere, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_bfloat16_is_refused_where_it_would_end_the_process(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "bfloat16_works_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="bfloat16 does not work on this CPU"):
        Trainer(model, settings(dtype="bfloat16"))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["all weights", "lora"])
def test_weights_are_copies_under_the_models_own_names(
    model: Any, rows: list[Row], scored: Score, lora: LoraSettings | None
) -> None:
    from rollwright.models.tiny import tiny_llama

    names = set(model.state_dict())
    learner = Trainer(model, settings(lora=lora, loss=LossSettings(kl_coefficient=0.1)))
    learner.step(scored(rows, model))
    weights = learner.weights()
    assert weights.version == 1
    assert weights.tensors is not None
    assert set(weights.tensors) == names
    fresh = tiny_llama(24, hidden_size=32, layers=2)
    fresh.load_state_dict(dict(weights.tensors))
    ids = torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(fresh(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    kept = {name: each.clone() for name, each in weights.tensors.items()}
    assert learner.step(scored(rows, model)).version == 2
    assert all(torch.equal(each, kept[name]) for name, each in weights.tensors.items())


@pytest.mark.parametrize(
    "lora", [None, LoraSettings(rank=2, modules=("q_proj",))], ids=["all weights", "lora"]
)
def test_an_export_is_a_folder_that_transformers_loads(
    model: Any, rows: list[Row], scored: Score, tmp_path: Path, lora: LoraSettings | None
) -> None:
    from transformers import AutoModelForCausalLM

    learner = Trainer(model, settings(lora=lora))
    learner.step(scored(rows, model))
    weights = learner.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
    assert weights.folder == tmp_path / "out"
    assert weights.checksum == weights_checksum(tmp_path / "out")


def test_an_empty_batch_is_skipped_and_counted(model: Any, rows: list[Row]) -> None:
    learner = Trainer(model, settings())
    nothing = [msgspec.structs.replace(rows[0], mask=bytes(len(rows[0].mask)))]
    assert [learner.step([]).skipped, learner.step(nothing).skipped] == [Skip.EMPTY, Skip.EMPTY]
    assert learner.skipped == {"empty batch": 2}
    assert learner.version == 0


def test_a_batch_in_which_nothing_was_better_changes_nothing(model: Any, chain: Make, scored: Score) -> None:
    learner = Trainer(model, settings(weight_decay=0.5))
    before = [each.clone() for each in model.parameters()]
    report = learner.step(scored(build_rows([[chain("a", [1.0]), chain("b", [1.0])]], RLOO()), model))
    assert report.skipped is Skip.NO_ADVANTAGE
    assert report.reward == 1.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_loss_that_is_not_a_number_is_skipped_and_then_stops_the_training(
    model: Any, rows: list[Row], scored: Score
) -> None:
    learner = Trainer(model, settings(max_skips_in_a_row=2))
    good = scored(rows, model)
    bad = [msgspec.structs.replace(row, advantages=floats([float("nan")]) * len(row.mask)) for row in good]
    before = [each.clone() for each in model.parameters()]
    assert learner.step(bad).skipped is Skip.NOT_FINITE
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert learner.version == 0
    assert learner.step(good).skipped is None
    assert learner.step(bad).skipped is Skip.NOT_FINITE
    with pytest.raises(
        TrainingStopped, match="not finite, 2 steps in a row, after version 1; set learning_rate"
    ):
        learner.step(bad)
    assert learner.skipped == {"loss is not finite": 3}


def test_an_engine_with_other_weights_is_noticed(model: Any, rows: list[Row], scored: Score) -> None:
    from rollwright.models.tiny import tiny_llama

    stranger = tiny_llama(24, hidden_size=32, layers=2, initializer_range=0.3, seed=99)
    learner = Trainer(model, settings(max_skips_in_a_row=2))
    report = learner.step(scored(rows, stranger))
    assert report.skipped is Skip.LOGPROB_GAP
    assert report.gap is not None
    assert report.gap > 0.5
    with pytest.raises(TrainingStopped, match=r"gap of .* nats, 2 steps in a row.*same weights, temperature"):
        learner.step(scored(rows, stranger))
    assert learner.version == 0


def test_ids_of_another_vocabulary_are_refused(model: Any, rows: list[Row]) -> None:
    strange = msgspec.structs.replace(
        rows[0], token_ids=type(rows[0].token_ids)("i", [99] * len(rows[0].mask))
    )
    with pytest.raises(ConfigError, match="token id 99, but the model has 24"):
        Trainer(model, settings()).step([strange])


def test_memory_that_does_not_suffice_halves_the_micro_batches_once(
    model: Any, rows: list[Row], scored: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = scored(rows, model)
    tokens = sum(pack(row).length for row in batch)
    limit = [tokens - 1]
    real = gradients.collate

    def collate(packed: Any, places: Any, device: Any) -> Any:
        made = real(packed, places, device)
        if made.tokens > limit[0]:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")
        return made

    monkeypatch.setattr(gradients, "collate", collate)
    learner = Trainer(model, settings())
    report = learner.step(batch)
    assert report.skipped is None
    assert report.micro_batches > 1
    limit[0] = 1
    with pytest.raises(
        TrainingStopped,
        match=f"out of memory after version 1.* of {tokens // 2} tokens; .* set tokens_per_micro_batch lower",
    ):
        learner.step(scored(rows, model))
    assert learner.version == 1
    assert all(each.grad is None for each in model.parameters())


def test_what_was_gathered_before_memory_ran_out_is_not_counted_twice(
    model: Any, rows: list[Row], scored: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = scored(rows, model)
    twin = copy.deepcopy(model)
    Trainer(twin, settings(tokens_per_micro_batch=30)).step(batch)
    real, calls = gradients.collate, [0]

    def collate(packed: Any, places: Any, device: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise MemoryError
        return real(packed, places, device)

    monkeypatch.setattr(gradients, "collate", collate)
    Trainer(model, settings(tokens_per_micro_batch=60)).step(batch)
    assert calls[0] > 6
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


def test_memory_that_runs_out_between_two_updates_leaves_a_version_that_says_so(
    model: Any, rows: list[Row], scored: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = scored(rows, model)
    learner = Trainer(model, settings(epochs=2))
    real = trainer.add_gradients

    def once(*given: Any, **named: Any) -> Any:
        if learner.updates:
            raise RuntimeError("CUDA out of memory")
        return real(*given, **named)

    monkeypatch.setattr(trainer, "add_gradients", once)
    with pytest.raises(TrainingStopped, match="out of memory after version 1"):
        learner.step(batch)
    assert learner.version == 1


def test_other_errors_are_not_taken_for_missing_memory(
    model: Any, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(trainer, "add_gradients", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        Trainer(model, settings()).step(rows)


def test_a_device_that_is_not_there_is_refused(model: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("cuda is there")
    with pytest.raises(ConfigError, match="device cuda does not exist here; accepted: auto, cpu"):
        Trainer(model, settings(device="cuda"))
