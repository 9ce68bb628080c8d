"""Remote programs of a run whose workers are processes: they know one address, and whoever is killed, no recorded call is
paid twice and every rollout ends once."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.gateway import Gateway
from rollwright.rollout.remote_workers import RunBoard, address_towards
from rollwright.run.worker_settings import worker_urls
from rollwright.simulation.server_process import RunningServer, simulated_server

LATENCY = 0.08
"""Seconds of a generation: slow enough to be killed in the middle, fast enough for a test."""

CALLS = 3

PROGRAM = f"""
import sys
import openai
from rollwright import RemoteRun

def solve(task, session):
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = [{{"role": "user", "content": task["question"]}}]
    for number in range({CALLS}):
        answer = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        messages += [{{"role": "assistant", "content": answer}}, {{"role": "user", "content": f"And {{number}}?"}}]
    return answer

RemoteRun(sys.argv[1]).play(solve, concurrency=8)
"""


@pytest.fixture
async def engine() -> AsyncIterator[RunningServer]:
    async with simulated_server(latency=LATENCY, latency_sigma=0.3) as server:
        yield server


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Callable[[int], "subprocess.Popen[bytes]"]]:
    """Starts remote programs, and ends those that are left."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> "subprocess.Popen[bytes]":
        words = [sys.executable, str(tmp_path / "program.py"), f"http://127.0.0.1:{port}"]
        started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def configure(lab: Any, engine: RunningServer, lease: float = 4.0) -> int:
    """A run whose only tag is played by remote programs; returns its port for them."""
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(16)]
    (lab.folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    agent = {"kind": "remote", "lease_seconds": lease}
    tag = {"tasks": "sums.jsonl", "agent": agent, "rewards": [{"kind": "length", "limit": 0, "ramp": 50}]}
    port = free_port()
    lab.config(
        policy={"kind": "openai", "base_url": engine.base_url, "model": "simulated"},
        custom_envs={"Sums": tag},
        remote={"port": port},
        train_env_manager={"num_env_groups": 4, "group_size": 4, "tags": ["Sums"]},
    )
    return port


def wait_for_requests(lab: Any, engine: RunningServer, wanted: int) -> None:
    lab.until(lambda: lab.requests(engine.stats_url) >= wanted, f"{wanted} requests to the engine")


def check_paid_once(lab: Any, engine: RunningServer, *, in_flight: int = 0) -> None:
    """Beside the recorded calls, at most the generations in flight of lost attempts were paid for."""
    trajectories, story = lab.check_whole()
    assert {len(each.turns) for each in trajectories} == {CALLS}
    made = sum(len(each.turns) for each in trajectories)
    assert made <= lab.requests(engine.stats_url) <= made + story.lost_attempts + in_flight


def test_programs_play_what_worker_processes_hold_also_after_one_is_killed(
    crash_lab: Any, engine: RunningServer, programs: Any
) -> None:
    port = configure(crash_lab, engine)
    run = crash_lab.start("run", "crash.yaml", "--workers", "2")
    program = programs(port)
    crash_lab.until(lambda: len(crash_lab.workers_of(run)) == 2, "two workers")
    wait_for_requests(crash_lab, engine, 30)
    crash_lab.until(lambda: crash_lab.kill_a_playing_worker(run), "a worker in the middle of a rollout")
    crash_lab.finish(run)
    check_paid_once(crash_lab, engine)
    assert crash_lab.story().lost_attempts >= 1
    assert all("process" in str(each) for each in workers(crash_lab))
    assert program.wait(timeout=60) == 0  # it was told that the run has ended


def test_a_killed_program_hands_its_rollouts_to_another_one(
    crash_lab: Any, engine: RunningServer, programs: Any
) -> None:
    port = configure(crash_lab, engine, lease=1.5)
    run = crash_lab.start("run", "crash.yaml", "--workers", "2")
    first = programs(port)
    wait_for_requests(crash_lab, engine, 30)
    first.kill()
    programs(port)
    crash_lab.finish(run)
    check_paid_once(crash_lab, engine)


def test_a_killed_run_is_resumed_under_the_programs_that_wait_for_it(
    crash_lab: Any, engine: RunningServer, programs: Any
) -> None:
    port = configure(crash_lab, engine)
    run = crash_lab.start("run", "crash.yaml", "--workers", "2")
    programs(port)
    crash_lab.until(lambda: len(crash_lab.workers_of(run)) == 2, "two workers")
    wait_for_requests(crash_lab, engine, 40)
    run.kill()
    run.wait()
    crash_lab.until(lambda: not crash_lab.living_workers, "the end of its workers")
    paid = crash_lab.settled_requests(engine.stats_url, quiet_seconds=LATENCY * 4)
    recorded = crash_lab.story().recorded_turns
    crash_lab.do("resume", "runs/crash", "--workers", "2")
    trajectories, _ = crash_lab.check_whole()
    made = sum(len(each.turns) for each in trajectories)
    assert crash_lab.requests(engine.stats_url) - paid == made - recorded


def test_a_worker_that_joins_the_store_plays_what_programs_take_from_the_run(
    crash_lab: Any, engine: RunningServer, programs: Any
) -> None:
    port = configure(crash_lab, engine)
    run = crash_lab.start("run", "crash.yaml", "max_inflight=8")
    store = crash_lab.run_folder / "store.db"
    crash_lab.until(store.exists, "the store")
    worker = crash_lab.start("worker", "--store", store, "--id", "joined", "--heartbeat-interval", "0.4")
    crash_lab.until(lambda: "joined" in workers(crash_lab), "the other worker")
    programs(port)
    crash_lab.finish(run)
    worker.send_signal(signal.SIGTERM)
    crash_lab.finish(worker)
    check_paid_once(crash_lab, engine)


def workers(lab: Any) -> set[str | None]:
    return {each.worker_id for each in lab.story().attempts}


# -- the protocol between a run and its workers -------------------------------------------------------------


def post(url: str, body: Any, key: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextlib.asynccontextmanager
async def run_board() -> AsyncIterator[tuple[RunBoard, Gateway]]:
    board, gateway = RunBoard(), Gateway()
    board.serve(gateway)
    try:
        yield board, gateway
    finally:
        await board.close()
        await gateway.close()


def offers(gateway: Gateway, *attempts: int) -> dict[str, Any]:
    told = [{"rollout_id": "r", "attempt_id": f"a{n}", "attempt": n, "tag": "Sums"} for n in attempts]
    return {"address": gateway.url, "key": "k", "offers": told}


async def test_only_a_worker_of_the_run_may_announce_rollouts() -> None:
    async with run_board() as (board, gateway):
        status, told = await asyncio.to_thread(post, f"{gateway.url}/offers", offers(gateway, 1), "other")
        assert (status, told["error"]["code"]) == (401, "unauthorized")
        status, _ = await asyncio.to_thread(
            post, f"{gateway.url}/offers", offers(gateway, 1), board.worker_key
        )
        assert status == 200


async def test_a_worker_that_the_run_cannot_reach_is_told_so() -> None:
    async with run_board() as (board, gateway):
        body = {**offers(gateway, 1), "address": f"http://127.0.0.1:{free_port()}"}
        status, told = await asyncio.to_thread(post, f"{gateway.url}/offers", body, board.worker_key)
        assert status == 502
        assert "the run cannot reach http://127.0.0.1" in told["error"]["message"]


async def test_an_announced_rollout_that_cannot_be_had_is_skipped() -> None:
    async with run_board() as (board, gateway):
        await asyncio.to_thread(post, f"{gateway.url}/offers", offers(gateway, 1), board.worker_key)
        # Its worker says that nothing of that name waits there.
        status, told = await asyncio.to_thread(post, f"{gateway.url}/rollouts", {"timeout": 0.2}, "")
        assert (status, told["error"]["code"]) == (404, "no_rollout")


def test_a_worker_listens_where_it_reaches_the_run() -> None:
    assert address_towards("http://127.0.0.1:8810") == "127.0.0.1"


@pytest.mark.parametrize(
    ("listening", "expected"),
    [
        (["http://127.0.0.1:1"], ("http://127.0.0.1:1", "https://run.example")),
        (["http://0.0.0.0:1"], ("http://127.0.0.1:1", "http://node:1", "https://run.example")),
        (
            ["http://127.0.0.1:1", "http://node:2"],
            ("http://127.0.0.1:1", "http://node:2", "https://run.example"),
        ),
    ],
)
def test_workers_are_told_every_address_of_the_run(listening: list[str], expected: tuple[str, ...]) -> None:
    assert worker_urls(listening, ["node"], "https://run.example/") == expected
