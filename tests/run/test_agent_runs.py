"""Runs whose tasks are played by a user's own function: through the session, an SDK, in every kind of worker."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.rollout import TooManyRefills
from rollwright.run.checks import check_config
from rollwright.run.folder import RunReader
from rollwright.run.run import Run
from rollwright.tasks import draw_of, epoch_row
from rollwright.trajectory import Trajectory, check

AGENTS = """
import asyncio
import openai
from rollwright.trajectory import Message

async def asks(task, session):
    turn = await session.generate([Message("user", task["question"])])
    return {"right": float(turn.text.split()[-1:] == [str(task["answer"])]), "length": 1}

def asks_plainly(task, session):
    turn = session.generate([Message("user", task["question"])])
    task["answer"] = None  # its own copy
    return float(turn.text.split()[-1:] == [str(turn.text.split()[-1])])

async def by_sdk(task, session):
    messages = []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for question in (task["question"], "Are you sure?"):
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model="any", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return messages[-1]["content"]

def by_plain_sdk(task, session):
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        return client.chat.completions.create(model="any", messages=messages).choices[0].message.content

async def raises(task, session):
    await session.generate([Message("user", task["question"])])
    raise LookupError("no tool for this")

async def hangs(task, session):
    await session.generate([Message("user", task["question"])])
    await asyncio.sleep(3600)

async def returns_an_object(task, session):
    await session.generate([Message("user", task["question"])])
    return object()

async def returns_a_text(task, session):
    await session.generate([Message("user", task["question"])])
    return "done"

async def returns_nothing(task, session):
    await session.generate([Message("user", task["question"])])

async def asks_nothing(task, session):
    return 1.0

def takes_one(task):
    return 1.0
