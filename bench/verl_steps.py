"""Real training steps of verl on a CPU with rollwright's episodes. Runs in the environment `.venvs/losses`; see `losses.py`.

    python bench/losses.py --verl

verl's own `AgentLoopWorker` makes the agent loops and pads their outputs, its `compute_advantage` computes advantages, and its
`ActorRolloutRefWorker` computes log-probabilities and updates the actor with FSDP2 over gloo. A tiny torch policy of rollwright
takes the place of its inference servers and gets the new weights after every step. Checked in every step: ids, mask and
log-probabilities in verl's batch are those that were sampled, with the version of the weights; log-probabilities that verl's
trainer computes equal them; the update changes the weights.

verl 0.9.1 has no platform for CPUs, so this adds one to its registry. Not run: its inference servers and the Ray trainer around
these parts, which ask for a GPU.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from torch.distributed import FileStore
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.models.transformers import monkey_patch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import TokenOutput

from rollwright.engines.base import Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.rendering import make_renderer
from rollwright.engines.torch import TorchPolicy
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.models import load_model
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.trajectory import token_ids

STEPS, LEVELS, MEMBERS, TURNS = 3, 2, 4, 2
_COMPARED = ("input_ids", "attention_mask", "responses", "response_mask", "rollout_log_probs")
SAME = 1e-5
"""Largest difference of two log-probabilities of the same token under the same weights, in float32."""


class OddLetters:
    """Every turn is worth the share of odd bytes in the answer."""

    prompts = PromptTemplates(system="", opening="{observation}", turn="{observation}")
    instruction = ""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, seed: int) -> Reset:
        self.turns = 0
        return Reset(str(seed), {})

    async def step(self, answer: str) -> Step:
        self.turns += 1
        reward = sum(ord(each) % 2 for each in answer) / max(len(answer), 1)
        return Step(f"turn {self.turns}", reward, self.turns == TURNS, False, {})

    async def close(self) -> None:
        """Holds nothing."""


def _nothing(*arguments: Any) -> int:
    return 0


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """What verl asks of a device, answered for a CPU."""

    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        get_device_name=lambda *arguments: "cpu",
        is_available=lambda: True,
        current_device=_nothing,
        max_memory_allocated=_nothing,
        max_memory_reserved=_nothing,
        memory_allocated=_nothing,
        memory_reserved=_nothing,
        mem_get_info=lambda *arguments: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        set_device=_nothing,
        empty_cache=_nothing,
        synchronize=_nothing,
    )
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = _nothing
    empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NO_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


class Server:
    """Takes the place of verl's inference servers; remembers every answer by the ids up to its end."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self.said: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        prompt = Prompt(request_id, (request_id, len(prompt_ids)), (), token_ids(prompt_ids))
        asked = Sampling(temperature=sampling_params["temperature"], max_tokens=sampling_params["max_tokens"])
        made = await self.policy.generate(prompt, asked)
        ids, logprobs = made.sampled_ids.tolist(), made.logprobs.tolist()
        self.said[tuple(prompt_ids) + tuple(ids)] = ids, logprobs
        told = {"global_steps": self.policy.version}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=told)


def configuration(place: Path) -> Any:
    """verl's own configuration, with the model, the agent loop and sizes for a CPU."""
    tokenizer = tiny_tokenizer(["turn 0123456789"], 300)
    tiny_llama(len(tokenizer), hidden_size=32, layers=1, heads=2).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    env = f"{{env_type: '__main__:OddLetters', max_steps: {TURNS}, max_tokens_per_step: 6}}"
    (place / "run.yaml").write_text(
        f"custom_envs: {{OddLetters: {env}}}\ntrain_env_manager: {{num_env_groups: 1, tags: [OddLetters]}}"
    )
    target = "rollwright.run.verl_agent_loop.RollwrightAgentLoop"
    (place / "loops.yaml").write_text(
        f"- {{name: rollwright, _target_: {target}, config: {place / 'run.yaml'}}}"
    )
    part = "actor_rollout_ref"
    settings = {
        f"{part}.model.path": place / "model",
        f"{part}.model.use_remove_padding": "false",
        f"+{part}.model.override_config.attn_implementation": "sdpa",
        f"{part}.rollout.name": "vllm",
        f"{part}.rollout.n": MEMBERS,
        f"{part}.rollout.calculate_log_probs": "true",
        f"{part}.rollout.agent.agent_loop_config_path": place / "loops.yaml",
        f"{part}.rollout.prompt_length": 64,
        f"{part}.rollout.response_length": 128,
        f"{part}.rollout.log_prob_micro_batch_size_per_gpu": 4,
        f"{part}.actor.strategy": "fsdp2",
        f"{part}.actor.ppo_micro_batch_size_per_gpu": 4,
        f"{part}.actor.ppo_mini_batch_size": LEVELS,
        f"{part}.actor.optim.lr": 1e-2,
        f"{part}.actor.use_torch_compile": "false",
        f"{part}.actor.fsdp_config.use_torch_compile": "false",
        f"{part}.actor.fsdp_config.model_dtype": "fp32",
        f"+{part}.actor.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32}",
        "algorithm.adv_estimator": "grpo",
        "trainer.device": "cpu",
    }
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in settings.items()])


