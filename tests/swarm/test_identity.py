"""A key that only its owner can read, and numbers that never come twice."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import FormatError, RollwrightError
from rollwright.swarm import identity as identity_module
from rollwright.swarm.identity import (
    Identity,
    SequenceFile,
    is_signed,
    load_identity,
    shared_signatures,
    short_name,
)


def test_an_identity_is_made_once_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    first = load_identity(path)
    assert load_identity(path).peer == first.peer
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["identity.key"]
    assert is_signed(first.peer, b"hello", load_identity(path).sign(b"hello"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o660])
def test_a_key_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    load_identity(path)
    path.chmod(mode)
    with pytest.raises(RollwrightError, match="chmod 600"):
        load_identity(path)
    path.chmod(0o600)
    load_identity(path)


def test_a_folder_that_all_users_may_write_to_is_no_home(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    for mode in (0o777, 0o1777, 0o703):
        folder.chmod(mode)
        with pytest.raises(RollwrightError, match="all users may write here"):
            load_identity(folder / "identity.key")
        assert not list(folder.iterdir())
    folder.chmod(0o775)  # a group may be the user's alone
    load_identity(folder / "identity.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_user_s_folder_is_no_home(tmp_path: Path) -> None:
    os.chown(tmp_path, 65_534, 65_534)
    with pytest.raises(RollwrightError, match="belongs to another user"):
        load_identity(tmp_path / "identity.key")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"ab" * 31, b"ab" * 33, b"\xff" * 64])
def test_a_damaged_key_is_refused_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(FormatError, match="not an identity"):
        load_identity(path)
    assert path.read_bytes() == content


def test_a_pipe_or_a_folder_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "pipe", mode=0o600)
    for name in ("folder", "pipe"):
        with pytest.raises(RollwrightError, match="not a plain file"):
            load_identity(tmp_path / name)
    with pytest.raises(RollwrightError, match="cannot be read or made"):
        load_identity(tmp_path / "pipe" / "identity.key")


@given(st.binary(max_size=200), st.integers(0, 511))
def test_a_signature_holds_for_its_message_and_key_alone(message: bytes, bit: int) -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(message)
    assert is_signed(one.peer, message, signature)
    assert not is_signed(other.peer, message, signature)
    assert not is_signed(one.peer, message + b"x", signature)
    changed = bytearray(signature)
    changed[bit // 8] ^= 1 << bit % 8
    assert not is_signed(one.peer, message, bytes(changed))


@pytest.mark.parametrize("peer", ["", "zz" * 32, "00", "ff" * 32, "00" * 32, "01" + "00" * 31])
def test_nonsense_and_weak_keys_sign_nothing(peer: str) -> None:
    assert not is_signed(peer, b"message", bytes(64))
    assert isinstance(short_name(peer), str)


def test_short_names_can_be_said_and_differ() -> None:
    names = {short_name(Identity.generate().peer) for _ in range(200)}
    assert len(names) == 200
    assert all(len(name) == 11 and name.replace("-", "").isalpha() for name in names)


def test_sequence_numbers_grow_over_restarts(tmp_path: Path) -> None:
    first = SequenceFile(tmp_path / "sequence")
    numbers = [first.next() for _ in range(12)]
    assert numbers == list(range(numbers[0], numbers[0] + 12))
    first.close()
    again = SequenceFile(tmp_path / "sequence")
    assert again.next() > numbers[-1]
    again.close()


@pytest.mark.parametrize("left", [None, "", "7\n"])
def test_a_sequence_that_was_lost_or_set_back_goes_on_beyond_what_was_used(
    tmp_path: Path, left: str | None
) -> None:
    first = SequenceFile(tmp_path / "sequence")
    used = [first.next() for _ in range(3)]
    first.close()
    (tmp_path / "sequence").unlink()
    if left is not None:
        (tmp_path / "sequence").write_text(left)
    time.sleep(0.01)
    again = SequenceFile(tmp_path / "sequence")
    assert again.next() > used[-1]
    again.close()


def test_a_number_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from rollwright.swarm.identity import SequenceFile\n"
        "numbers = SequenceFile(Path(sys.argv[1]))\n"
        "for _ in range(5): print(numbers.next(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "sequence"
    died = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    used = [int(each) for each in died.stdout.split()]
    assert len(used) == 5
    numbers = SequenceFile(path)
    assert int((tmp_path / "sequence").read_text()) == used[-1]
    assert numbers.next() > used[-1]
    numbers.close()


def test_two_nodes_cannot_run_with_one_identity(tmp_path: Path) -> None:
    held = SequenceFile(tmp_path / "sequence")
    with pytest.raises(RollwrightError, match="another node"):
        SequenceFile(tmp_path / "sequence")
    held.close()
    SequenceFile(tmp_path / "sequence").close()


def test_a_clock_that_is_set_back_does_not_matter(tmp_path: Path) -> None:
    ahead = 10**15
    (tmp_path / "sequence").write_text(f"{ahead:020d}\n")
    numbers = SequenceFile(tmp_path / "sequence")
    assert numbers.next() == ahead + 1
    numbers.close()


def test_a_damaged_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sequence").write_text("many\n")
    with pytest.raises(FormatError, match="sequence number"):
        SequenceFile(tmp_path / "sequence")


def test_the_key_belongs_to_its_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "identity.key"
    load_identity(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(RollwrightError, match="another user"):
        load_identity(path)


def test_shared_signatures_hold_for_exactly_what_was_signed_and_end_with_the_simulation() -> None:
    one, other = Identity.generate(), Identity.generate()
    before = one.sign(b"before")
    with shared_signatures(2):
        signature = one.sign(b"message")
        assert is_signed(one.peer, b"message", signature)
        assert not is_signed(one.peer, b"massage", signature)
        assert not is_signed(other.peer, b"message", signature)
        assert not is_signed(one.peer, b"message", bytes([signature[0] ^ 1]) + signature[1:])
        assert is_signed(one.peer, b"before", before), "checked, since it was not noted"
        table = identity_module._shared
        assert table is not None
        assert table.holds(one.peer, b"message", signature)
        for number in range(2):
            one.sign(bytes([number]))
        assert not table.holds(one.peer, b"message", signature), "the oldest are forgotten"
        assert is_signed(one.peer, b"message", signature)
    assert identity_module._shared is None
