"""A resources server of NeMo-Gym is played as its own simple agent plays it: session, tools, verification."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

import rollwright as rw
from rollwright.envs import registry

ADD_ONE = [
    {"call": {"name": "increment_counter", "arguments": {"count": 1}}},
    {"call": {"name": "get_counter_value"}},
    {"say": "now {result}"},
]
WRONG = [
    {"call": {"name": "increment_counter", "arguments": {"count": "many"}}},
    {"call": {"name": "no_such_function"}},
    {"say": "I was told {result}"},
]
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": "",
        "strict": True,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    for name, properties in (("increment_counter", {"count": {"type": "integer"}}), ("get_counter_value", {}))
]


def write_rows(file: Path, count: int) -> Path:
    rows = [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": f"task {n}: {'add one' if n % 2 else 'be wrong'}"}],
                "tools": TOOLS,
            },
            "initial_count": n,
            "expected_count": n + 1,
        }
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


class CounterServer:
    """The contract of NeMo-Gym's example of a stateful server, with its answers to what is wrong."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.broken = False

    async def seed_session(self, request: Request) -> JSONResponse:
        session = f"s{len(self.counts)}"
        self.counts[session] = (await request.json())["initial_count"]
        answer = JSONResponse({})
        answer.set_cookie("counter", session)
        return answer

    async def increment_counter(self, request: Request) -> JSONResponse:
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return JSONResponse({"detail": "Input should be a valid integer"}, status_code=422)
        self.counts[request.cookies["counter"]] += count
        return JSONResponse({"success": True})

    async def get_counter_value(self, request: Request) -> JSONResponse:
        return JSONResponse({"count": self.counts[request.cookies["counter"]]})

    async def verify(self, request: Request) -> JSONResponse | PlainTextResponse:
        asked = await request.json()
        self.verified.append(asked)
        if self.broken:
            return PlainTextResponse("Internal Server Error", status_code=500)
        right = asked["expected_count"] == self.counts[request.cookies["counter"]]
        return JSONResponse({**asked, "reward": float(right), "calls": 3})

    def app(self) -> Starlette:
        names = ("seed_session", "increment_counter", "get_counter_value", "verify")
        routes = [Route(f"/{name}", getattr(self, name), methods=["POST"]) for name in names]
        return Starlette(routes=routes)


