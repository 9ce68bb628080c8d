"""Reasons for refusing a peer's manifest or group. Every refusal has exactly one, and is counted under it."""

from enum import StrEnum

from rollwright.errors import RollwrightError


class PeerRefusal(StrEnum):
    """Grouped by stage: envelope, manifest, fetch, content."""

    MALFORMED = "malformed"
    """Not a manifest, or one beyond the limits."""
    OTHER_PROTOCOL = "other_protocol"
    """Another protocol version."""
    BAD_SIGNATURE = "bad_signature"
    """Not signed by the peer that it names."""
    OTHER_SWARM = "other_swarm"

    OWN = "own"
    """A manifest of this node."""
    QUARANTINED = "quarantined"
    """The peer is in quarantine."""
    REPLAY = "replay"
    """A sequence number that was used before, or is too old to tell."""
    EQUIVOCATION = "equivocation"
    """Two different signed manifests with one sequence number."""
    OLD_ROUND = "old_round"
    FUTURE_ROUND = "future_round"
    CLOCK_SKEW = "clock_skew"
    """The peer's clock and this node's differ by more than is allowed."""
    OVER_QUOTA = "over_quota"
    """More manifests of one peer than a round allows."""
    TOO_LARGE = "too_large"
    UNKNOWN_ENV = "unknown_env"
    """This node does not play that environment, so it cannot verify the group."""
    OTHER_ENV_VERSION = "other_env_version"
    """Another version of the environment, in which a seed may give another task."""
    FOREIGN_SEED = "foreign_seed"
    """The task is not from the peer's own stream: a chosen task, or another peer's group."""
    DUPLICATE_TASK = "duplicate_task"
    """A group of this task was accepted from this peer before."""

    NOT_FETCHED = "not_fetched"
    """The content did not arrive in time, or had another digest."""

    MALFORMED_CONTENT = "malformed_content"
    """The digest is right, but the content is no shared group, or one beyond the limits."""
    CONTENT_DIFFERS = "content_differs"
    """The content contradicts its manifest."""
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    """Most of its answers nearly repeat those of an earlier group."""
    OTHER_TASK = "other_task"
    """The recipe gives another task on this node."""
    WRONG_REWARD = "wrong_reward"
    """The replay earned other rewards than were claimed."""
    WRONG_TOKENS = "wrong_tokens"
    """The token ids do not decode to the text."""
    WRONG_ACTIONS = "wrong_actions"
    """The replayed episode ends before its last action."""
    UNVERIFIABLE = "unverifiable"
    """The replay failed or took too long; says nothing certain about the peer."""
    CANNOT_CHECK = "cannot_check"
    """This node's own environment failed before any action, or its policy did, or its tokenizer cannot encode the text:
    not the peer's fault."""
    TOO_LONG = "too_long"
    """Does not fit into this node's `sequence_length`."""
    UNLIKELY = "unlikely"
    """This node's policy would hardly ever sample it: correct, but useless for training."""


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
"""Reasons that no honest node gives: one is enough for quarantine."""

SUSPECT = frozenset({PeerRefusal.UNVERIFIABLE, PeerRefusal.WRONG_TOKENS})
"""Reasons that an honest node gives now and then; several in a row lead to quarantine."""


class PeerRefused(RollwrightError):
    """A manifest or group of a peer is refused."""

    def __init__(self, reason: PeerRefusal, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
