"""Peers that were caught cheating, with the evidence.

Invariants: a verdict is on disk before it takes effect, and holds across restarts until it is released; the evidence is
signed by the peer itself, so any third party can check it; the folder's size is bounded: beyond the limit a verdict is
kept without its evidence.

Layout: one folder for each peer, with `verdict.json` and, within the limit, `manifest.bin` and `content.bin`.
"""

import json
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from rollwright.errors import FormatError
from rollwright.swarm.identity import short_name
from rollwright.swarm.refusals import BLAMED, SUSPECT, PeerRefusal, PeerRefused

STRIKES = 5
"""Suspicious refusals in a row that lead to quarantine; an honest peer has one now and then."""

MAX_EVIDENCE_BYTES = 256 << 20
"""Evidence of all peers together."""

MAX_VERDICTS = 10_000
"""Beyond it the oldest are dropped: a peer can make a new key at any time, so old verdicts protect little."""

_MAX_SUSPECTS = 4096
_PEER = re.compile(r"[0-9a-f]{64}\Z")


class QuarantineVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a peer is in quarantine."""

    peer: str
    name: str
    """Readable name."""
    reason: PeerRefusal
    detail: str
    time: float
    """Seconds since 1970."""
    has_evidence: bool


class Quarantine:
    def __init__(
        self, folder: Path, *, strikes: int = STRIKES, max_evidence_bytes: int = MAX_EVIDENCE_BYTES
    ) -> None:
        self._folder = folder
        self._strikes = strikes
        self._max_evidence_bytes = max_evidence_bytes
        self._suspects: OrderedDict[str, int] = OrderedDict()
        """Suspicious refusals in a row, by peer."""
        folder.mkdir(parents=True, exist_ok=True)
        self._verdicts = OrderedDict(
            (each.peer, each) for each in sorted(self._read(), key=lambda each: each.time)
        )
        self._evidence_bytes = sum(
            file.stat().st_size for file in folder.glob("*/*.bin") if not file.is_symlink()
        )

    def __contains__(self, peer: str) -> bool:
        return peer in self._verdicts

    @property
    def verdicts(self) -> list[QuarantineVerdict]:
        """All verdicts, the oldest first."""
        return list(self._verdicts.values())

    def judge(
        self, peer: str, refused: PeerRefused, *, now: float, manifest: bytes, content: bytes = b""
    ) -> bool:
        """Account for a refusal; return whether the peer is in quarantine now."""
        if peer in self._verdicts:
            return True
        if refused.reason in SUSPECT:
            strikes = self._suspects.pop(peer, 0) + 1
            self._suspects[peer] = strikes
            if len(self._suspects) > _MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            if strikes < self._strikes:
                return False
        elif refused.reason not in BLAMED:
            return False
        self._condemn(peer, refused, now, manifest, content)
        return True

    def trust_again(self, peer: str) -> None:
        """Reset the peer's strikes, because a group of it was verified."""
        self._suspects.pop(peer, None)

    def release(self, peer: str) -> bool:
        """Revoke a verdict; return whether there was one."""
        verdict = self._verdicts.pop(peer, None)
        self._suspects.pop(peer, None)
        if verdict is not None:
            self._clear(peer)
        return verdict is not None

    def _condemn(self, peer: str, refused: PeerRefused, now: float, manifest: bytes, content: bytes) -> None:
        evidence = {"manifest.bin": manifest, "content.bin": content}
        size = sum(map(len, evidence.values()))
        has_room = self._evidence_bytes + size <= self._max_evidence_bytes
        detail = refused.detail[:500]
        verdict = QuarantineVerdict(
            peer, short_name(peer), refused.reason, detail, now, has_evidence=has_room
        )
        place = self._folder / peer
        place.mkdir(exist_ok=True)
        if has_room:
            for name, data in evidence.items():
                (place / name).write_bytes(data)
            self._evidence_bytes += size
        partial = place / "verdict.json.partial"
        partial.write_text(json.dumps(msgspec.to_builtins(verdict), indent=2) + "\n", encoding="utf-8")
        partial.replace(place / "verdict.json")
        self._verdicts[peer] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._clear(self._verdicts.popitem(last=False)[0])

    def _clear(self, peer: str) -> None:
        place = self._folder / peer
        self._evidence_bytes -= sum(file.stat().st_size for file in place.glob("*.bin"))
        shutil.rmtree(place, ignore_errors=True)

    def _read(self) -> list[QuarantineVerdict]:
        found = []
        for file in self._folder.glob("*/verdict.json"):
            if not _PEER.match(file.parent.name):
                continue
            try:
                plain: Any = json.loads(file.read_text(encoding="utf-8"))
                found.append(msgspec.convert(plain, QuarantineVerdict))
            except (ValueError, msgspec.ValidationError) as error:
                raise FormatError(
                    f"{file}: not a verdict: {error}; remove its folder to release the peer"
                ) from error
        return found
