"""Agents that are programs of their own, from npm: `make test-clients` runs them if npm is there.

Each gets a home and a working folder of its own. The script behind the gateway lets it run one harmless command.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]

HOME = Path(__file__).parents[2] / ".venvs" / "client-npm"
PACKAGES = ("@anthropic-ai/claude-code@2.1.326", "@openai/codex@0.169.0", "opencode-ai@1.18.33")
PROMPT = "Print the word lisbon in the shell."
TITLE = {"system": "(?i)title generator|short title", "replies": [{"say": "Print a word"}]}


class Program(NamedTuple):
    """One program: the tool that it runs commands with, its arguments and variables, and what is recorded of it."""

    tool: str
    argument: str
    command: tuple[str, ...]
    variables: dict[str, str]
    sequences: int
    metrics: tuple[str, ...] = ()


PROGRAMS = {
    "claude": Program(
        "Bash",
        "command",
        ("-p", PROMPT, "--dangerously-skip-permissions", "--output-format", "json"),
        {"IS_SANDBOX": "1", "ANTHROPIC_MODEL": "policy", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        1,
    ),
    "codex": Program(
        "exec_command",
        "cmd",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        {},
        1,
        ("gateway_tools_ignored",),
    ),
    "opencode": Program("bash", "command", ("run", "--model", "rw/policy", PROMPT), {}, 2),
}


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the installed programs."""
    marker = HOME / "installed.txt"
    if not marker.exists() or marker.read_text() != "\n".join(PACKAGES):
        HOME.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(HOME), *PACKAGES]
        subprocess.run(command, check=True, capture_output=True)
        marker.write_text("\n".join(PACKAGES))
    return HOME / "node_modules" / ".bin"


def configure(folder: Path, base_url: str, key: str) -> None:
    """The settings by which the programs find another provider."""
    (folder / ".codex").mkdir()
    (folder / ".codex" / "config.toml").write_text(
        'model = "policy"\nmodel_provider = "rw"\n[model_providers.rw]\nname = "rw"\n'
        f'base_url = "{base_url}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    )
    options = {"baseURL": base_url, "apiKey": key}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {"policy": {"tool_call": True}},
    }
    (folder / "opencode.json").write_text(json.dumps({"provider": {"rw": provider}, "share": "disabled"}))


CODEX_CALLS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "namespace": (
        "policy",
        [
            {"call": {"name": "multi_agent_v1__close_agent", "arguments": {"target": "nobody"}}},
            {"say": "It answered: {result}"},
        ],
        "nobody",
    ),
    "custom": (
        "gpt-5.6-sol",
        [
            {
                "call": {
                    "name": "functions__exec",
                    "arguments": {
                        "input": 'text((await tools.exec_command({cmd: "echo lis$((1))bon"})).output)'
                    },
                }
            },
            {"say": "It answered: {result}"},
        ],
        "lis1bon",
    ),
}
"""By the kind of tool: the model's name, by which Codex chooses its tools; what the model says; what the tool answers."""


@pytest.mark.parametrize("kind", CODEX_CALLS)
async def test_codex_runs_its_tools_that_are_no_functions(
    kind: str, programs: Path, make_recorded: Any, run_program: Any, tmp_path: Path
) -> None:
    model, replies, wanted = CODEX_CALLS[kind]
    scenes = [{"task": "lisbon", "replies": replies}, {"when": "lisbon", "replies": replies}]
    recorded = make_recorded([*scenes, {"replies": [{"say": "All done."}]}])
    configure(tmp_path, recorded.base_url, recorded.api_key)
    words = ("exec", "-m", model, *PROGRAMS["codex"].command[1:])
    said = await run_program([str(programs / "codex"), *words], recorded, tmp_path)
    assert "It answered" in said
    assert wanted in said
    recorded.assert_served(1)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_does_its_whole_tool_loop(
    name: str, programs: Path, make_recorded: Any, run_program: Any, tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    call = {
        "name": program.tool,
        "arguments": {program.argument: "echo lisbon", "description": "Prints a word"},
    }
    replies = [{"call": call}, {"say": "It printed: {result}"}]
    # The prompt is the first message of the user, or behind one that describes the environment.
    scenes = [{"task": "lisbon", "replies": replies}, {"when": "lisbon", "replies": replies}]
    recorded = make_recorded([TITLE, *scenes, {"replies": [{"say": "All done."}]}])
    configure(tmp_path, recorded.base_url, recorded.api_key)
    command = [str(programs / name), *program.command]
    said = await run_program(command, recorded, tmp_path, **program.variables)
    assert "It printed" in said
    recorded.assert_served(program.sequences)
    assert all(metric in recorded.trajectory.metrics for metric in program.metrics)
