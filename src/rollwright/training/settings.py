"""Settings of training, and the plug points for advantages, losses and metric writers. Does not import torch."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rollwright.registry import Registry
from rollwright.settings import Device, Settings, Share

HISTORY_KEYS = ("history", "history_length", "window", "max_prompt_length", "truncation_length")
"""Keys of other systems that truncate the history in training only; refused with the reason."""

ADVANTAGES: Registry[Any] = Registry(
    "advantages",
    "advantage",
    {
        "grpo": "rollwright.training.advantages.episodes:GRPO",
        "dr_grpo": "rollwright.training.advantages.episodes:DrGRPO",
        "rloo": "rollwright.training.advantages.episodes:RLOO",
        "reinforce_plus_plus": "rollwright.training.advantages.episodes:ReinforcePlusPlus",
        "reinforce_plus_plus_tokens": "rollwright.training.advantages.tokens:ReinforcePlusPlusTokens",
        "gigpo": "rollwright.training.advantages.steps:GiGPO",
        "agent_wise": "rollwright.training.advantages.episodes:AgentWise",
        "tree": "rollwright.training.advantages.tree:TurnTree",
        "path_grpo": "rollwright.training.advantages.paths:PathGRPO",
        "tree_grpo": "rollwright.training.advantages.paths:TreeGRPO",
        "segment_value": "rollwright.training.advantages.tree:SegmentValue",
        "gae": "rollwright.training.advantages.values:TokenGAE",
    },
    protocol="rollwright.training.advantages.base:Advantage",
    key="training.advantage.name",
)
"""`gae` uses the values of `training.critic`. GAE over turns, which needs a value function that a configuration file cannot
name, is available in Python."""

LOSSES: Registry[Any] = Registry(
    "losses",
    "loss",
    {
        "clipped": "rollwright.training.losses:clipped_loss",
        "gspo": "rollwright.training.losses.rollout_wise:gspo_loss",
        "gmpo": "rollwright.training.losses.rollout_wise:gmpo_loss",
        "cispo": "rollwright.training.losses.token_wise:cispo_loss",
        "dppo_tv": "rollwright.training.losses.token_wise:dppo_tv_loss",
        "dppo_kl": "rollwright.training.losses.token_wise:dppo_kl_loss",
        "sapo": "rollwright.training.losses.token_wise:sapo_loss",
        "clip_cov": "rollwright.training.losses.covariance:clip_cov_loss",
        "kl_cov": "rollwright.training.losses.covariance:kl_cov_loss",
    },
    protocol="rollwright.training.losses:Loss",
    key="training.loss.name",
)

NO_GRADIENT_WITHOUT_ADVANTAGE = frozenset(
    {"clipped", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "clip_cov"}
)
"""Losses in which a token with advantage 0 has gradient 0. Not `gmpo`, which uses the mean advantage of the rollout, nor
`kl_cov`, which has a penalty of its own; of user-defined ones it is not known."""

METRIC_WRITERS: Registry[Any] = Registry(
    "metric_writers",
    "metrics",
    {
        "jsonl": "rollwright.training.metrics:open_jsonl",
        "tensorboard": "rollwright.training.metrics:open_tensorboard",
        "wandb": "rollwright.training.metrics:Wandb",
    },
    protocol="rollwright.training.metrics:MetricWriter",
    key="training.writers",
)


def _known_writer(name: str) -> str:
    if not METRIC_WRITERS.knows(name):
        raise ValueError(METRIC_WRITERS.unknown(name))
    return name


Writer = Annotated[str, AfterValidator(_known_writer)]
"""A metric writer, by its name."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class Aggregation(StrEnum):
    """Divisor of the sum of token losses. Tokens of a tree count by their weights."""

    TOKEN_MEAN = "token_mean"
    """Number of tokens of the batch: all tokens have the same weight, so long rollouts weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Number of tokens of each rollout, then number of rollouts: all rollouts have the same weight."""
    CONSTANT = "constant"
    """`constant_length` times the number of rollouts: a token's weight does not depend on any length (Dr. GRPO)."""
    BATCH_MEAN = "batch_mean"
    """Number of rollouts: a rollout's token losses are summed, so long rollouts weigh more."""
    BATCH_SUM = "batch_sum"
    """1: the plain sum over all tokens; the gradient grows with the batch."""


