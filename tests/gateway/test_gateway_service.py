"""The gateway as a service over a store: rollouts are opened, recorded and committed by HTTP, and outlive the gateway."""

import asyncio
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rollwright.engines.base import Sampling
from rollwright.gateway import Gateway
from rollwright.gateway.service import GatewayService, ServiceSettings
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import open_store
from rollwright.store.records import RolloutStatus
from rollwright.trajectory import Trajectory, check

ADMIN = "rw-admin-key"
CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}]}


async def post(url: str, key: str, body: Any, **headers: str) -> tuple[int, Any]:
    given = {"Authorization": f"Bearer {key}", **headers}
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=given) as answer:
        return answer.status, await answer.json()


async def talk(opened: dict[str, Any], turns: int, messages: list[Any] | None = None) -> list[str]:
    """An agent of `turns` turns; returns what it was told."""
    said: list[str] = []
    messages = [] if messages is None else messages
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"turn {turn}"})
            answer = await client.chat.completions.create(model="m", messages=messages)
            said.append(str(answer.choices[0].message.content))
            messages.append({"role": "assistant", "content": said[-1]})
    return said


class Service:
    def __init__(self, engine: Any, **settings: Any) -> None:
        self.store = MemoryStore()
        self.engine = engine
        self.gateway = Gateway()
        fast = {"heartbeat_interval": 0.05, "poll_interval": 0.2}
        given = ServiceSettings(Sampling(max_tokens=256), **{**fast, **settings})
        self.service = GatewayService(self.store, engine, self.gateway, given, admin_key=ADMIN)
        self.service.listen()
        self._running = asyncio.create_task(self.service.run())

    async def open(self, body: Any, **headers: str) -> Any:
        status, answer = await post(f"{self.gateway.url}/rollouts", ADMIN, body, **headers)
        assert status == 200, answer
        return answer

    async def end(self, opened: Any, key: str, **how: Any) -> tuple[int, Any]:
        return await post(f"{self.gateway.address(opened['rollout_id'])}/end", key, how)

    async def trajectory(self, rollout_id: str) -> Trajectory:
        kept = await self.store.get_trajectories([rollout_id])
        return check(Trajectory.from_bytes(kept[rollout_id]))

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.service.close()
        await self.store.close()


@asynccontextmanager
async def serving(engine: Any, **settings: Any) -> AsyncIterator[Service]:
    made = Service(engine, **settings)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def service(engine: Any) -> AsyncIterator[Service]:
    async with serving(engine) as made:
        yield made


async def test_a_rollout_is_opened_played_and_committed(service: Service) -> None:
    opened = await service.open({"input": {"question": 7}, "rollout_id": "ro-a", "mode": "train"})
    assert opened["input"] == {"question": 7}
    said = await talk(opened, 3)
    status, ended = await service.end(opened, opened["api_key"], reward=0.5, success=True)
    assert (status, ended) == (200, {"status": "succeeded", "turns": 3, "reward": 0.5, "metrics": {}})
    trajectory = await service.trajectory("ro-a")
    assert [turn.text for turn in trajectory.turns] == said
    assert (trajectory.reward, trajectory.success, trajectory.stop) == (0.5, True, "terminated")
    made = [generation.sampled_ids for _, _, generation in service.engine.made]
    assert [turn.sampled_ids for turn in trajectory.turns] == made
    rollout = await service.store.get_rollout_by_id("ro-a")
    assert rollout is not None
    assert (rollout.status, rollout.mode) == (RolloutStatus.SUCCEEDED, "train")


async def test_waiting_rollouts_are_taken_in_turn_or_by_name(service: Service) -> None:
    for name in ("ro-a", "ro-b", "ro-c"):
        await service.store.enqueue_rollout({"name": name}, rollout_id=name)
    assert (await service.open({"rollout_id": "ro-b"}))["input"] == {"name": "ro-b"}
    assert (await service.open({}))["rollout_id"] == "ro-a"
    assert (await service.open({}))["rollout_id"] == "ro-c"
    status, answer = await post(f"{service.gateway.url}/rollouts", ADMIN, {})
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_opening_needs_the_administrators_key(service: Service) -> None:
    opened = await service.open({"input": 1})
    for key in ("rw-wrong", opened["api_key"]):
        status, _ = await post(f"{service.gateway.url}/rollouts", key, {"input": 2})
        assert status == 401
    assert (await service.store.query_rollouts()).total == 1


async def test_asking_again_for_a_rollout_gives_the_same_key(service: Service) -> None:
    named = {"Idempotency-Key": "abc"}
    first = await service.open({"input": 1, "rollout_id": "ro-a"}, **named)
    assert await service.open({"input": 1, "rollout_id": "ro-a"}, **named) == first
    status, _ = await post(f"{service.gateway.url}/rollouts", ADMIN, {"rollout_id": "ro-a"})
    assert status in (400, 409)  # it is being played


