"""Values and gradients of verl's and TRL's own loss functions on random batches, written to a file.

    .venvs/losses/bin/python bench/losses_peers.py OUT.npz --batches 1000 --seed 7

Runs in an environment with verl and TRL and without rollwright; `bench/losses.py` makes it. The file holds the inputs, and
for each case the loss, its gradient by token, and the settings with which rollwright computes the same. Masks are uneven
and have gaps; ratios reach e⁹.
"""

import argparse
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

ROWS, LENGTH = 4, 12
Batch = dict[str, torch.Tensor]

AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "batch_mean": "seq-mean-token-sum",
    "batch_sum": "token-sum",
    "constant": "seq-mean-token-sum-norm",
}


def draw(generator: numpy.random.Generator) -> Batch:
    """A batch: log-probabilities, advantages and a mask with gaps, all exact in 32 bits."""
    shape = (ROWS, LENGTH)
    lengths = generator.integers(1, LENGTH + 1, ROWS)
    mask = (numpy.arange(LENGTH) < lengths[:, None]) & (generator.random(shape) < 0.8)
    mask[:, 0] = True
    new = -generator.exponential(1.5, shape) - 1e-3

    def near(log_probabilities: Any, share_far: float) -> Any:
        far = generator.random(shape) < share_far
        step = numpy.where(far, generator.normal(0, 4, shape), generator.normal(0, 0.3, shape)).clip(-9, 9)
        return numpy.minimum(log_probabilities - step, -1e-3)

    old = near(new, 0.3)
    values = {
        "new": new,
        "old": old,
        "engine": near(old, 0.2),
        "reference": near(new, 0.2),
        "advantages": generator.normal(0, 1.5, shape),
        "rollout_advantages": generator.normal(0, 1.5, (ROWS, 1)).repeat(LENGTH, 1),
        "entropy": generator.exponential(1, shape),
        "rewards": generator.normal(0, 1, shape),
        "values": generator.normal(0, 1, shape),
        "mask": mask,
    }
    return {name: torch.tensor(each.astype(numpy.float32)).double() for name, each in values.items()}


def verl(
    name: str, aggregation: str = "token_mean", policy: dict[str, Any] | None = None, **actor: Any
) -> Any:
    """A policy loss of verl's registry, with the engine's log-probabilities as the old ones."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=name, **(policy or {})),
        **actor,
    )

    def loss(
        batch: Batch, new: torch.Tensor, old: str = "engine", weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        found: torch.Tensor = core_algos.POLICY_LOSS_REGISTRY[name](
            old_log_prob=batch[old],
            log_prob=new,
            advantages=batch["advantages"],
            response_mask=batch["mask"],
            loss_agg_mode=AGGREGATIONS[aggregation],
            config=config,
            rollout_is_weights=weights,
        )[0]
        return found

    return loss


def corrected(threshold: Any, level: str = "token") -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """verl's clip against the model before the step, with its own weights for the engine."""
    plain = verl("vanilla", clip_ratio_c=1e9)

    def loss(batch: Batch, new: torch.Tensor) -> torch.Tensor:
        weights, _ = compute_rollout_correction_weights(
            batch["old"] - batch["engine"], batch["mask"], level, threshold
        )
        found: torch.Tensor = plain(batch, new, "old", weights)
        return found

    return loss


def rejected(option: str, threshold: str) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """verl's rejection of rollouts as a weight, so that the divisor stays that of all tokens."""
    plain = verl("vanilla", clip_ratio_c=1e9)

    def loss(batch: Batch, new: torch.Tensor) -> torch.Tensor:
        kept, _ = compute_rollout_rejection_mask(
            batch["old"] - batch["engine"], batch["mask"], option, threshold
        )
        found: torch.Tensor = plain(batch, new, "old", kept)
        return found

    return loss


def verl_divergence(kind: str) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    plain = verl("vanilla", clip_ratio_c=1e9)

    def loss(batch: Batch, new: torch.Tensor) -> torch.Tensor:
        estimates = core_algos.kl_penalty(new, batch["reference"], kind)
        found: torch.Tensor = plain(batch, new) + 0.1 * core_algos.agg_loss(
            estimates, batch["mask"], "token-mean"
        )
        return found

    return loss


def verl_entropy(batch: Batch, new: torch.Tensor) -> torch.Tensor:
    """The entropy is a function of the log-probabilities here, so that its gradient shows."""
    bonus = core_algos.agg_loss(batch["entropy"] * new.square(), batch["mask"], "token-mean")
    found: torch.Tensor = verl("vanilla", clip_ratio_c=1e9)(batch, new) - 0.01 * bonus
    return found


