"""Settings of training, and the plug points of this box. Importing it imports no torch."""

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
"""Keys that would cut the history in training alone; refused with the reason instead of a hint at a key."""

ADVANTAGES: Registry[Any] = Registry(
    "advantages",
    "advantage",
    {
        "grpo": "rollwright.training.advantages.episodes:GRPO",
        "dr_grpo": "rollwright.training.advantages.episodes:DrGRPO",
        "rloo": "rollwright.training.advantages.episodes:RLOO",
        "reinforce_plus_plus": "rollwright.training.advantages.episodes:ReinforcePlusPlus",
        "gigpo": "rollwright.training.advantages.steps:GiGPO",
        "agent_wise": "rollwright.training.advantages.agents:AgentWise",
        "tree": "rollwright.training.advantages.tree:Tree",
        "path_grpo": "rollwright.training.advantages.paths:PathGRPO",
        "tree_grpo": "rollwright.training.advantages.paths:TreeGRPO",
        "segment_value": "rollwright.training.advantages.tree:SegmentValue",
    },
    protocol="rollwright.training.advantages.base:Advantage",
    key="training.advantage.name",
)
"""GAE is not among them: it needs a function that estimates values, which no configuration file can name."""

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
    """The divisor of the sum over tokens. A tree's tokens count by their weights everywhere."""

    TOKEN_MEAN = "token_mean"
    """The tokens of the batch: every token weighs the same, long episodes more."""
    SEQUENCE_MEAN = "sequence_mean"
    """The tokens of each rollout, then the rollouts: every rollout weighs the same."""
    CONSTANT = "constant"
    """`constant_length` for each rollout: neither length nor luck changes a token's weight (Dr. GRPO)."""


class Ratio(StrEnum):
    """The denominator of the probability ratio."""

    ENGINE = "engine"
    """The engine's probability, which sampled: one ratio corrects for staleness and for numerical differences."""
    PROXIMAL = "proximal"
    """The trainer's own before the step, for clipping; the difference between it and the engine's becomes a weight that
    is cut at `truncation` (truncated importance sampling)."""


class AdvantageConfig(Settings):
    """How much better than expected a turn was. A plain name will do: `advantage: rloo`."""

    name: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `gigpo`, `agent_wise`; of trees `tree`, and for comparison
    `path_grpo`, `tree_grpo` or `segment_value`; or one's own as `module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of that advantage, for example `std: false`."""


class LossSettings(Settings):
    """The clipped policy-gradient loss and what may be added to it."""

    name: str = "clipped"
    """`clipped`, or a loss of one's own as `module:name`, which gets these settings too."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a loss of one's own."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Whether every token weighs the same, every rollout, or a token of every rollout the same (Dr. GRPO)."""
    constant_length: PositiveInt = 1024
    """Tokens that a rollout is divided by; for `constant`."""
    clip_low: Share = 0.2
    """The ratio of probabilities counts down to one minus this."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio counts up to one plus this."""
    ratio: Ratio = Ratio.ENGINE
    """What the new probability is compared with: what the engine sampled with, or the trainer's own before the step,
    with the engine's in a weight that is cut at `truncation`."""
    truncation: Annotated[float, Field(ge=1)] = 2.0
    """Most that this weight may be; for `proximal`."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the base model."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy, which is then driven up."""

    @property
    def only_advantages(self) -> bool:
        """Whether a token without advantage has no gradient; of a loss of one's own this is not known."""
        return self.name == "clipped" and self.kl_coefficient == 0 and self.entropy_coefficient == 0


class LoraSettings(Settings):
    """Low-rank adapters instead of all weights."""

    rank: PositiveInt = 16
    """Of the adapters."""
    alpha: PositiveInt = 32
    """An adapter's product is scaled by `alpha / rank`."""
    modules: list[str] | Literal["all-linear"] = "all-linear"
    """Which layers get one, by the end of their names."""


