"""What a client wishes about sampling changes nothing behind the trainer's back, and is never dropped in silence."""

import asyncio
from typing import Any

import openai
import pytest

from rollwright.agents import EpisodeFailure
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.gateway import CaptureRules, Gateway
from rollwright.training.advantages import GRPO
from rollwright.training.rows import build_rows, untrained_turns
from rollwright.trajectory import (
    FinishReason,
    SamplingParams,
    Trajectory,
    VersionRun,
    floats,
    samples,
    token_ids,
)

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
HONOURED = CaptureRules(client_sampling="honoured")


def trained_tokens(trajectory: Trajectory) -> int:
    return sum(sum(sample.mask) for sample in samples(trajectory))


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0},
        {"temperature": 0.3},
        {"top_p": 0.5},
        {"frequency_penalty": 1.0},
        {"presence_penalty": -1.0},
        {"logit_bias": {"65": 100}},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"min_p": 0.9}},
        {"extra_body": {"repetition_penalty": 2.0}},
    ],
    ids=str,
)
async def test_a_clients_own_sampling_is_ignored_and_counted(
    clients: Any, played: Any, engine: Any, wish: dict[str, Any]
) -> None:
    async with clients.openai(played.access) as client:
        await client.chat.completions.create(**CHAT, **wish)
        await client.chat.completions.create(**CHAT)
    assert [sampling for _, sampling, _ in engine.made] == [played.sampling] * 2
    trajectory = await played.close()
    assert trajectory.metrics == {"gateway_sampling_ignored": 1.0}
    assert trajectory.sampling == SamplingParams(temperature=1.0)
    assert [turn.sampling for turn in trajectory.turns] == [None, None]
    assert trained_tokens(trajectory) == trajectory.sampled_tokens


async def test_both_houses_sampling_is_ignored_and_counted(clients: Any, played: Any, engine: Any) -> None:
    async with clients.openai(played.access) as client:
        told = await client.responses.create(model="m", input="one", temperature=0, top_p=0.2)
        assert (told.temperature, told.top_p) == (1.0, 1.0)  # as it was sampled
    async with clients.anthropic(played.access) as client:
        await client.messages.create(**CHAT, max_tokens=99, extra_body={"temperature": 0, "top_k": 1})
        await client.messages.create(**CHAT, max_tokens=99)
    drawn = {(sampling.temperature, sampling.top_p) for _, sampling, _ in engine.made}
    assert drawn == {(1.0, 1.0)}
    assert played.trajectory.metrics == {"gateway_sampling_ignored": 2.0}


async def test_the_rollouts_own_values_are_no_wish(clients: Any, played: Any) -> None:
    async with clients.openai(played.access) as client:
        await client.chat.completions.create(
            **CHAT, temperature=1, top_p=1, presence_penalty=0, extra_body={"top_k": -1}
        )
    assert played.trajectory.metrics == {}


