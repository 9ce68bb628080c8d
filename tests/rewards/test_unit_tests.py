"""Unit tests of an answer's code, in the Python sandbox. Code cannot write its own score where values are compared."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollwright.rewards import RewardFailure, Rewards, ScoredAttempt
from rollwright.rewards.settings import UnitTestsReward
from rollwright.rewards.unit_tests import UnitTests, extract_code
from rollwright.trajectory import Trajectory

Attempts = Callable[..., Trajectory]

SECONDS = 20.0
"""For honest code, on a busy machine."""


@pytest.fixture
async def rewards() -> AsyncIterator[Rewards]:
    made = Rewards.build([{"kind": "unit_tests", "seconds": SECONDS}])
    yield made
    await made.close()


ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ECHO = "```\nimport sys\nfor line in sys.stdin:\n    print(int(line) * 2)\n```"
ASK = "```py\nn = int(input())\nif __name__ == '__main__':\n    print(n + 1)\n```"


@pytest.mark.parametrize(
    ("answer", "tests", "expected"),
    [
        (ADD, [{"call": "add(1, 2)", "returns": 3}, {"call": "add('a', 'b')", "returns": "ab"}], 1),
        (ADD, [{"call": "add(1, 2)", "returns": 3}, {"call": "add(1, 2)", "returns": 4}], 0),
        (ADD, [{"call": "add((1,), (2,))", "returns": [1, 2]}], 1),
        (ADD, [{"call": "add(True, 0)", "returns": True}], 0),
        (ADD, [{"call": "add(0.1, 0.2)", "returns": 0.3}], 1),
        (ADD, [{"call": "add(0.1, 0.2)", "returns": "0.3"}], 0),
        (ADD, "assert add(1, 2) == 3\nassert add(0, 0) == 0", 1),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0),
        (ADD, ["from math import nan\nassert nan != nan"], 1),
        ("def add(a, b): return a + b", [{"call": "add(1, 2)", "returns": 3}], 1),
        (ECHO, [{"input": "1\n2\n", "output": "2\n4"}], 1),
        (ECHO, [{"input": "1\n2\n", "output": "2\n5"}], 0),
        (ASK, [{"input": "1", "output": "2"}], 1),
        ("```python\n'a value that is not printed'\n```", [{"output": ""}], 1),
        ("import sys\ndef add(a, b): sys.exit(0)", ["assert add(1, 2) == 3"], 0),
        ("no code at all", ["assert True"], 0),
        ("", [{"output": "2"}], 0),
    ],
)
async def test_code_passes_all_its_tests_or_is_worth_nothing(
    rewards: Rewards, answer: str, tests: Any, expected: float, attempt_with: Attempts
) -> None:
    assert (await rewards.evaluate({"tests": tests}, attempt_with(answer))).total == expected


@pytest.mark.parametrize(
    "code",
    [
        "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import json\njson.dumps = lambda *a, **k: '3 or 4'\ndef add(a, b): return 0",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'junk')\n    except OSError: pass",
        "def add(a, b): return [[[" + "[" * 50 + "]" * 53,
    ],
)
async def test_code_that_cheats_is_worth_nothing(rewards: Rewards, code: str, attempt_with: Attempts) -> None:
    task = {"tests": [{"call": "add(1, 2)", "returns": 3}]}
    assert (await rewards.evaluate(task, attempt_with(code))).total == 0


async def test_code_that_does_not_end_is_worth_nothing(attempt_with: Attempts) -> None:
    rewards = Rewards.build([{"kind": "unit_tests", "seconds": 0.5}])
    try:
        task = {"tests": ["assert True"]}
        assert (await rewards.evaluate(task, attempt_with("while True: pass"))).total == 0
    finally:
        await rewards.close()


async def test_partial_is_the_share_of_tests_that_pass(attempt_with: Attempts) -> None:
    rewards = Rewards.build([{"kind": "unit_tests", "partial": True, "seconds": SECONDS}])
    try:
        tests = [{"call": f"add({n}, 1)", "returns": 3} for n in range(4)]
        assert (await rewards.evaluate({"tests": tests}, attempt_with(ADD))).total == 0.25
    finally:
        await rewards.close()


@pytest.mark.parametrize("tests", [[], [3], [{"in": "a"}], [{"call": "f()"}], ["assert True"] * 101])
async def test_tests_that_cannot_be_read_are_a_failure(
    rewards: Rewards, tests: Any, attempt_with: Attempts
) -> None:
    with pytest.raises(RewardFailure, match="reward unit_tests: the task's 'tests'"):
        await rewards.evaluate({"tests": tests}, attempt_with(ADD))


async def test_the_death_of_the_process_that_makes_sandboxes_costs_no_answer_its_reward(
    attempt_with: Attempts,
) -> None:
    component = UnitTests("unit_tests", UnitTestsReward(kind="unit_tests", seconds=SECONDS))
    code = "import time\ndef slow():\n    time.sleep(1.0)\n    return 1"
    task = {"tests": [{"call": "slow()", "returns": 1}]}
    try:
        attempt = ScoredAttempt(task, attempt_with(code))
        assert await component.evaluate(attempt) == 1.0
        evaluation = asyncio.ensure_future(component.evaluate(attempt))
        await asyncio.sleep(0.4)
        process = component._sandboxes._fork_server.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        assert await evaluation == 1.0
    finally:
        await component.close()


def test_the_last_block_of_python_is_the_code() -> None:
    answer = "```python\nfirst\n```\n```bash\nls\n```\n```Python\nsecond\n```\n```json\n{}\n```"
    assert extract_code(answer) == "second\n"


@pytest.mark.parametrize("tests", [["assert True"], [{"output": ""}]])
async def test_a_machine_without_a_sandbox_is_a_failure(
    tests: Any, attempt_with: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(RewardFailure, match="reward unit_tests: the Python sandbox needs Linux"):
        await Rewards.build("unit_tests").evaluate({"tests": tests}, attempt_with(ADD))
