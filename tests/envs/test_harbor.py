"""Harbor task folders: rewards of the oracle and of doing nothing, failures of verifiers, steps, services and forks."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollwright.config import build
from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.harbor.compose import find_services, interpolate
from rollwright.envs.harbor.environment import HarborEnv
from rollwright.envs.harbor.tasks import find_tasks, load_task, substitute
from rollwright.errors import ConfigError
from rollwright.run.run import Run
from rollwright.sandbox.attempts import AttemptBoxes, use_boxes
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.box import BoxLabel
from rollwright.sandbox.leases import STATE_VARIABLE
from rollwright.sandbox.pool import BoxPool

HAS_PYTHON = Path("/usr/bin/python3").exists()

PLAIN_TEST = '[ "$(cat /answer 2>/dev/null)" = 42 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'


def make_task(
    folder: Path, *, toml: str = "", test: str = PLAIN_TEST, solve: str = "echo 42 > /answer"
) -> Path:
    """A task in the image of this machine's own programs."""
    for each in ("environment", "tests", "solution"):
        (folder / each).mkdir(parents=True)
    head = 'schema_version = "1.4"\n[task]\nname = "test/plain"\n'
    environment = '[environment]\ndocker_image = "host"\nnetwork_mode = "no-network"\nmemory_mb = 256\n'
    (folder / "task.toml").write_text(toml or head + environment)
    (folder / "instruction.md").write_text("Write 42 to /answer.\n")
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solve}\n")
    return folder


@pytest.fixture
async def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AttemptBoxes]:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    backend = make_backend("bubblewrap")
    if why := await check_backend(backend):
        await backend.aclose()
        pytest.skip(f"bubblewrap does not run here: {why}")
    pool = BoxPool(backend)
    yield AttemptBoxes(pool, BoxLabel(rollout_id="r"))
    await pool.aclose()


async def play(folder: Path, boxes: AttemptBoxes, *, oracle: bool) -> float:
    """The reward of the oracle, or of doing nothing."""
    with use_boxes(boxes):
        env = HarborEnv(str(folder))
        await env.reset(0)
        while True:
            action = env.best_action() if oracle else env.actions()[0]
            step = await env.step(env.answer(action or ""))
            if step.terminated:
                return step.reward


def plain(toml: str) -> str:
    return f'[environment]\ndocker_image = "host"\nnetwork_mode = "no-network"\n{toml}'


CASES: dict[str, dict[str, str]] = {
    "reward.txt": {},
    "reward.json before reward.txt": {
        "test": f'{PLAIN_TEST}\n[ -e /answer ] && echo \'{{"reward": 1, "speed": 3}}\' > /logs/verifier/reward.json '
        "|| echo '{\"reward\": 0}' > /logs/verifier/reward.json; echo 7 > /logs/verifier/reward.txt; exit 1"
    },
    "environment variables": {
        "toml": plain('env = { KEY = "${NOT_SET_ANYWHERE:-42}" }\n'),
        "solve": "echo $KEY > /answer",
    },
    "a healthcheck": {
        "toml": plain('[environment.healthcheck]\ncommand = "test -d /logs"\ninterval_sec = 0.1\n')
    },
    "an unprivileged agent": {
        "toml": plain('[agent]\nuser = "agent"\n'),
        "solve": "id -u > /tmp/who",
        "test": '[ "$(cat /tmp/who)" = 1000 ]; echo $((1 - $?)) > /logs/verifier/reward.txt',
    },
    "a separate verifier": {
        "toml": 'artifacts = ["/answer"]\n' + plain('[verifier]\nenvironment_mode = "separate"\n'),
        "solve": "echo 42 > /answer; echo 1 > /not-copied",
        "test": f"[ -e /not-copied ] && exit 1\n{PLAIN_TEST}",
    },
}


@pytest.mark.parametrize("case", CASES)
async def test_the_oracle_solves_a_task_and_doing_nothing_does_not(
    case: str, tmp_path: Path, boxes: AttemptBoxes
) -> None:
    folder = make_task(tmp_path / "task", **CASES[case])
    assert await play(folder, boxes, oracle=True) == 1.0
    again = AttemptBoxes(boxes._pool, boxes.label)
    assert await play(folder, again, oracle=False) == 0.0


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("exit 0", "has written neither reward.json nor reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "finite numbers are accepted"),
        ("echo '{}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "reward.json holds"),
        ('echo \'{"a": "b"}\' > /logs/verifier/reward.json', "reward.json holds"),
        ("echo broken >&2; exit 3", "broken"),
    ],
)
async def test_a_verifier_that_breaks_is_a_failure_and_never_a_reward_of_0(
    test: str, why: str, tmp_path: Path, boxes: AttemptBoxes
) -> None:
    with pytest.raises(EnvironmentFailure, match=why):
        await play(make_task(tmp_path / "task", test=test), boxes, oracle=True)