class TrainerSettings(Settings):
    """How the trainer makes new weights of a batch of rows."""

    loss: LossSettings = LossSettings()
    lora: LoraSettings | None = None
    learning_rate: NonNegativeFloat = 1e-5
    """After the warm-up it stays, unless `final_learning_rate` is set."""
    warmup_updates: NonNegativeInt = 0
    """Optimiser updates over which the learning rate grows from 0."""
    final_learning_rate: NonNegativeFloat | None = None
    """What the learning rate falls to, evenly, by the last of `max_steps`. Unset: it stays."""
    beta1: Beta = 0.9
    """AdamW's memory of gradients."""
    beta2: Beta = 0.95
    """AdamW's memory of their squares."""
    weight_decay: NonNegativeFloat = 0.0
    """On matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Longer gradients are cut to it."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimiser updates in each pass."""
    tokens_per_micro_batch: PositiveInt = 2048
    """Tokens that go through the model at once, padding included; memory grows with it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations."""
    device: Device = "auto"
    """Where the trainer computes: `cpu`, `mps`, `cuda`, `cuda:1` … or `auto`. The variable `CPU_ONLY` comes first."""
    max_logprob_gap: PositiveFloat = 0.5
    """Mean difference, in nats, between the engine's log-probabilities and the trainer's above which a batch is not
    trained on."""
    max_skips_in_a_row: PositiveInt = 3
    """Steps without an update, for a reason that means trouble, after which training stops."""

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.mini_batches

    def learning_rate_at(self, update: int, total_updates: int = 1) -> float:
        """The learning rate of the update after `update` others, in a training of `total_updates`."""
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
    """Folder of the base model, as transformers saves it, or the name of a fetched one. Unset: the policy's own."""
    from_run: str | None = None
    """Folder of a recorded run: its batches are trained on, in their order, and nothing is played."""
    advantage: AdvantageConfig = AdvantageConfig()
    samples: Literal["paths", "turns"] = "paths"
    """One row for each token sequence, or one for each turn, which costs more tokens and gives the same loss."""
    update_mode: Literal["drain", "abort_and_resume", "restart_turn"] = "abort_and_resume"
    """What happens to the calls in flight when new weights arrive: they finish first, go on under the new weights, or
    begin anew."""
    hand_over: Literal["auto", "tensors", "folder"] = "auto"
    """How weights reach the policy: in memory, or as a folder with a checksum. `auto`: in memory where it is in this
    process."""
    checkpoint_steps: PositiveInt = 10
    """Steps between checkpoints. A run that is killed does the steps since the last one again, from its record."""
    keep_checkpoints: PositiveInt = 2
    """Older ones are removed."""
    keep_steps: PositiveInt | Literal["all"] | None = None
    """Steps whose batches, trajectories, rollouts, failures and figures are kept; there are up to twice as many before
    the older half is removed, and those since the oldest kept checkpoint stay in any case. `all`: nothing is removed.
    Unset: all in `rollwright train`, 200 in a node of a swarm, which runs for months."""
    writers: list[Writer] = Field(default_factory=_jsonl)
    """Where the figures of each step go, beside the run's own files: `jsonl`, `tensorboard`, `wandb`, or a writer of one's
    own as `module:name`."""

    @model_validator(mode="before")
    @classmethod
    def _as_played(cls, value: Any) -> Any:
        for key in HISTORY_KEYS if isinstance(value, dict) else ():
            if key in value:
                raise ValueError(
                    f"{key}: training reads the prompts as the model saw them; a history that is cut only here would "
                    "be trained off-policy. Cut it while playing, with `agent.history`"
                )
        return value

    @model_validator(mode="before")
    @classmethod
    def _some_or_all(cls, value: Any) -> Any:
        keep = value.get("keep_steps") if isinstance(value, dict) else None
        if keep not in (None, "all") and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ValueError(f"keep_steps: {keep!r} is neither a number of steps, at least 1, nor `all`")
        return value

    @field_validator("advantage", "loss", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
