"""The trainer: turns batches of rows into new weights.

Always true: a step increments `version` exactly if it changed a weight; a step that skips an update reports the reason.
Updates depend on the rows, the settings and the state alone, so a trainer that was saved and restored continues with the
same numbers, bit for bit.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rollwright import rng
from rollwright.engines.base import Weights
from rollwright.errors import ConfigError, RollwrightError
from rollwright.hardware import gigabytes, is_out_of_memory
from rollwright.models.loading import weights_checksum
from rollwright.training.checkpoints import (
    Checkpoint,
    CheckpointManifest,
    read_manifest,
    save_model_tensors,
    save_tensors,
    write_folder,
)
from rollwright.training.critic import Critic, explained_variance
from rollwright.training.gradients import BeforeStep, TokenTally, add_gradients, logprobs_of_rows
from rollwright.training.losses import check_loss
from rollwright.training.micro_batches import MicroBatch, PackedRow, check_ids, pack, scoring_row
from rollwright.training.model import TrainedModel
from rollwright.training.ranks.collective import ALONE, Ranks
from rollwright.training.report import Skip, StepReport, batch_figures, silent_share
from rollwright.training.row_memory import memory_for_rows
from rollwright.training.rows import Row
from rollwright.training.settings import TrainerSettings as TrainerSettings
from rollwright.training.signal import GradientSignal, SplitHalf, split_half
from rollwright.training.trained_state import TrainedState, restore_random_states
from rollwright.training.update_figures import skip_advice, staleness, update_figures
from rollwright.trajectory import MIN_TEMPERATURE, Floats, TokenIds, floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_T = TypeVar("_T")
_Updates = tuple[list[TokenTally], list[float], Skip | None, GradientSignal | None]
"""Tallies, gradient norms, why the last update was skipped, and the signal of the first one if it was measured."""


class TrainingStopped(RollwrightError):
    """Training cannot continue usefully; the message says what happened and what to change. Trained weights are kept."""


class Trainer:
    """Computes gradients and optimiser updates, and saves and restores its state. Not thread-safe."""

    def __init__(
        self,
        model: "PreTrainedModel",
        settings: TrainerSettings,
        *,
        total_updates: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        """`model` is the base model even if a checkpoint is restored afterwards: the KL term refers to it.

        `total_updates`: updates of the whole training, for the learning-rate schedule. `temperature`: for tokens without a
        recorded one; log-probabilities are computed at the temperature at which the engine sampled. `seed`: for the
        initialisation of adapters and the order of mini-batches. `ranks`: with more than one, every rank has a trainer, and
        they call the same methods in the same order.
        """
        if not MIN_TEMPERATURE <= temperature < math.inf:
            raise ConfigError(
                f"trainer: temperature is {temperature:g}; accepted: {MIN_TEMPERATURE:g} or more"
            )
        check_loss(settings.loss)
        self.settings = settings
        self._total_updates, self._temperature, self._seed = total_updates, temperature, seed
        self.version = 0
        """Number of steps that changed the weights; 0 is the base model."""
        self.updates = 0
        """Number of optimiser updates so far."""
        self.skipped: Counter[str] = Counter()
        """Number of steps that skipped an update, by reason."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called after every micro-batch, in the thread that computes."""
        self._skips_in_a_row = 0
        self._budget = settings.tokens_per_micro_batch
        self._halved = False
        self.ranks = ranks
        self._model = TrainedModel(model, settings, seed, ranks)
        self._parameters = self._model.trained_parameters()
        self._optimizer = _optimizer(self._parameters, self._model.critic_parameters(), settings)
        self._state = TrainedState(self._parameters, self._optimizer, ranks)

    def step(self, rows: Sequence[Row]) -> StepReport:
        """Trains on one batch. Blocks. Raises `TrainingStopped` after too many failed steps in a row."""
        began = time.perf_counter()
        self.ranks.waited = 0.0
        rollouts, reward, success = batch_figures(rows)
        packed = [pack(row, self._temperature) for row in rows if any(row.mask)]
        known = {
            "rollouts": rollouts,
            "reward": reward,
            "success": success,
            "silent_groups": silent_share(rows),
            "rows": len(packed),
            "tokens": sum(len(row.targets) for row in packed),
            "staleness": staleness(packed, self.version),
        }
        may_idle = self.settings.loss.only_advantages and self.settings.critic is None
        idle = sum(not row.advantages.any() for row in packed) if may_idle else 0
        if not packed or idle == len(packed):
            return self._skip(Skip.NO_ADVANTAGE if packed else Skip.EMPTY, known, began)
        check_ids(packed, self._model.vocabulary)
        self._check_lengths(packed)
        tallies, norms, why, found = self._updates(packed)
        known |= {} if found is None else {"gradient_signal": found.signal, "gradient_noise": found.noise}
        known |= {"rows_without_gradient": idle, "updates": len(norms), **update_figures(tallies, norms)}
        known["value_explained"] = explained_variance(packed)
        if why is not None:
            return self._skip(why, known, began)
        self._skips_in_a_row = 0
        return self._report(known, began)

    def _updates(self, packed: Sequence[PackedRow]) -> _Updates:
        """Runs the updates of a step up to the first one that is skipped."""
        before = self._before(packed)
        signal: GradientSignal | None = None
        tallies: list[TokenTally] = []
        norms: list[float] = []
        for chosen in list(self._mini_batches(packed)):
            rows = [packed[place] for place in chosen]
            own = BeforeStep(_chosen(before.proximal, chosen), _chosen(before.reference, chosen))
            split = None if tallies or not self._measures_signal else split_half(rows, self._parameters)
            tally = self._gradients(rows, own, split)
            if split is not None and tally.micro_batches:
                signal = split.finish()
            if not tally.micro_batches:
                continue  # no row of this mini-batch has a gradient
            tallies.append(tally)
            norm = self._clip_gradients()
            why = self._reason_to_skip(tally, norm, first=not norms)
            if why is None:
                self._optimizer_step()
                self.version += not norms
                norms.append(norm)
            self._optimizer.zero_grad(set_to_none=True)
            if why is not None:
                return tallies, norms, why, signal
        return tallies, norms, None, signal

    @property
    def _measures_signal(self) -> bool:
        # Ranks sum up their gradients at the end of all passes, so with several there is no gradient of a half.
        every = self.settings.signal_steps
        return every > 0 and self.version % every == 0 and self.ranks.size == 1

    def _reason_to_skip(self, tally: TokenTally, norm: float, *, first: bool) -> Skip | None:
        if not math.isfinite(tally.loss) or not math.isfinite(norm):
            return Skip.NOT_FINITE
        # After the first update the trained model differs from the engine on purpose.
        if first and tally.mean("gap") > self.settings.max_logprob_gap:
            return Skip.LOGPROB_GAP
        return None

    def _clip_gradients(self) -> float:
        """Clips the gradients to `max_grad_norm`; returns their norm before, which is the same on all ranks."""
        norm = self.ranks.gradient_norm(self._parameters.values())
        if norm > self.settings.max_grad_norm:
            share = self.settings.max_grad_norm / (norm + _NEVER_ZERO)
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        return norm

    def _optimizer_step(self) -> None:
        for group in self._optimizer.param_groups:
            rate = self.settings.learning_rate_at(self.updates, self._total_updates)
            group["lr"] = rate * group["learning_rate_factor"]
        self._optimizer.step()
        self.updates += 1

    def _before(self, packed: Sequence[PackedRow]) -> BeforeStep:
        """Computes the log-probabilities that are needed from before the first update."""
        loss, model = self.settings.loss, self._model

        def score(scores: Callable[[MicroBatch], Tensor], *, reference: bool = False) -> list[Tensor]:
            return self._within_memory(
                packed,
                lambda budget: logprobs_of_rows(
                    scores,
                    packed,
                    model.device,
                    budget,
                    self.on_progress,
                    model=model,
                    reference=reference,
                ),
            )

        # With a single update, the forward pass of the update gives the same log-probabilities.
        own = loss.uses_model_before_step and self.settings.updates_per_step > 1
        return BeforeStep(
            proximal=score(lambda batch: model.logprobs(batch)[0]) if own else None,
            reference=score(model.reference_logprobs, reference=True) if loss.kl_coefficient else None,
        )

    def _gradients(
        self, rows: Sequence[PackedRow], before: BeforeStep, split: SplitHalf | None = None
    ) -> TokenTally:
        def gather(budget: int) -> TokenTally:
            self._optimizer.zero_grad(set_to_none=True)
            return add_gradients(
                self._model,
                rows,
                self.settings.loss,
                tokens_per_micro_batch=budget,
                before=before,
                critic=self._critic(),
                seed=rng.seed("loss", self._seed, self.updates),
                on_progress=self.on_progress,
                split=split,
            )

        return self._within_memory(rows, gather)

    def _critic(self) -> Critic | None:
        settings = self.settings.critic
        if settings is None:
            return None
        return Critic(
            settings, warming_up=self.updates < settings.warmup_steps * self.settings.updates_per_step
        )

    def _within_memory(self, rows: Sequence[PackedRow], compute: Callable[[int], _T]) -> _T:
        """Runs `compute` with the token budget of a micro-batch; on the first out-of-memory error, again with half of it."""
        try:
            return compute(self._budget)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._halved:
                raise self._out_of_memory(max(row.length for row in rows)) from error
        self._halved = True
        self._budget = max(min(self._budget, sum(row.length for row in rows)) // 2, 1)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._within_memory(rows, compute)

    def _out_of_memory(self, longest: int) -> TrainingStopped:
        self._optimizer.zero_grad(set_to_none=True)
        return TrainingStopped(
            f"out of memory after version {self.version}, also with micro-batches of {self._budget} tokens; "
            f"the longest row has {longest:,}, and a row is computed as a whole; "
            "set tokens_per_micro_batch lower, train shorter rows, use LoRA or a smaller model"
        )

    def _mini_batches(self, packed: Sequence[PackedRow]) -> Iterator[list[int]]:
        """Row indices of each update of a step: rows of one rollout stay together; rollouts are shuffled in every epoch."""
        count = self.settings.mini_batches
        for epoch in range(self.settings.epochs):
            if count == 1:
                yield list(range(len(packed)))
                continue
            rollouts = list(dict.fromkeys(row.rollout_id for row in packed))
            rng.generator("mini-batches", self._seed, self.version, epoch).shuffle(rollouts)
            part = {rollout: place % count for place, rollout in enumerate(rollouts)}
            for number in range(min(count, len(rollouts))):
                yield [place for place, row in enumerate(packed) if part[row.rollout_id] == number]

    def _check_lengths(self, packed: Sequence[PackedRow]) -> None:
        """Refuses a row that no rank can compute; rows that a micro-batch has room for are not looked at."""
        longest = max(packed, key=lambda row: row.length)
        if longest.length <= self._budget:
            return
        memory = -self.ranks.maxima([-float(memory_for_rows(self._model.device))])[0]
        need = self._model.row_memory.size(longest.length)
        if need > memory:
            lighter = "" if self.settings.activation_checkpointing else "set activation_checkpointing, "
            raise TrainingStopped(
                f"rollout {longest.rollout_id}: its row of {longest.length:,} tokens needs more than {gigabytes(int(need))} "
                f"for its activations, and a rank has {gigabytes(int(memory))} left, in which at most "
                f"{self._model.row_memory.longest(memory):,} tokens fit; a row is not cut over ranks: {lighter}"
                "play shorter episodes, or use a smaller model"
            )

    def _skip(self, why: Skip, known: Mapping[str, Any], began: float) -> StepReport:
        self.skipped[why] += 1
        report = self._report(known, began, why)
        if why in (Skip.NOT_FINITE, Skip.LOGPROB_GAP):
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= self.settings.max_skips_in_a_row:
                raise TrainingStopped(skip_advice(why, report, self._skips_in_a_row))
        return report

    def _report(self, known: Mapping[str, Any], began: float, skipped: Skip | None = None) -> StepReport:
        seconds = time.perf_counter() - began
        return StepReport(
            version=self.version,
            skipped=skipped,
            learning_rate=self._optimizer.param_groups[0]["lr"] if known.get("updates") else 0.0,
            seconds=seconds,
            ranks=self.ranks.size,
            **self.ranks.figures(seconds),
            **known,
        )

    def logprobs(self, sequences: Sequence[tuple[TokenIds, TokenIds]]) -> list[Floats]:
        """For each prompt and continuation, the log-probabilities of the continuation's ids under the current weights and
        the trainer's temperature."""
        rows = [scoring_row(prompt, sampled, self._temperature) for prompt, sampled in sequences]
        check_ids(rows, self._model.vocabulary)
        model = self._model
        found = self._within_memory(
            rows,
            lambda budget: logprobs_of_rows(
                lambda batch: model.logprobs(batch)[0],
                rows,
                model.device,
                budget,
                self.on_progress,
                model=model,
            ),
        )
        return [floats(each.tolist()) for each in found]

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """For each row, the critic's value of the state before each token under the current weights; 0 where the mask is 0."""
        if self.settings.critic is None:
            raise ConfigError("training.critic: is not set, so there are no values")
        packed = [pack(row, self._temperature) for row in rows]
        check_ids(packed, self._model.vocabulary)
        model = self._model
        found = self._within_memory(
            packed,
            lambda budget: logprobs_of_rows(
                lambda batch: model.logprobs_and_values(batch)[2],
                packed,
                model.device,
                budget,
                self.on_progress,
                model=model,
            ),
        )
        given = []
        for row, own, each in zip(rows, packed, found, strict=True):
            values = torch.zeros(len(row.mask))
            values[own.places + 1] = each.cpu()
            given.append(floats(values.tolist()))
        return given

    def weights(self) -> Weights:
        """Copies of all weights for a policy in this process, with adapters merged."""
        return Weights(version=self.version, tensors=self._model.merged())

    def export(self, folder: Path) -> Weights:
        """Saves the model in transformers' format, with adapters merged, for an engine that loads folders."""
        tensors = self._model.merged()
        if self.ranks.rank:
            return Weights(version=self.version, tensors=tensors)
        unique = {id(tensor): name for name, tensor in reversed(tensors.items())}

        def fill(place: Path) -> None:
            self._model.base.config.save_pretrained(place)
            save_model_tensors(place, {name: tensors[name] for name in unique.values()})

        write_folder(folder, fill)
        return Weights(version=self.version, folder=folder, checksum=weights_checksum(folder))

    def export_adapter(self, folder: Path) -> Weights:
        """Saves the adapters alone in peft's format, for an engine that has the base model."""
        if self.settings.lora is None:
            raise ConfigError("training.hand_over: `adapter` needs training.lora")
        tensors = self._model.adapter_tensors()
        if self.ranks.rank:
            return Weights(version=self.version)

        def fill(place: Path) -> None:
            self._model.save_adapter_config(place)
            save_tensors(place / "adapter_model.safetensors", tensors)

        write_folder(folder, fill)
        return Weights(version=self.version, adapter=folder, checksum=weights_checksum(folder))

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Saves the state from which a trainer with the same base model and settings resumes, on any number of ranks."""
        state = {
            "version": self.version,
            "updates": self.updates,
            "skipped": dict(self.skipped),
            "skips_in_a_row": self._skips_in_a_row,
            "tokens_per_micro_batch": self._budget,
            "halved": self._halved,
        }
        sharded = self.settings.checkpoint_layout == "sharded"
        write = self._state.write_shards if sharded else self._state.write_whole
        write(folder, state, extra)

    def restore(self, folder: Path) -> dict[str, Any]:
        """Restores the state that `save` wrote; returns its `extra`."""
        manifest = read_manifest(folder)
        if manifest.sharded:
            self.take_shards(folder, manifest)
            return dict(manifest.extra)
        checkpoint = self.read(folder)
        self.take(checkpoint.tensors["model"], checkpoint.tensors["optimizer"], checkpoint.state)
        restore_random_states(checkpoint.tensors["random"])
        return dict(checkpoint.extra)

    def read(self, folder: Path) -> Checkpoint:
        """Reads a checkpoint as whole tensors and checks that it is of this model."""
        return self._state.read_whole(folder)

    def take(
        self,
        parameters: Mapping[str, Tensor | None],
        moments: Mapping[str, Tensor | None],
        state: Mapping[str, Any],
    ) -> None:
        """Takes over a state. Ranks other than 0 need the names alone, except of single numbers among the moments."""
        self._state.take_whole(parameters, moments)
        self._take_counters(state)

    def take_shards(self, folder: Path, manifest: CheckpointManifest) -> None:
        """Takes over a state of which every rank reads its own rows."""
        self._state.take_shards(folder, manifest)
        self._take_counters(manifest.state)

    def _take_counters(self, state: Mapping[str, Any]) -> None:
        self.version, self.updates = state["version"], state["updates"]
        self.skipped = Counter(state["skipped"])
        self._skips_in_a_row = state["skips_in_a_row"]
        self._budget, self._halved = state["tokens_per_micro_batch"], state["halved"]

    def interrupt(self) -> None:
        """Does nothing: a step ends by itself."""

    def close(self) -> None:
        """Ends the other ranks, if this trainer leads some."""


def _optimizer(
    parameters: Mapping[str, nn.Parameter], critic: Mapping[str, nn.Parameter], settings: TrainerSettings
) -> torch.optim.AdamW:
    """AdamW without weight decay on biases, norms and the value head, which has a learning rate of its own."""
    policy = [each for name, each in parameters.items() if name not in critic]
    factor = 1.0 if settings.critic is None else settings.critic.learning_rate_factor
    groups: list[dict[str, Any]] = [
        {"params": [each for each in policy if each.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [each for each in policy if each.dim() <= 1], "weight_decay": 0.0},
    ]
    for group in groups:
        group["learning_rate_factor"] = 1.0
    groups.append({"params": list(critic.values()), "weight_decay": 0.0, "learning_rate_factor": factor})
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


def _chosen(values: Sequence[Tensor] | None, places: Sequence[int]) -> list[Tensor] | None:
    return None if values is None else [values[place] for place in places]


_NEVER_ZERO = 1e-6
"""Added to a norm before it divides, as in torch."""
