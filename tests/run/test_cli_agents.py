"""Agents on the command line in boxes, and agents for environments that judge a box. The program here is a shell script that
speaks to the model as any CLI does; `make test-clients` runs the real ones."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from box_leftovers import leftovers
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import build
from rollwright.errors import ConfigError, RollwrightError
from rollwright.rollout.cli_agents.installing import Installation, install, is_installed
from rollwright.rollout.cli_agents.recipe import CliRecipe, Packages, fill
from rollwright.run.checks import check_config
from rollwright.run.run import Run
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import BoxMount, BoxNeeds, BoxSpec, Network
from rollwright.sandbox.leases import STATE_VARIABLE
from rollwright.trajectory import Trajectory, samples

SCRIPT = r"""
task=$(cat)
cd $HOME
call() {
  body="{\"model\":\"$1\",\"messages\":[{\"role\":\"system\",\"content\":\"stamp=$RANDOM; You help.\"},$2]}"
  exec 3<>/dev/tcp/127.0.0.1/9119
  printf 'POST %s/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %s\r\nConnection: close\r\n\r\n%s' \
    "/${BASE_URL#http://*/}" "$KEY" "${#body}" "$body" >&3
  cat <&3
}
call side '{"role":"user","content":"name this"}' > title
asked="{\"role\":\"user\",\"content\":\"$task\"}"
call policy "$asked" > first
call policy "$asked,{\"role\":\"assistant\",\"content\":\"go on\"},{\"role\":\"user\",\"content\":\"more\"}" > second
grep -q '^HTTP/1.1 200' first || { echo "error: $(cat first)" >&2; exit 5; }
(exec 4<>/dev/tcp/127.0.0.1/$OTHER_PORT) 2>/dev/null && echo "reached another port"
echo "$task" | grep -o '[0-9]*' > /answer
case $MODE in fail) echo "error: it broke" >&2; echo last line >&2; exit 3;; hang) sleep 7777;; esac
echo "as $(id -un) in $PWD: $SETTING"
"""

MODULE = f'''
from rollwright.rollout.cli_agents.recipe import CliRecipe
from rollwright.trajectory import Message

RECIPE = CliRecipe(
    name="mine",
    packages=None,
    command=("bash", "$home/bin/agent.sh"),
    environment={{"BASE_URL": "$base_url", "KEY": "$api_key", "SETTING": "costs $$5", "OTHER_PORT": "1"}},
    files={{"bin/agent.sh": {SCRIPT.replace("$", "$$")!r}}},
    strip=(r"stamp=\\d+; ",),
)
NOT_ONE = 7


async def works(task, session):
    """Does the work by a call of its own."""
    await session.generate([Message("user", task["instruction"])])
    box = await session.box()
    await box.run(["sh", "-c", "echo $0 | grep -o '[0-9]*' > /answer", task["instruction"]])
'''

LEASE = 2.0
TEST = '[ "$(cat /answer 2>/dev/null)" = {answer} ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
REPLIES = [
    {"system": "help", "replies": [{"say": "go on"}]},
    {"replies": [{"say": "```bash\necho 42 > /answer\n```"}]},
]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "boxes-state"
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    yield folder
    until = time.monotonic() + LEASE + 5
    while (left := leftovers(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


@pytest.fixture
def boxes() -> None:
    async def check() -> str:
        backend = make_backend("bubblewrap")
        try:
            return await check_backend(backend)
        finally:
            await backend.aclose()

    if why := asyncio.run(check()):
        pytest.skip(f"bubblewrap does not run here: {why}")


def make_task(folder: Path, *, toml: str = "", steps: tuple[str, ...] = ()) -> Path:
    """A task that wants 42 in /answer; with steps, one number after the other."""
    environment = '[environment]\ndocker_image = "host"\nnetwork_mode = "no-network"\nmemory_mb = 256\n'
    listed = "".join(f'[[steps]]\nname = "{each}"\n' for each in steps)
    for place in [folder / "steps" / each for each in steps] or [folder]:
        number = place.name if steps else "42"
        for name, text in {
            "instruction.md": f"Write {number} to the answer.",
            "tests/test.sh": f"#!/bin/bash\n{TEST.format(answer=number)}\n",
            "solution/solve.sh": f"echo {number} > /answer\n",
        }.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    (folder / "environment").mkdir(parents=True)
    (folder / "task.toml").write_text(environment + toml + listed)
    return folder


def settings_of(folder: Path, agent: Any, **more: Any) -> dict[str, Any]:
    module = f"cli_agents_{folder.parent.name.replace('-', '_')}_{folder.name}"
    (folder / f"{module}.py").write_text(MODULE, encoding="utf-8")
    text = json.dumps(agent).replace("MODULE", module)
    tasks = folder / "tasks"
    if not tasks.exists():
        make_task(tasks / "answer")
    return {
        "name": "cli",
        "folder": str(folder),
        "custom_envs": {
            "Answer": {
                "env_type": f"harbor:{tasks}",
                "agent": json.loads(text),
                "box": {"lease_seconds": LEASE},
            }
        },
        "policy": {"kind": "simulated", "tokens_per_second": 1e6, "script": REPLIES},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Answer"]},
        "limits": {"max_attempts": 1, "max_refills": 1},
        **more,
    }


def play(settings: dict[str, Any]) -> list[Trajectory]:
    failures: list[str] = []

    async def run() -> list[Trajectory]:
        async with Run(build(settings), on_failed=lambda _, reason: failures.append(reason)) as it:
            return (await it.get_batch()).trajectories

    try:
        return asyncio.run(run())
    except RollwrightError as error:
        raise AssertionError(failures[0] if failures else str(error)) from error


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize("user", ["", "agent"])
def test_a_program_in_the_box_plays_the_task_and_its_calls_are_one_sequence(
    tmp_path: Path, user: str
) -> None:
    if user:
        make_task(tmp_path / "tasks" / "answer", toml=f'[agent]\nuser = "{user}"\n')
        (tmp_path / "tasks" / "answer" / "tests" / "test.sh").write_text(
            "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
        )
    settings = settings_of(tmp_path, {"cli": "MODULE:RECIPE", "output_kb": 1})
    for each in play(settings):
        assert (each.reward, each.success) == (1.0, True)
        assert each.metrics["gateway_left_out"] == 1  # the call beside the task
        side, first, second = each.turns
        assert (side.filtered, first.filtered, second.filtered) == ("gateway.calls", None, None)
        assert (first.extends, second.extends) == (
            None,
            first.id,
        )  # the stamp in the system prompt is taken out
        trained = [row for row in samples(each) if sum(row.mask)]
        assert [sum(row.mask) for row in trained] == [len(first.sampled_ids) + len(second.sampled_ids)]
        assert json.loads(each.returned or "") == f"as {user or 'root'} in /opt/rollwright/home: costs $5"


@pytest.mark.usefixtures("boxes")
def test_rows_of_a_file_are_played_in_a_box_that_reaches_the_model_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Write 42", "answer": 42}) + "\n")
    settings = settings_of(tmp_path, {"cli": "MODULE:RECIPE", "prompt": "{question} now"})
    settings["custom_envs"]["Answer"] |= {
        "tasks": "rows.jsonl",
        "rewards": [{"kind": "contains", "texts": ["as root"]}],
    }
    del settings["custom_envs"]["Answer"]["env_type"]
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
    ) as other:
        try:
            until = time.monotonic() + 20
            while not (ports := [each.laddr.port for each in psutil.Process(other.pid).net_connections()]):
                assert time.monotonic() < until
                time.sleep(0.05)
            settings["custom_envs"]["Answer"]["agent"]["environment"] = {"OTHER_PORT": str(ports[0])}
            played = play(settings)
        finally:
            other.kill()
    for each in played:
        assert "reached another port" not in (each.returned or "")
        assert each.reward == 1.0


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"environment": {"MODE": "fail"}}, "agent: command: mine: exit code 3: error: it broke"),
        ({"environment": {"MODE": "hang"}, "timeout": 1.5}, "mine did not end within 1.5 s"),
        ({"environment": {"KEY": "stranger"}}, "exit code 5"),
    ],
)
def test_a_program_that_fails_or_hangs_is_a_failure_and_never_a_reward(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        play(settings_of(tmp_path, {"cli": "MODULE:RECIPE", **more}))


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        ("oracle", 1.0),
        ("nop", 0.0),
        ("terminal", 1.0),
        ("MODULE:works", 1.0),
        ({"command": ["bash", "mine.sh"]}, 1.0),
    ],
)
def test_a_harbor_task_is_played_by_any_agent(tmp_path: Path, agent: Any, reward: float) -> None:
    (tmp_path / "mine.sh").write_text(
        SCRIPT.replace("task=$(cat)", "task=$(grep -o 'Write [0-9]*' $ROLLWRIGHT_TASK)")
        .replace("BASE_URL", "OPENAI_BASE_URL")
        .replace("$KEY", "$OPENAI_API_KEY")
        .replace("$OTHER_PORT", "1")
    )
    settings = settings_of(tmp_path, {"kind": "terminal", "max_turns": 2} if agent == "terminal" else agent)
    for each in play(settings):
        assert each.reward == reward
        assert each.success is (reward == 1.0)
        assert bool(each.turns) is (agent not in ("oracle", "nop"))


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize("agent", [{"cli": "MODULE:RECIPE"}, "oracle"])
def test_each_step_of_a_task_is_told_and_judged_in_turn(tmp_path: Path, agent: Any) -> None:
    make_task(tmp_path / "tasks" / "answer", steps=("17", "42"))
    for each in play(settings_of(tmp_path, agent)):
        assert each.reward == 1.0
        assert len(each.turns) == (0 if agent == "oracle" else 6)


@pytest.mark.usefixtures("boxes")
def test_the_output_is_shown_and_nothing_is_installed_in_a_rollout(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {"cli": "MODULE:RECIPE"}, max_steps=1)
    del settings["folder"]
    (tmp_path / "cli.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(tmp_path / "cli.yaml"), "--runs", str(tmp_path / "runs")])
    assert ran.exit_code == 0, ran.output
    shown = runner.invoke(app, ["show", str(tmp_path / "runs" / "cli"), "cli.train-g0-m0"])
    assert "as root in /opt/rollwright/home: costs $5" in shown.output, shown.output
    assert not (tmp_path / "cache" / "cli_agents").exists()


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_run_leaves_nothing_of_its_agents(
    tmp_path: Path, state: Path, how: signal.Signals
) -> None:
    settings = settings_of(tmp_path, {"cli": "MODULE:RECIPE", "environment": {"MODE": "hang"}})
    del settings["folder"]
    (tmp_path / "cli.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "rollwright",
        "run",
        str(tmp_path / "cli.yaml"),
        "--runs",
        str(tmp_path / "runs"),
    ]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)

    def sleeping() -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter(["cmdline", "environ"]):
            if each.info["cmdline"] == ["sleep", "7777"] and "/opt/rollwright" in str(each.info["environ"]):
                found.append(each)
        return found

    before = {each.pid for each in sleeping()}
    until = time.monotonic() + 60
    while len({each.pid for each in sleeping()} - before) < 2:
        assert time.monotonic() < until
        assert run.poll() is None
        time.sleep(0.1)
    own = [each for each in sleeping() if each.pid not in before]
    run.send_signal(how)
    run.wait(30)
    until = time.monotonic() + 30
    while any(each.is_running() for each in own) or leftovers(state):
        assert time.monotonic() < until, leftovers(state)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("agent", "env_type", "says"),
    [
        ({"cli": "claude-cod"}, None, r"custom_envs\.Answer\.agent\.cli: .*did you mean `claude-code`"),
        ({"cli": "MODULE:NOT_ONE"}, None, "is a int, not a CliRecipe"),
        ({"cli": "nowhere:at_all"}, None, "no module named 'nowhere'"),
        ({"cli": "codex", "network": "none"}, None, "network"),
        ({"cli": "codex", "timeut": 3}, None, "timeut"),
        ("nop", "FrozenLake", r"such as harbor:PATH; Answer is neither"),
        ({"cli": "codex"}, "FrozenLake", r"such as harbor:PATH; Answer is neither"),
        ("remote", "FrozenLake", r"Answer is neither"),
    ],
)
def test_a_wrong_agent_is_told_in_one_line_before_anything_is_played(
    tmp_path: Path, agent: Any, env_type: str | None, says: str
) -> None:
    settings = settings_of(tmp_path, agent)
    if env_type is not None:
        settings["custom_envs"]["Answer"]["env_type"] = env_type
    with pytest.raises(ConfigError, match=says) as told:
        check_config(build(settings))
    assert "\n" not in str(told.value)


def test_a_box_gets_what_an_agent_needs_whatever_its_spec_allows() -> None:
    mount = BoxMount("/here", "/opt/there")
    public = BoxSpec(network=Network.ALLOWLIST, allowed_hosts=("a",))
    only = BoxNeeds(mounts=(mount,), gateway=True, only_gateway=True)
    assert only.apply(public) == BoxSpec(network=Network.GATEWAY, mounts=(mount,))
    beside = BoxNeeds(gateway=True)
    assert beside.apply(public) == public
    assert beside.apply(BoxSpec()).network is Network.GATEWAY
    assert BoxNeeds().apply(public) == public


def test_a_placeholder_that_does_not_exist_is_named() -> None:
    assert fill("$model and $$5", {"model": "m"}, "here") == "m and $5"
    with pytest.raises(ConfigError, match=r"here: unknown placeholder 'modell'; accepted: \$model, and \$\$"):
        fill("$modell", {"model": "m"}, "here")


NPM = """#!/bin/sh
echo called >> {log}
[ -e {broken} ] && {{ echo "npm error 404 no such package" >&2; exit 1; }}
while [ "$1" != --prefix ]; do shift; done
sleep 0.2
mkdir -p "$2/node_modules/.bin" && printf '#!/bin/sh\\n' > "$2/node_modules/.bin/tool"
"""


def test_an_agent_is_installed_once_by_whoever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, broken = tmp_path / "log", tmp_path / "broken"
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM.format(log=log, broken=broken))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{os.environ['PATH']}")
    recipe = CliRecipe("tool", Packages("npm", ("tool@1.0.0",)), ("node_modules/.bin/t*",))
    broken.touch()
    with pytest.raises(
        ConfigError, match="agent cli tool: cannot be installed: npm error 404 no such package"
    ):
        install(recipe)
    assert not is_installed(recipe)
    broken.unlink()
    log.unlink()
    threads = [threading.Thread(target=install, args=(recipe,)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert log.read_text().split() == ["called"]
    found = Installation.of(recipe)
    assert found.program("node_modules/.bin/t*") == "/opt/rollwright/agent/node_modules/.bin/tool"
    with pytest.raises(ConfigError, match="has no bin/other"):
        found.program("bin/other")
    other = CliRecipe("tool", Packages("npm", ("tool@2.0.0",)), ("node_modules/.bin/tool",))
    assert not is_installed(other)