async def test_steps_are_verified_one_after_the_other(tmp_path: Path, boxes: AttemptBoxes) -> None:
    folder = make_task(tmp_path / "task")
    (folder / "task.toml").write_text(plain("") + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for name, right in (("one", "1"), ("two", "2")):
        step = folder / "steps" / name
        (step / "tests").mkdir(parents=True)
        (step / "solution").mkdir()
        (step / "instruction.md").write_text(f"Write {right}.")
        check = f'[ "$(cat /step)" = {right} ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
        (step / "tests" / "test.sh").write_text(f"#!/bin/bash\n{check}\n")
        (step / "solution" / "solve.sh").write_text(f"echo {right} > /step\n")
    assert await play(folder, boxes, oracle=True) == 1.0
    with use_boxes(AttemptBoxes(boxes._pool, boxes.label)):
        env = HarborEnv(str(folder))
        assert (await env.reset(0)).observation == "Write 1."
        await env.step("```bash\necho 1 > /step\n```")
        assert (await env.step("```bash\ndone\n```")).observation == "Write 2."
        assert (await env.step("```bash\ndone\n```")).reward == 0.5


async def test_services_find_each_other_by_name(tmp_path: Path, boxes: AttemptBoxes) -> None:
    if os.geteuid() != 0:
        pytest.skip("boxes of bubblewrap share a network only when they are started by root")
    folder = make_task(
        tmp_path / "task",
        solve="for i in $(seq 50); do exec 3<>/dev/tcp/server/8123 && break; sleep 0.1; done; cat <&3 > /answer",
    )
    if not HAS_PYTHON:
        pytest.skip("the service of this test needs /usr/bin/python3")
    serve = (
        "python3 -c \"import socket; s = socket.create_server(('', 8123)); "
        "[(lambda c: (c.sendall(b'42'), c.close()))(s.accept()[0]) for _ in range(9)]\""
    )
    compose = {"services": {"main": {"image": "host"}, "server": {"image": "host", "command": serve}}}
    (folder / "environment" / "docker-compose.yaml").write_text(yaml.safe_dump(compose))
    assert await play(folder, boxes, oracle=True) == 1.0


async def test_an_environment_in_a_box_forks(tmp_path: Path, boxes: AttemptBoxes) -> None:
    with use_boxes(boxes):
        env = HarborEnv(str(make_task(tmp_path / "task")))
        await env.reset(0)
        await env.step("```bash\necho 4 > /part\n```")
        other = await env.fork()
        await other.step("```bash\necho $(cat /part)2 > /answer\n```")
        assert (await other.step("```bash\ndone\n```")).reward == 1.0
        assert (await env.step("```bash\ndone\n```")).reward == 0.0


async def test_tests_and_solution_are_not_there_while_the_agent_works(
    tmp_path: Path, boxes: AttemptBoxes
) -> None:
    with use_boxes(boxes):
        env = HarborEnv(str(make_task(tmp_path / "task")))
        await env.reset(0)
        seen = await env.step("```bash\nls /tests /solution\n```")
        assert "/tests" in seen.observation
        assert "cannot access" in seen.observation
        cheating = await env.step(env.answer("solution"))
        assert not cheating.terminated


async def test_the_older_layout_of_terminal_bench_is_played(tmp_path: Path, boxes: AttemptBoxes) -> None:
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Write 42 to /answer.\nmax_test_timeout_sec: 60\n")
    (folder / "docker-compose.yaml").write_text("services: {client: {image: host}}\n")
    (folder / "solution.sh").write_text("echo 42 > /answer\n")
    (folder / "run-tests.sh").write_text(
        'if [ "$(cat /answer)" = 42 ]; then echo "==== 2 passed in 0.1s ====";'
        ' else echo "==== 1 failed, 1 passed in 0.1s ===="; fi\n'
    )
    assert await play(folder, boxes, oracle=True) == 1.0
    assert await play(folder, AttemptBoxes(boxes._pool, boxes.label), oracle=False) == 0.0


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("random", 0.0)])
def test_a_run_plays_task_folders_by_tag(
    policy: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))

    async def run() -> list[float]:
        backend = make_backend("bubblewrap")
        why = await check_backend(backend)
        await backend.aclose()
        if why:
            pytest.skip(f"bubblewrap does not run here: {why}")
        make_task(tmp_path / "tasks" / "one")
        make_task(tmp_path / "tasks" / "two")
        settings: dict[str, Any] = {
            "policy": {"kind": policy},
            "train_env_manager": {
                "num_env_groups": 2,
                "group_size": 2,
                "tags": [f"harbor:{tmp_path / 'tasks'}"],
            },
        }
        async with Run(build(settings)) as it:
            return [each.reward for each in (await it.get_batch()).trajectories]

    assert asyncio.run(run()) == [reward] * 4


