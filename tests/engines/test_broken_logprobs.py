"""Numbers that are no ids or no log-probabilities end the attempt at the engine's boundary, and reach no trajectory."""

import math
from typing import Any

import pytest

from rollwright.agents import EpisodeFailure, Session
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.engines.partial import PartialCompletion, check_piece
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.errors import FormatError
from rollwright.trajectory import (
    Boundary,
    FinishReason,
    Message,
    Trajectory,
    VersionRun,
    floats,
    token_ids,
)

ASKED = PartialCompletion(token_ids([1]), Sampling(max_tokens=8), vocabulary_size=1000)


@pytest.mark.parametrize("value", [-1e39, -1e308, -math.inf, math.inf, math.nan, 0.01, 1e39, None])
def test_an_engines_answer_with_a_number_that_is_no_logprob_is_broken(value: float | None) -> None:
    with pytest.raises(FormatError, match="is not the log-probability of token 1"):
        check_piece(ASKED, [5, 6], [-0.5, value], FinishReason.STOP)


@pytest.mark.parametrize("value", [-3.4028234663852886e38, -9999.0, 0.0, 1e-4])
def test_what_is_kept_is_finite_and_not_above_zero(value: float) -> None:
    piece = check_piece(ASKED, [5], [value], FinishReason.STOP)
    assert math.isfinite(piece.logprobs[0])
    assert piece.logprobs[0] <= 0


@pytest.mark.parametrize("id", [-1, 1000, 2**31, 2**63, 10**30])
def test_an_id_outside_the_vocabulary_is_broken(id: int) -> None:
    with pytest.raises(FormatError, match="not in the vocabulary"):
        check_piece(ASKED, [id], [-0.5], FinishReason.STOP)


class Broken:
    """A policy of one's own that answers with whatever it is given."""

    renderer = BytesRenderer()
    version = 0
    pressure = 0

    def __init__(self, made: Generation) -> None:
        self._made = made

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        return self._made

    async def close(self) -> None: ...


def generation(ids: Any, logprobs: Any, stamped: int | None = None, **more: Any) -> Generation:
    made = token_ids(ids)
    return Generation("x", made, floats(logprobs), (VersionRun(0, stamped or len(made)),), **more)


async def generate(made: Generation) -> Trajectory:
    trajectory = Trajectory("ro", "at", "g", "t", 0)
    session = Session(trajectory, Broken(made), Sampling(), ("k",), sequence_length=99, generate_timeout=9)
    await session.generate([Message("user", "go")])
    return trajectory


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (generation([1, 2], [-1.0, math.nan]), "a log-probability that is not finite"),
        (generation([1, 2], [-1.0, -1e39]), "a log-probability that is not finite"),
        (generation([1, 2], [math.inf, -math.inf]), "a log-probability that is not finite"),
        (generation([1, 2], [-1.0, 0.5]), "0.5 is not a log-probability: it is above 0"),
        (generation([1, 2], [-1.0]), "2 token ids but 1 log-probabilities"),
        (generation([1, -2], [-1.0, -1.0]), "-2 is not a token id"),
        (generation([1, 2], [-1.0, -1.0], stamped=3), "version stamps that do not cover its 2 tokens"),
    ],
)
async def test_a_policy_of_ones_own_is_held_to_the_same(made: Generation, why: str) -> None:
    with pytest.raises(EpisodeFailure, match=f"engine: EngineError: Broken: {why}") as caught:
        await generate(made)
    assert caught.value.record.boundary is Boundary.ENGINE


async def test_text_without_ids_needs_no_logprobs() -> None:
    trajectory = await generate(generation([], [], exact=False))
    assert trajectory.turns[0].text == "x"
