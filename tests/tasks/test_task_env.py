"""A row is a level: the template makes it a question, and a wrong template is one line."""

import pytest

from rollwright.envs.base import EnvironmentFailure, can_fork
from rollwright.tasks import TaskError
from rollwright.tasks.env import TaskEnv, check_template, default_template, fill
from rollwright.tasks.sources import RowList

ROWS = [
    {"question": "1 + 1 {x}", "answer": {"text": "2"}},
    {"question": "2 + 2", "answer": {"text": "4"}},
    {"other": 1},
]


@pytest.fixture
def env() -> TaskEnv:
    return TaskEnv(RowList(ROWS, "rows"), "Solve: {question}")


async def test_the_level_is_the_row_and_its_braces_are_text(env: TaskEnv) -> None:
    assert (await env.reset(0)).observation == "Solve: 1 + 1 {x}"
    assert env.task == ROWS[0]
    assert (await env.reset(1)).observation == "Solve: 2 + 2"


async def test_an_answer_ends_the_episode_without_a_reward(env: TaskEnv) -> None:
    await env.reset(1)
    _, reward, terminated, truncated, _ = await env.step("4")
    assert (reward, terminated, truncated) == (0.0, True, False)


async def test_a_row_without_the_field_is_a_failure_that_names_both(env: TaskEnv) -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"row 2: template: `\{question\}` is no field; accepted: \{other\}"
    ):
        await env.reset(2)
    with pytest.raises(EnvironmentFailure, match="row 3: there are 3"):
        await env.reset(3)


async def test_a_fork_has_the_same_row_and_shares_nothing(env: TaskEnv) -> None:
    await env.reset(0)
    assert can_fork(env)
    copy = env.fork()
    await env.reset(1)
    assert copy.task == ROWS[0]


def test_items_of_a_field_can_be_named_and_attributes_cannot() -> None:
    assert fill("{answer[text]}", ROWS[0]) == "2"
    for template in ("{question.__class__}", "{question.upper}", "{answer.text[0]}"):
        with pytest.raises(TaskError, match="is no field; accepted"):
            fill(template, ROWS[0])


@pytest.mark.parametrize(
    "template", ["{answer[text].__class__}", "{question", "{}", "{answer[none]}", "{question:d}"]
)
def test_a_template_that_cannot_be_filled_is_one_line(template: str) -> None:
    with pytest.raises(TaskError, match=r"^tasks\.jsonl: template: ") as raised:
        check_template(template, ROWS[0], "tasks.jsonl")
    assert "\n" not in str(raised.value)


def test_a_usual_field_is_asked_without_a_template() -> None:
    assert default_template({"id": 1, "prompt": "x"}, "t") == "{prompt}"
    with pytest.raises(TaskError, match=r"t: has the fields id, text; say by `template` how a row is asked"):
        default_template({"id": 1, "text": "x"}, "t")