class Ratio(StrEnum):
    """The denominator of the probability ratio."""

    ENGINE = "engine"
    """Probability of the engine that sampled: one ratio corrects for staleness and numerical differences."""
    PROXIMAL = "proximal"
    """Probability of the trained model before the step, for clipping; its ratio to the engine's is a separate weight,
    truncated at `truncation` (truncated importance sampling)."""


class Correction(StrEnum):
    """Correction for the difference between the engine and the model before the step; `r` is the ratio of their
    probabilities. With `ratio: proximal` a weight, with `ratio: engine` only a mask: 1 instead of `r`."""

    NONE = "none"
    """No weight."""
    TRUNCATE = "truncate"
    """`min(r, truncation)` (truncated importance sampling)."""
    MASK = "mask"
    """`r` between `truncation_low` and `truncation`, else 0 (masked importance sampling, IcePop)."""
    SEQUENCE_TRUNCATE = "sequence_truncate"
    """As `truncate`, with the product of `r` over the rollout."""
    SEQUENCE_MASK = "sequence_mask"
    """As `mask`, with the product of `r` over the rollout."""
    GEOMETRIC_MASK = "geometric_mask"
    """1 if the geometric mean of `r` over the rollout is between `truncation_low` and `truncation`, else 0."""


KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
"""Estimators of the divergence from the base model; with `+`, the value of the named one and the gradient of k2."""


class AdvantageConfig(Settings):
    """The advantage estimator. A name alone is accepted: `advantage: rloo`."""

    name: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_tokens`, `gigpo`, `agent_wise`; with a `critic`
    `gae`; of trees `tree`, and for comparison `path_grpo`, `tree_grpo` or `segment_value`; or a user-defined one as
    `module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the estimator, for example `std: false`."""


class LossSettings(Settings):
    """The policy-gradient loss, with a correction for the engine and optional KL and entropy terms."""

    name: str = "clipped"
    """`clipped` (PPO), `gspo`, `gmpo`, `cispo`, `dppo_tv`, `dppo_kl`, `sapo`, `clip_cov`, `kl_cov`, or a user-defined loss
    as `module:name`, which receives these settings too."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss, for example `tau_negative` of `sapo` or `share` of `kl_cov`."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Divisor of the sum of token losses: tokens of the batch (`token_mean`), tokens of each rollout (`sequence_mean`), a
    constant (Dr. GRPO), rollouts of the batch (`batch_mean`), or 1 (`batch_sum`)."""
    constant_length: PositiveInt = 1024
    """Divisor for each rollout; for `constant`."""
    clip_low: Share = 0.2
    """Lower clip of the probability ratio: one minus this. Of `gmpo`: of the log-ratio; of `dppo_tv` and `dppo_kl`: largest
    divergence of a token that becomes less likely."""
    clip_high: NonNegativeFloat = 0.2
    """Upper clip of the probability ratio: one plus this. Of `gmpo`: of the log-ratio; of `dppo_tv` and `dppo_kl`: largest
    divergence of a token that becomes more likely."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper limit of the ratio where the advantage is negative (dual clip); for `clipped`. Unset: no limit."""
    ratio: Ratio = Ratio.ENGINE
    """Denominator of the probability ratio: the engine's probability, or that of the trained model before the step, with
    the `correction` as a separate weight for the engine."""
    correction: Correction = Correction.TRUNCATE
    """Weight for the difference between engine and model before the step: `none`, `truncate` or `mask` of each token,
    `sequence_truncate`, `sequence_mask` or `geometric_mask` of whole rollouts. With `ratio: engine` only masks apply."""
    truncation: Annotated[float, Field(ge=1)] = 2.0
    """Upper limit of that weight."""
    truncation_low: Share = 0.5
    """Lower limit of that weight, below which it is 0; for masks."""
    max_rollout_divergence: PositiveFloat | None = None
    """Mean difference of log-probabilities, engine minus model, above which tokens of a rollout with negative advantages
    are left out (off-policy sequence mask). Unset: none are."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the base model."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that divergence: `k1`, `k2` or `k3`; `k1+` and `k3+` have the gradient of k2."""
    kl_limit: PositiveFloat | None = None
    """Largest value of a token's k3, beyond which it has no gradient (verl: 10). Unset: no limit."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    @property
    def only_advantages(self) -> bool:
        """Whether a token with advantage 0 has gradient 0; unknown for a user-defined loss, hence false."""
        plain = self.name in NO_GRADIENT_WITHOUT_ADVANTAGE
        return plain and self.kl_coefficient == 0 and self.entropy_coefficient == 0

    @property
    def corrects_rollouts(self) -> bool:
        """Whether the weight of a token depends on its whole rollout."""
        of_rollouts = (Correction.SEQUENCE_TRUNCATE, Correction.SEQUENCE_MASK, Correction.GEOMETRIC_MASK)
        return self.correction in of_rollouts or self.max_rollout_divergence is not None

    @property
    def uses_model_before_step(self) -> bool:
        """Whether log-probabilities of the model before the step are used."""
        of_engine = (Correction.NONE, Correction.TRUNCATE, Correction.SEQUENCE_TRUNCATE)
        return self.ratio is Ratio.PROXIMAL or self.correction not in of_engine


class LoraSettings(Settings):
    """Low-rank adapters instead of all weights."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """Adapters are scaled by `alpha / rank`."""
    modules: list[str] | Literal["all-linear"] = "all-linear"
    """Layers with an adapter, by the end of their names."""


class CriticSettings(Settings):
    """A value head on the trained model, for the advantage `gae` (PPO)."""

    coefficient: PositiveFloat = 0.5
    """Weight of the value loss beside the policy loss."""
    clip: PositiveFloat | None = 0.2
    """Largest change of a token's value in one step that has a gradient. `null`: no limit."""
    trunk: bool = True
    """Whether the value loss trains the model, too, and not the head alone."""
    learning_rate_factor: PositiveFloat = 10.0
    """Learning rate of the head, as a multiple of `learning_rate`: it starts at 0, the model does not."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the head alone is trained, before its values are good enough to train the policy by."""