async def test_honoured_sampling_is_recorded_and_only_a_modelled_one_is_trained(
    clients: Any, gateway: Gateway, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1", rules=HONOURED)
    async with clients.openai(played.access) as client:
        for wish in ({}, {"temperature": 0}, {"temperature": 0.3}, {"top_p": 0.5}):
            await client.chat.completions.create(**CHAT, **wish)
        with pytest.raises(openai.BadRequestError, match="top_k is not supported"):
            await client.chat.completions.create(**CHAT, extra_body={"top_k": 5})
    trajectory = Trajectory.from_bytes((await played.close()).to_bytes())
    plain, greedy, cool, cut = trajectory.turns
    assert plain.sampling is None
    assert greedy.sampling == SamplingParams(temperature=0.0)
    assert cool.sampling == SamplingParams(temperature=0.3)
    assert cut.sampling == SamplingParams(top_p=0.5)
    assert trajectory.metrics["gateway_sampling_honoured"] == 3
    assert trained_tokens(trajectory) == len(plain.sampled_ids) + len(cool.sampled_ids)
    other = Trajectory("ro-2", "a", "group", "gateway", 0, turns=[plain], sampling=trajectory.sampling)
    other.episode_reward = 1.0
    groups = [[trajectory, other]]
    assert untrained_turns(groups) == {
        "turns: sampled at temperature 0": 1,
        "turns: sampled with top_p 0.5": 1,
    }
    heats = {
        round(heat, 3)
        for row in build_rows(groups, GRPO())
        for heat, trained in zip(row.temperatures or (), row.mask, strict=True)
        if trained
    }
    assert heats == {0.3, 1.0}


async def test_a_rollout_whose_every_turn_was_greedy_is_not_trainable(
    clients: Any, gateway: Gateway, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1", rules=HONOURED)
    async with clients.openai(played.access) as client:
        await client.chat.completions.create(**CHAT, temperature=0)
    assert (await played.close()).not_trainable == "sampled at temperature 0"


async def test_a_rollout_without_an_answered_call_is_a_failure(
    clients: Any, gateway: Gateway, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1")
    await played.close()
    played.recorder.raise_failure()
    with pytest.raises(EpisodeFailure, match="agent: no_call: no call of the agent was answered"):
        played.recorder.raise_unused()
    allowed = clients.rollout(gateway, engine, "ro-2", rules=CaptureRules(allow_no_calls=True))
    await allowed.close()
    allowed.recorder.raise_unused()


class Stopping:
    """Says the same words always, and stops where it is told to; its ids have the stop text."""

    renderer = BytesRenderer()
    version = 0
    pressure = 0

    def __init__(self, words: str, *, cuts: bool) -> None:
        self._words, self._cuts = words, cuts

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        ends = [place + len(each) for each in sampling.stop if (place := self._words.find(each)) >= 0]
        said = self._words[: min(ends)] if ends else self._words
        ids = token_ids(said.encode())
        text = said
        for each in sampling.stop:
            text = text.removesuffix(each) if self._cuts else text
        return Generation(
            text=text,
            sampled_ids=ids,
            logprobs=floats([-0.5] * len(ids)),
            versions=(VersionRun(0, len(ids)),),
            finish=FinishReason.STOP,
            completion_tokens=len(ids),
        )

    async def close(self) -> None: ...


async def test_an_empty_stop_text_stops_nothing(clients: Any, played: Any, engine: Any) -> None:
    async with clients.openai(played.access) as client:
        told = await client.chat.completions.create(**CHAT, stop=[""])
    assert told.choices[0].message.content == played.trajectory.turns[0].text != ""
    assert engine.made[0][1].stop == ()


@pytest.mark.parametrize("cuts", [True, False])
async def test_anthropics_stop_sequence_is_named_and_not_part_of_the_answer(
    clients: Any, gateway: Gateway, cuts: bool
) -> None:
    played = clients.rollout(gateway, Stopping("Think. END of it", cuts=cuts), "ro-1")
    asked: Any = {**CHAT, "max_tokens": 99, "stop_sequences": ["STOP", "END"]}
    async with clients.anthropic(played.access) as client:
        told = await client.messages.create(**asked)
        assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "END")
        assert told.content[0].text == "Think. "
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "END")
        plain = await client.messages.create(**CHAT, max_tokens=99)
        assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)
    assert played.trajectory.turns[0].sampled_ids == token_ids(b"Think. END")


async def test_an_engines_failure_is_reported_with_the_turns_that_there_are(
    clients: Any, gateway: Gateway
) -> None:
    class Failing(clients.engine):  # type: ignore[misc, name-defined]
        """The first call fails, after the second was answered."""

        async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
            if prompt.ids is not None and b"fail" in bytes(each % 256 for each in prompt.ids):
                while not self.made:
                    await asyncio.sleep(0)
                raise RuntimeError("it broke")
            return await super().generate(prompt, sampling)  # type: ignore[no-any-return]

    played = clients.rollout(gateway, Failing(), "ro-1")
    async with clients.openai(played.access, max_retries=0) as client:
        failing = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "fail"}],
            extra_headers={"x-rollwright-agent": "a"},
        )
        answered = client.chat.completions.create(**CHAT)
        outcomes = await asyncio.gather(answered, failing, return_exceptions=True)
    assert isinstance(outcomes[1], openai.APIStatusError)
    await played.close()
    with pytest.raises(EpisodeFailure) as caught:
        played.recorder.raise_failure()
    assert caught.value.record.turn == len(played.trajectory.turns) == 1