async def test_a_rollout_is_ended_by_its_own_key_or_the_administrators_and_only_once(
    service: Service,
) -> None:
    one, other = [await service.open({"input": number}) for number in range(2)]
    await talk(one, 1)
    assert (await service.end(one, other["api_key"], reward=1.0))[0] == 401
    first = await service.end(one, ADMIN, reward=1.0)
    assert first[0] == 200
    assert await service.end(one, one["api_key"], reward=1.0) == first  # the answer was lost
    assert (await service.end(one, one["api_key"], reward=0.0))[0] == 410
    assert (await service.trajectory(one["rollout_id"])).reward == 1.0
    with pytest.raises(openai.APIStatusError, match="over"):
        await talk(one, 1)


@pytest.mark.parametrize("reward", ["NaN", "1e999", "1e30", '"1"', "null"])
async def test_a_reward_that_is_no_finite_number_ends_nothing(service: Service, reward: str) -> None:
    """It is refused, and the rollout stays open, so that it can be ended with a real one."""
    opened = await service.open({"input": 1})
    await talk(opened, 1)
    body = f'{{"reward": {reward}}}'.encode()
    url = f"{service.gateway.url}/rollouts/{opened['rollout_id']}/end"
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {opened['api_key']}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(urllib.request.urlopen, request)
    assert refused.value.code in (400, 422)
    refused.value.close()
    assert (await service.end(opened, opened["api_key"], reward=1.0))[0] == 200


async def test_the_key_of_an_earlier_attempt_ends_nothing(service: Service) -> None:
    opened = await service.open({"input": 1, "rollout_id": "ro-a"})
    await service.end(opened, opened["api_key"], error="broken")
    again = await service.open({"rollout_id": "ro-a"})
    await talk(again, 1)
    assert (await service.end(again, opened["api_key"], reward=9.0))[0] == 410
    assert (await service.end(again, again["api_key"], reward=1.0))[0] == 200
    assert (await service.trajectory("ro-a")).reward == 1.0


async def test_an_agent_can_be_kept_from_naming_its_own_reward(engine: Any) -> None:
    async with serving(engine, agent_ends=False) as service:
        opened = await service.open({"input": 1})
        await talk(opened, 1)
        assert (await service.end(opened, opened["api_key"], reward=1.0))[0] == 401
        assert (await service.end(opened, ADMIN, reward=0.25))[0] == 200
        assert (await service.trajectory(opened["rollout_id"])).reward == 0.25


async def test_a_rollout_without_a_call_is_a_failure_unless_it_was_opened_so(service: Service) -> None:
    opened = await service.open({"input": 1, "rollout_id": "ro-a"})
    _, ended = await service.end(opened, opened["api_key"], reward=1.0)
    assert (ended["status"], ended["turns"]) == ("failed", 0)
    assert ended["reason"].startswith("agent: no_call: ")
    again = await service.open({"rollout_id": "ro-a"})
    _, ended = await service.end(again, again["api_key"], error="its own words")
    assert ended["reason"] == "agent: reported: its own words"
    allowed = await service.open({"rollout_id": "ro-a", "allow_no_calls": True})
    _, ended = await service.end(allowed, allowed["api_key"], reward=1.0)
    assert (ended["status"], ended["turns"]) == ("succeeded", 0)


async def test_sampling_is_pinned_unless_the_rollout_was_opened_otherwise(service: Service) -> None:
    for asked, name in (({}, "ignored"), ({"client_sampling": "honoured"}, "honoured")):
        opened = await service.open({"input": 1, **asked})
        async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
            await client.chat.completions.create(**CHAT, temperature=0)
        _, ended = await service.end(opened, opened["api_key"], reward=1.0)
        assert ended["metrics"] == {f"gateway_sampling_{name}": 1.0}
        trajectory = await service.trajectory(opened["rollout_id"])
        assert (trajectory.not_trainable is None) is (name == "ignored")


async def test_a_failed_rollout_is_no_result_and_is_tried_again_from_its_journal(service: Service) -> None:
    opened = await service.open({"input": 1, "rollout_id": "ro-a"})
    said = await talk(opened, 2)
    _, ended = await service.end(opened, opened["api_key"], error="the sandbox\nis gone")
    assert ended["status"] == "failed"
    assert ended["reason"] == "agent: reported: the sandbox is gone"
    again = await service.open({"rollout_id": "ro-a"})
    assert (again["attempt"], again["api_key"] != opened["api_key"]) == (2, True)
    assert (await talk(again, 3))[:2] == said
    assert len(service.engine.made) == 3
    await service.end(again, again["api_key"], reward=1.0)
    assert len((await service.trajectory("ro-a")).turns) == 3


