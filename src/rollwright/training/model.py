"""The model in training: log-probabilities of chosen tokens, merged weights, LoRA adapters and precision.

Always true: log-probabilities are in float32 at the temperature at which each token was sampled; the model is never in
training mode, so no dropout is active; merged weights have the names of the base model.
"""

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollwright.errors import ConfigError
from rollwright.hardware import choose_dtype, pick_device
from rollwright.training.branch_attention import tokens_per_pair
from rollwright.training.micro_batches import MicroBatch
from rollwright.training.ranks.collective import ALONE, Ranks
from rollwright.training.ranks.sharding import ShardedModule, checkpoint_activations, decoder_layers, full
from rollwright.training.row_memory import LENGTHS, RowMemory, kept_bytes
from rollwright.training.settings import LoraSettings, TrainerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MULTIPLY = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Linear(32, 32)(torch.ones(8, 32)).float().sum().backward()
"""


def check_bfloat16(device: torch.device) -> None:
    """Refuses bfloat16 on CPUs where it would kill the process.

    Some virtual machines advertise matrix instructions (AMX) that they do not execute. torch then uses them, and the first
    matrix product raises SIGILL, which no `except` catches.
    """
    if device.type == "cpu" and not bfloat16_works_on_cpu():
        raise ConfigError(
            "trainer settings: dtype bfloat16 does not work on this CPU (illegal instruction); "
            "use float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before the start"
        )


@cache
def bfloat16_works_on_cpu() -> bool:
    """Tried once, in a subprocess."""
    return subprocess.run([sys.executable, "-c", _MULTIPLY], capture_output=True, check=False).returncode == 0


_ADAPTER = "default"
"""peft's name of the single adapter."""
_WRAPPED = "base_model.model."
"""Prefix that peft adds to the names of weights."""


