"""Episodes played through verl's server interface come back as verl's agent loops return them, token by token."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollwright.agents import EpisodeFailure
from rollwright.config import RunConfig, build
from rollwright.engines.rendering.bytes import END, BytesRenderer
from rollwright.errors import ConfigError
from rollwright.rng import generator
from rollwright.rollout.episode import Episode, new_session, play_episode
from rollwright.run.build import SettingsTable, make_env
from rollwright.training.bridges import completion_of
from rollwright.training.bridges.verl import VerlPolicy, agent_loop_output
from rollwright.training.rows import NotTrainable
from rollwright.trajectory import SamplingParams, Trajectory

LAKE = {"name": "lake", "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]}}


@dataclass
class Answer:
    """Has the fields of verl's `TokenOutput`."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Server:
    """Answers any prompt with some bytes, and remembers what it was asked and what it said."""

    def __init__(self, answer: type = Answer, *, logprobs: bool = True) -> None:
        self.calls: list[tuple[list[int], dict[str, Any], list[int]]] = []
        self._answer = answer
        self._logprobs = logprobs

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        dice = generator("verl", len(self.calls))
        ids = [dice.randrange(97, 123) for _ in range(dice.randint(1, 5))] + [END]
        self.calls.append((prompt_ids, sampling_params, ids))
        return self._answer(
            token_ids=ids,
            log_probs=[-0.5 - each / 1000 for each in ids] if self._logprobs else None,
            extra_fields={"global_steps": 3},
        )


async def played(server: Server, config: RunConfig, params: dict[str, Any] | None = None) -> Trajectory:
    episode = Episode(tag="FrozenLake", seed=7, mode="train", group_id="g", group=0, member=0, run_seed=1)
    settings = SettingsTable(config)(episode)
    policy = VerlPolicy(server, BytesRenderer(), params or {"temperature": 0.7, "top_k": -1})
    env = make_env(settings)
    session = new_session(episode, policy, settings, env, rollout_id="r", attempt_id="a")
    return await play_episode(session, env, settings, policy, lambda: make_env(settings))


async def test_what_verl_gets_is_exactly_what_its_server_saw_and_said() -> None:
    server = Server()
    trajectory = await played(server, build(LAKE))
    output = agent_loop_output(
        completion_of(trajectory), prompt_length=10_000, response_length=10_000, seconds=1.0
    )
    last_prompt, _, last_answer = server.calls[-1]
    assert output["prompt_ids"] == server.calls[0][0]
    assert output["prompt_ids"] + output["response_ids"] == last_prompt + last_answer
    sampled = [each for each, own in zip(output["response_ids"], output["response_mask"], strict=True) if own]
    assert sampled == [each for _, _, answer in server.calls for each in answer]
    told = [
        each for each, own in zip(output["response_logprobs"], output["response_mask"], strict=True) if own
    ]
    assert told == pytest.approx([-0.5 - each / 1000 for each in sampled])
    assert output["num_turns"] == 2 * len(server.calls)
    assert output["reward_score"] == trajectory.score
    assert output["extra_fields"]["min_global_steps"] == output["extra_fields"]["max_global_steps"] == 3
    assert all(params["temperature"] == 0.7 and params["logprobs"] for _, params, _ in server.calls)


async def test_turns_record_what_verl_sampled_with_and_verl_answers_for_it() -> None:
    server = Server()
    trajectory = await played(server, build(LAKE))
    assert {turn.sampling for turn in trajectory.turns} == {SamplingParams(temperature=0.7)}
    greedy = await played(
        Server(), build(LAKE), {"temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.0}
    )
    assert greedy.not_trainable == "sampled at temperature 0"
    own = completion_of(greedy, own_sampling=True)  # a validation of verl's, which verl does not train on
    assert sum(own.mask) == greedy.sampled_tokens


async def test_a_server_without_logprobs_is_refused() -> None:
    with pytest.raises(EpisodeFailure, match="calculate_log_probs"):
        await played(Server(logprobs=False), build(LAKE))


async def test_what_does_not_fit_is_refused_and_never_cut_off() -> None:
    completion = completion_of(await played(Server(), build(LAKE)))
    with pytest.raises(ConfigError, match=r"data.max_prompt_length: 3 is too few"):
        agent_loop_output(completion, prompt_length=3, response_length=10_000, seconds=0.0)
    with pytest.raises(ConfigError, match=r"data.max_response_length: 3 is too few"):
        agent_loop_output(completion, prompt_length=10_000, response_length=3, seconds=0.0)


async def test_an_episode_of_several_token_sequences_is_refused() -> None:
    windowed = build({**LAKE, "agent": {"history": {"mode": "window", "length": 1}}})
    trajectory = await played(Server(), windowed)
    assert len(trajectory.turns) > 2
    with pytest.raises(NotTrainable, match="other trainers take one"):
        completion_of(trajectory)


@pytest.mark.engines
def test_the_agent_loop_runs_with_verls_own_classes(tmp_path: Path) -> None:
    loops = pytest.importorskip("verl.experimental.agent_loop.agent_loop", reason="verl is not installed")
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput

    from rollwright.models.tiny import tiny_tokenizer

    (tmp_path / "lake.yaml").write_text(
        "train_env_manager: {num_env_groups: 1, tags: [FrozenLake]}", encoding="utf-8"
    )
    trainer_config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"prompt_length": 4096, "response_length": 8192}}, "data": {}}
    )
    server = Server(TokenOutput)

    async def run() -> Any:
        loop = instantiate(
            {
                "_target_": "rollwright.run.verl_agent_loop.RollwrightAgentLoop",
                "config": str(tmp_path / "lake.yaml"),
            },
            trainer_config=loops.DictConfigWrap(config=trainer_config),
            server_manager=server,
            tokenizer=tiny_tokenizer(["left down right up"]),
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=loops.DictConfigWrap(trainer_config.data),
            tools=loops.ToolListWrap([]),
        )
        return await loop.run({"temperature": 1.0}, raw_prompt=[], extra_info={"seed": 7})

    output = asyncio.run(run())
    assert isinstance(output, loops.AgentLoopOutput)
    last_prompt, _, last_answer = server.calls[-1]
    assert output.prompt_ids + output.response_ids == last_prompt + last_answer
    assert output.as_dict()["rm_scores"][-1] == pytest.approx(output.reward_score)
