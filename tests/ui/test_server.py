"""The page's server: read only, guarded, never wrong about a damaged run, and without secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollwright.run.folder import RunReader
from rollwright.run.trajectory_log import TRAJECTORIES
from rollwright.ui.app import POLICY, is_near

API = ("run", "live", "episodes", "training", "swarm", "evaluation", "pairs")


def test_runs_are_listed_with_state_and_progress(page: str, serving: ModuleType) -> None:
    runs = {each["id"]: each for each in serving.ask(page, "runs")["runs"]}
    assert set(runs) == {"lake", "tree", "team", "node", "exam", "damaged", "hostile"}
    lake = runs["lake"]
    assert (lake["state"], lake["kind"], lake["simulated"]) == ("ended", "rollouts", True)
    assert lake["progress"]["steps"] == lake["progress"]["most_steps"] == 3
    assert len(lake["rewards"]) == 3
    assert lake["tokens"] > 0
    assert runs["node"]["kind"] == "swarm"
    assert (runs["exam"]["kind"], runs["exam"]["cost"]) == ("evaluation", 0.0123)
    assert runs["damaged"]["problems"] > 2


def test_a_damaged_run_is_an_answer_that_says_so(page: str, serving: ModuleType) -> None:
    for name in API:
        status, body, _ = serving.get(f"{page}api/{name}?run=damaged")
        assert status in (200, 422), (name, body)
    lines = serving.ask(page, "live", run="damaged")["problem_lines"]
    assert any("config.yaml: is damaged" in line for line in lines)
    assert any("damaged place" in line for line in lines)
    assert any("metrics.jsonl" in line for line in lines)
    found = serving.ask(page, "episodes", run="damaged")
    assert 0 < found["episodes"] < 8, "what is left of the log is listed"


def test_the_listed_episodes_are_those_of_the_log(page: str, serving: ModuleType, played: Path) -> None:
    wanted = {each.rollout_id: each for each in RunReader(played / "lake").trajectories()}
    found = serving.ask(page, "episodes", run="lake", limit=200)
    assert found["total"] == len(wanted)
    for row in found["rows"]:
        trajectory = wanted[row["rollout_id"]]
        assert row["reward"] == pytest.approx(trajectory.reward)
        assert row["turns"] == len(trajectory.turns)
        assert row["tokens"] == trajectory.sampled_tokens


def test_the_tokens_shown_are_the_tokens_trained(page: str, serving: ModuleType, played: Path) -> None:
    one = next(each for each in RunReader(played / "lake").trajectories() if ".train-" in each.group_id)
    shown = serving.ask(page, "tokens", run="lake", rollout=one.rollout_id, turn=0)
    assert shown["sampled"]["ids"] == list(one.turns[0].sampled_ids)
    assert shown["prompt"]["ids"] == list(one.turns[0].prompt_ids)
    assert shown["sampled"]["logprobs"] == pytest.approx(list(one.turns[0].logprobs), abs=1e-5)
    assert "".join(shown["sampled"]["text"]).strip() == one.turns[0].text
    assert shown["sampled"]["advantage"] is not None


def test_only_reading_is_answered(page: str, serving: ModuleType) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert serving.get(f"{page}api/runs", method=method)[0] == 405


def test_nothing_is_written_to_the_folders(played: Path, page: str, serving: ModuleType) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {
            str(each): (each.stat().st_size, each.stat().st_mtime_ns)
            for each in played.rglob("*")
            if each.is_file()
        }

    before = state()
    for run in ("lake", "damaged", "node"):
        for name in API:
            serving.get(f"{page}api/{name}?run={run}")
    assert state() == before


def test_every_answer_forbids_code_and_other_origins(page: str, serving: ModuleType) -> None:
    for path in ("", "app.js", "api/runs", "nothing"):
        _, _, headers = serving.get(page + path)
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_another_site_that_names_itself_as_host_is_refused(page: str, serving: ModuleType) -> None:
    assert serving.get(f"{page}api/runs", {"host": "evil.example:80"})[0] == 421
    assert serving.get(f"{page}api/runs", {"host": "localhost:1"})[0] == 200


def test_a_path_in_a_request_leads_nowhere(page: str, serving: ModuleType) -> None:
    for name in ("../..", "/etc", "lake/../damaged", "..%2f..", ""):
        status, body, _ = serving.get(f"{page}api/run?run={name}")
        assert status == 404, body
    for path in ("static/app.js", "../pyproject.toml", "app.js/../../app.py"):
        assert serving.get(page + path)[0] == 404


def test_with_a_token_nothing_is_told_without_it(played: Path, serving: ModuleType) -> None:
    with serving.serving([str(played)], token="let-me-in-please") as url:
        for path in ("", "app.js", "api/runs"):
            assert serving.get(url + path)[0] == 401
        assert serving.get(f"{url}?token=wrong")[0] == 403
        known = {"authorization": "Bearer let-me-in-please"}
        status, body, _ = serving.get(f"{url}api/runs", known)
        assert status == 200
        assert b"let-me-in-please" not in body


def test_off_loopback_the_command_makes_a_token(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "rollwright",
        "ui",
        str(tmp_path),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--tied",
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdin is not None
        assert "?token=" in command.stdout.readline()
        command.stdin.close()


def test_no_secret_is_in_any_answer(
    tmp_path: Path, make: ModuleType, serving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sesame-7781-open"
    monkeypatch.setenv("SOME_API_KEY", secret)
    settings = make.LAKE | {
        "name": "secrets",
        "policy": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"},
    }
    said = f"key {secret}, sk-abcdefghijklmnopqrstuvwx, http://user:hunter22@host/x"
    make.written(
        tmp_path / "secrets", settings, iter([make.episode("secrets", 0, 0, [make.turn(0, said, said)])])
    )
    file = tmp_path / "secrets" / "config.yaml"  # a run refuses such settings, an edited file may have them
    file.write_text(file.read_text().replace("http://127.0.0.1:1", "http://me:hunter22@127.0.0.1:1"))
    (tmp_path / "secrets" / "store.address").write_text("postgresql://me@127.0.0.1:1/none\n")
    rollout = "secrets.train-g0-m0"
    with serving.serving([str(tmp_path)]) as url:
        serving.ask(url, "episodes", run="secrets")
        answers = [
            serving.get(f"{url}api/{name}?run=secrets&rollout={rollout}&text=key")[1]
            for name in (*API, "episode", "forest", "runs")
        ]
    told = b"\n".join(answers)
    assert rollout.encode() in told
    for each in (secret, "hunter22", "sk-abcdefghijklmnopqrstuvwx"):
        assert each.encode() not in told


def test_a_log_that_grows_is_followed(tmp_path: Path, make: ModuleType, serving: ModuleType) -> None:
    folder = make.long_run(tmp_path / "runs" / "long", 400)
    whole = (folder / TRAJECTORIES).read_bytes()
    (folder / TRAJECTORIES).write_bytes(whole[: len(whole) // 2])
    with serving.serving([str(tmp_path / "runs")]) as url:
        first = serving.ask(url, "episodes", run="long")["episodes"]
        assert 0 < first < 40
        with (folder / TRAJECTORIES).open("ab") as log:
            log.write(whole[len(whole) // 2 :])
        while serving.ask(url, "episodes", run="long")["episodes"] < 40:
            pass
        assert serving.ask(url, "run", run="long")["problem_lines"] == []
        other = folder / "other"
        other.write_bytes(whole[: len(whole) // 2])
        os.replace(other, folder / TRAJECTORIES)  # as pruning does
        while serving.ask(url, "episodes", run="long")["episodes"] >= 40:
            pass


def test_a_store_that_does_not_answer_is_told(serving: ModuleType) -> None:
    with serving.serving(["http://127.0.0.1:9/"]) as url:
        (run,) = serving.ask(url, "runs")["runs"]
        assert run["kind"] == "store"
        assert run["error"]
        status, body, _ = serving.get(f"{url}api/episodes?run=store+1")
        assert status == 200, body


def test_a_wrong_filter_is_refused_in_one_line(page: str, serving: ModuleType) -> None:
    status, body, _ = serving.get(f"{page}api/episodes?run=lake&least=high")
    assert status == 422
    assert "least" in json.loads(body)["error"]


@pytest.mark.parametrize("place", ["notes.txt", "ftp://host/runs", "host=db password=x"])
def test_a_place_without_runs_is_refused_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "notes.txt").write_text("no store")
    words = [sys.executable, "-m", "rollwright", "ui", place, "--port", "0", "--no-browser"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "password=x" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_leads_to_no_store_on_another_machine(tmp_path: Path) -> None:
    assert is_near(str(tmp_path / "store.db"), tmp_path)
    assert is_near("http://127.0.0.1:8700", tmp_path)
    assert is_near("postgresql://me@localhost/db", tmp_path)
    for other in (
        "http://evil.example",
        "postgresql://me@db/rollouts",
        "/etc/passwd",
        "http+unix:///run/other.sock",
    ):
        assert not is_near(other, tmp_path)
