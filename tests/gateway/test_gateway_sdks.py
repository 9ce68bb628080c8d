"""Unmodified SDKs against the gateway: what is recorded is what the engine made, id for id."""

import asyncio
from typing import Any

import pytest

from rollwright.trajectory import check, full_prompt, samples


def assert_exact(played: Any, engine: Any) -> None:
    """Each prompt is its parent's prompt, what was sampled, and what is new; ids and log-probabilities are the engine's."""
    trajectory = check(played.trajectory)
    assert len(trajectory.turns) == len(engine.made)
    for turn, (prompt, _, made) in zip(trajectory.turns, engine.made, strict=True):
        assert turn.sampled_ids == made.sampled_ids
        assert turn.logprobs == made.logprobs
        assert turn.versions == made.versions
        assert full_prompt(trajectory.turns, turn.id) == prompt.ids


async def test_eight_chat_turns_are_one_sequence(clients: Any, played: Any, engine: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    async with clients.openai(played.access) as client:
        for number in range(8):
            messages.append({"role": "user", "content": f"question {number}"})
            answer = await client.chat.completions.create(model="m", messages=messages)
            assert answer.choices[0].finish_reason == "stop"
            assert answer.model == "m"
            messages.append(answer.choices[0].message)
    assert_exact(played, engine)
    assert [turn.extends for turn in played.trajectory.turns] == [None, *range(7)]
    assert [turn.after for turn in played.trajectory.turns] == [None, *range(7)]
    last = played.trajectory.turns[-1]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        last.prompt_tokens,
        last.completion_tokens,
    )


async def test_chat_streams_say_the_same_and_continue_each_other(
    clients: Any, played: Any, engine: Any
) -> None:
    messages: list[Any] = [{"role": "user", "content": "one"}]
    async with clients.openai(played.access) as client:
        for number in range(3):
            text, usage, finish = "", None, None
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
            assert (text, finish) == (played.trajectory.turns[number].text, "stop")
            assert usage is not None
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert_exact(played, engine)
    assert [turn.extends for turn in played.trajectory.turns] == [None, 0, 1]


async def test_responses_are_recorded_whether_the_client_keeps_the_history_or_not(
    clients: Any, played: Any, engine: Any
) -> None:
    async with clients.openai(played.access) as client:
        first = await client.responses.create(model="m", instructions="Be brief.", input="one")
        assert first.output_text == played.trajectory.turns[0].text
        named = await client.responses.create(
            model="m", instructions="Be brief.", input="two", previous_response_id=first.id
        )
        history: list[Any] = [{"role": "user", "content": "one"}]
        history += [item.to_dict() for item in first.output]
        history.append({"role": "user", "content": "two"})
        whole = await client.responses.create(model="m", instructions="Be brief.", input=history)
        without = await client.responses.create(model="m", input="three", previous_response_id=named.id)
    assert_exact(played, engine)
    turns = played.trajectory.turns
    assert [turn.extends for turn in turns] == [None, 0, 0, None]  # other instructions: another prompt
    assert turns[1].prompt_ids == turns[2].prompt_ids
    assert whole.status == without.status == "completed"


async def test_response_streams_say_the_same(clients: Any, played: Any, engine: Any) -> None:
    async with (
        clients.openai(played.access) as client,
        client.responses.stream(model="m", input="one") as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert final.output_text == played.trajectory.turns[0].text
    assert_exact(played, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages_continue_each_other(
    stream: bool, clients: Any, played: Any, engine: Any
) -> None:
    messages: list[Any] = []
    async with clients.anthropic(played.access) as client:
        for number in range(4):
            messages.append({"role": "user", "content": f"question {number}"})
            asked = {"model": "m", "max_tokens": 200, "system": "Be brief.", "messages": messages}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            assert answer.content[0].text == played.trajectory.turns[number].text
            assert answer.stop_reason == "end_turn"
            assert answer.usage.output_tokens == played.trajectory.turns[number].completion_tokens
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
    assert_exact(played, engine)
    assert [turn.extends for turn in played.trajectory.turns] == [None, 0, 1, 2]


async def test_a_client_that_rewrites_history_starts_a_new_sequence_and_is_counted(
    clients: Any, played: Any, engine: Any
) -> None:
    async with clients.openai(played.access) as client:

        async def ask(*messages: tuple[str, str]) -> str:
            given: Any = [{"role": role, "content": content} for role, content in messages]
            answer = await client.chat.completions.create(model="m", messages=given)
            return str(answer.choices[0].message.content)

        said = await ask(("user", "one"))
        await ask(("user", "one"), ("assistant", f"  {said}\n"), ("user", "two"))  # white space: the same
        await ask(("user", "one"), ("assistant", "something else"), ("user", "two"))
        await ask(("user", "summary"), ("assistant", said), ("user", "two"))
    assert_exact(played, engine)
    assert [turn.extends for turn in played.trajectory.turns] == [None, 0, None, None]
    assert played.trajectory.metrics["gateway_rewritten"] == 2


async def test_the_token_limit_and_stop_texts_are_the_calls_own_within_the_rollouts_bounds(
    clients: Any, played: Any, engine: Any
) -> None:
    async with clients.openai(played.access) as client:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
        cut = await client.chat.completions.create(**asked, max_tokens=3, stop="X")
        assert cut.choices[0].finish_reason == "length"
        await client.chat.completions.create(**asked, max_completion_tokens=1000)
        await client.chat.completions.create(**asked)
    samplings = [sampling for _, sampling, _ in engine.made]
    assert samplings[0].stop == ("X",)
    assert [each.max_tokens for each in samplings] == [3, 256, 256]
    assert samplings[2] == played.sampling


async def test_concurrent_equal_calls_are_different_samples_in_the_order_of_asking(
    clients: Any, gateway: Any
) -> None:
    engine = clients.engine(tokens_per_second=400.0)  # long ones finish later
    played = clients.rollout(gateway, engine, "ro-1")
    async with clients.openai(played.access) as client:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
        answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(6)))
    turns = check(played.trajectory).turns
    assert len(turns) == len({answer.id for answer in answers}) == 6
    assert [turn.after for turn in turns] == [None, *range(5)]
    assert {turn.sampled_ids.tobytes() for turn in turns} == {
        m.sampled_ids.tobytes() for _, _, m in engine.made
    }
    assert "gateway_replayed" not in played.trajectory.metrics


async def test_agents_are_told_apart_by_a_header(clients: Any, played: Any) -> None:
    async with clients.openai(played.access, default_headers={"x-rollwright-agent": "critic"}) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
    assert played.trajectory.turns[0].agent == "critic"


async def test_sub_agents_that_all_hear_the_same_are_sequences_of_their_own(
    clients: Any, gateway: Any
) -> None:
    """Eight of them in parallel, with the same prompts and the same answers."""
    played = clients.rollout(gateway, clients.scripted({"say": "Yes."}, {"say": "Still yes."}), "ro-1")

    async def converse(client: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "Is it?"}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "Sure?"}]

    async with clients.openai(played.access) as client:
        await asyncio.gather(*(converse(client) for _ in range(8)))
    trajectory = check(await played.close())
    rows = samples(trajectory)
    assert (len(trajectory.turns), len(rows)) == (24, 8)
    assert sum(sum(each.mask) for each in rows) == sum(len(turn.sampled_ids) for turn in trajectory.turns)