def check_batch(batch: Any, server: Server, version: int) -> None:
    """verl's padded batch is, token by token, what the server saw and said."""
    for row in range(len(batch)):
        held = {name: batch.batch[name][row] for name in _COMPARED}
        whole = held["input_ids"][held["attention_mask"].bool()].tolist()
        mask = held["response_mask"].bool()
        sampled, logprobs = held["responses"][mask].tolist(), held["rollout_log_probs"][mask].tolist()
        ids: list[int] = []
        told: list[float] = []
        for length in range(len(whole) + 1):
            if (answer := server.said.get(tuple(whole[:length]))) is not None:
                ids += answer[0]
                told += answer[1]
        assert sampled == ids, "verl's mask is 1 exactly where a token was sampled"
        assert np.allclose(logprobs, told, atol=1e-7)
    assert set(batch.non_tensor_batch["min_global_steps"]) == {version}
    assert set(batch.non_tensor_batch["max_global_steps"]) == {version}


async def train(place: Path) -> None:
    config = configuration(place)
    renderer = make_renderer(tiny_tokenizer(["turn 0123456789"], 300), "auto")
    policy = TorchPolicy(load_model(str(place / "model")), renderer)
    server = Server(policy)
    loops = AgentLoopWorker(config, server)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    worker.init_model()
    trainer = SimpleNamespace(config=config, actor_rollout_wg=worker, distillation_config=None)
    weights = {name: each.clone() for name, each in policy._model.state_dict().items()}
    for step in range(STEPS):
        levels = [LEVELS * step + level for level in range(LEVELS) for _ in range(MEMBERS)]
        rows = {
            "agent_name": ["rollwright"] * len(levels),
            "raw_prompt": [[{"role": "user", "content": "play"}]] * len(levels),
            "extra_info": [{"seed": level} for level in levels],
            "uid": [f"level {level}" for level in levels],
        }
        arrays = {name: np.fromiter(values, dtype=object) for name, values in rows.items()}
        batch = await loops.generate_sequences(DataProto.from_dict(non_tensors=arrays))
        check_batch(batch, server, version=step)
        batch.meta_info["temperature"] = config.actor_rollout_ref.rollout.temperature
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        before, _ = RayPPOTrainer._compute_old_log_prob(trainer, batch)
        gaps = (before.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).abs()
        gap = float(gaps[batch.batch["response_mask"].bool()].max())
        assert gap < SAME, f"verl's log-probabilities differ by {gap} from the sampled ones"
        batch = batch.union(before)
        batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
        batch = compute_advantage(batch, adv_estimator="grpo", num_repeat=MEMBERS, config=config.algorithm)
        done = RayPPOTrainer._update_actor(trainer, batch).meta_info["metrics"]
        norm = float(done["actor/grad_norm"][0])
        assert norm > 0
        parameters, _ = worker.actor.engine.get_per_tensor_param()
        tensors = {
            name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
            for name, each in parameters
        }
        assert any(not torch.equal(weights[name], each) for name, each in tensors.items()), (
            "nothing was learned"
        )
        weights |= tensors
        await policy.update_weights(Weights(version=step + 1, tensors=tensors), UpdateMode.DRAIN)
        tokens = int(batch.batch["response_mask"].sum())
        reward = float(batch.batch["rm_scores"].sum(-1).mean())
        print(
            f"step {step}: {len(batch)} episodes, {tokens} sampled tokens, reward {reward:.3f}, "
            f"largest difference of log-probabilities {gap:.1e}, gradient norm {norm:.3f}"
        )
    await policy.close()


def main() -> None:
    sys.modules.setdefault("__main__", sys.modules[__name__])
    set_platform(CpuPlatform())
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
    monkey_patch.is_trl_available = lambda: False  # it looks for a class that TRL 1.16 does not have
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        asyncio.run(train(Path(folder)))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
