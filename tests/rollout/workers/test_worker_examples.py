"""The examples about workers run as they are, and show what they say they show."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("words", [(), ("--processes",)], ids=["coroutines", "processes"])
def test_four_workers_share_twenty_rollouts_C3_C4(words: tuple[str, ...]) -> None:
    shown = example("share_rollouts.py", *words)
    lines = re.findall(r"^(worker-\d) took (ro-\w+) ", shown, re.MULTILINE)
    assert len(lines) == len({rollout for _, rollout in lines}) == 20, shown
    taken = Counter(worker for worker, _ in lines)
    assert set(taken) == {"worker-0", "worker-1", "worker-2", "worker-3"}
    assert min(taken.values()) >= 3
    assert "worker-3: idle" in shown
    assert "claimed and not finished: 0" in shown


def test_workers_and_their_limits_are_settings_C5() -> None:
    shown = example("share_rollouts.py", "--workers", "3", "--rollouts", "9", "--max-rollouts", "2")
    taken = Counter(re.findall(r"^(worker-\d) took", shown, re.MULTILINE))
    assert taken == {"worker-0": 2, "worker-1": 2, "worker-2": 2}


def test_a_plain_function_is_played_by_workers() -> None:
    shown = example("custom_agent.py")
    assert shown.count(" took ro-") == 9
    results = re.findall(r"^What is \d \+ \d\? reward (\S+) after (\d) turns$", shown, re.MULTILINE)
    assert len(results) == 9
    assert set(results) <= {("1", "1"), ("0.5", "2"), ("0", "2")}
    assert len(set(results)) > 1
