"""A real vLLM server: exact ids, log-probabilities of the model that made them, new weights, a killed engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from rollwright.agents import Session
from rollwright.config import build
from rollwright.engines.base import Generation, Prompt, Renderer, Sampling, UpdateMode, Weights
from rollwright.engines.http_policy import HttpEnginePolicy
from rollwright.engines.partial import PartialCompletion, Piece
from rollwright.engines.settings import EngineServersConfig
from rollwright.engines.vllm import VllmDialect
from rollwright.run.run import Run
from rollwright.trajectory import Message, Trajectory, expand_versions, full_prompt, samples

if TYPE_CHECKING:
    from vllm_server import VllmServer

pytestmark = pytest.mark.engines

PRECISION = 1e-3
"""Of vLLM in float32 against a forward pass of transformers."""

VOCABULARY = 49152
Scorer = Callable[[Sequence[int], Sequence[int], float], list[float]]


class Listening(VllmDialect):
    """Remembers which prompts the engine says it saw."""

    def response(self, body: bytes, partial: PartialCompletion) -> Piece:
        SEEN.append(msgspec.json.decode(body)["choices"][0]["prompt_token_ids"])
        return super().response(body, partial)


SEEN: list[list[int]] = []


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> Renderer:
    from rollwright.engines.rendering import make_renderer
    from rollwright.engines.rendering.tokenizer import load_tokenizer

    return make_renderer(load_tokenizer(model_folder))


def scorer(folder: Path) -> Scorer:
    """Log-probabilities of given tokens behind a prompt, by one forward pass of the weights in a folder."""
    import torch

    from rollwright.models import load_model

    model = load_model(folder)
    model.eval()

    def score(prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
        scored = torch.log_softmax(logits / temperature, dim=-1)
        return [float(scored[place, token]) for place, token in enumerate(sampled)]

    return score


@pytest.fixture(scope="session")
def scorers(model_folder: Path, perturbed_folder: Path) -> list[Scorer]:
    """By parity of the version: the first weights, the perturbed ones."""
    return [scorer(model_folder), scorer(perturbed_folder)]


@asynccontextmanager
async def opened(
    server: "VllmServer", renderer: Renderer, extra_body: dict[str, Any] | None = None
) -> AsyncIterator[HttpEnginePolicy]:
    dialect = Listening("smollm2", extra_body or {})
    policy = HttpEnginePolicy(
        EngineServersConfig(base_urls=[server.url], vocabulary_size=VOCABULARY), dialect, renderer
    )
    SEEN.clear()
    try:
        yield policy
    finally:
        await policy.close()


def assert_scored(prompt: Sequence[int], made: Any, scorers: list[Scorer], temperature: float = 1.0) -> None:
    """Every token's log-probability is what the weights of its version give."""
    stamps = expand_versions(made.versions)
    assert len(stamps) == len(made.sampled_ids) == len(made.logprobs) > 0
    expected = {
        parity: scorers[parity](prompt, made.sampled_ids.tolist(), temperature)
        for parity in {v % 2 for v in stamps}
    }
    for place, (version, logprob) in enumerate(zip(stamps, made.logprobs, strict=True)):
        assert logprob == pytest.approx(expected[version % 2][place], abs=PRECISION)


async def test_a_probe_finds_everything(server: "VllmServer", renderer: Renderer) -> None:
    async with opened(server, renderer) as policy:
        found = await policy.probe()
    assert found.engine.startswith("vLLM 0.")
    assert found.trainable
    assert found.missing == ""
    assert found.update_modes == tuple(UpdateMode)


