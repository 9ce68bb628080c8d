"""Remote programs as agents: they take rollouts of a run over HTTP, and whatever they do, a rollout is judged once."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from rollwright import RemoteRollout, RemoteRun, RollwrightError
from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.rollout import Activity, TooManyRefills
from rollwright.run.checks import check_config
from rollwright.run.folder import RunFolder
from rollwright.run.run import Run
from rollwright.run.training import TrainingRun
from rollwright.trajectory import Trajectory, check

LAST_WORD = {"kind": "exact_match", "extract": r"(\S+)\s*$"}

PROGRAM = """
import sys, time
import openai
from rollwright import RemoteRun

for rollout in RemoteRun(sys.argv[1]):
    client = openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": rollout.task["question"]}])
    print(rollout.rollout_id, flush=True)
    time.sleep(3600)
"""


def ask(task: dict[str, Any], session: RemoteRollout) -> str:
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        question: Any = {"role": "user", "content": task["question"]}
        return client.chat.completions.create(model="m", messages=[question]).choices[0].message.content or ""


async def ask_async(task: dict[str, Any], session: RemoteRollout) -> str:
    return await asyncio.to_thread(ask, task, session)


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROLLWRIGHT_GATEWAY_KEY", raising=False)
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(16)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def content(tmp_path: Path, lease: float = 60.0, **more: Any) -> dict[str, Any]:
    agent = {"kind": "remote", "lease_seconds": lease}
    return {
        "name": "sums",
        "folder": str(tmp_path),
        "custom_envs": {"Sums": {"tasks": "sums.jsonl", "agent": agent, "rewards": [LAST_WORD]}},
        "policy": {"kind": "simulated", "skill": 1.0, "tokens_per_second": 1e5, "mean_tokens": 5},
        "remote": {"port": 0},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Sums"]},
        **more,
    }


async def play(
    settings: dict[str, Any],
    program: Callable[[str], Any],
    told: list[str] | None = None,
    counts: list[Activity] | None = None,
) -> list[Trajectory]:
    """Plays one batch, while `program` runs in a thread with the run's address."""
    failures: list[str] = [] if told is None else told
    async with Run(
        build(settings), on_failed=lambda rollout, why: failures.append(f"{rollout}: {why}")
    ) as run:
        assert run.settings.board is not None
        if counts is not None:
            counts.append(run.activity)
        while not run.settings.board.url:
            await asyncio.sleep(0.01)
        thread = threading.Thread(target=program, args=(run.settings.board.url,), daemon=True)
        thread.start()
        return (await run.get_batch()).trajectories


@pytest.mark.parametrize("function", [ask, ask_async])
def test_a_remote_program_plays_the_rollouts_of_a_run(tmp_path: Path, function: Any) -> None:
    played = asyncio.run(play(content(tmp_path), lambda url: RemoteRun(url).play(function, concurrency=2)))
    assert len({each.rollout_id for each in played}) == 4
    for each in played:
        check(each)
        assert (each.components, len(each.turns), each.not_trainable) == ({"exact_match": 1.0}, 1, None)
        assert each.conversation[0].content == f"{each.seed} + 1 = ?"
        assert json.loads(each.returned or "") == each.conversation[-1].content


