"""The examples about the gateway run as they are."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_agent_of_the_plain_client_gives_one_sequence_for_each_rollout() -> None:
    shown = example("gateway_openai.py")
    found = re.findall(r"^(\w+): 3 turns, (\d+) of (\d+) tokens trained$", shown, re.MULTILINE)
    assert {topic for topic, _, _ in found} == {"rivers", "bridges", "tides"}
    assert all(0 < int(trained) < int(whole) for _, trained, whole in found)


def test_an_agent_framework_is_recorded_with_its_tool_call() -> None:
    shown = example("gateway_agents.py")
    assert '"turns":2,"reward":1.0' in shown
    assert "turn 0 continues None: 80 sampled ids" in shown
    assert "turn 1 continues 0: 12 sampled ids" in shown