async def test_an_agent_that_goes_another_way_keeps_what_is_still_true(service: Service) -> None:
    opened = await service.open({"input": 1, "rollout_id": "ro-a"})
    said = await talk(opened, 3)
    await service.end(opened, opened["api_key"], error="broken")
    again = await service.open({"rollout_id": "ro-a"})
    messages: list[Any] = []
    assert await talk(again, 1, messages) == said[:1]
    messages.append({"role": "user", "content": "something else"})
    async with openai.AsyncOpenAI(base_url=again["base_url"], api_key=again["api_key"]) as client:
        await client.chat.completions.create(model="m", messages=messages)
    assert len(service.engine.made) == 4
    assert len(await service.store.read_journal("ro-a")) == 2
    await service.end(again, again["api_key"], reward=1.0)
    trajectory = await service.trajectory("ro-a")
    assert trajectory.turns[0].text == said[0]
    assert [turn.extends for turn in trajectory.turns] == [None, 0]


async def test_an_engines_failure_is_no_result(clients: Any) -> None:
    async with serving(clients.engine(failure_rate=1.0)) as service:
        opened = await service.open({"input": 1})
        with pytest.raises(openai.APIStatusError):
            await talk(opened, 1)
        _, ended = await service.end(opened, opened["api_key"], reward=0.0)
        assert ended["status"] == "failed"
        assert ended["reason"].startswith("engine: EngineError")
        attempt = await service.store.get_latest_attempt(opened["rollout_id"])
        assert attempt is not None
        assert attempt.reason == ended["reason"]


async def test_a_rollout_that_the_store_takes_away_is_sealed(service: Service) -> None:
    opened = await service.open({"input": 1})
    await talk(opened, 1)
    await service.store.cancel_rollouts([opened["rollout_id"]], "not needed")
    while len(service.gateway.registry):
        await asyncio.sleep(0.01)
    with pytest.raises(openai.APIStatusError) as late:
        await talk(opened, 1)
    assert late.value.status_code == 410
    assert (await service.end(opened, opened["api_key"], reward=1.0))[0] == 410


async def test_a_silent_agent_loses_its_rollout(engine: Any) -> None:
    async with serving(engine, idle_seconds=0.2) as service:
        opened = await service.open({"input": 1})
        while len(service.gateway.registry):
            await asyncio.sleep(0.02)
        attempt = await service.store.get_latest_attempt(opened["rollout_id"])
        assert attempt is not None
        assert attempt.status == "timeout"
        assert "no call for 0.2 s" in str(attempt.reason)


async def test_a_gateway_that_stops_hands_its_rollouts_back(engine: Any) -> None:
    store = None
    async with serving(engine) as service:
        opened = await service.open({"input": 1})
        store = service.store
        await service.service.close()
        rollout = await store.get_rollout_by_id(opened["rollout_id"])
        assert rollout is not None
        assert rollout.status is RolloutStatus.REQUEUING


CONFIG = """
policy: {{kind: simulated, tokens_per_second: 1000000, mean_tokens: {length}}}
limits: {{lease_seconds: 1, heartbeat_interval: 0.2}}
val_env_manager: {{num_env_groups: 1, tags: [FrozenLake]}}
"""
COMMAND = "import typer; from rollwright.cli.gateway import gateway; typer.run(gateway)"


@asynccontextmanager
async def command(
    folder: Path, address: str, length: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`rollwright gateway` as a process, and where it listens. Its engine says answers of about this length."""
    (folder / "config.yaml").write_text(CONFIG.format(length=length), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, str(folder / "config.yaml"), "--store", address, "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ROLLWRIGHT_GATEWAY_KEY": ADMIN},
    )
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        found = re.search(r"http://\S+:\d+", said)
        assert found, said
        yield process, found[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_gateway_killed_in_the_middle_loses_no_recorded_turn(tmp_path: Path) -> None:
    address = str(tmp_path / "store.db")
    async with command(tmp_path, address, 40) as (process, url):
        _, opened = await post(f"{url}/rollouts", ADMIN, {"input": 1, "rollout_id": "ro-a"})
        said = await talk(opened, 3)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with command(tmp_path, address, 200) as (process, url):  # it would say something else
        status = 0
        while status != 200:  # until the lease of the dead one is over
            status, again = await post(f"{url}/rollouts", ADMIN, {"rollout_id": "ro-a"})
            await asyncio.sleep(0.1)
        assert again["attempt"] == 2
        assert (await talk(again, 4))[:3] == said
        await post(f"{url}/rollouts/ro-a/end", again["api_key"], {"reward": 1.0})
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    store = await open_store(address)
    kept = await store.get_trajectories(["ro-a"])
    trajectory = check(Trajectory.from_bytes(kept["ro-a"]))
    assert [turn.text for turn in trajectory.turns][:3] == said
    assert (len(trajectory.turns), trajectory.reward) == (4, 1.0)
    await store.close()
