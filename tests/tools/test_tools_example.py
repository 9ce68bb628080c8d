"""The tools example runs unmodified."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.py"


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_example_runs_and_solves_its_task() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "did you mean 'python'?" in done.stdout
    assert done.stdout.endswith("reward 1.0\n")
