"""Real steps of TRL's GRPOTrainer on a CPU, fed by real rollouts of the model that it trains."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.engines.base import UpdateMode, Weights
from rollwright.errors import ConfigError, RollwrightError
from rollwright.run.run import Run
from rollwright.simulation.players import RandomPlayer
from rollwright.training.bridges import completion_of
from rollwright.training.bridges.trl import TrlRollouts
from rollwright.trajectory import Trajectory


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    return Path(tiny.save_model(tmp_path / "model"))


def byte_tokenizer() -> Any:
    """What TRL wants beside the model: it only decodes with it, for its own logs."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{each}>": each for each in range(261)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")),
        eos_token="<260>",
        pad_token="<260>",
    )


def trainer_of(model: Path, rollouts: TrlRollouts, folder: Path, **more: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=GRPOConfig(**arguments),
        processing_class=byte_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["episode"] * 64}),
        reward_funcs=rollouts.reward,
        rollout_func=rollouts,
    )


class Watched(Run):
    """Remembers what it handed out."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.handed_out: list[list[Trajectory]] = []

    async def get_batch(self, batch_size: int | None = None) -> Any:
        batch = await super().get_batch(batch_size)
        self.handed_out.append(batch.trajectories)
        return batch


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("quiet")
def test_trl_takes_real_steps_on_rollouts_of_its_own_current_weights(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    import torch

    config = tiny.configuration(
        model, train_env_manager={"num_env_groups": 2, "group_size": 4, "tags": ["OddBytes"]}
    )
    policy = tiny.policy(model)
    run = Watched(config, policy=policy)
    with TrlRollouts(run) as rollouts:
        trainer = trainer_of(model, rollouts, tmp_path / "trl")
        before = {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}
        trainer.train()
        after = trainer.model.state_dict()
        rollouts.sync_weights(trainer)
        served = policy._model.state_dict()
        assert all(torch.equal(served[name], each) for name, each in after.items())
    assert any(not torch.equal(before[name], each) for name, each in after.items())
    versions = [
        {stamp.version for each in batch for turn in each.turns for stamp in turn.versions}
        for batch in run.handed_out
    ]
    assert versions == [{0}, {1}, {2}], "every batch was played by the weights it was trained into"
    logged = [row for row in trainer.state.log_history if "reward" in row]
    earned = [sum(each.score for each in batch) / len(batch) for batch in run.handed_out]
    assert [row["reward"] for row in logged] == pytest.approx(earned, rel=1e-5)
    sampled = [sum(each.sampled_tokens for each in batch) / len(batch) for batch in run.handed_out]
    assert [row["completions/mean_length"] for row in logged] == pytest.approx(sampled), (
        "only sampled tokens count"
    )


def rows_of_loss(trainer: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Collects, from now on, what TRL computes its loss on: ids, mask of the completion, log-probabilities where it is 1."""
    rows: list[tuple[list[int], list[int], list[float]]] = []
    compute_loss, compute_logprobs = trainer._compute_loss, trainer._get_per_token_logps_and_entropies

    def noted_loss(model: Any, inputs: Any) -> Any:
        def noted_logprobs(*arguments: Any, **more: Any) -> Any:
            found = compute_logprobs(*arguments, **more)
            for row, logprobs in enumerate(found[0].detach()):
                prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
                present = inputs["completion_mask"][row].bool()
                mask = inputs["tool_mask"][row][present]
                ids = [*prompt.tolist(), *inputs["completion_ids"][row][present].tolist()]
                rows.append((ids, mask.tolist(), logprobs[present][mask.bool()].tolist()))
            return found

        trainer._get_per_token_logps_and_entropies = noted_logprobs
        return compute_loss(model, inputs)

    trainer._compute_loss = noted_loss
    return rows


@pytest.mark.usefixtures("quiet")
def test_trl_computes_its_loss_on_exactly_the_tokens_masks_and_log_probabilities_that_were_sampled(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    config = tiny.configuration(
        model, train_env_manager={"num_env_groups": 2, "group_size": 4, "tags": ["OddBytes"]}
    )
    run = Watched(config, policy=tiny.policy(model))
    with TrlRollouts(run) as rollouts:
        trainer = trainer_of(model, rollouts, tmp_path / "trl")
        found = rows_of_loss(trainer)
        trainer.train()
    played = [completion_of(each) for batch in run.handed_out for each in batch]
    sampled = [
        (
            [*each.prompt, *each.ids],
            list(each.mask),
            [told for told, own in zip(each.logprobs, each.mask, strict=True) if own],
        )
        for each in played
    ]
    assert len(found) == 24, "three steps of eight episodes"
    assert sum(0 in mask for _, mask, _ in found) == 24, "every episode has an observation between its turns"
    for ours, theirs in zip(sorted(sampled), sorted(found), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], abs=1e-4)


@pytest.mark.usefixtures("quiet")
def test_rollouts_of_another_temperature_than_trl_computes_at_are_refused(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    config = tiny.configuration(
        model,
        "sampling.temperature=0.7",
        train_env_manager={"num_env_groups": 2, "group_size": 4, "tags": ["OddBytes"]},
    )
    with TrlRollouts(Run(config, policy=tiny.policy(model))) as rollouts:
        trainer = trainer_of(model, rollouts, tmp_path / "trl")
        with pytest.raises(
            ConfigError, match=r"was played at 0\.7, but TRL computes at 1; they must be the same"
        ):
            trainer.train()
    with TrlRollouts(Run(config, policy=tiny.policy(model))) as rollouts:
        trainer_of(model, rollouts, tmp_path / "same", temperature=0.7, max_steps=1).train()


class Forgetful:
    """A policy that says it took the weights and did not."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.renderer = policy.renderer
        self.version = 0
        self.pressure = 0
        self.generate = policy.generate
        self.close = policy.close

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        pass


@pytest.mark.usefixtures("quiet")
def test_stale_rollouts_do_not_pass_as_on_policy(tiny: Any, model: Path, tmp_path: Path) -> None:
    config = tiny.configuration(
        model, train_env_manager={"num_env_groups": 2, "group_size": 4, "tags": ["OddBytes"]}
    )
    run = Run(config, policy=Forgetful(tiny.policy(model)))
    with TrlRollouts(run) as rollouts:
        trainer = trainer_of(model, rollouts, tmp_path / "trl")
        with pytest.raises(RollwrightError, match="tokens of version 0, but TRL is at 1"):
            trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.usefixtures("quiet")
def test_settings_that_would_deceive_trl_are_refused(tiny: Any, model: Path, tmp_path: Path) -> None:
    ahead = Run(tiny.configuration(model, async_generation_ratio=1), policy=tiny.policy(model))
    with pytest.raises(ConfigError, match="only 0 is accepted"):
        TrlRollouts(ahead)
    fixed = Run(tiny.configuration(model), policy=RandomPlayer())
    with pytest.raises(ConfigError, match="takes no new weights"):
        TrlRollouts(fixed)
    with TrlRollouts(Run(tiny.configuration(model), policy=tiny.policy(model))) as rollouts:
        trainer = trainer_of(model, rollouts, tmp_path / "trl", num_generations=2)
        with pytest.raises(ConfigError, match="num_generations is 2"):
            trainer.train()
