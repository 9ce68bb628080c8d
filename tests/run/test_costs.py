"""The ledger of costs is what the servers have counted: agents, judges, groups' judges, rules, opponents, failures."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import rollwright as rw
from rollwright.config import build
from rollwright.run.costs import CostBook
from rollwright.run.evaluating import evaluate_run, settle_evaluation
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import play_run

AGENT = """
import openai

async def titles(task, session):
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for model in ("main", "mini"):
            messages = [{"role": "user", "content": f"{task['question']} for {model}"}]
            await client.chat.completions.create(model=model, messages=messages)
    return 1.0
"""

COUNTED = ("calls", "prompt", "cached", "completion", "reasoning")


class CountingServer(ThreadingHTTPServer):
    """An OpenAI-compatible API for several models, which counts what it bills."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.billed: dict[str, Counter[str]] = {}
        self.lock = threading.Lock()
        self.fail_every = 0
        self.storm = 0
        """Requests that are answered with 429 before any other."""
        self.answered = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def bill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        text = json.dumps(body["messages"])
        with self.lock:
            self.answered += 1
            number = self.answered
            if self.fail_every and number % self.fail_every == 0:
                return None
            usage = {
                "prompt": len(text),
                "cached": len(text) // 3,
                "completion": 7 + number % 5,
                "reasoning": number % 4,
            }
            self.billed.setdefault(body["model"], Counter()).update({"calls": 1, **usage})
        return {
            "choices": [
                {"message": {"role": "assistant", "content": _say(text, number)}, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": usage["prompt"],
                "completion_tokens": usage["completion"],
                "prompt_tokens_details": {"cached_tokens": usage["cached"]},
                "completion_tokens_details": {"reasoning_tokens": usage["reasoning"]},
            },
        }


def _say(text: str, number: int) -> str:
    if "Rank the answers" in text:
        return "ranking: " + " > ".join(str(n) for n in range(1, text.count("between the marks") + 1))
    return "score: 0.5" if "Grade the answer" in text else str(number)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingServer

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": each} for each in ("player", "small", "judge", "ranker")]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.storm -= 1
            stormy = self.server.storm >= 0
        if stormy:
            self._reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.05"})
            return
        answer = self.server.bill(body)
        self._reply(400 if answer is None else 200, answer or {"error": {"message": "no"}})

    def _reply(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[CountingServer]:
    server = CountingServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def content(tmp_path: Path, api: CountingServer, **more: Any) -> dict[str, Any]:
    rows = [{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "agent_of_ledger.py").write_text(AGENT, encoding="utf-8")

    def model(name: str) -> dict[str, Any]:
        return {"kind": "openai", "model": name, "base_url": api.url, "max_retries": 0}

    judges = [
        {
            "kind": "judge",
            "name": "style",
            "rubric": "Is it nice?",
            "policy": model("judge"),
            "cache_size": 0,
        },
        {"kind": "group_judge", "name": "best", "rubric": "Which is best?", "policy": model("ranker")},
    ]
    return {
        "name": "ledger",
        "folder": str(tmp_path),
        "max_steps": 3,
        "policy": model("player"),
        "policies": {"small": model("small")},
        "gateway": {"calls": [{"model": "mini", "policy": "small"}]},
        "prices": {
            name: {"prompt": 1.0, "completion": 2.0} for name in ("player", "small", "judge", "ranker")
        },
        "custom_envs": {
            "Sums": {"tasks": "sums.jsonl", "rewards": ["exact_match", *judges]},
            "Titles": {
                "tasks": "sums.jsonl",
                "agent": "agent_of_ledger:titles",
                "rewards": ["returned", judges[0]],
            },
        },
        "train_env_manager": {"num_env_groups": 4, "group_size": 3, "tags": ["Sums", "Titles"]},
        **more,
    }


async def spent(path: Path, settings: dict[str, Any], *, resume: bool = False) -> dict[str, Any]:
    config = build(settings)
    folder = RunFolder.reopen(path) if resume else RunFolder.begin(path, config)
    summary = await play_run(config, folder, resume=resume)
    found: dict[str, Any] = summary["costs"]
    return found


async def test_every_call_is_in_the_ledger_of_its_model_agent_tag_and_judge(
    tmp_path: Path, api: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    costs = await spent(tmp_path / "run", content(tmp_path, api))
    assert set(costs["by"]["model"]) == {"player", "small", "judge", "ranker"}
    for model, counts in costs["by"]["model"].items():
        assert {name: counts[name] for name in COUNTED} == dict(api.billed[model]), model
    assert set(costs["by"]["judge"]) == {"style", "best"}
    assert {each["model"] for each in costs["entries"] if each["tag"] == "Titles"} == {
        "player",
        "small",
        "judge",
    }
    assert {each["agent"] for each in costs["entries"] if each["judge"]} == {""}
    total = {name: sum(counts[name] for counts in api.billed.values()) for name in COUNTED}
    assert {name: costs["total"][name] for name in COUNTED} == total
    assert costs["total"]["usd"] == pytest.approx((total["prompt"] + 2 * total["completion"]) / 1e6)


async def test_a_run_in_two_parts_has_the_ledger_of_all_that_was_billed(
    tmp_path: Path, api: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    settings = content(tmp_path, api)
    first = await spent(tmp_path / "run", {**settings, "budget": {"tokens": 20_000}})
    assert first["total"]["calls"] == sum(each["calls"] for each in api.billed.values())
    last = await spent(tmp_path / "run", settings, resume=True)
    assert first["total"]["calls"] < last["total"]["calls"]
    for model, counts in last["by"]["model"].items():
        assert {name: counts[name] for name in COUNTED} == dict(api.billed[model]), model
    book = CostBook(build(settings), RunFolder.reopen(tmp_path / "run"))
    book.restore()
    assert book.ledger.sums(build(settings).prices)["by"] == last["by"]


async def test_what_failed_episodes_have_used_is_in_the_ledger(
    tmp_path: Path, api: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    api.fail_every = 11
    settings = content(tmp_path, api, limits={"max_attempts": 1, "max_refills": 100})
    settings["custom_envs"]["Sums"]["rewards"] = [
        "exact_match",
        settings["custom_envs"]["Sums"]["rewards"][1],
    ]
    costs = await spent(tmp_path / "run", settings)
    assert RunReader(tmp_path / "run").failures()
    for model, counts in costs["by"]["model"].items():
        assert {name: counts[name] for name in COUNTED} == dict(api.billed[model]), model


def test_a_budget_in_dollars_needs_the_prices_of_judges_too(tmp_path: Path, api: CountingServer) -> None:
    settings = content(tmp_path, api, budget={"usd": 1.0})
    del settings["prices"]["ranker"]
    with pytest.raises(rw.ConfigError, match=r"prices\.ranker"):
        CostBook(build(settings))


async def test_calls_that_a_team_throws_away_are_paid_for(
    tmp_path: Path, api: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    settings = content(tmp_path, api, agent={"performance": {"enable_early_termination": False}})
    settings["custom_envs"] = {"Sums": {"tasks": "sums.jsonl", "rewards": ["exact_match"]}}
    settings["orchestras"] = {"Sums": {"kind": "math", "agents": {"verifier": {"policy": "small"}}}}
    settings["train_env_manager"]["tags"] = ["Sums"]
    costs = await spent(tmp_path / "run", settings)
    turns = sum(len(each.turns) for each in RunReader(tmp_path / "run").trajectories())
    assert costs["total"]["calls"] > turns
    assert len(costs["by"]["agent"]) == 2
    for model, counts in costs["by"]["model"].items():
        assert {name: counts[name] for name in COUNTED} == dict(api.billed[model]), model


async def test_a_storm_of_429_over_worker_processes_fails_no_episode_and_is_not_billed(
    tmp_path: Path, api: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    api.storm = 60
    settings = content(tmp_path, api, evaluation={"tags": ["Sums"], "samples": 3, "cache": False})
    settings["custom_envs"]["Sums"]["rewards"] = ["exact_match"]
    config = settle_evaluation(build(settings))
    folder = RunFolder.begin(tmp_path / "run", config)
    summary, report = await evaluate_run(config, folder, workers=2)
    assert api.storm < 0
    assert report["episodes"] == {"finished": 36, "failed": 0, "not_played": 0}
    counted = summary["costs"]["by"]["model"]["player"]
    assert {name: counted[name] for name in COUNTED} == dict(api.billed["player"])