async def test_a_chain_of_8_turns_is_one_unbroken_sequence_for_us_and_for_the_engine(
    server: "VllmServer", renderer: Renderer, scorers: list[Scorer]
) -> None:
    trajectory = Trajectory("rollout", "attempt", "group", "chat", seed=0)
    async with opened(server, renderer) as policy:
        session = Session(
            trajectory, policy, Sampling(max_tokens=12), ("run",), sequence_length=2000, generate_timeout=120
        )
        turn = await session.generate([Message("system", "Be brief."), Message("user", "Name a river.")])
        for number in range(7):
            turn = await session.generate(
                [Message("user", f"Another one, please ({number}).")], continues=turn
            )
    turns = trajectory.turns
    assert len(turns) == len(SEEN) == 8
    before: list[int] = []
    for place, turn in enumerate(turns):
        assert turn.exact
        assert SEEN[place] == [*before, *turn.prompt_ids] == full_prompt(turns, place).tolist()
        before = [*SEEN[place], *turn.sampled_ids]
    (sample,) = samples(trajectory)
    assert sample.token_ids.tolist() == before
    assert sum(sample.mask) == sum(len(turn.sampled_ids) for turn in turns)
    for place, turn in enumerate(turns):
        assert_scored(SEEN[place], turn, scorers)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_agree_with_a_forward_pass_and_the_stop_token_is_part_of_the_sample(
    server: "VllmServer", renderer: Renderer, scorers: list[Scorer], temperature: float
) -> None:
    ids = renderer.open([Message("user", "Say hi.")])
    async with opened(server, renderer) as policy:
        sampling = Sampling(temperature=temperature, max_tokens=60)
        made = await asyncio.gather(
            *(policy.generate(Prompt(f"e{place}", ("hi", place), (), ids), sampling) for place in range(6))
        )
        again = await policy.generate(Prompt("e0", ("hi", 0), (), ids), sampling)
    assert again.sampled_ids == made[0].sampled_ids
    assert any(each.sampled_ids[-1] in renderer.stop_ids for each in made)
    for each in made:
        assert each.exact
        assert (each.finish == "stop") == (each.sampled_ids[-1] in renderer.stop_ids)
        assert_scored(ids.tolist(), each, scorers, temperature)


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_new_weights_while_calls_run_and_every_token_is_of_the_weights_it_is_stamped_with(
    server: "VllmServer",
    renderer: Renderer,
    scorers: list[Scorer],
    model_folder: Path,
    perturbed_folder: Path,
    mode: UpdateMode,
) -> None:
    ids = renderer.open([Message("user", "Count to one hundred.")])
    async with opened(server, Endless(renderer), extra_body={"ignore_eos": True}) as policy:
        sampling = Sampling(max_tokens=60)
        # The first call of a new server takes seconds; those that follow are under way when the weights change.
        await policy.generate(Prompt("first", ("first",), (), ids), Sampling(max_tokens=1))
        calls = [
            asyncio.create_task(policy.generate(Prompt(f"e{place}", ("count", place), (), ids), sampling))
            for place in range(3)
        ]
        await asyncio.sleep(2)
        await policy.update_weights(Weights(1, perturbed_folder), mode)
        made: list[Generation] = await asyncio.gather(*calls)
        later = await policy.generate(Prompt("later", ("later",), (), ids), sampling)
        await policy.update_weights(Weights(2, model_folder), UpdateMode.DRAIN)
        restored = await policy.generate(Prompt("restored", ("restored",), (), ids), sampling)
    expected = {UpdateMode.DRAIN: {0}, UpdateMode.ABORT_AND_RESUME: {0, 1}, UpdateMode.RESTART_TURN: {1}}
    for each in made:
        assert set(expand_versions(each.versions)) == expected[mode]
    assert (set(expand_versions(later.versions)), set(expand_versions(restored.versions))) == ({1}, {2})
    for each in (*made, later, restored):
        assert len(each.sampled_ids) == 60
        assert_scored(ids.tolist(), each, scorers)


class Endless:
    """The model's renderer, but an engine does not stop by itself."""

    stop_ids = ()

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


async def test_an_engine_killed_mid_run_comes_back_with_the_present_weights_and_the_run_finishes(
    server: "VllmServer", renderer: Renderer, scorers: list[Scorer], perturbed_folder: Path
) -> None:
    config = build(
        {
            "name": "test",
            "sampling": {"temperature": 1.0},
            "async_generation_ratio": 4,
            "sequence_length": 1500,
            "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
            "custom_envs": {"FrozenLake": {"max_steps": 3, "max_tokens_per_step": 12}},
        }
    )
    async with opened(server, renderer) as policy, Run(config, policy=policy) as run:
        first = await run.get_batch()
        await policy.update_weights(Weights(1, perturbed_folder), UpdateMode.ABORT_AND_RESUME)
        server.kill()
        server.start()
        second = await run.get_batch()
        assert policy.counters.outages > 0
        assert not policy.counters.failures
    for trajectory in (*first.trajectories, *second.trajectories):
        assert trajectory.not_trainable is None
    stamps = set()
    for trajectory in second.trajectories:
        for place, turn in enumerate(trajectory.turns):
            assert_scored(full_prompt(trajectory.turns, place).tolist(), turn, scorers)
            stamps |= set(expand_versions(turn.versions))
    assert 1 in stamps
