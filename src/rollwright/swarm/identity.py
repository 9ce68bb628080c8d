"""A node's identity: an Ed25519 key in a file that only its owner can read.

Invariants:
- A peer's id is its public key, so no other node can sign for it.
- A key file that other users could read is refused, not repaired, because it may have been read already; so is a folder
  that all users may write to.
- A sequence number is on disk before it is used, so a node never signs two messages with the same number, whenever it
  dies. At each start the numbers continue at least from the clock's milliseconds, so a file that was lost or restored from
  a backup repeats none.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rollwright.errors import ConfigError, FormatError, RollwrightError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

IDENTITY_FILE = "identity.key"
SEQUENCE_FILE = "sequence"

KEY_BYTES = 32
SIGNATURE_BYTES = 64
"""Both as RFC 8032 has them."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""No permission of group and others is tolerated on the key."""

_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"
"""Sixteen and four: two syllables encode 16 bits and can be read out on a telephone."""


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError("cryptography is not installed; install rollwright[swarm]") from error
    return ed25519


class Identity:
    """A node's key."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key
        self.peer: str = key.public_key().public_bytes_raw().hex()
        """This node's id: hex of its public key."""

    @classmethod
    def generate(cls) -> "Identity":
        """Make a new identity, in memory only."""
        return cls(_ed25519().Ed25519PrivateKey.generate())

    def sign(self, message: bytes) -> bytes:
        signature = self._key.sign(message)
        if _shared is not None:
            _shared.note(self.peer, message, signature)
        return signature

    def __repr__(self) -> str:
        return f"Identity({short_name(self.peer)})"


def load_identity(path: Path) -> Identity:
    """Load the identity from a file; create the file if it is missing."""
    try:
        refuse_open_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            _create(path)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RollwrightError(f"{path}: cannot be read or made: {error.strerror}") from error
    try:
        _refuse_others(path, os.fstat(handle))
        text = os.read(handle, 1024)
    finally:
        os.close(handle)
    try:
        raw = bytes.fromhex(text.decode("ascii").strip())
        return Identity(_ed25519().Ed25519PrivateKey.from_private_bytes(raw))
    except ValueError as error:
        raise FormatError(
            f"{path}: not an identity: expected {2 * KEY_BYTES} hex digits; restore it from a backup, "
            "or move it away to get a new identity"
        ) from error


def _create(path: Path) -> None:
    """Create the key file atomically: it is written under another name and linked, so a crash leaves no partial key."""
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw().hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    finally:
        partial.unlink()


def _refuse_others(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise RollwrightError(f"{path}: not a plain file; an identity is one")
    if found.st_uid != os.geteuid():
        raise RollwrightError(f"{path}: belongs to another user; an identity must be the user's own")
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise RollwrightError(
            f"{path}: others may read this identity (mode {mode:04o}); if nobody has, run `chmod 600 {path}`, "
            "else move it away to get a new one"
        )


def refuse_open_folder(folder: Path) -> None:
    """Create the folder if it is missing; refuse one that other users control. A node writes all its files there: a user who
    could place links in it could make the node write anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise RollwrightError(
            f"{folder}: belongs to another user; the folder of a node must be the user's own"
        )
    if found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        raise RollwrightError(
            f"{folder}: all users may write here (mode {mode:04o}); the folder of a node must be the user's own: choose "
            "another one"
        )


class SharedSignatures:
    """Signatures that keys of this process made, so that a simulation of many nodes need not check them for each other. Bounded:
    the oldest are forgotten, and are checked like any other then."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: OrderedDict[bytes, None] = OrderedDict()

    def note(self, peer: str, message: bytes, signature: bytes) -> None:
        self._made[_digest(peer, message, signature)] = None
        if len(self._made) > self._limit:
            self._made.popitem(last=False)

    def holds(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Whether the key of this peer made exactly this signature for exactly this message here."""
        return _digest(peer, message, signature) in self._made


_shared: SharedSignatures | None = None


@contextlib.contextmanager
def shared_signatures(limit: int) -> Iterator[None]:
    """For a process that holds the keys of a whole simulated swarm; a real node never does."""
    global _shared
    before, _shared = _shared, SharedSignatures(limit)
    try:
        yield
    finally:
        _shared = before


def _digest(peer: str, message: bytes, signature: bytes) -> bytes:
    # Key and signature have fixed lengths, so their concatenation is unambiguous.
    return blake2b(peer.encode() + signature + message, digest_size=16).digest()


def is_signed(peer: str, message: bytes, signature: bytes) -> bool:
    """Whether the peer's key signed exactly this message."""
    if _shared is not None and _shared.holds(peer, message, signature):
        return True
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(peer).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=4096)
def _public_key(peer: str) -> "Ed25519PublicKey":
    """Decoding a key takes a fifth of the time of a check."""
    key: Ed25519PublicKey = _ed25519().Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer))
    return key


def short_name(peer: str) -> str:
    """A readable name of the first 32 bits of the key: easy to tell apart, too short to prove an identity."""
    try:
        number = int(peer[:8], 16)
    except ValueError:
        return "nobody"
    return "-".join(_syllables(number >> shift & 0xFFFF) for shift in (16, 0))


def _syllables(bits: int) -> str:
    consonants, vowels = _CONSONANTS, _VOWELS
    return "".join(
        (
            consonants[bits >> 12 & 15],
            vowels[bits >> 10 & 3],
            consonants[bits >> 6 & 15],
            vowels[bits >> 4 & 3],
            consonants[bits & 15],
        )
    )


class SequenceFile:
    """Sequence numbers that never repeat, though the process may die at any time. One process at a time holds the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise RollwrightError(
                f"{path.parent}: another node runs with this identity; stop it first"
            ) from error
        said = self._file.read(64).split(b"\n")[0]
        if said and not said.isdigit():
            raise FormatError(f"{path}: not a sequence number: {said[:20]!r}; a whole number is accepted")
        self._last = max(int(said or b"0"), int(time.time() * 1000))

    def next(self) -> int:
        self._last += 1
        # Of fixed length: the new number overwrites the old one within one disk sector.
        os.pwrite(self._file.fileno(), b"%020d\n" % self._last, 0)
        os.fsync(self._file.fileno())
        return self._last

    def close(self) -> None:
        self._file.close()
