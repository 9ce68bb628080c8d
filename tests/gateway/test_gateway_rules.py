"""Which calls are trained, who answers them, and why a conversation starts anew."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from rollwright.engines.base import ToolSpec
from rollwright.gateway import CaptureRules
from rollwright.gateway.conversations import Conversations, RewriteCause
from rollwright.teams.policies import TeamPolicies
from rollwright.trajectory import Message, check, full_prompt, samples

TITLE = "You make a short title for the conversation."


def rules(*entries: dict[str, Any]) -> CaptureRules:
    return CaptureRules.model_validate({"calls": list(entries)})


async def ask(client: Any, text: str, system: str | None = None, model: str = "main") -> str:
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    answer = await client.chat.completions.create(model=model, messages=messages)
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize(
    "rule",
    [{"model": "*-mini"}, {"agent": "titles"}, {"system": "short title"}],
    ids=["model", "agent", "system"],
)
async def test_calls_that_a_rule_names_are_answered_and_not_trained(
    rule: dict[str, Any], clients: Any, gateway: Any, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1", rules=rules(rule))
    async with clients.openai(played.access) as client:
        await ask(client, "work")
        titles = client.with_options(default_headers={"x-rollwright-agent": "titles"})
        await ask(titles, "title?", TITLE, "gpt-mini")
    turns = check(played.trajectory).turns
    assert [played.trajectory.untrained(turn) for turn in turns] == [None, "gateway.calls"]
    assert played.trajectory.never_trained() == ["left out by gateway.calls"]
    assert played.trajectory.metrics == {"gateway_left_out": 1.0}


async def test_the_first_rule_that_matches_decides(clients: Any, gateway: Any, engine: Any) -> None:
    only = rules({"model": "policy", "train": True}, {"model": "*"})
    played = clients.rollout(gateway, engine, "ro-1", rules=only)
    async with clients.openai(played.access) as client:
        await ask(client, "work", model="policy")
        await ask(client, "title", model="gpt-mini")
    assert [turn.filtered for turn in played.trajectory.turns] == [None, "gateway.calls"]


async def test_another_policy_can_answer_and_its_text_never_becomes_a_prompt_of_the_runs_own(
    clients: Any, gateway: Any, engine: Any
) -> None:
    other = clients.scripted({"say": "A title."})
    policies = TeamPolicies(engine, by_name={"small": other})
    named = rules({"model": "small", "policy": "small"})
    played = clients.rollout(gateway, policies, "ro-1", rules=named)
    async with clients.openai(played.access) as client:
        said = await ask(client, "title?", TITLE, "small")
        history: list[Any] = [
            {"role": "system", "content": TITLE},
            {"role": "user", "content": "title?"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "and now?"},
        ]
        await client.chat.completions.create(model="main", messages=history)
        await client.chat.completions.create(model="small", messages=history)
    turns = check(played.trajectory).turns
    assert said == "A title."
    assert (len(other.made), len(engine.made)) == (2, 1)
    assert [turn.extends for turn in turns] == [None, None, 0]
    assert [turn.filtered for turn in turns] == ["gateway.calls", None, "gateway.calls"]
    assert full_prompt(turns, 1) == engine.made[0][0].ids


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"train": True}, "names no call"),
        ({"system": "("}, "not a regular expression"),
        ({"model": "m", "policy": "small", "train": True}, "its own policy alone"),
        ({"modle": "m"}, "modle"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rule: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        rules(rule)


async def test_eight_subagents_at_once_are_eight_sequences_with_every_token_in_the_loss_once(
    clients: Any, gateway: Any
) -> None:
    engine = clients.engine(tokens_per_second=3000.0)
    played = clients.rollout(gateway, engine, "ro-1")
    async with clients.openai(played.access) as client:

        async def subagent(number: int) -> None:
            messages: list[Any] = [{"role": "system", "content": f"You are helper {number % 2}."}]
            for turn in range(3):
                messages.append({"role": "user", "content": f"part {number}, step {turn}"})
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message)

        await ask(client, "plan")
        await asyncio.gather(*map(subagent, range(8)))
    trajectory = check(played.trajectory)
    roots = [turn for turn in trajectory.turns if turn.extends is None]
    rows = samples(trajectory)
    assert len(roots) == len(rows) == 9  # the main agent's, and one for each subagent
    trained = sorted(
        tuple(
            id
            for id, mask in zip(
                row.token_ids[span.start : span.stop], row.mask[span.start : span.stop], strict=True
            )
            if mask
        )
        for row in rows
        for span in row.spans
    )
    assert trained == sorted(tuple(made.sampled_ids) for _, _, made in engine.made)
    assert len(engine.made) == 25


def conversation(*said: tuple[str, str]) -> list[Message]:
    return [Message(role, text) for role, text in said]


@pytest.mark.parametrize(
    ("said", "tools", "cause"),
    [
        ([("system", "s"), ("user", "1"), ("assistant", "a"), ("user", "2")], "other", RewriteCause.TOOLS),
        ([("system", "t"), ("user", "1"), ("assistant", "a"), ("user", "2")], "tool", RewriteCause.SYSTEM),
        (
            [("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b")],
            "tool",
            RewriteCause.DROPPED,
        ),
        ([("system", "s"), ("user", "2"), ("assistant", "b"), ("user", "3")], "tool", RewriteCause.DROPPED),
        ([("system", "s"), ("user", "1"), ("assistant", "A"), ("user", "2")], "tool", RewriteCause.ANSWER),
        ([("system", "s"), ("user", "1!"), ("assistant", "a"), ("user", "2")], "tool", RewriteCause.MESSAGE),
        (
            [("system", "s"), ("user", "summary"), ("assistant", "b"), ("user", "3")],
            "tool",
            RewriteCause.MESSAGE,
        ),
    ],
)
def test_a_rewritten_conversation_is_put_down_to_its_cause(
    said: list[tuple[str, str]], tools: str, cause: RewriteCause
) -> None:
    known, own = Conversations(), [ToolSpec("tool")]
    first = conversation(("system", "s"), ("user", "1"))
    known.add(first, own, Message("assistant", "a"), 0)
    second = [*first, Message("assistant", "a"), Message("user", "2")]
    known.add(second, own, Message("assistant", "b"), 1)
    asked = [ToolSpec(tools)]
    assert known.find(conversation(*said), asked) is None
    assert known.explain(conversation(*said), asked) is cause


async def test_rewrites_are_counted_by_cause(clients: Any, played: Any) -> None:
    async with clients.openai(played.access) as client:
        said = await ask(client, "one", "system")
        for system, answer in (("other", said), ("system", "invented")):
            history: list[Any] = [
                {"role": "system", "content": system},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "two"},
            ]
            await client.chat.completions.create(model="m", messages=history)
    assert played.trajectory.metrics == {
        "gateway_rewritten": 2.0,
        "gateway_rewritten_system": 1.0,
        "gateway_rewritten_answer": 1.0,
    }
