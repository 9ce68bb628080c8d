"""A node gives others nothing that it would not train on itself."""

import msgspec
import pytest

from rollwright.errors import RollwrightError
from rollwright.swarm.content import shared_member
from rollwright.trajectory import UNDELIVERED, SamplingParams, Trajectory, Turn, VersionRun, floats, token_ids

TURN = Turn(
    id=0,
    after=None,
    extends=None,
    prompt_ids=token_ids([1]),
    sampled_ids=token_ids([2, 3]),
    logprobs=floats([-0.5, -0.5]),
    versions=(VersionRun(0, 2),),
    text="ab",
)


@pytest.mark.parametrize(
    ("own", "turn", "why"),
    [
        (SamplingParams(temperature=0.0), TURN, "sampled at temperature 0"),
        (SamplingParams(), msgspec.structs.replace(TURN, sampling=SamplingParams(top_p=0.5)), "top_p 0.5"),
        (SamplingParams(), msgspec.structs.replace(TURN, filtered=UNDELIVERED), "no answer reached"),
    ],
)
def test_what_would_not_be_trained_here_is_not_shared(own: SamplingParams, turn: Turn, why: str) -> None:
    played = Trajectory("ro", "at", "g", "t", 0, turns=[turn], sampling=own)
    with pytest.raises(RollwrightError, match=why):
        shared_member(played)
    shared_member(Trajectory("ro", "at", "g", "t", 0, turns=[TURN], sampling=SamplingParams(temperature=0.8)))