def trl(kind: str, **settings: Any) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """TRL's `GRPOTrainer._compute_loss`, called with a stand-in for the trainer."""
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments |= {name: settings.pop(name) for name in list(settings) if name in arguments}
    which = settings.pop("advantages", "advantages")

    def loss(batch: Batch, new: torch.Tensor) -> torch.Tensor:
        trainer = SimpleNamespace(
            loss_type=kind,
            args=SimpleNamespace(**arguments),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.2,
            beta=0.0,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            max_completion_length=16,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1,
                gather=lambda values: values,
                gather_for_metrics=lambda values: values,
                reduce=lambda values, reduction: values,
            ),
            _metrics={"train": _Anything()},
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            _get_per_token_logps_and_entropies=lambda *_, **__: (new, batch["entropy"], None),
        )
        vars(trainer).update(settings)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": batch["mask"],
            "advantages": batch[which],
            "old_per_token_logps": batch["engine"],
            "ref_per_token_logps": batch["reference"],
            "num_items_in_batch": batch["mask"].sum(),
        }
        found: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
        return found

    return loss


class _Anything(dict[str, list[Any]]):
    def __missing__(self, key: str) -> list[Any]:
        return self.setdefault(key, [])


def own(name: str = "clipped", **settings: Any) -> dict[str, Any]:
    return {"name": name, **settings}


