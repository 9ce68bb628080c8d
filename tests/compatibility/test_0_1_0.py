"""Files that 0.1.0 wrote open, show, profile, export and go on to their end: nothing is lost, nothing is paid twice.

`tests/data/0_1_0` has the files, and README.md there says how they were made. All of it goes through the command line,
SQLite, JSON and Parquet, as a user's own scripts do.
"""

import json
import lzma
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from counting_engine import counting_engine

DATA = Path(__file__).parents[1] / "data" / "0_1_0"
CONFIGS = sorted((DATA / "configs").glob("*.yaml"))
RUNS = ("finished", "interrupted", "interrupted_http", "node", "team", "training", "tree")
PATIENCE = 120.0
"""Seconds after which a command will not end any more, on however slow a machine."""
STOPPED = 3
"""Exit code of `swarm status` for a node that nobody keeps at work."""
EXPORTED = (
    "turn",
    "after",
    "extends",
    "agent",
    "text",
    "action",
    "reward",
    "prompt_ids",
    "sampled_ids",
    "logprobs",
)

AGENT = """
async def agent(task, session):
    if task["n"] == 2:
        raise ValueError("two is wrong")
    return float(2 * task["n"])
"""
"""The agent that filled the store, without the task that never ends."""


class Shell:
    """`rollwright` in a folder with unpacked files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def unpack(self, *names: str) -> Path:
        """Unpacks the archives; gives the run folder of the last one."""
        for name in names:
            with tarfile.open(DATA / f"{name}.tar.xz") as archive:
                archive.extractall(self.folder, filter="tar")
        return self.folder / "runs" / names[-1]

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "rollwright", *map(str, words)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def do(self, *words: str | Path, code: int = 0) -> str:
        process = self.start(*words)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, errors or output
        assert "Traceback" not in errors
        return output

    def exported(self, run: Path) -> dict[str, list[dict[str, Any]]]:
        """The turns of each rollout."""
        file = self.folder / f"{run.name}.parquet"
        self.do("export", run, "--output", file)
        found: dict[str, list[dict[str, Any]]] = {}
        for row in pq.read_table(file).to_pylist():
            found.setdefault(row["rollout_id"], []).append(row)
        return found

    def clean_up(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.clean_up()


def digest(turns: list[dict[str, Any]]) -> str:
    kept = [{key: turn[key] for key in EXPORTED} for turn in turns]
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def expected(run: str) -> dict[str, str]:
    """Digests of the turns of each rollout, as 0.1.0 exported them."""
    content: dict[str, dict[str, str]] = json.loads((DATA / "exported.json").read_text())
    return content[run]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def ask(store: Path, question: str) -> list[Any]:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(question).fetchall()


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.05)


@pytest.mark.parametrize("name", RUNS)
def test_every_turn_that_was_finished_is_exported_as_0_1_0_exported_it(shell: Shell, name: str) -> None:
    found = shell.exported(shell.unpack(name))
    assert {each: digest(turns) for each, turns in found.items()} == expected(name)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_shown_and_profiled(shell: Shell, name: str) -> None:
    run = shell.unpack(name)
    rollouts = list(expected(name))
    shown = shell.do("show", run)
    assert rollouts[0] in shown
    for each in (rollouts[0], rollouts[-1]):
        assert each in shell.do("show", run, each)
    assert f"profile of {name}" in shell.do("profile", run)
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]


@pytest.mark.parametrize(("name", "solved"), [("finished", "75 %"), ("team", "50 %"), ("tree", "69 %")])
def test_a_run_that_has_ended_says_so_and_can_be_made_longer(shell: Shell, name: str, solved: str) -> None:
    run = shell.unpack(name)
    before = rows(run)
    steps = sum(row["mode"] == "train" for row in before)
    said = shell.do("resume", run, "--no-live")
    assert "this run has ended" in said
    assert solved in said
    assert rows(run) == before
    shell.do("resume", run, f"max_steps={steps + 1}", "--no-live")
    after = rows(run)
    assert after[: len(before)] == before
    assert [row["step"] for row in after if row["mode"] == "train"] == list(range(steps + 1))
    found = shell.exported(run)
    assert len(found) == sum(row["trajectories"] for row in after)
    assert expected(name).items() < {each: digest(turns) for each, turns in found.items()}.items()


def check_whole(shell: Shell, run: Path, before: list[dict[str, Any]], ended: set[Any]) -> None:
    """Four steps and two validations, each once; what was there is still there."""
    after = rows(run)
    assert after[: len(before)] == before
    assert Counter((row["mode"], row["step"]) for row in after) == Counter(
        [*(("train", step) for step in range(4)), ("val", 2), ("val", 4)]
    )
    found = shell.exported(run)
    assert len(found) == 4 * 4 + 2 * 8
    assert expected(run.name).items() < {each: digest(turns) for each, turns in found.items()}.items()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"]["opened"] == summary["ledger"]["delivered"] == len(found)
    completions = ask(run / "store.db", "SELECT rollout_id, attempt_id, status FROM completions")
    assert ended <= set(completions)
    assert {each for each, _, _ in completions} == set(found)
    assert len(completions) == len(found)
    assert {status for _, _, status in completions} == {"succeeded"}
    assert "this run has ended" in shell.do("resume", run, "--no-live")


OPEN_TURNS = "SELECT count(*) FROM journal JOIN rollouts USING (place) WHERE rollouts.end_time IS NULL"
ENDED = "SELECT rollout_id, attempt_id, status FROM completions"


def test_a_killed_run_goes_on_with_the_turns_of_its_journal_and_its_half_played_validation(
    shell: Shell,
) -> None:
    run = shell.unpack("interrupted")
    before, ended = rows(run), set(ask(run / "store.db", ENDED))
    ((recorded,),) = ask(run / "store.db", OPEN_TURNS)
    assert recorded > 0
    assert any(".val" in rollout for rollout, _, _ in ended)
    shell.do("resume", run, "policy.tokens_per_second=4000", "--no-live")
    check_whole(shell, run, before, ended)
    activity = json.loads((run / "summary.json").read_text())["activity"]
    assert activity["replayed_turns"] == recorded
    assert activity["replays_differed"] == 0


def test_an_engine_is_asked_for_exactly_the_turns_that_0_1_0_did_not_record(shell: Shell) -> None:
    run = shell.unpack("interrupted_http")
    before, ended = rows(run), set(ask(run / "store.db", ENDED))
    ((recorded,),) = ask(run / "store.db", OPEN_TURNS)
    assert recorded > 0
    with counting_engine() as engine:
        shell.do("resume", run, f"policy.base_url={engine.base_url}", "--no-live")
        asked = engine.generations
    check_whole(shell, run, before, ended)
    was_there = {rollout for rollout, _, _ in ended}
    played = {each: turns for each, turns in shell.exported(run).items() if each not in was_there}
    assert asked == sum(map(len, played.values())) - recorded


def test_a_killed_training_goes_on_from_its_checkpoint_to_a_model_that_plays(shell: Shell) -> None:
    run = shell.unpack("model", "training")
    before, ended = rows(run), set(ask(run / "store.db", ENDED))
    assert [row["step"] for row in before if row["mode"] == "train"] == [0, 1, 2]
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["000002"]
    shell.do("train", "--resume", run, "--no-live")
    after = rows(run)
    assert after[: len(before)] == before
    assert [row["step"] for row in after if row["mode"] == "train"] == list(range(6))
    assert [row["step"] for row in after if row["mode"] == "val"] == [0, 2, 4, 6]
    updates = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in updates if "loss" in row] == list(range(6)), (
        "each batch is trained on once"
    )
    found = shell.exported(run)
    assert expected("training").items() < {each: digest(turns) for each, turns in found.items()}.items()
    assert len(found) == sum(row["trajectories"] for row in after)
    assert ended <= set(ask(run / "store.db", ENDED))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["training"]["version"] == 6
    assert "this run has ended" in shell.do("train", "--resume", run, "--no-live")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings.update(name="played", training=None, max_steps=1, eval_steps=None)
    settings["policy"]["model"] = str(run / "model")
    (shell.folder / "played.yaml").write_text(yaml.safe_dump(settings))
    shell.do("run", "played.yaml", "--no-live")
    assert len(shell.exported(shell.folder / "runs" / "played")) == 8 + 4


def test_a_killed_node_is_the_same_node_and_goes_on_with_its_rounds(shell: Shell) -> None:
    home = shell.unpack("model", "node")
    before = rows(home)
    identity, sequence = shell.do("swarm", "identity", home), int((home / "sequence").read_text())
    assert "3 rounds done" in shell.do("swarm", "status", home, code=STOPPED)
    foreign = [each["group"] for row in before for each in row["foreign"]]
    assert foreign
    shell.do("swarm", "join", "node.yaml", "max_steps=6", "training.keep_steps=1000", "--home", home)
    after = rows(home)
    assert after[: len(before)] == before
    assert [row["step"] for row in after] == list(range(6))
    taken = [each["group"] for row in after for each in row["foreign"]]
    assert taken == foreign, "no group of a peer is trained on again"
    assert shell.do("swarm", "identity", home) == identity
    assert int((home / "sequence").read_text()) >= sequence
    found = shell.exported(home)
    assert expected("node").items() < {each: digest(turns) for each, turns in found.items()}.items()
    assert (home / "model" / "model.safetensors").is_file()


def statuses(store: Path) -> list[str]:
    return [status for (status,) in ask(store, "SELECT status FROM rollouts ORDER BY place")]


def test_rollouts_in_every_state_are_seen_and_played_to_their_ends(shell: Shell) -> None:
    shell.unpack("store")
    store = shell.folder / "store.db"
    assert statuses(store) == [
        "succeeded",
        "failed",
        "requeuing",
        "succeeded",
        "cancelled",
        "preparing",
        "queuing",
        "queuing",
    ]
    ended = set(ask(store, ENDED))
    names = [name for (name,) in ask(store, "SELECT rollout_id FROM rollouts ORDER BY place")]
    seen = shell.do("ps", "--store", store)
    assert "succeeded 2  failed 1  cancelled 1" in seen
    assert all(name in seen for name in names[5:])
    assert names[0] in shell.do("show", store)
    (shell.folder / "own_agent.py").write_text(AGENT)
    worker = shell.start("worker", "--store", store, "--agent", "own_agent:agent", "--id", "later")
    open_left = "SELECT count(*) FROM rollouts WHERE end_time IS NULL"
    until(lambda: worker.poll() is not None or ask(store, open_left) == [(0,)], "the ends of all rollouts")
    assert worker.poll() is None, worker.communicate()
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=PATIENCE)
    assert statuses(store) == [
        "succeeded",
        "failed",
        "failed",
        "succeeded",
        "cancelled",
        "succeeded",
        "succeeded",
        "succeeded",
    ]
    completions = ask(store, ENDED)
    assert ended < set(completions)
    assert len(completions) == len(names)
    tries = ask(store, "SELECT count(*) FROM attempts WHERE place = 3")
    assert tries == [(3,)], "the try before counts"


def settings_of_0_1_0(name: str) -> dict[str, Any]:
    """Every setting of a configuration by its path, defaults among them."""
    content: dict[str, dict[str, Any]] = json.loads(lzma.decompress((DATA / "settings.json.xz").read_bytes()))
    return content[name]


def shown_settings(shell: Shell, file: Path) -> dict[str, Any]:
    found = json.loads(shell.do("config", "show", "--json", file))
    return {path: setting["value"] for path, setting in found.items()}


def keeps(before: Any, after: Any) -> bool:
    """Whether a value is as it was; a section in a list may have more settings than it had."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and keeps(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(map(keeps, before, after))
    return bool(before == after)


