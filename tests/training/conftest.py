"""Trajectories by their links and rewards, a small model, and rows whose log-probabilities are that model's own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from rollwright.rng import generator
from rollwright.training.rows import Row
from rollwright.trajectory import (
    Outcome,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 24


def _outcome(reward: float, penalty: float, observation: str) -> Outcome:
    return Outcome(observation=observation, reward=reward, penalty=penalty)


@pytest.fixture
def forest() -> Callable[..., Trajectory]:
    """`forest("r", [(after, reward), ...])`: a trajectory whose prompts extend the decision before."""

    def build(
        rollout: str,
        turns: Sequence[tuple[int | None, float]],
        *,
        penalties: Sequence[float] | None = None,
        agents: Sequence[str] | None = None,
        observations: Sequence[str] | None = None,
        counts: Sequence[int] | None = None,
        windowed: bool = False,
        group: str = "g",
        version: int = 0,
        **more: Any,
    ) -> Trajectory:
        dice = generator("tests", rollout)

        def draw(most: int) -> list[int]:
            return [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, most))]

        built = []
        for number, (after, reward) in enumerate(turns):
            sampled = token_ids(draw(4))
            built.append(
                Turn(
                    id=number,
                    after=after,
                    extends=None if windowed else after,
                    prompt_ids=token_ids(draw(6)),
                    sampled_ids=sampled,
                    logprobs=floats(-dice.random() - 0.5 for _ in sampled),
                    versions=(VersionRun(version, len(sampled)),),
                    agent=agents[number] if agents else "agent",
                    completion_tokens=len(sampled),
                    outcome=_outcome(
                        reward,
                        penalties[number] if penalties else 0.0,
                        observations[number] if observations else f"{rollout}-{number}",
                    ),
                    count=counts[number] if counts else 1,
                )
            )
        more = {"stop": StopReason.TERMINATED, "tag": "T", "seed": 1, "attempt_id": "a", **more}
        return Trajectory(rollout_id=rollout, group_id=group, turns=built, **more)

    return build


@pytest.fixture
def chain(forest: Callable[..., Trajectory]) -> Callable[..., Trajectory]:
    """`chain("r", [reward, ...])`: one decision after the other."""

    def build(rollout: str, rewards: Sequence[float], **more: Any) -> Trajectory:
        return forest(
            rollout, [(place - 1 if place else None, each) for place, each in enumerate(rewards)], **more
        )

    return build


@pytest.fixture
def model() -> "PreTrainedModel":
    import torch

    from rollwright.models.tiny import tiny_llama

    torch.set_num_threads(1)
    return tiny_llama(VOCABULARY, hidden_size=32, layers=2, initializer_range=0.3, seed=3)


@pytest.fixture
def scored() -> "Callable[..., list[Row]]":
    """The rows with a model's own log-probabilities, computed row by row over the whole vocabulary and sequence."""

    def score(rows: Sequence[Row], model: Any, temperature: float = 1.0) -> list[Row]:
        import torch

        found = []
        with torch.no_grad():
            for row in rows:
                ids = torch.tensor([list(row.token_ids)])
                every = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, dim=-1)
                own = [0.0, *(float(every[place, each]) for place, each in enumerate(ids[0, 1:].tolist()))]
                masked = floats(each if counts else 0.0 for each, counts in zip(own, row.mask, strict=True))
                found.append(msgspec.structs.replace(row, logprobs=masked))
        return found

    return score
