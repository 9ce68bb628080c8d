"""Every Python example in docs/policies.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("program", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_example_runs_and_prints_something(program: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) == 4