"""


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(16)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def module(tmp_path: Path) -> str:
    """Modules are found once in a process, so every test has one of its own."""
    name = f"agents_of_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(AGENTS, encoding="utf-8")
    return name


def content(tmp_path: Path, agent: Any, rewards: list[Any], **more: Any) -> dict[str, Any]:
    custom = {"tasks": "sums.jsonl", "agent": agent, "rewards": rewards}
    return {
        "name": "sums",
        "folder": str(tmp_path),
        "custom_envs": {"Sums": custom},
        "policy": {"kind": "simulated", "skill": 1.0, "tokens_per_second": 1e5, "mean_tokens": 5},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Sums"]},
        **more,
    }


async def play(settings: dict[str, Any], told: list[str] | None = None, **more: Any) -> list[Trajectory]:
    def note(rollout: str, reason: str) -> None:
        if told is not None:
            told.append(f"{rollout}: {reason}")

    async with Run(build(settings), on_failed=note, **more) as run:
        return (await run.get_batch()).trajectories


LAST_WORD = {"kind": "exact_match", "extract": r"(\S+)\s*$"}


@pytest.mark.parametrize("processes", [None, 2])
def test_an_unmodified_sdk_is_recorded_and_judged(tmp_path: Path, module: str, processes: int | None) -> None:
    settings = content(tmp_path, f"{module}:by_sdk", [LAST_WORD])
    for each in asyncio.run(play(settings, processes=processes)):
        check(each)
        assert [turn.extends for turn in each.turns] == [None, 0]
        assert each.not_trainable is None
        assert each.components == {"exact_match": 1.0}
        assert json.loads(each.returned or "") == each.conversation[-1].content
        assert [said.role for said in each.conversation] == ["user", "assistant"] * 2
        assert each.conversation[0].content == f"{each.seed} + 1 = ?"


def test_plain_functions_and_plain_clients_work_too(tmp_path: Path, module: str) -> None:
    for agent in ("asks_plainly", "by_plain_sdk"):
        played = asyncio.run(play(content(tmp_path, f"{module}:{agent}", [LAST_WORD])))
        assert {each.components["exact_match"] for each in played} == {1.0}
        assert {len(each.turns) for each in played} == {1}


def test_without_rewards_the_returned_numbers_count(tmp_path: Path, module: str) -> None:
    played = asyncio.run(play(content(tmp_path, f"{module}:asks", [])))
    for each in played:
        assert each.components == {"returned.length": 1.0, "returned.right": 1.0}
        assert each.reward == 2.0


def test_one_of_the_returned_numbers_can_be_chosen(tmp_path: Path, module: str) -> None:
    chosen = [{"kind": "returned", "key": "right", "weight": 0.5}]
    played = asyncio.run(play(content(tmp_path, f"{module}:asks", chosen)))
    assert {(each.reward, each.success) for each in played} == {(0.5, False)}


def test_agents_validate_greedily_on_held_out_rows(tmp_path: Path, module: str) -> None:
    settings = content(tmp_path, f"{module}:by_sdk", [LAST_WORD])
    settings["custom_envs"]["Sums"]["held_out"] = 0.3
    settings["val_env_manager"] = {"num_env_groups": 2, "tags": ["Sums"]}

    async def run() -> list[Trajectory]:
        async with Run(build(settings)) as it:
            return (await it.evaluate(0)).trajectories

    for each in asyncio.run(run()):
        assert each.sampling is not None
        assert each.sampling.temperature == 0.0
        assert len(each.turns) == 2


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        ("raises", "agent: LookupError: no tool for this"),
        ("hangs", "system: timeout: the episode took longer than 0.5 s"),
        (
            "returns_an_object",
            "agent: FormatError: it returned a object that JSON cannot hold: it holds a object",
        ),
        ("returns_a_text", "reward: returned: its value is a str ('done'); a finite number is accepted"),
        ("returns_nothing", "reward: returned: the agent returned nothing"),
        ("asks_nothing", "agent: no_call: the agent ended without one answered call"),
    ],
)
def test_what_an_agent_does_wrong_is_one_line_with_its_rollout_and_never_a_reward(
    tmp_path: Path, module: str, agent: str, cause: str
) -> None:
    limits = {"max_attempts": 1, "max_refills": 1, "episode_timeout": 0.5 if agent == "hangs" else 60.0}
    told: list[str] = []
    with pytest.raises(TooManyRefills):
        asyncio.run(play(content(tmp_path, f"{module}:{agent}", [], limits=limits), told))
    assert told
    for line in told:
        assert line.startswith("sums.train-g")
        assert cause in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("agent", "more", "says"),
    [
        ("none:here", {}, r"custom_envs\.Sums\.agent: .*no module named 'none'"),
        ("{module}:nobody", {}, r"custom_envs\.Sums\.agent: .*has no 'nobody'"),
        ("{module}:takes_one", {}, r"custom_envs\.Sums\.agent: is called as \(task, session\)"),
        ("nonsense", {}, r"custom_envs\.Sums\.agent: agent: unknown `nonsense`; expected module:name"),
        ({"command": []}, {}, r"custom_envs\.Sums\.agent\.command"),
        ("{module}:asks", {"strategy": {"kind": "tree"}}, r"strategy\.kind: an agent plays along one path"),
        ("{module}:asks", {"orchestras": {"Sums": {"kind": "math"}}}, "plays the tag already"),
    ],
)
def test_a_wrong_agent_shows_before_anything_is_played(
    tmp_path: Path, module: str, agent: Any, more: dict[str, Any], says: str
) -> None:
    named = agent.format(module=module) if isinstance(agent, str) else agent
    with pytest.raises(ConfigError, match=says):
        check_config(build(content(tmp_path, named, [LAST_WORD], **more)))


def test_an_agent_without_tasks_is_refused(tmp_path: Path) -> None:
    settings = {
        "custom_envs": {"FrozenLake": {"agent": "a:b"}},
        "train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]},
    }
    with pytest.raises(ConfigError, match=r"custom_envs\.FrozenLake\.agent: is a setting of `tasks`"):
        check_config(build(settings))


def test_a_killed_run_pays_no_recorded_call_of_an_agent_twice(
    crash_lab: Any, tmp_path: Path, module: str
) -> None:
    settings = content(tmp_path, f"{module}:by_sdk", [LAST_WORD], name="crash", max_steps=4)
    settings["policy"] |= {"tokens_per_second": 40, "mean_tokens": 20}
    del settings["folder"]
    crash_lab.config(**settings)
    run = crash_lab.start("run", "crash.yaml")
    log = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(lambda: log.exists() and log.read_text().splitlines(), "a batch")
    run.send_signal(signal.SIGKILL)
    run.wait()
    recorded = crash_lab.story().recorded_turns
    crash_lab.do("resume", crash_lab.run_folder)
    reader = RunReader(crash_lab.run_folder)
    played = list(reader.trajectories())
    assert len(played) == 16
    assert {len(each.turns) for each in played} == {2}
    assert {each.components["exact_match"] for each in played} == {1.0}
    summary = reader.summary() or {}
    assert summary["activity"]["turns"] <= 32 - recorded + summary["activity"]["replayed_turns"]


def test_ray_actors_open_the_same_file_and_play_the_same_agent(tmp_path: Path, module: str) -> None:
    pytest.importorskip("ray", reason="needs rollwright[ray]")
    settings = content(tmp_path, f"{module}:by_sdk", [LAST_WORD])
    here = asyncio.run(play(settings))
    there = asyncio.run(play(settings, ray="local", processes=1))
    assert {each.group_id: each.seed for each in here} == {each.group_id: each.seed for each in there}
    assert {each.components["exact_match"] for each in there} == {1.0}


def test_a_killed_training_goes_on_with_the_same_rows_and_trains_every_batch_once(
    crash_lab: Any, tmp_path: Path, module: str
) -> None:
    tokenizer = tiny_tokenizer(["0123456789 + = ?"], vocabulary_size=270)
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=512).save_pretrained(
        tmp_path / "m"
    )
    tokenizer.save_pretrained(tmp_path / "m")
    settings = content(tmp_path, f"{module}:by_sdk", [{"kind": "length", "limit": 0, "ramp": 50}])
    settings |= {"name": "crash", "max_steps": 6, "training": {"device": "cpu", "checkpoint_steps": 2}}
    settings["policy"] = {
        "kind": "torch",
        "model": str(tmp_path / "m"),
        "renderer": "template",
        "device": "cpu",
    }
    settings["custom_envs"]["Sums"]["max_tokens_per_step"] = 8
    del settings["folder"]
    crash_lab.config(**settings)
    run = crash_lab.start("train", "crash.yaml")
    log = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, "three batches")
    run.send_signal(signal.SIGKILL)
    run.wait()
    crash_lab.do("train", "--resume", crash_lab.run_folder)
    reader = RunReader(crash_lab.run_folder)
    rows = reader.metrics()
    assert [row["step"] for row in rows] == list(range(6))
    played = {each.group_id: each.seed for each in reader.trajectories()}
    slots = ["Sums", "Sums"]
    assert played == {
        f"crash.train-g{index}": epoch_row(42, "Sums", draw_of(index, "Sums", slots), 16)
        for index in range(12)
    }
    assert (crash_lab.run_folder / "model").is_dir()