def test_wrong_folders_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        find_tasks(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no task in it"):
        find_tasks(tmp_path)
    folder = make_task(tmp_path / "task", toml="[environment]\nmemory_mb = 'much'\n")
    with pytest.raises(ConfigError, match=r"task.toml: .*memory_mb"):
        load_task(folder)
    (folder / "task.toml").write_text("[environment]\n")
    with pytest.raises(ConfigError, match="needs a Dockerfile"):
        load_task(folder)
    (folder / "task.toml").write_text("[environment\n")
    with pytest.raises(ConfigError, match=r"task.toml"):
        load_task(folder)
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE is needed"):
        substitute({"A": "${NO_SUCH_VARIABLE}"}, "here")


def test_deprecated_sizes_are_read(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "host"\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    task = load_task(make_task(tmp_path / "task", toml=toml))
    assert (task.environment.memory_limit, task.environment.storage_limit, task.environment.network) == (
        2048,
        512,
        "no-network",
    )


async def test_the_network_of_a_phase_is_that_phases(tmp_path: Path, boxes: AttemptBoxes) -> None:
    toml = (
        '[environment]\ndocker_image = "host"\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"\n'
        '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.org"]\n'
    )
    test = '[ -n "$https_proxy" ] && [ "$(cat /seen)" = none ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
    folder = make_task(tmp_path / "task", toml=toml, test=test, solve="echo ${https_proxy:-none} > /seen")
    assert await play(folder, boxes, oracle=True) == 1.0


async def test_files_of_a_task_with_a_ready_image_are_in_the_working_folder(
    tmp_path: Path, boxes: AttemptBoxes
) -> None:
    folder = make_task(tmp_path / "task", toml=plain('workdir = "/srv"\n'), solve="cp given.txt /answer")
    (folder / "environment" / "given.txt").write_text("42\n")
    assert await play(folder, boxes, oracle=True) == 1.0


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        (plain("gpus = 1\n"), "environment.gpus"),
        (plain('os = "windows"\n'), "environment.os"),
        (plain('mcp_servers = [{name = "x", url = "y"}]\n'), "environment.mcp_servers"),
        (plain('[[steps]]\nname = "one"\nmin_reward = "much"\n'), "min_reward"),
    ],
)
def test_what_is_not_played_is_refused_by_name(tmp_path: Path, toml: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"task.toml: .*{why}"):
        load_task(make_task(tmp_path / "task", toml=toml))


def test_variables_of_a_compose_file_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "x")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    for text, filled in (
        ("$GIVEN ${GIVEN} $$GIVEN", "x x $GIVEN"),
        ("${UNSET} ${UNSET:-d} ${UNSET-d}", " d d"),
        ("${EMPTY:-d} ${EMPTY-d}", "d "),
        ("${GIVEN:+y} ${UNSET:+y}", "y "),
        ("no $ dollar", "no $ dollar"),
    ):
        assert interpolate(text) == filled


def test_a_service_runs_its_own_program_or_the_images(tmp_path: Path) -> None:
    compose = {
        "services": {
            "main": {"image": "host"},
            "plain": {"image": "host"},
            "command": {"image": "host", "command": "serve --port 80"},
            "entry": {"image": "host", "entrypoint": ["own"], "command": ["x"]},
            "healthy": {"image": "host", "healthcheck": {"test": ["CMD", "true"], "interval": "1m30s"}},
        }
    }
    (tmp_path / "docker-compose.yaml").write_text(yaml.safe_dump(compose, sort_keys=False))
    main, plain_one, command, entry, healthy = find_services(tmp_path, "")
    assert main.name == "main"
    assert plain_one.words(("entry",), ("cmd",)) == ("entry", "cmd")
    assert command.words(("entry",), ("cmd",)) == ("entry", "serve", "--port", "80")
    assert entry.words(("entry",), ("cmd",)) == ("own", "x")
    assert healthy.healthcheck is not None
    assert (healthy.healthcheck.command, healthy.healthcheck.interval_sec) == ("true", 90.0)