def evaluated(url: str, rows: Path, tmp_path: Path) -> rw.Evaluation:
    script = [{"when": "add one", "replies": ADD_ONE}, {"replies": WRONG}]
    config = {
        "policy": {"kind": "simulated", "tokens_per_second": 1e5, "script": script},
        "custom_envs": {"Counter": {"env_type": f"nemo_gym:{url}", "env_config": {"dataset": str(rows)}}},
        "limits": {"max_attempts": 1},
    }
    return rw.evaluate(config, tags=["Counter"], runs=tmp_path / "runs")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def counter() -> Iterator[tuple[CounterServer, str]]:
    made, port = CounterServer(), free_port()
    server = uvicorn.Server(uvicorn.Config(made.app(), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(f"http://127.0.0.1:{port}/verify")
    yield made, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def wait_for(url: str, process: "subprocess.Popen[bytes] | None" = None) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=5)
        except urllib.error.HTTPError:
            return  # it answers, if only that it wants a POST
        except OSError:
            assert process is None or process.poll() is None, "the server has ended"
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def check_played(found: rw.Evaluation, rows: int) -> None:
    assert {each.seed: each.reward for each in found.trajectories} == {n: float(n % 2) for n in range(rows)}
    for each in found.trajectories:
        assert len(each.turns) == 3
        assert all(turn.exact for turn in each.turns)
        if each.seed % 2:
            assert f'"count":{each.seed + 1}' in each.turns[-1].text.replace(" ", "")


def test_rows_are_played_with_their_session_tools_and_verification(
    counter: tuple[CounterServer, str], tmp_path: Path
) -> None:
    server, url = counter
    found = evaluated(url, write_rows(tmp_path / "rows.jsonl", 6), tmp_path)
    check_played(found, 6)
    assert found.trajectories[0].metrics["calls"] == 3
    told = next(each for each in server.verified if each["expected_count"] == 2)
    kinds = [item["type"] for item in told["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    assert told["response"]["output"][-1]["content"][0]["text"].startswith("now")
    wrong = next(each for each in server.verified if each["expected_count"] == 1)
    assert "valid integer" in wrong["response"]["output"][1]["output"]


def test_a_server_that_does_not_verify_is_a_failure_and_never_a_zero(
    counter: tuple[CounterServer, str], tmp_path: Path
) -> None:
    server, url = counter
    server.broken = True
    found = evaluated(url, write_rows(tmp_path / "rows.jsonl", 2), tmp_path)
    assert found.report["episodes"] == {"finished": 0, "failed": 2, "not_played": 0}
    assert "/verify: status" in found.report["failures"][0]["cause"]


def test_a_server_that_is_not_there_is_a_failure_with_its_address(tmp_path: Path) -> None:
    found = evaluated(f"http://127.0.0.1:{free_port()}", write_rows(tmp_path / "rows.jsonl", 2), tmp_path)
    assert found.report["episodes"]["failed"] == 2
    assert "seed_session" in found.report["failures"][0]["cause"]


@pytest.mark.parametrize(
    ("url", "content", "said"),
    [
        ("http://127.0.0.1:1", None, "cannot be read"),
        ("http://127.0.0.1:1", "", "has no rows"),
        ("http://127.0.0.1:1", '{"question": 1}\n', "line 1: is no row of NeMo-Gym"),
        ("http://127.0.0.1:1", "{", "line 1: is no row of NeMo-Gym"),
        ("nowhere", '{"responses_create_params": {"input": "x"}}\n', "is no address of a resources server"),
    ],
)
def test_wrong_settings_are_one_line(url: str, content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(rw.ConfigError, match=said) as raised:
        registry.make(f"nemo_gym:{url}", {"dataset": str(file)})
    assert "\n" not in str(raised.value)


REQUIREMENTS = (
    *(
        "fastapi",
        "uvicorn",
        "itsdangerous",
        "pydantic",
        "openai==2.7.2",
        "aiohttp",
        "hydra-core",
        "omegaconf",
    ),
    *("ray>=2.55", "orjson", "yappi", "gprof2dot", "pydot", "psutil", "rich", "devtools", "tqdm", "wandb"),
    *("mlflow-skinny", "requests", "pandas"),
)
"""What the servers of NeMo-Gym import; the whole package would bring several gigabytes more."""


@pytest.fixture(scope="module")
def nemo_gym_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with NeMo-Gym 0.4, the last one for Python 3.12."""
    python = next((found for name in ("python3.12", "python3.13") if (found := shutil.which(name))), None)
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip("needs Python 3.12 or 3.13")
    home = tmp_path_factory.mktemp("nemo_gym")
    subprocess.run([python, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *REQUIREMENTS], check=True, capture_output=True)
    subprocess.run([*pip, "--no-deps", "nemo-gym==0.4.0"], check=True, capture_output=True)
    return str(home / "bin" / "python")


@pytest.mark.foreign
def test_nemo_gyms_own_server_is_played(nemo_gym_python: str, tmp_path: Path) -> None:
    port = free_port()
    program = Path(__file__).with_name("nemo_gym_counter.py")
    process = subprocess.Popen([nemo_gym_python, str(program), str(port)], cwd=tmp_path)
    try:
        wait_for(f"http://127.0.0.1:{port}/verify", process)
        found = evaluated(f"http://127.0.0.1:{port}", write_rows(tmp_path / "rows.jsonl", 6), tmp_path)
        check_played(found, 6)
    finally:
        process.terminate()
        process.wait(10)
