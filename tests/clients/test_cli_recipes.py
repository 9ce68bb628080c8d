"""Every recipe with its real program: a task of five tool calls, in a box that reaches the gateway alone, over a scripted
engine. `make test-clients` runs them; each is installed once into the cache."""

import asyncio
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollwright.config import build
from rollwright.run.run import Run
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.leases import STATE_VARIABLE
from rollwright.trajectory import LEFT_OUT, Trajectory, check, samples

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]

TASKS = Path(__file__).parents[2] / "examples" / "cli_agents" / "tasks"
COMMANDS = ("ls -la", "seq 1 8 > numbers", "paste -sd+ numbers", "echo 36 > sum", "cat sum")


class ShellTool(NamedTuple):
    """How a program is told to run a command."""

    name: str
    argument: str = "command"
    more: tuple[tuple[str, Any], ...] = ()
    """Further arguments."""


SHELLS = {
    "claude-code": ShellTool("Bash", more=(("description", "Runs"),)),
    "codex": ShellTool("exec_command", "cmd"),
    "gemini-cli": ShellTool("run_shell_command"),
    "mini-swe-agent": ShellTool("bash"),
    "opencode": ShellTool("bash", more=(("description", "Runs"),)),
    "qwen-code": ShellTool("run_shell_command", more=(("is_background", False),)),
}


@pytest.fixture(autouse=True)
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "boxes-state"))

    async def check() -> str:
        backend = make_backend("bubblewrap")
        try:
            return await check_backend(backend)
        finally:
            await backend.aclose()

    if why := asyncio.run(check()):
        pytest.skip(f"bubblewrap does not run here: {why}")


def settings_of(name: str) -> dict[str, Any]:
    tool = SHELLS[name]
    calls: list[dict[str, Any]] = [
        {
            "say": f"Step {place}.",
            "call": {"name": tool.name, "arguments": {tool.argument: each, **dict(tool.more)}},
        }
        for place, each in enumerate(COMMANDS, 1)
    ]
    if name == "mini-swe-agent":
        done = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
        last: dict[str, Any] = {"call": {"name": "bash", "arguments": done}}
    else:
        last = {"say": "The sum is 36."}
    replies = [*calls, last]
    # The instruction is the first message of the user, or behind one that describes the environment.
    scenes = [
        {"system": "(?i)title generator", "replies": [{"say": "A sum"}]},
        {"task": "numbers from 1 to 8", "replies": replies},
        {"when": "numbers from 1 to 8", "replies": replies},
    ]
    return {
        "policy": {"kind": "simulated", "tokens_per_second": 1e6, "script": scenes},
        "sequence_length": 200_000,
        "custom_envs": {
            "Sum": {"env_type": f"harbor:{TASKS}", "agent": {"cli": name}, "max_tokens_per_step": 4096}
        },
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Sum"]},
        "limits": {"max_attempts": 1, "max_refills": 1},
    }


async def play(settings: dict[str, Any]) -> list[Trajectory]:
    failures: list[str] = []
    try:
        async with Run(build(settings), on_failed=lambda _, reason: failures.append(reason)) as run:
            return (await run.get_batch()).trajectories
    except Exception as error:
        raise AssertionError(failures or error) from error


@pytest.mark.parametrize("name", SHELLS)
def test_a_program_finishes_a_task_of_five_tool_calls_as_one_growing_sequence(name: str) -> None:
    first, second = asyncio.run(play(settings_of(name)))
    for each in (first, second):
        assert (each.reward, each.success) == (1.0, True)
        check(each)
        beside = [turn.id for turn in each.turns if turn.filtered == LEFT_OUT]
        work = [turn for turn in each.turns if turn.filtered is None]
        assert len(beside) + len(work) == len(each.turns)
        assert len(work) == 6
        assert [turn.extends for turn in work] == [None, *(turn.id for turn in work[:-1])]
        # Every fork would be counted by its cause, and every refusal, too: there are none.
        counted = {key for key in each.metrics if key.startswith("gateway_")}
        assert counted <= {"gateway_left_out", "gateway_tools_ignored", "gateway_sampling_ignored"}
        assert each.metrics.get("gateway_left_out", 0) == len(beside) == (1 if name == "opencode" else 0)
        (row,) = [row for row in samples(each) if any(row.mask)]
        assert sum(row.mask) == sum(len(turn.sampled_ids) for turn in work)
    # Members of a group have the same prompt, so that an engine computes it once.
    opened = [next(turn for turn in each.turns if turn.filtered is None) for each in (first, second)]
    assert opened[0].prompt_ids == opened[1].prompt_ids
