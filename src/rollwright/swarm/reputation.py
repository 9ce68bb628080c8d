"""What this node knows of its peers: which are caught, which are proven, and which did not answer lately.

The quarantine and the seen groups are on disk; silence is remembered for a few rounds in memory.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from rollwright.swarm.admission import Candidates
from rollwright.swarm.duplicates import SeenGroups
from rollwright.swarm.gathering import GroupCheck
from rollwright.swarm.identity import short_name
from rollwright.swarm.quarantine import Quarantine
from rollwright.swarm.refusals import PeerRefused
from rollwright.swarm.signed import open_signed

SILENT_FOR = 3
"""Gatherings in which a peer whose content did not arrive comes after the others."""

_MAX_SILENT = 4096
"""Peers whose silence is remembered; the oldest are forgotten."""

_log = logging.getLogger(__name__)


class Reputation:
    """The `PeerJudge` of a node."""

    def __init__(
        self,
        quarantine: Quarantine,
        seen: SeenGroups,
        candidates: Candidates,
        clock: Callable[[], float],
    ) -> None:
        self._quarantine = quarantine
        self._seen = seen
        self._candidates = candidates
        self._clock = clock
        self._gatherings = 0
        self._silent: OrderedDict[str, int] = OrderedDict()
        """Peers whose content did not arrive, with the number of that gathering."""
        self._proven: set[str] = set()

    def begin_gathering(self) -> tuple[set[str], set[str]]:
        """Count a gathering; return the proven and the silent peers as they are at its start."""
        self._gatherings += 1
        # Fixed for the whole gathering: the order was drawn with these, and must not change while it runs.
        self._proven = self._seen.peers()
        silent = {peer for peer, when in self._silent.items() if self._gatherings - when <= SILENT_FOR}
        return self._proven, silent

    def is_caught(self, peer: str) -> bool:
        return peer in self._quarantine

    def is_proven(self, peer: str) -> bool:
        return peer in self._proven

    def judge(self, check: GroupCheck) -> None:
        if check.refused is None:
            self._quarantine.trust_again(check.manifest.peer)
        else:
            envelope = self._candidates.envelope(check.manifest)
            self._blame(check.manifest.peer, check.refused, envelope, check.data)

    def judge_announcement(self, envelope: bytes, refused: PeerRefused) -> None:
        """Blame the signer of a manifest that proves dishonesty by itself."""
        self._blame(open_signed(envelope).peer, refused, envelope)

    def note_answer(self, peer: str) -> None:
        self._silent.pop(peer, None)

    def note_silence(self, peer: str) -> None:
        self._silent[peer] = self._gatherings
        self._silent.move_to_end(peer)
        if len(self._silent) > _MAX_SILENT:
            self._silent.popitem(last=False)

    def _blame(self, peer: str, refused: PeerRefused, envelope: bytes, data: bytes = b"") -> None:
        if peer in self._quarantine:
            return
        if self._quarantine.judge(peer, refused, now=self._clock(), manifest=envelope, content=data):
            _log.warning("peer %s (%s) is in quarantine: %s", short_name(peer), peer[:16], refused)