@pytest.mark.parametrize("file", CONFIGS, ids=[each.stem for each in CONFIGS])
def test_a_configuration_means_the_same(shell: Shell, file: Path) -> None:
    """Later releases may have more settings; modules of the package may have moved, and are found where they are."""
    shown = shown_settings(shell, file)
    meant = settings_of_0_1_0(file.stem)
    assert len(meant) > 50
    changed = {path for path, value in meant.items() if not keeps(value, shown.get(path, "missing"))}
    moved = {path for path, value in meant.items() if str(value).startswith("rollwright.")}
    assert changed <= moved


def test_there_are_configurations_to_look_at() -> None:
    assert len(CONFIGS) == 10


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("demo", ("rollout_batch_size=24", "train_env_manager.num_env_groups=3", "val_env_manager=null")),
        ("team_with_tools", ("rollout_batch_size=4", "train_env_manager.num_env_groups=1")),
    ],
)
def test_a_configuration_is_played(shell: Shell, name: str, overrides: tuple[str, ...]) -> None:
    fast = ("max_steps=1", "policy.tokens_per_second=20000")
    shell.do("run", DATA / "configs" / f"{name}.yaml", *overrides, *fast, "--no-live")
    (row,) = rows(shell.folder / "runs" / name)
    assert len(shell.exported(shell.folder / "runs" / name)) == row["trajectories"] > 0


def test_a_configuration_of_the_first_schema_is_migrated_and_comes_back(shell: Shell) -> None:
    file = shell.folder / "schema_1.yaml"
    written = (DATA / "configs" / file.name).read_bytes()
    file.write_bytes(written)
    shell.do("config", "migrate", file)
    content = yaml.safe_load(file.read_text())
    assert content["schema_version"] >= 2
    assert (content["training"]["beta1"], content["training"]["beta2"]) == (0.8, 0.95)
    assert "# of Adam" in file.read_text()
    shell.do("config", "rollback", file)
    assert file.read_bytes() == written
