"""Why something of a peer was not taken. Every refusal has exactly one reason, and is counted under it."""

from enum import StrEnum

from rollwright.errors import RollwrightError


class PeerRefusal(StrEnum):
    """Grouped by when it shows: at the envelope, at the manifest, while fetching, at the content."""

    MALFORMED = "malformed"
    """Not a manifest at all, or one that breaks its limits."""
    OTHER_PROTOCOL = "other_protocol"
    """Of a release that speaks another version."""
    BAD_SIGNATURE = "bad_signature"
    """Not signed by the peer that it names."""
    OTHER_SWARM = "other_swarm"

    OWN = "own"
    """This node's own, come back."""
    QUARANTINED = "quarantined"
    """Of a peer that was caught before."""
    REPLAY = "replay"
    """Seen before, or so old that it cannot be told."""
    EQUIVOCATION = "equivocation"
    """Two different manifests with one sequence number, both signed."""
    OLD_ROUND = "old_round"
    FUTURE_ROUND = "future_round"
    CLOCK_SKEW = "clock_skew"
    """The peer's clock and this node's differ by more than is allowed."""
    OVER_QUOTA = "over_quota"
    """More manifests than one peer may announce in a round."""
    TOO_LARGE = "too_large"
    UNKNOWN_ENV = "unknown_env"
    """This node does not play that environment, so it cannot check."""
    OTHER_ENV_VERSION = "other_env_version"
    """The same seed may give another task there."""
    FOREIGN_SEED = "foreign_seed"
    """The task is not one of the peer's own: it chose it, or took another peer's group."""
    DUPLICATE_TASK = "duplicate_task"
    """A group of this task was taken from this peer already."""

    NOT_FETCHED = "not_fetched"
    """The content did not come in time, or was not what was asked for."""

    MALFORMED_CONTENT = "malformed_content"
    """Signed for, and still not a shared group, or one that breaks its limits."""
    CONTENT_DIFFERS = "content_differs"
    """The content is not what its manifest says."""
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    """Most of its answers are nearly those of a group that was seen before."""
    OTHER_TASK = "other_task"
    """The recipe gives another task here than there."""
    WRONG_REWARD = "wrong_reward"
    """The environment gives other rewards for these actions than were claimed."""
    WRONG_TOKENS = "wrong_tokens"
    """The token ids do not say what the text says."""
    WRONG_ACTIONS = "wrong_actions"
    """The episode ends before its last action, or goes on behind it."""
    UNVERIFIABLE = "unverifiable"
    """Checking its actions failed or took too long here; says nothing certain about the peer."""
    CANNOT_CHECK = "cannot_check"
    """This node's own environment failed before any action, or its policy did, or its tokenizer has no ids for the text:
    nothing that the peer could help."""
    TOO_LONG = "too_long"
    """Does not fit into this node's `sequence_length`."""
    UNLIKELY = "unlikely"
    """This node's policy would hardly ever say it: true, and still nothing to learn from."""


BLAMED = frozenset(
    {
        PeerRefusal.EQUIVOCATION,
        PeerRefusal.FOREIGN_SEED,
        PeerRefusal.MALFORMED_CONTENT,
        PeerRefusal.CONTENT_DIFFERS,
        PeerRefusal.WRONG_REWARD,
        PeerRefusal.WRONG_ACTIONS,
    }
)
"""What no honest node signs: once is enough for quarantine."""

SUSPECT = frozenset({PeerRefusal.UNVERIFIABLE, PeerRefusal.WRONG_TOKENS})
"""What may happen to an honest node now and then; several times in a row, it leads to quarantine too."""


class PeerRefused(RollwrightError):
    """Something of a peer is not taken."""

    def __init__(self, reason: PeerRefusal, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