class TrainerSettings(Settings):
    """Settings of the trainer: loss, adapters, optimiser, micro-batches."""

    loss: LossSettings = LossSettings()
    lora: LoraSettings | None = None
    critic: CriticSettings | None = None
    """A value head on the model; `critic: {}` takes every default. Unset: none."""
    learning_rate: NonNegativeFloat = 1e-5
    """Learning rate after the warm-up; constant unless `final_learning_rate` is set."""
    warmup_updates: NonNegativeInt = 0
    """Optimiser updates over which the learning rate grows from 0."""
    final_learning_rate: NonNegativeFloat | None = None
    """Learning rate after the last of `max_steps`, reached linearly. Unset: the learning rate is constant."""
    beta1: Beta = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: Beta = 0.95
    """AdamW's decay of the mean of squared gradients."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW, on matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimiser updates in each pass."""
    tokens_per_micro_batch: PositiveInt = 2048
    """Tokens of one forward pass, padding included; memory grows with it."""
    share_prefixes: bool = True
    """Whether rows with a common prefix (a group's prompt, the turns of a rollout, branches) go through the model as one
    sequence, in which the prefix is computed once. The gradient is the same. Models whose attention takes no mask of this
    kind compute every row."""
    processes: PositiveInt = 1
    """Ranks of the trainer: this process, and others that it starts on this machine."""
    sharding: Literal["full", "hybrid", "replicate"] = "full"
    """What ranks hold of weights, gradients and optimiser state: a shard (`full`), a shard within every `shard_ranks` ranks
    (`hybrid`), or a copy (`replicate`)."""
    shard_ranks: PositiveInt = 1
    """Ranks that share one copy of the weights, for example those of one machine; for `hybrid`. Divides `processes`."""
    gather: Literal["once", "every_pass"] = "once"
    """Whether ranks gather the weights once for each update, or layer by layer in every pass, which needs less memory and
    more communication."""
    activation_checkpointing: bool = False
    """Whether activations are computed again in the backward pass instead of being kept: less memory, a third more time."""
    checkpoint_layout: Literal["whole", "sharded"] = "whole"
    """Files of a checkpoint: whole tensors that rank 0 gathers, or shards that every rank writes by itself into the run's
    folder, which all ranks share then, so that the state need not fit one rank."""
    rank_timeout: PositiveFloat = 300.0
    """Seconds that ranks wait for each other; after them, or when a rank dies, all ranks end."""
    rank_restarts: NonNegativeInt = 3
    """Restarts of lost ranks, from the last checkpoint, without a finished step between them; after them the run ends."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Data type of activations. `auto`: bfloat16 where it is faster, measured once for each machine."""
    device: Device = "auto"
    """Device of the trainer: `cpu`, `mps`, `cuda`, `cuda:1` … or `auto`. The variable `CPU_ONLY` takes precedence."""
    max_logprob_gap: PositiveFloat = 0.5
    """Mean absolute difference, in nats, between the engine's and the trainer's log-probabilities above which a batch is
    skipped."""
    max_skips_in_a_row: PositiveInt = 3
    """Consecutive steps skipped for `loss is not finite` or `log-probability gap` after which training stops."""
    signal_steps: NonNegativeInt = 10
    """Steps from one measurement of the gradient's signal and noise to the next, by its two halves; 0: none. Not with several
    ranks."""

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.mini_batches

    def learning_rate_at(self, update: int, total_updates: int = 1) -> float:
        """Learning rate of the update with this index, in a training of `total_updates`."""
        warm = min(1.0, (update + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        rate = self.learning_rate
        if self.final_learning_rate is not None:
            rate += (self.final_learning_rate - rate) * min(1.0, update / total_updates)
        return rate * warm


class ServeSettings(Settings):
    """Where batches are offered to a trainer in another process, by HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs `token_env`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8710
    """0: any free one; `training/served_at.txt` in the run's folder says which."""
    token_env: str | None = None
    """Name of the environment variable with the token that trainers send. Unset: none is asked for."""
    lease_seconds: PositiveFloat = 60.0
    """Seconds after which a batch of a silent trainer is handed out again."""


def _jsonl() -> list[Writer]:
    return ["jsonl"]


class TrainingConfig(TrainerSettings):
    """`rollwright train`: one step for each batch, `max_steps` of them."""

    model: str | None = None
    """Folder of the base model in transformers' format, or the name of a fetched one. Unset: the policy's own."""
    from_run: str | None = None
    """Folder of a recorded run whose batches are trained on, in their order, without playing episodes."""
    advantage: AdvantageConfig = AdvantageConfig()
    samples: Literal["paths", "turns"] = "paths"
    """One row for each token sequence, or one for each turn, which costs more tokens and gives the same loss."""
    update_mode: Literal["drain", "abort_and_resume", "restart_turn"] = "abort_and_resume"
    """Treatment of calls in flight when new weights arrive: finish first, resume with the new weights, or restart the
    turn."""
    serve: ServeSettings | None = None
    """Offers batches over HTTP to a trainer elsewhere, instead of training in this process; `serve: {}` takes every default.
    The settings of loss and optimiser are the trainer's own then."""
    hand_over: Literal["auto", "tensors", "folder", "adapter"] = "auto"
    """Transfer of weights to the policy: in memory, as a folder with a checksum, or with `lora` as the adapter alone, which
    vLLM and SGLang load beside the earlier one while calls go on. `auto`: in memory if the policy is in this process, else
    a folder."""
    checkpoint_steps: PositiveInt = 10
    """Steps between checkpoints. A run that was killed repeats the steps since the last one, from its record."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep; older ones are removed."""
    keep_steps: PositiveInt | Literal["all"] | None = None
    """Number of steps whose batches, trajectories, rollouts, failures and metrics are kept. Up to twice as many exist
    before the older half is removed; steps since the oldest kept checkpoint are never removed. `all`: keep everything.
    Unset: `all` in `rollwright train`, 200 in a node of a swarm, which runs for months."""
    writers: list[Writer] = Field(default_factory=_jsonl)
    """Metric writers, in addition to the run's own files: `jsonl`, `tensorboard`, `wandb`, or a user-defined one as
    `module:name`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_history_keys(cls, value: Any) -> Any:
        for key in HISTORY_KEYS if isinstance(value, dict) else ():
            if key in value:
                raise ValueError(
                    f"{key}: training reads the prompts as the model saw them; a history that is cut only here would "
                    "be trained off-policy. Cut it while playing, with `agent.history`"
                )
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_keep_steps(cls, value: Any) -> Any:
        keep = value.get("keep_steps") if isinstance(value, dict) else None
        if keep not in (None, "all") and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ValueError(f"keep_steps: {keep!r} is neither a number of steps, at least 1, nor `all`")
        return value

    @field_validator("advantage", "loss", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