def cases() -> dict[str, tuple[Callable[[Batch, torch.Tensor], torch.Tensor], dict[str, Any]]]:
    """For each case, the peer's function and rollwright's settings; `advantages` among them names other advantages."""
    wide: dict[str, Any] = {"clip_low": 0.15, "clip_high": 0.35}
    verl_wide = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.35}
    proximal: dict[str, Any] = {"ratio": "proximal"}
    found: dict[str, Any] = {
        f"verl vanilla, {name}": (
            verl("vanilla", name, clip_ratio_c=1e9),
            own(aggregation=name, constant_length=LENGTH),
        )
        for name in AGGREGATIONS
    }
    found |= {
        "verl vanilla, asymmetric": (verl("vanilla", clip_ratio_c=1e9, **verl_wide), own(**wide)),
        "verl vanilla, dual": (verl("vanilla", clip_ratio_c=3.0), own(dual_clip=3.0)),
        "verl gspo": (
            verl("gspo", "sequence_mean", **verl_wide),
            own("gspo", aggregation="sequence_mean", **wide),
        ),
        "verl gspo, token_mean": (verl("gspo"), own("gspo")),
        "verl cispo": (verl("cispo", **verl_wide), own("cispo", **wide)),
        "verl dppo_tv": (verl("dppo_tv", clip_ratio_c=20.0), own("dppo_tv")),
        "verl dppo_kl": (
            verl("dppo_kl", clip_ratio_c=5.0, clip_ratio_low=0.05, clip_ratio_high=0.1),
            own("dppo_kl", clip_low=0.05, clip_high=0.1, options={"truncation": 5.0}),
        ),
        "verl sapo": (
            verl("sapo", tau_pos=1.0, tau_neg=1.5),
            own("sapo", aggregation="sequence_mean", options={"tau_negative": 1.5}),
        ),
        "verl geo_mean": (
            verl("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.6),
            own("gmpo", aggregation="sequence_mean", clip_low=0.4, clip_high=0.6),
        ),
        "verl clip_cov": (
            verl("clip_cov", policy={"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 4.0}),
            own("clip_cov", options={"share": 0.1, "low": 0.1, "high": 4.0}),
        ),
        "verl kl_cov": (
            verl("kl_cov", policy={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}),
            own("kl_cov", options={"share": 0.2, "coefficient": 0.7}),
        ),
        "verl token importance sampling, truncated": (corrected(2.0), own(**proximal)),
        "verl token importance sampling, masked": (
            corrected("0.5_5.0"),
            own(correction="mask", truncation=5.0, **proximal),
        ),
        "verl sequence importance sampling, truncated": (
            corrected(3.0, "sequence"),
            own(correction="sequence_truncate", truncation=3.0, **proximal),
        ),
        "verl sequence importance sampling, masked": (
            corrected("0.1_10.0", "sequence"),
            own(correction="sequence_mask", truncation_low=0.1, truncation=10.0, **proximal),
        ),
        # verl bounds the inverse ratio.
        "verl geometric mask": (
            rejected("seq_mean_k1", f"{1 / 1.6}_2.0"),
            own(correction="geometric_mask", truncation_low=0.5, truncation=1.6, **proximal),
        ),
        "verl entropy": (verl_entropy, own(entropy_coefficient=0.01)),
        "trl bnpo": (trl("bnpo"), own()),
        "trl dapo, asymmetric": (trl("dapo", epsilon_low=0.15, epsilon_high=0.35), own(**wide)),
        "trl grpo": (trl("grpo"), own(aggregation="sequence_mean")),
        "trl dr_grpo": (trl("dr_grpo"), own(aggregation="constant", constant_length=16)),
        "trl luspo, tokens": (trl("luspo"), own(aggregation="batch_mean")),
        "trl bnpo, delta": (trl("bnpo", delta=3.0), own(dual_clip=3.0)),
        # TRL gives all tokens of a rollout the same share of its gradient, whatever their own advantages are.
        "trl grpo, sequence": (
            trl("grpo", importance_sampling_level="sequence", advantages="rollout_advantages"),
            own(
                "gspo",
                aggregation="sequence_mean",
                advantages="rollout_advantages",
                options={"max_log_ratio": 20.0},
            ),
        ),
        "trl cispo": (trl("cispo", epsilon_high=1.5), own("cispo", clip_low=1.0, clip_high=0.5)),
        "trl sapo": (trl("sapo"), own("sapo", aggregation="sequence_mean")),
        "trl bnpo, kl": (trl("bnpo", beta=0.1), own(kl_coefficient=0.1)),
        "trl bnpo, off-policy sequence mask": (
            trl("bnpo", off_policy_mask_threshold=0.4),
            own(max_rollout_divergence=0.4),
        ),
    }
    for kind in ("k1", "k2", "k3", "k1+", "k3+"):
        found[f"verl {kind}"] = (
            verl_divergence(kind),
            own(kl_coefficient=0.1, kl_estimator=kind, kl_limit=10.0),
        )
    return found


def advantages(batch: Batch) -> dict[str, torch.Tensor]:
    """verl's estimators over tokens; rewards are at the last token of each turn, a run of the mask."""
    mask = batch["mask"]
    ends = mask * (1 - torch.cat([mask[:, 1:], torch.zeros(ROWS, 1)], dim=1))
    rewards = batch["rewards"] * ends
    found = {"turn_rewards": rewards}
    for discount in (1.0, 0.9):
        config = SimpleNamespace(gamma=discount)
        found[f"reinforce_plus_plus {discount}"] = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config
        )[0]
        gae, returns = core_algos.compute_gae_advantage_return(rewards, batch["values"], mask, discount, 0.95)
        found |= {f"gae {discount}": gae, f"gae returns {discount}": returns}
    found["reinforce_plus_plus_baseline"] = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards.clone(), mask, numpy.arange(ROWS) // 2
    )[0]
    return found


VALUE_CLIP = 0.2


def value_loss(batch: Batch) -> dict[str, numpy.ndarray[Any, Any]]:
    """verl's loss of a critic whose values moved since the rollout, and its gradient by token."""
    mask, old = batch["mask"], batch["values"]
    moved = (old + 0.4 * batch["rewards"].roll(1, 1)).float().double().requires_grad_()
    value, _ = core_algos.compute_value_loss(
        vpreds=moved,
        returns=advantages(batch)["gae returns 1.0"],
        values=old,
        response_mask=mask,
        cliprange_value=VALUE_CLIP,
        loss_agg_mode="token-mean",
    )
    value.backward()
    assert moved.grad is not None
    return {
        "moved": moved.detach().numpy(),
        "loss": numpy.array(float(value.detach())),
        "gradient": (moved.grad * mask).numpy(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    rollout_corr_helper.compute_is_metrics = lambda **_: {}  # divides by 0 where every weight is masked
    torch.randperm = lambda count, **_: torch.arange(count)  # verl draws from the global generator
    generator = numpy.random.default_rng(given.seed)
    batches = [draw(generator) for _ in range(given.batches)]
    arrays: dict[str, Any] = {
        name: torch.stack([batch[name] for batch in batches]).numpy().astype(numpy.float32)
        for name in batches[0]
    }
    settings = {}
    for name, (loss, ours) in cases().items():
        values, gradients = [], []
        for batch in batches:
            new = batch["new"].clone().requires_grad_()
            value = loss(batch, new)
            value.backward()
            assert new.grad is not None, name
            assert math.isfinite(float(value.detach())), name
            values.append(float(value.detach()))
            gradients.append((new.grad * batch["mask"]).numpy())
        arrays[f"value {name}"] = numpy.array(values)
        arrays[f"gradient {name}"] = numpy.stack(gradients).astype(numpy.float32)
        settings[name] = ours
    found = [advantages(batch) for batch in batches]
    for name in found[0]:
        arrays[f"advantage {name}"] = numpy.stack([each[name].numpy() for each in found])
    critics = [value_loss(batch) for batch in batches]
    for name in critics[0]:
        arrays[f"critic {name}"] = numpy.stack([each[name] for each in critics])
    arrays["settings"] = numpy.array(json.dumps(settings))
    numpy.savez_compressed(given.out, **arrays)


if __name__ == "__main__":
    main()
