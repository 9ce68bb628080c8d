"""Row E6: the user's file is really read, layers win in their order, and every change of a file can be taken back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rollwright.cli.config import app
from rollwright.config import build, dump, load
from rollwright.config.edit import backups, installed, lock_of, migrate, rollback, write
from rollwright.config.env_vars import environment_settings
from rollwright.config.migrations import CURRENT, KEY, MIGRATIONS
from rollwright.config.provenance import origins
from rollwright.errors import ConfigError

OLD = """# my own settings
seed: 7   # lucky
training:
  betas: [0.8, 0.9] # slow
  learning_rate: 0.5
policy: {kind: torch, model: smollm2}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("ROLLWRIGHT__") or name == "CPU_ONLY"]:
        monkeypatch.delenv(name)
    place = tmp_path / "mine.yaml"
    place.write_text(OLD)
    return place


def test_the_users_file_is_really_read(file: Path) -> None:
    assert load(file).seed == 7
    file.write_text(OLD.replace("seed: 7", "seed: 8"))
    assert load(file).seed == 8


def test_later_layers_win(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build({}).seed == 42
    assert load(file).seed == 7
    monkeypatch.setenv("ROLLWRIGHT__SEED", "9")
    assert load(file).seed == 9
    assert load(file, ["seed=10"]).seed == 10


def test_every_value_says_where_it_comes_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT__TRAINING__EPOCHS", "3")
    monkeypatch.setenv("CPU_ONLY", "1")
    found = {each.key: each for each in origins(file, ["max_steps=5"])}
    assert found["seed"].origin == f"{file}:2"
    assert found["training.learning_rate"].origin == f"{file}:5"
    assert found["training.beta1"].origin == str(file)
    assert found["training.beta1"].value == 0.8
    assert (found["training.epochs"].value, found["training.epochs"].origin) == (
        3,
        "environment: ROLLWRIGHT__TRAINING__EPOCHS",
    )
    assert found["training.device"].origin == found["policy.device"].origin == "environment: CPU_ONLY"
    assert found["max_steps"].origin == "command line"
    assert found["policy.max_batch"].origin == found["profile_steps"].origin == "default"


def test_variables_name_keys_and_tags(file: Path) -> None:
    found = environment_settings(
        {},
        {
            "ROLLWRIGHT__custom_envs__Lake__max_steps": "4",
            "ROLLWRIGHT__POLICY__KIND": "oracle",
            "ROLLWRIGHT": "x",
        },
    )
    assert {each.override for each in found} == {"custom_envs.Lake.max_steps=4", "policy.kind=oracle"}


def test_a_variable_with_a_mistake_is_refused_like_a_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT__SED", "9")
    with pytest.raises(ConfigError, match="sed: unknown key; did you mean `seed`"):
        load(file)


def test_an_older_file_means_the_same_before_and_after_it_is_migrated(file: Path) -> None:
    before = load(file)
    assert before.training is not None
    assert (before.training.beta1, before.training.beta2) == (0.8, 0.9)
    done = migrate(file)
    assert done.changes == (MIGRATIONS[0].what,)
    assert load(file) == before
    assert file.read_text() == (
        f"# my own settings\n{KEY}: {CURRENT}\nseed: 7   # lucky\ntraining:\n  beta1: 0.8 # slow\n  beta2: 0.9\n"
        "  learning_rate: 0.5\npolicy: {kind: torch, model: smollm2}\n"
    )
    assert migrate(file).backup is None


def test_what_cannot_be_edited_in_place_is_written_anew(file: Path) -> None:
    file.write_text(
        "training: {betas: [0.8, 0.9]} # all in one line\npolicy: {kind: torch, model: smollm2}\n"
    )
    before = load(file)
    done = migrate(file)
    assert done.comments_lost
    assert load(file) == before


def test_a_rollback_gives_back_the_same_bytes(file: Path) -> None:
    odd = OLD.replace("\n", "\r\n").encode() + b"# \xc3\xa4 without an end"
    file.write_bytes(odd)
    file.chmod(0o640)
    migrate(file)
    new = file.read_bytes()
    assert new != odd
    assert rollback(file).dependencies == ()
    assert file.read_bytes() == odd
    rollback(file)
    assert file.read_bytes() == new
    assert file.stat().st_mode & 0o777 == 0o640


def test_every_change_has_its_own_backup_though_the_clock_stands(file: Path) -> None:
    contents = []
    for number in range(3):
        file.write_text(OLD + f"# {number}\n")
        contents.append(file.read_bytes())
        migrate(file)
    assert [each.read_bytes() for each in backups(file)] == contents
    rollback(file, backups(file)[0])
    assert file.read_bytes() == contents[0]
    with pytest.raises(ConfigError, match="is no backup of"):
        rollback(file, file)


@given(st.binary(max_size=200))
def test_whatever_bytes_a_file_has_come_back(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("bytes") / "any.yaml"
    write(file.with_name("any.yaml.20200101T000000Z.bak"), content)
    file.write_bytes(b"something else")
    rollback(file)
    assert file.read_bytes() == content


def test_a_backup_knows_what_was_installed(file: Path) -> None:
    done = migrate(file)
    assert done.backup is not None
    lock = lock_of(done.backup)
    assert lock.read_text().split() == installed()
    lock.write_text("pydantic==1.0\n" + lock.read_text())
    assert rollback(file).dependencies == ("pydantic==1.0",)


CRASH = """
import os, sys
from pathlib import Path
from rollwright.config import edit
real = os.fsync
def crash(handle):
    real(handle)
    if sys.argv[2] in os.readlink(f"/proc/self/fd/{handle}"):
        os._exit(9)
edit.os.fsync = crash
edit.migrate(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("where", [".lock", ".bak", ".mine.yaml."])
def test_a_crash_in_the_middle_leaves_the_old_file(file: Path, where: str) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(file), where], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert file.read_text() == OLD


def test_a_file_of_a_newer_release_is_refused(file: Path) -> None:
    file.write_text(f"{KEY}: {CURRENT + 1}\n")
    with pytest.raises(ConfigError, match="is of a newer release; this one knows up to"):
        load(file)
    file.write_text(f"{KEY}: soon\n")
    with pytest.raises(ConfigError, match="got 'soon'; a whole number from 1"):
        migrate(file)


def test_a_configuration_as_used_says_its_version_and_loads_again(file: Path) -> None:
    config = load(file)
    file.write_text(dump(config))
    assert file.read_text().startswith(f"{KEY}: {CURRENT}\n")
    assert load(file) == config


def test_a_file_that_is_wrong_for_another_reason_is_not_touched(file: Path) -> None:
    file.write_text("sed: 3\n")
    with pytest.raises(ConfigError, match="did you mean `seed`"):
        migrate(file)
    assert file.read_text() == "sed: 3\n"
    assert not backups(file)


def test_the_commands(file: Path) -> None:
    def call(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "command line" in call("show", str(file), "seed=1", "--origin")
    assert "0.5" in call("diff", str(file))
    assert f"{KEY}: {CURRENT}" in call("migrate", str(file), "--dry-run")
    assert file.read_text() == OLD
    assert "from version 1 to 2" in call("migrate", str(file))
    assert ".bak" in call("rollback", str(file), "--list")
    assert "no difference" in call("diff", str(file), str(backups(file)[0]))
    call("rollback", str(file))
    assert file.read_text() == OLD
