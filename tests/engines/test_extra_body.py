"""A user's further request fields cannot shape what is trained behind the trainer's back."""

from typing import Any

import pytest

from rollwright.agents import Session
from rollwright.engines import Sampling
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.openai_api import sent, shaping
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.settings import OpenAIPolicyConfig
from rollwright.engines.vllm import VllmDialect, VllmPolicy
from rollwright.errors import ConfigError
from rollwright.simulation.server_process import simulated_server
from rollwright.trajectory import Message, SamplingParams, Trajectory


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, None),
        ({"user": "me", "priority": 3, "seed": 1}, None),
        ({"top_k": 20}, SamplingParams(0.7, top_k=20)),
        ({"top_k": -1}, SamplingParams(0.7)),
        ({"temperature": 0}, SamplingParams(0.0)),
        ({"min_p": 0.1, "user": "me"}, SamplingParams(0.7, min_p=0.1)),
        ({"logit_bias": {"5": 9}}, SamplingParams(0.7, other=("logit_bias",))),
        ({"guided_json": {}, "bad_words": []}, SamplingParams(0.7, other=("bad_words", "guided_json"))),
        ({"a_field_of_next_year": 1}, SamplingParams(0.7, other=("a_field_of_next_year",))),
    ],
)
def test_what_a_field_does_to_the_distribution_is_known(
    extra: dict[str, Any], told: SamplingParams | None
) -> None:
    assert sent(Sampling(temperature=0.7), shaping(extra)) == told


@pytest.mark.parametrize("extra", [{"temperature": "hot"}, {"top_k": 1.5}, {"min_p": None}])
def test_a_value_of_a_wrong_kind_is_refused_before_the_start(extra: dict[str, Any]) -> None:
    for make in (
        lambda: VllmDialect("m", extra),
        lambda: OpenAIPolicy(
            OpenAIPolicyConfig(base_url="http://127.0.0.1:9/v1", model="m", extra_body=extra)
        ),
    ):
        with pytest.raises(ConfigError, match="extra_body: Expected"):
            make()


def test_raw_logprobs_are_of_the_models_own_distribution_alone() -> None:
    dialect = VllmDialect("m", {"min_p": 0.1})
    drawn = dialect.sent(Sampling())
    assert drawn is not None
    assert not dialect.faithful(drawn, processed=False)
    assert dialect.faithful(drawn, processed=True)


async def test_turns_of_an_engine_with_further_fields_say_so_and_are_not_trained() -> None:
    async with simulated_server() as server:
        for extra, why in (({"min_p": 0.1}, "sampled with min_p 0.1"), ({"user": "me"}, None)):
            policy = VllmPolicy(server.base_url, "simulated", BytesRenderer(), extra_body=extra)
            trajectory = Trajectory("ro", "at", "g", "t", 0)
            session = Session(
                trajectory, policy, Sampling(), ("k",), sequence_length=999, generate_timeout=30
            )
            await session.generate([Message("user", "go")])
            assert trajectory.not_trainable == why
            can = await policy.probe()
            assert can.trainable is (why is None)
            if why is not None:
                assert can.missing.startswith(f"extra_body changes the distribution ({why})")
            await policy.close()
