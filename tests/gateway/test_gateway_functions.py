"""Agent functions in workers: `session.base_url` and `session.api_key` belong to one episode, and end with it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest

from rollwright.config import build
from rollwright.rollout import Activity, Assignment, InflightLimit, RolloutContext
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.run.build import function_settings, make_env
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptedRollout, Rollout, RolloutConfig, RolloutStatus
from rollwright.trajectory import Trajectory, check

Play = Callable[..., Awaitable[list[Rollout]]]
CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}]}


class Workshop:
    """A store, an engine, and workers that play a function."""

    def __init__(self, engine: Any) -> None:
        self.store = MemoryStore()
        self.engine = engine
        self.activity = Activity()

    async def play(self, agent: Any, count: int = 1, max_attempts: int = 1, **limits: Any) -> list[Rollout]:
        """Enqueues `count` rollouts and plays them to their ends."""
        config = build({"val_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}, **limits})
        settings = function_settings(config, agent)

        async def playbook(claimed: AttemptedRollout) -> Assignment:
            return Assignment(settings, self.engine, agent)

        context = RolloutContext(self.store, playbook, make_env, InflightLimit(8), self.activity)
        worker = RolloutWorker(context, "worker-0", WorkerSettings(8, resources=None))
        rules = RolloutConfig(max_attempts=max_attempts)
        made = [await self.store.enqueue_rollout({"n": number}, config=rules) for number in range(count)]
        running = asyncio.create_task(worker.run())
        ended = await self.store.wait_for_rollouts([each.rollout_id for each in made], timeout=30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return ended

    async def trajectory(self, rollout: Rollout) -> Trajectory:
        kept = await self.store.get_trajectories([rollout.rollout_id])
        return check(Trajectory.from_bytes(kept[rollout.rollout_id]))


@pytest.fixture
async def workshop(engine: Any) -> AsyncIterator[Workshop]:
    made = Workshop(engine)
    yield made
    await made.store.close()


def client_of(session: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


async def test_concurrent_agents_are_recorded_each_in_its_own_trajectory(workshop: Workshop) -> None:
    accesses: dict[int, tuple[str, str]] = {}

    async def agent(task: dict[str, int], session: Any) -> float:
        accesses[task["n"]] = session.base_url, session.api_key
        messages: list[Any] = []
        async with client_of(session) as client:
            for turn in range(3):
                messages.append({"role": "user", "content": f"task {task['n']}, turn {turn}"})
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message)
        return float(task["n"])

    ended = await workshop.play(agent, 6)
    assert {each.status for each in ended} == {RolloutStatus.SUCCEEDED}
    assert len(set(accesses.values())) == 6
    made = {generation.sampled_ids.tobytes() for _, _, generation in workshop.engine.made}
    for rollout in ended:
        trajectory = await workshop.trajectory(rollout)
        assert trajectory.reward == rollout.input["n"]
        assert [turn.extends for turn in trajectory.turns] == [None, 0, 1]
        assert {turn.sampled_ids.tobytes() for turn in trajectory.turns} <= made
    assert workshop.activity.turns == 18


async def test_a_plain_function_uses_the_plain_client(workshop: Workshop) -> None:
    def agent(task: Any, session: Any) -> float:
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            client.chat.completions.create(**CHAT)
        return 2.0

    (rollout,) = await workshop.play(agent)
    trajectory = await workshop.trajectory(rollout)
    assert (trajectory.reward, len(trajectory.turns)) == (2.0, 1)


async def test_the_key_is_worth_nothing_once_the_episode_is_over(workshop: Workshop) -> None:
    kept: list[openai.AsyncOpenAI] = []
    refused: list[int] = []

    async def agent(task: dict[str, int], session: Any) -> float:
        if not kept:
            kept.append(client_of(session))
            await kept[0].chat.completions.create(**CHAT)
            return 1.0
        while not workshop.activity.finished:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.APIStatusError) as late:
            await kept[0].chat.completions.create(**CHAT)
        refused.append(late.value.status_code)
        await kept[0].close()
        return 0.0

    ended = await workshop.play(agent, 2)
    assert refused == [410]
    assert sorted([len((await workshop.trajectory(each)).turns) for each in ended]) == [0, 1]


async def test_the_reward_can_come_by_http(workshop: Workshop) -> None:
    async def agent(task: Any, session: Any) -> None:
        import aiohttp

        async with client_of(session) as client:
            await client.chat.completions.create(**CHAT)
        url = f"{session.base_url.removesuffix('/v1')}/end"
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={"reward": 0.75, "success": True}, headers=headers) as answer,
        ):
            assert answer.status == 200

    (rollout,) = await workshop.play(agent)
    trajectory = await workshop.trajectory(rollout)
    assert (trajectory.reward, trajectory.success) == (0.75, True)


@pytest.mark.parametrize("swallows", [False, True])
async def test_an_engines_failure_is_the_engines_whatever_the_agent_makes_of_it(
    swallows: bool, clients: Any
) -> None:
    workshop = Workshop(clients.engine(failure_rate=1.0))

    async def agent(task: Any, session: Any) -> float:
        try:
            async with client_of(session) as client:
                await client.with_options(max_retries=0).chat.completions.create(**CHAT)
        except openai.APIStatusError:
            if not swallows:
                raise
        return 0.0

    (rollout,) = await workshop.play(agent)
    assert rollout.status is RolloutStatus.FAILED
    assert dict(workshop.activity.failures) == {"engine: EngineError": 1}
    await workshop.store.close()


async def test_the_agents_own_failure_is_the_agents(workshop: Workshop) -> None:
    async def agent(task: Any, session: Any) -> float:
        async with client_of(session) as client:
            await client.chat.completions.create(**CHAT)
        raise ValueError("no")

    (rollout,) = await workshop.play(agent)
    assert rollout.status is RolloutStatus.FAILED
    assert dict(workshop.activity.failures) == {"agent: ValueError": 1}


async def test_running_out_of_room_ends_the_episode_and_counts(workshop: Workshop) -> None:
    async def agent(task: Any, session: Any) -> float:
        messages: list[Any] = []
        async with client_of(session) as client:
            while True:
                messages.append({"role": "user", "content": "more"})
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message)

    (rollout,) = await workshop.play(agent, sequence_length=300)
    trajectory = await workshop.trajectory(rollout)
    assert (trajectory.stop, trajectory.reward) == ("max_length", 0.0)
    assert len(trajectory.turns) > 1


async def test_another_attempt_gets_the_recorded_answers(workshop: Workshop) -> None:
    texts: list[list[str]] = []

    async def agent(task: Any, session: Any) -> float:
        messages: list[Any] = []
        texts.append([])
        async with client_of(session) as client:
            for turn in range(4):
                messages.append({"role": "user", "content": f"turn {turn}"})
                answer = await client.chat.completions.create(model="m", messages=messages)
                texts[-1].append(answer.choices[0].message.content)
                messages.append(answer.choices[0].message)
                if turn == 2 and len(texts) == 1:
                    raise ValueError("the first attempt breaks")
        return 1.0

    (rollout,) = await workshop.play(agent, max_attempts=2)
    assert rollout.status is RolloutStatus.SUCCEEDED
    assert texts[1][:3] == texts[0]
    assert len(workshop.engine.made) == 4
    assert workshop.activity.replayed_turns == 3
    trajectory = await workshop.trajectory(rollout)
    assert [turn.extends for turn in trajectory.turns] == [None, 0, 1, 2]


async def test_an_agent_that_goes_another_way_in_its_next_attempt_starts_anew(workshop: Workshop) -> None:
    calls: list[str] = []

    async def agent(task: Any, session: Any) -> float:
        async with client_of(session) as client:
            say = "one" if not calls else "two"
            calls.append(say)
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": say}])
            if len(calls) == 1:
                raise ValueError("the first attempt breaks")
        return 1.0

    (rollout,) = await workshop.play(agent, max_attempts=2)
    assert rollout.status is RolloutStatus.SUCCEEDED
    assert calls == ["one", "two", "two"]
    assert workshop.activity.replays_differed == 1
    assert len((await workshop.trajectory(rollout)).turns) == 1


async def test_a_function_that_took_an_address_and_made_no_call_has_failed(workshop: Workshop) -> None:
    async def agent(task: Any, session: Any) -> float:
        assert session.base_url
        return 1.0

    (ended,) = await workshop.play(agent)
    assert ended.status is RolloutStatus.FAILED
    allowed = {"gateway": {"allow_no_calls": True}}
    (ended,) = await workshop.play(agent, **allowed)
    assert ended.status is RolloutStatus.SUCCEEDED


async def test_a_functions_agent_samples_as_the_run_says(workshop: Workshop) -> None:
    async def agent(task: Any, session: Any) -> float:
        async with client_of(session) as client:
            await client.chat.completions.create(**CHAT, temperature=0)
        return 1.0

    (ended,) = await workshop.play(agent, sampling={"temperature": 0.7})
    trajectory = await workshop.trajectory(ended)
    assert trajectory.metrics == {"gateway_sampling_ignored": 1.0}
    assert trajectory.sampling is not None
    assert trajectory.sampling.temperature == 0.7
    (ended,) = await workshop.play(
        agent, sampling={"temperature": 0.7}, gateway={"client_sampling": "honoured"}
    )
    assert (await workshop.trajectory(ended)).not_trainable == "sampled at temperature 0"
