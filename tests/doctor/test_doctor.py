"""Rows E7 and E10: what the doctor finds, what it says to do, and whether its exit code is honest."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import build
from rollwright.doctor.checks import (
    Health,
    check_clock,
    check_engine,
    check_identity,
    check_machine,
    check_node,
    check_ports,
)
from rollwright.doctor.startup import PARTS, check_startup, compare, median_start
from rollwright.errors import FormatError
from rollwright.swarm.heartbeat import NodePhase, Pulse

SOUND = """
policy: {kind: random}
training: {}
swarm: {}
train_env_manager: {num_env_groups: 1, tags: [FrozenLake]}
"""


def doctor(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, "-m", "rollwright", "doctor", "--json", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("[") else [], done.stderr


def test_a_sound_node_has_nothing_to_fix_and_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(SOUND)
    code, findings, said = doctor(tmp_path, "node.yaml")
    assert code == 0, (findings, said)
    assert {each["about"] for each in findings} >= {
        "config",
        "machine",
        "memory",
        "disk",
        "clock",
        "engine",
        "ports",
        "identity",
        "node",
    }
    assert [each.name for each in tmp_path.iterdir()] == ["node.yaml"]


def test_what_is_wrong_is_named_with_what_to_do_and_the_code_says_so(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(SOUND + "sed: 3\n")
    home = tmp_path / "home"
    home.mkdir()
    (home / "identity.key").write_text("00" * 32)
    (home / "identity.key").chmod(0o644)
    code, findings, _ = doctor(tmp_path, "node.yaml", "--home", "home")
    assert code == 1
    wrong = {each["about"]: each for each in findings if each["health"] == "fix"}
    assert set(wrong) == {"config", "identity"}
    assert "did you mean `seed`?" in wrong["config"]["what"]
    assert "chmod 600" in wrong["identity"]["fix"]


def test_an_address_in_use_and_an_engine_that_is_away_must_be_fixed(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp/127.0.0.1:{taken.getsockname()[1]}"
        config = build(
            {
                "policy": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"},
                "swarm": {"communication": {"listen": [address], "bootstrap": [address, "tcp/127.0.0.1:1"]}},
            }
        )
        ports = list(check_ports(config, tmp_path))
    assert [each.health for each in ports] == [Health.FIX, Health.WELL]
    assert "choose another port" in ports[0].fix
    (engine,) = check_engine(config)
    assert engine.health is Health.FIX
    assert "does not answer" in engine.what


def test_a_node_without_a_supervisor_is_known_by_its_heartbeat(tmp_path: Path) -> None:
    (nothing,) = check_node(tmp_path)
    assert "no node was started here yet" in nothing.what
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = [f"tcp/127.0.0.1:{taken.getsockname()[1]}"]
        config = build({"swarm": {"communication": {"listen": listen}}})
        pulse = Pulse(tmp_path)
        pulse.enter(NodePhase.TRAIN, 7, 7)
        (running,), (port,) = check_node(tmp_path), check_ports(config, tmp_path)
        assert "it runs, with 7 rounds done" in running.what
        assert (port.health, "by this node" in port.what) == (Health.WELL, True)
        pulse.enter(NodePhase.STOPPED, 7, 7)
        (stopped,), (port,) = check_node(tmp_path), check_ports(config, tmp_path)
        assert "does not run now" in stopped.what
        assert port.health is Health.FIX


def test_a_model_is_looked_for_where_it_would_be_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def health(model: str) -> Health:
        (found,) = check_engine(build({"policy": {"kind": "torch", "model": model}}))
        return found.health

    assert health(str(tmp_path)) is Health.WELL
    assert health("smollm2") is Health.NOTE
    assert health("owner/name") is Health.NOTE
    assert health("nowhere") is Health.FIX
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert health("owner/name") is Health.FIX


def test_a_clock_that_went_back_is_seen_by_the_heartbeat(tmp_path: Path) -> None:
    Pulse(tmp_path, clock=lambda: time.time() + 3600).enter(NodePhase.TRAIN, 1, 0)
    (found,) = check_clock(tmp_path)
    assert found.health is Health.FIX
    assert "3600 s in the future" in found.what or "3599 s in the future" in found.what


def test_a_folder_that_cannot_be_written_to_must_be_fixed(tmp_path: Path) -> None:
    assert not [each for each in check_machine(tmp_path / "new" / "home") if each.health is Health.FIX]
    disk = [each for each in check_machine(Path("/proc/1/task")) if each.about == "disk"]
    assert disk[0].health is Health.FIX


def test_an_identity_is_not_made_by_looking(tmp_path: Path) -> None:
    (found,) = check_identity(tmp_path)
    assert found.health is Health.NOTE
    assert not list(tmp_path.iterdir())


def test_a_start_is_measured_by_part_and_compared_with_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))  # nothing is fetched there: the tiny model
    file = tmp_path / "start.json"
    (made,) = check_startup(file)
    assert made.health is Health.WELL
    before = json.loads(file.read_text())
    assert before["model"] == "tiny"
    assert set(before["warm"]) == set(PARTS)
    assert all(seconds > 0 for seconds in before["warm"].values())
    (same,) = compare(before, "tiny", before["warm"], file)
    assert same.health is Health.WELL
    (slower,) = compare(before, "tiny", {**before["warm"], "command": 99.0}, file)
    assert slower.health is Health.NOTE
    assert "command 99.0 s instead of" in slower.what
    (other,) = compare(before, "smollm2", before["warm"], file)
    assert "was measured with tiny" in other.what
    file.write_text("{}")
    with pytest.raises(FormatError, match="is no measured start"):
        list(check_startup(file))


def test_the_middle_start_counts() -> None:
    starts = [dict.fromkeys(PARTS, seconds) for seconds in (1.0, 9.0, 2.0)]
    assert median_start(starts) == dict.fromkeys(PARTS, 2.0)
