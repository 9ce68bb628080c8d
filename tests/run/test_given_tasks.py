"""`rollwright.train` and `evaluate` with tasks, an agent and rewards as Python objects."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rollwright as rw
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.run.folder import RunReader

ROWS = [{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(40)]

SCRIPT = """
import sys
import openai
import rollwright as rw

rows = [{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(8)]

async def solve(task, session):
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        question = {"role": "user", "content": task["question"]}
        reply = await client.chat.completions.create(model="m", messages=[question])
        return reply.choices[0].message.content

def correct(task, answer):
    return float(answer.split()[-1] == task["answer"])

settings = {"policy": {"kind": "torch", "model": sys.argv[1], "renderer": "template"}, "sequence_length": 200}
settings["custom_envs"] = {"Tasks": {"max_tokens_per_step": 4}}
print(rw.evaluate(policy={"kind": "oracle"}, tasks=rows, agent=solve, reward=correct))
trained = rw.train(settings, tasks=rows, agent=solve, reward=correct, steps=1, runs=sys.argv[2])
print(rw.train(resume=trained.folder, steps=2).summary["training"]["steps"], "steps")
"""


def solve(task: dict[str, Any], session: Any) -> str:
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        question: Any = {"role": "user", "content": task["question"]}
        return client.chat.completions.create(model="m", messages=[question]).choices[0].message.content or ""


def correct(task: dict[str, Any], answer: str) -> float:
    return float(task["answer"] in answer)


def some_rows() -> Iterator[dict[str, str]]:
    yield from ROWS[:6]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer(["0123456789 + = ?"], vocabulary_size=270)
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=512).save_pretrained(
        tmp_path / "m"
    )
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("tasks", [ROWS[:6], some_rows, (row for row in ROWS[:6]), lambda: iter(ROWS[:6])])
def test_rows_come_from_a_list_a_function_a_generator_or_a_lambda(tasks: Any) -> None:
    found = rw.evaluate(policy={"kind": "oracle"}, tasks=tasks, agent=solve, reward=correct)
    assert (found.scores["Tasks"].episodes, found.reward) == (6, 1.0)


def test_rows_come_from_a_file_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1 = ?,2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = rw.evaluate(policy={"kind": "oracle"}, tasks="rows.csv", agent=solve, reward="exact_match")
    assert found.scores["Tasks"].episodes == 1
    assert (
        rw.evaluate(policy={"kind": "oracle"}, tasks=tmp_path / "rows.csv", reward="exact_match").reward
        == 1.0
    )


def test_functions_of_a_function_work_and_keep_their_names() -> None:
    def half(task: dict[str, Any]) -> float:
        return 0.5

    agents: list[Any] = [lambda task, session: solve(task, session)]
    found = rw.evaluate(
        policy={"kind": "oracle"}, tasks=ROWS, agent=agents[0], reward=[half, correct], episodes=3
    )
    assert {tuple(each.components.items()) for each in found.trajectories} == {
        (("half", 0.5), ("correct", 1.0))
    }


def test_a_model_is_trained_for_an_epoch_and_validated_on_held_out_rows(model: Path, tmp_path: Path) -> None:
    settings = {
        "policy": {"kind": "torch", "model": str(model), "renderer": "template", "device": "cpu"},
        "custom_envs": {"Tasks": {"max_tokens_per_step": 8}},
    }
    length = {"kind": "length", "limit": 0, "ramp": 50}

    async def in_a_notebook() -> rw.TrainingResult:
        return rw.train(
            settings, tasks=ROWS, agent=solve, reward=[correct, length], held_out=0.2, runs=tmp_path / "runs"
        )

    trained = asyncio.run(in_a_notebook())
    reader = RunReader(trained.folder)
    played = {each.seed for each in reader.trajectories() if ".train-" in each.group_id}
    steps = [each["step"] for each in trained.validations]
    assert steps[0] == 0
    assert steps[-1] == trained.summary["training"]["steps"]
    assert len(played) > 24  # of the 32 rows or so that are not held out
    assert {tuple(each.components) for each in reader.trajectories()} == {("correct", "length")}


def test_functions_of_a_script_work_and_resume(model: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, str(tmp_path / "script.py"), str(model), str(tmp_path / "runs")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "Tasks: reward 1.000" in ran.stdout
    assert "2 steps" in ran.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"agent": 3}, "agent: is a int; a function, module:function"),
        ({"reward": 4}, "reward: is a int; a function, a kind, or settings are accepted"),
        ({"tasks": []}, "tasks: gives no rows"),
        ({"tasks": [1]}, "tasks, row 0: is a int; a mapping is accepted"),
        ({"tasks": "missing.jsonl"}, r"custom_envs\.Tasks\.tasks: .*missing\.jsonl"),
        ({"tags": ["FrozenLake"]}, "tags: is given beside `tasks`"),
        ({"tasks": None}, "agent, reward: are for `tasks`, which is not given"),
        ({"resume": "runs/x"}, "`resume` continues with the run's own settings"),
    ],
)
def test_what_cannot_be_used_is_one_line(given: dict[str, Any], says: str) -> None:
    wanted: dict[str, Any] = {"tasks": ROWS, "agent": solve, "reward": correct, **given}
    with pytest.raises(rw.RollwrightError, match=says):
        rw.train(**wanted)