def test_plain_http_is_enough(tmp_path: Path) -> None:
    def post(url: str, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return dict(json.load(answer))

    def program(url: str) -> None:
        while True:
            found = post(f"{url}/rollouts", {"timeout": 30})
            address, key = found["base_url"], found["api_key"]
            question = {"model": "m", "messages": [{"role": "user", "content": found["task"]["question"]}]}
            post(f"{address}/chat/completions", question, key)
            assert post(f"{url}/rollouts/{found['rollout_id']}/heartbeat", {}, key) == {"status": "ok"}
            post(f"{url}/rollouts/{found['rollout_id']}/end", {"reward": 0.25}, key)

    def until_it_ends(url: str) -> None:
        with contextlib.suppress(urllib.error.URLError):
            program(url)

    settings = content(tmp_path)
    settings["custom_envs"]["Sums"]["rewards"] = ["returned"]
    assert {each.reward for each in asyncio.run(play(settings, until_it_ends))} == {0.25}


def test_a_training_hands_its_rollouts_to_remote_programs(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(["0123456789 + = ?"], vocabulary_size=270)
    model = tmp_path / "m"
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=512).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = content(tmp_path, max_steps=2, training={"device": "cpu"})
    settings["policy"] = {"kind": "torch", "model": str(model), "renderer": "template", "device": "cpu"}
    settings["custom_envs"]["Sums"] |= {
        "rewards": [{"kind": "length", "limit": 0, "ramp": 20}],
        "max_tokens_per_step": 8,
    }
    folder, config = RunFolder.create(tmp_path / "runs", build(settings))

    async def run() -> TrainingRun:
        training = TrainingRun(config, folder)
        work = asyncio.create_task(training.run())
        while training.local is None or not getattr(training.local.settings.board, "url", ""):
            await asyncio.sleep(0.01)
            assert not work.done(), work.result()
        board = training.local.settings.board
        assert board is not None
        thread = threading.Thread(
            target=lambda: RemoteRun(board.url, patience=1).play(ask, concurrency=4), daemon=True
        )
        thread.start()
        await work
        return training

    assert asyncio.run(run()).summary()["steps"] == 2


def test_a_killed_program_loses_its_rollouts_and_pays_no_recorded_call_twice(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    began: list[subprocess.Popen[str]] = []

    def program(url: str) -> None:
        hung = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), url], stdout=subprocess.PIPE, text=True
        )
        began.append(hung)
        assert hung.stdout is not None
        assert hung.stdout.readline().startswith("sums.train-g")
        os.kill(hung.pid, signal.SIGKILL)
        hung.wait()
        RemoteRun(url).play(ask, concurrency=2)

    counts: list[Activity] = []
    played = asyncio.run(play(content(tmp_path, lease=2.0), program, counts=counts))
    assert {each.components["exact_match"] for each in played} == {1.0}
    assert len(played) == 4
    assert (counts[0].replayed_turns, counts[0].total().turns) == (1, 4)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ({"error": "LookupError: no tool\nfor this"}, "agent: reported: LookupError: no tool for this"),
        ({}, "reward: returned: the agent returned nothing"),
        ({"returned": "many"}, "reward: returned: its value is a str ('many'); a finite number is accepted"),
        (None, "agent: timeout: the program made no call and sent no heartbeat for 0.5 s"),
    ],
)
def test_what_a_program_does_wrong_is_one_line_with_its_rollout_and_never_a_reward(
    tmp_path: Path, end: dict[str, Any] | None, cause: str
) -> None:
    def program(url: str) -> None:
        for rollout in RemoteRun(url, patience=1):
            with contextlib.suppress(openai.APIError, RollwrightError):  # its group was dropped meanwhile
                ask(rollout.task, rollout)
                if end is not None:
                    rollout.end(**end)

    limits = {"max_attempts": 1, "max_refills": 1}
    settings = content(tmp_path, lease=0.5 if end is None else 60.0, limits=limits)
    settings["custom_envs"]["Sums"]["rewards"] = ["returned"]
    told: list[str] = []
    with pytest.raises(TooManyRefills):
        asyncio.run(play(settings, program, told))
    assert told
    for line in told:
        assert line.startswith("sums.train-g")
        assert cause in line
        assert "\n" not in line


def test_a_rollout_that_was_taken_back_refuses_its_late_program(tmp_path: Path) -> None:
    late: list[bool] = []

    def program(url: str) -> None:
        run = RemoteRun(url, patience=1)
        first = run.next()
        assert first is not None
        for rollout in run:
            if rollout.rollout_id == first.rollout_id:
                late.append(first.end("4"))
            rollout.end(ask(rollout.task, rollout))

    played = asyncio.run(play(content(tmp_path, lease=0.5), program))
    assert {each.components["exact_match"] for each in played} == {1.0}
    assert late == [False]


def test_a_repeated_report_is_answered_again_and_never_ends_the_next_attempt(tmp_path: Path) -> None:
    answers: list[bool] = []

    def program(url: str) -> None:
        run = RemoteRun(url, patience=1)
        first = run.next()
        assert first is not None
        ask(first.task, first)
        answers.append(first.end(error="try again"))
        held: list[RemoteRollout] = []
        while (rollout := run.next()) is not None and rollout.rollout_id != first.rollout_id:
            held.append(rollout)
            answers.append(first.end(error="try again"))  # of an attempt that has ended
        assert rollout is not None
        answers.append(first.end(error="try again"))  # while another program plays the next one
        for each in (rollout, *held):
            each.end(ask(each.task, each))

    played = asyncio.run(play(content(tmp_path), program))
    assert {each.components["exact_match"] for each in played} == {1.0}
    assert len(played) == 4
    assert answers[0]
    assert answers[-1] is False


def test_waiting_for_a_program_counts_for_no_limit(tmp_path: Path) -> None:
    limits = {"episode_timeout": 3.0, "max_attempts": 1, "max_refills": 1}  # far longer than playing takes

    def program(url: str) -> None:
        threading.Event().wait(3.5)
        RemoteRun(url).play(ask, concurrency=4)

    assert len(asyncio.run(play(content(tmp_path, limits=limits), program))) == 4


def test_a_key_is_needed_where_others_can_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = content(tmp_path, remote={"host": "0.0.0.0", "port": 0})
    with pytest.raises(ConfigError, match=r"remote\.host: '0\.0\.0\.0' can be reached from other machines"):
        check_config(build(settings))
    monkeypatch.setenv("ROLLWRIGHT_GATEWAY_KEY", "s3cret")
    refused: list[str] = []

    def program(url: str) -> None:
        try:
            RemoteRun(url, key="wrong").next()
        except RollwrightError as error:
            refused.append(str(error))
        RemoteRun(url).play(ask, concurrency=2)

    assert len(asyncio.run(play(content(tmp_path), program))) == 4
    assert "the key is missing or wrong" in refused[0]


def test_a_program_without_a_run_says_so() -> None:
    with pytest.raises(RollwrightError, match=r"127\.0\.0\.1:9"):
        RemoteRun("http://127.0.0.1:9", patience=0.1).play(ask)
