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
        "gigpo": "rollwright.training.advantages.steps:GiGPO",
        "agent_wise": "rollwright.training.advantages.episodes:AgentWise",
        "tree": "rollwright.training.advantages.tree:TurnTree",
        "path_grpo": "rollwright.training.advantages.paths:PathGRPO",
        "tree_grpo": "rollwright.training.advantages.paths:TreeGRPO",
        "segment_value": "rollwright.training.advantages.tree:SegmentValue",
    },
    protocol="rollwright.training.advantages.base:Advantage",
    key="training.advantage.name",
)
"""Without GAE, which needs a value function that a configuration file cannot name."""

LOSSES: Registry[Any] = Registry(
    "losses",
    "loss",
    {"clipped": "rollwright.training.losses:clipped_loss"},
    protocol="rollwright.training.losses:Loss",
    key="training.loss.name",
)

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


class Ratio(StrEnum):
    """The denominator of the probability ratio."""

    ENGINE = "engine"
    """Probability of the engine that sampled: one ratio corrects for staleness and numerical differences."""
    PROXIMAL = "proximal"
    """Probability of the trained model before the step, for clipping; its ratio to the engine's is a separate weight,
    truncated at `truncation` (truncated importance sampling)."""


class AdvantageConfig(Settings):
    """The advantage estimator. A name alone is accepted: `advantage: rloo`."""

    name: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `gigpo`, `agent_wise`; of trees `tree`, and for comparison
    `path_grpo`, `tree_grpo` or `segment_value`; or a user-defined one as `module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the estimator, for example `std: false`."""


class LossSettings(Settings):
    """The clipped policy-gradient loss, with optional KL and entropy terms."""

    name: str = "clipped"
    """`clipped`, or a user-defined loss as `module:name`, which receives these settings too."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a user-defined loss."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Divisor of the sum of token losses: tokens of the batch, tokens of each rollout, or a constant (Dr. GRPO)."""
    constant_length: PositiveInt = 1024
    """Divisor for each rollout; for `constant`."""
    clip_low: Share = 0.2
    """Lower clip of the probability ratio: one minus this."""
    clip_high: NonNegativeFloat = 0.2
    """Upper clip of the probability ratio: one plus this."""
    ratio: Ratio = Ratio.ENGINE
    """Denominator of the probability ratio: the engine's probability, or that of the trained model before the step, with a
    separate weight for the engine that is truncated at `truncation`."""
    truncation: Annotated[float, Field(ge=1)] = 2.0
    """Upper limit of that weight; for `proximal`."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the base model."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    @property
    def only_advantages(self) -> bool:
        """Whether a token with advantage 0 has gradient 0; unknown for a user-defined loss, hence false."""
        return self.name == "clipped" and self.kl_coefficient == 0 and self.entropy_coefficient == 0


class LoraSettings(Settings):
    """Low-rank adapters instead of all weights."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """Adapters are scaled by `alpha / rank`."""
    modules: list[str] | Literal["all-linear"] = "all-linear"
    """Layers with an adapter, by the end of their names."""


class TrainerSettings(Settings):
    """Settings of the trainer: loss, adapters, optimiser, micro-batches."""

    loss: LossSettings = LossSettings()
    lora: LoraSettings | None = None
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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of activations."""
    device: Device = "auto"
    """Device of the trainer: `cpu`, `mps`, `cuda`, `cuda:1` … or `auto`. The variable `CPU_ONLY` takes precedence."""
    max_logprob_gap: PositiveFloat = 0.5
    """Mean absolute difference, in nats, between the engine's and the trainer's log-probabilities above which a batch is
    skipped."""
    max_skips_in_a_row: PositiveInt = 3
    """Consecutive steps skipped for `loss is not finite` or `log-probability gap` after which training stops."""

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
    hand_over: Literal["auto", "tensors", "folder"] = "auto"
    """Transfer of weights to the policy: in memory, or as a folder with a checksum. `auto`: in memory if the policy is in
    this process."""
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