class TrainedModel:
    """A causal language model on its device, with LoRA adapters if configured."""

    def __init__(
        self, model: "PreTrainedModel", settings: TrainerSettings, seed: int = 0, ranks: Ranks = ALONE
    ) -> None:
        self.device = pick_device(settings.device)
        self.base = model.to(self.device)  # type: ignore[arg-type]
        self._bfloat16 = choose_dtype(settings.dtype) == "bfloat16"
        if self._bfloat16:
            check_bfloat16(self.device)
        self._head = _head(self.base)
        self._reference: nn.Module | None = None
        if settings.loss.kl_coefficient and settings.lora is None:
            self._reference = copy.deepcopy(self.base).requires_grad_(False).eval()
        self.module: Any = (
            self.base if settings.lora is None else _with_adapters(self.base, settings.lora, seed)
        )
        self.value_head: nn.Linear | None = None
        """The critic: value of the state before a token, from the input of the output head. It starts at 0, so it needs no
        random numbers, and is whole on every rank: it has one row."""
        if settings.critic is not None:
            self.value_head = _value_head(self._head, self.device)
        # Dropout would add noise to the probability ratios, so the model is never in training mode.
        self.module.eval()
        self._lora = settings.lora is not None
        self.tokens_per_pair = tokens_per_pair(self.base) if settings.share_prefixes else None
        """Cost of attention for rows that share a prefix; `None`: they are computed one by one."""
        if settings.activation_checkpointing:
            checkpoint_activations(decoder_layers(self.base))
        self.ranks = ranks
        self.gathers_once = settings.gather == "once"
        self._shards: list[ShardedModule] = []
        """The trained module and the reference model, if they are sharded."""
        if ranks.size > 1:  # after the passes above: these leave the weights gathered
            _ = self.row_memory  # while every rank has whole weights, so that it communicates nothing
            self._shards = [
                ShardedModule(module, decoder_layers(module), settings, ranks)
                for module in (self.module, self._reference)
                if module is not None
            ]

    @property
    def vocabulary(self) -> int:
        return int(self.base.get_input_embeddings().num_embeddings)

    @cached_property
    def row_memory(self) -> RowMemory:
        """Memory of a row's activations by its length, without those of the output head."""

        def run(length: int) -> Tensor:
            ids = torch.zeros(1, length, dtype=torch.long, device=self.device)
            last = torch.tensor([length - 1], device=self.device)
            mixed = torch.autocast(self.device.type, torch.bfloat16) if self._bfloat16 else nullcontext()
            with mixed, _only_at(self._head, last):
                return self.module(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

        first, second, third = (kept_bytes(partial(run, length)) for length in LENGTHS)
        return RowMemory.of((first, second, third))

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; tied weights appear once."""
        return {
            name: each for name, each in self.module.named_parameters() if each.requires_grad
        } | self.critic_parameters()

    def critic_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the value head by name; none without a critic."""
        if self.value_head is None:
            return {}
        return {f"value_head.{name}": each for name, each in self.value_head.named_parameters()}

    def logprobs(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of each trained token, and the entropy of its distribution; both at the temperature at which
        the token was sampled."""
        return self._score(self.module, self._head, batch, entropy_gradient)[:2]

    def logprobs_and_values(
        self, batch: MicroBatch, *, entropy_gradient: bool = False, trunk: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `logprobs`, and the critic's value of the state before each trained token. `trunk`: whether gradients of values
        reach the model below the value head."""
        new, entropy, states = self._score(self.module, self._head, batch, entropy_gradient)
        assert self.value_head is not None
        values: Tensor = self.value_head((states if trunk else states.detach()).float()).squeeze(-1)
        return new, entropy, values if batch.choices is None else values[batch.choices]

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities under the base model, without gradient."""
        with torch.no_grad():
            if self._lora:
                with self.module.disable_adapter():
                    return self._score(self.module, self._head, batch, False)[0]
            assert self._reference is not None
            return self._score(self._reference, _head(self._reference), batch, False)[0]

    def _score(
        self, module: Any, head: nn.Module, batch: MicroBatch, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies, and the inputs of the output head at the batch's places."""
        mixed = torch.autocast(self.device.type, torch.bfloat16) if self._bfloat16 else nullcontext()
        with mixed, _only_at(head, batch.places) as states:
            logits = module(input_ids=batch.inputs, use_cache=False, **_branches(batch)).logits[0]
        logits, heat = logits.float(), batch.temperatures
        if isinstance(heat, Tensor):
            logits = logits / heat.unsqueeze(1)
        elif heat != 1:
            logits = logits / heat
        norm = torch.logsumexp(logits, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = norm - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
        if batch.choices is None:
            return logits.gather(1, batch.targets.unsqueeze(1)).squeeze(1) - norm, entropy, states[0]
        chosen = logits[batch.choices, batch.targets] - norm[batch.choices]
        return chosen, entropy[batch.choices], states[0]

    @contextmanager
    def gathered(self, *, reference: bool = False) -> Iterator[None]:
        """Inside, passes communicate nothing, if weights are gathered once. `reference`: of the base model."""
        if not self._shards or not self.gathers_once:
            yield
            return
        with self._shards[-1 if reference else 0].gathered():
            yield

    def touch(self, *, reference: bool = False) -> None:
        """One pass with gradient 0: takes part in the communication of a pass of other ranks."""
        module = self._reference if reference and self._reference is not None else self.module
        logits = module(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False
        ).logits
        if logits.requires_grad:
            (logits.float().sum() * 0.0).backward()

    def reduce_gradients(self) -> None:
        """Sums up the gradients of all ranks, if passes did not."""
        if self._shards and self.gathers_once:
            self._shards[0].reduce(self.touch)
        if self._shards:
            for parameter in self.critic_parameters().values():
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.ranks.add_up(own)

    def merged(self) -> dict[str, Tensor]:
        """Copies of all weights under the names of the base model, with adapters merged.

        Tied weights are one tensor under several names. All ranks have to call this.
        """
        deltas = self._deltas() if self._lora else {}
        copies: dict[int, Tensor] = {}
        found = {}
        for wrapped, tensor in self.module.state_dict(keep_vars=True).items():
            name = wrapped.removeprefix(_WRAPPED)
            if "lora_" in name:
                continue
            if name in deltas:
                found[name.replace(".base_layer.", ".")] = full(tensor) + deltas[name]
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = full(tensor).clone()
            found[name.replace(".base_layer.", ".")] = copies[id(tensor)]
        return found

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The adapters' weights under peft's names. All ranks have to call this."""
        return {
            name.replace(f".{_ADAPTER}.", "."): full(each)
            for name, each in self.module.named_parameters()
            if "lora_" in name
        }

    def save_adapter_config(self, place: Path) -> None:
        """Writes peft's description of the adapters."""
        config = copy.copy(self.module.peft_config[_ADAPTER])
        config.inference_mode = True
        config.save_pretrained(str(place))

    def _deltas(self) -> dict[str, Tensor]:
        with self._shards[0].gathered() if self._shards else nullcontext():
            return _deltas(self.module)


def _branches(batch: MicroBatch) -> dict[str, Tensor]:
    """Arguments of the model for bundles with branches."""
    if batch.mask is None or batch.positions is None:
        return {}
    return {"attention_mask": batch.mask, "position_ids": batch.positions}


@contextmanager
def _only_at(head: nn.Module, places: Tensor) -> Iterator[list[Tensor]]:
    """Restricts the output head, and everything after it, to the chosen positions, as one sequence; yields a list to which
    its inputs there are added."""
    states: list[Tensor] = []

    def pick(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        states.append(given[0].flatten(0, 1).index_select(0, places))
        return (states[-1].unsqueeze(0),)

    hook = head.register_forward_pre_hook(pick)
    try:
        yield states
    finally:
        hook.remove()


def _head(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"trainer: {type(model).__name__} has no output head; a causal language model is needed"
        )
    return head


def _value_head(head: Any, device: torch.device) -> nn.Linear:
    size = getattr(head, "in_features", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"training.critic: the output head is a {type(head).__name__}, not a linear layer, so its inputs are unknown"
        )
    with torch.random.fork_rng(devices=[]):
        made = nn.Linear(size, 1, device=device)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def _with_adapters(model: "PreTrainedModel", lora: LoraSettings, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.modules, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():  # peft initialises adapters from torch's global generator
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def _deltas(module: Any) -> dict[str, Tensor]:
    """Weight updates of the adapters, by the name of the weight that they are added to."""
    with torch.no_grad():
        return {
            f"{name.removeprefix(_WRAPPED)}.base_layer.weight": layer.get_delta_weight(_ADAPTER)
            for name, layer in module.named_modules()
            if hasattr(layer, "get_delta_weight")
        }
