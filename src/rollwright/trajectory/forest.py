"""The trajectory: all turns of one attempt, as a forest.

Always true: `turns[i].id == i`; both links of a turn point to earlier turns; a turn has as many log-probabilities and
version stamps as sampled ids. So a walk along either link terminates. A turn stores only the ids that its prompt adds,
so the size is linear in the number of turns.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rollwright.errors import FormatError
from rollwright.trajectory.arrays import TokenIds, token_ids
from rollwright.trajectory.codec import Codec
from rollwright.trajectory.elsewhere import check_present
from rollwright.trajectory.timing import Timing
from rollwright.trajectory.turn import (
    LEFT_OUT,
    UNDELIVERED,
    ErrorRecord,
    SamplingParams,
    StopReason,
    ToolCall,
    Turn,
)
from rollwright.trajectory.usage import OutsideCall


class Message(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    reasoning: str = ""
    """Reasoning of an assistant message, where the model separates it from the answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant message."""
    tool_call_id: str | None = None
    """Id of the call that a `tool` message answers."""
    name: str | None = None
    """Name of the tool that a `tool` message comes from."""

    @property
    def length(self) -> int:
        """Number of characters in all its texts, including those that a prompt may omit."""
        length = len(self.content) + len(self.reasoning) + len(self.tool_call_id or "") + len(self.name or "")
        if self.tool_calls:
            length += sum([len(each.id) + len(each.name) + len(each.arguments) for each in self.tool_calls])
        return length


class Trajectory(msgspec.Struct, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """All turns of one attempt at a rollout."""

    rollout_id: str
    attempt_id: str
    group_id: str
    tag: str
    """Tag of the environment."""
    seed: int
    """Seed of the level, shared by all members of the group."""
    opening: tuple[Message, ...] = ()
    """The messages before the first turn, as the agent wrote them."""
    observation: str = ""
    """Observation that `reset` returned."""
    turns: list[Turn] = msgspec.field(default_factory=list)
    stop: StopReason | None = None
    """`None` while the episode runs."""
    success: bool | None = None
    """Whether the task was solved; `None` if the environment does not report it, or the leaves of a tree differ."""
    episode_reward: float = 0.0
    """Reward for the episode as a whole, in addition to the rewards of its turns."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Metrics of the environment, summed over the turns."""
    filtered: str | None = None
    """The filter that removed all its turns from the loss; `None`: no filter did."""
    in_baseline: bool = True
    """Whether its reward counts in the baseline of its group."""
    penalties: dict[str, float] = msgspec.field(default_factory=dict)
    """Penalties of filters by name; the outcomes' penalties include them."""
    error: ErrorRecord | None = None
    duration: float = 0.0
    """Seconds from the first `reset` to the end of the episode."""
    timing: Timing | None = None
    """Recorded waits of the attempt; `None` if they were not measured."""
    sampling: SamplingParams | None = None
    """Sampling parameters of all turns without their own; `None`: written by a release that did not record them."""
    components: dict[str, float] = msgspec.field(default_factory=dict)
    """Unweighted values of the named rewards from which `episode_reward` was computed; empty without named rewards."""
    returned: str | None = None
    """Return value of the agent's function, as JSON text; `None`: it returned nothing."""
    conversation: tuple[Message, ...] = ()
    """Messages of the last conversation including the final answer, for an agent that keeps its own history; empty if
    `opening`, turns and observations determine them."""
    judged: tuple[OutsideCall, ...] = ()
    """Tokens that calls beside its turns have used: of judges for its rewards, of agents beside the episode."""

    @property
    def reward(self) -> float:
        """The task's reward: turn rewards summed along each path and averaged over the leaves by weight. A chain gives
        its sum; a tree gives the mean over its roots of the mean over their children, and so on."""
        return self.episode_reward + self._over_leaves("reward")

    @property
    def penalty(self) -> float:
        """Format penalties, aggregated like the reward and separate from it."""
        return self._over_leaves("penalty")

    @property
    def score(self) -> float:
        """Reward plus penalty."""
        return self.reward + self.penalty

    @property
    def success_share(self) -> float | None:
        """Weighted share of leaves that solved the task; `None` if the environment does not report success."""
        if self.success is not None or not self.turns:
            return None if self.success is None else float(self.success)
        weights = turn_weights(self.turns)
        judged = [
            (weights[leaf], outcome.success)
            for leaf in leaves(self.turns)
            if (outcome := self.turns[leaf].outcome) is not None and outcome.success is not None
        ]
        return sum(weight * solved for weight, solved in judged) if judged else None

    def _over_leaves(self, field: str) -> float:
        sums: list[float] = []
        for turn in self.turns:
            before = 0.0 if turn.after is None else sums[turn.after]
            sums.append(before + (getattr(turn.outcome, field) if turn.outcome else 0.0))
        ends = leaves(self.turns)
        if len(ends) < 2:
            return sums[ends[0]] if ends else 0.0
        weights = turn_weights(self.turns)
        return sum(weights[leaf] * sums[leaf] for leaf in ends)

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens, each turn counted once."""
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def paid_tokens(self) -> int:
        """Sampled tokens with a turn counted once for each of the equal samples it represents."""
        return sum(turn.completion_tokens * turn.count for turn in self.turns)

    @property
    def not_trainable(self) -> str | None:
        """Reason why no turn of this trajectory can be trained on; `None`: some turn can."""
        if self.error is not None:
            return f"{self.error.boundary} failure: {self.error.kind}"
        if any(not turn.exact for turn in self.turns if turn.filtered is None):
            return "the engine returned no exact token ids and log-probabilities"
        sampled = [turn for turn in self.turns if turn.sampled_ids]
        if not sampled:
            return "no token was sampled"
        reasons = [self._never_trained(turn) for turn in sampled]
        return reasons[0] if all(reasons) else None

    def sampling_of(self, turn: Turn) -> SamplingParams | None:
        """Sampling parameters of a turn; `None`: not recorded."""
        return self.sampling if turn.sampling is None else turn.sampling

    def untrained(self, turn: Turn) -> str | None:
        """Reason why a turn is excluded from the loss; `None`: it is included."""
        return self.filtered or turn.filtered or self._never_trained(turn)

    def never_trained(self) -> list[str]:
        """Reasons of the turns that no trainer can use, regardless of filters."""
        reasons = (self._never_trained(turn) for turn in self.turns if turn.sampled_ids)
        return [reason for reason in reasons if reason is not None]

    def _never_trained(self, turn: Turn) -> str | None:
        """Reason other than a filter: an answer that was not delivered, or a distribution that trainers cannot compute."""
        if turn.filtered == UNDELIVERED:
            return "no answer reached the agent"
        if turn.filtered == LEFT_OUT:
            return "left out by gateway.calls"
        sampling = self.sampling_of(turn)
        return None if sampling is None else sampling.not_modelled

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version among the sampled tokens of unfiltered turns; `None`: there are none."""
        return min(
            (turn.oldest_version for turn in self.turns if turn.versions and turn.filtered is None),
            default=None,
        )

    def to_bytes(self) -> bytes:
        return _CODEC.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "Trajectory":
        """Decodes a trajectory; raises `FormatError` unless it is complete and consistent."""
        return check(_CODEC.decode(check_present(data)))

    @staticmethod
    def read_rollout_id(data: bytes) -> str:
        """The rollout's id alone, of a record that is known to be whole."""
        return _CODEC.rollout_id(data)

    @staticmethod
    def outline(data: bytes) -> "Trajectory":
        """Decodes everything but token ids and log-probabilities, which are empty. Cheap, for lists and searches; its
        samples and `not_trainable` mean nothing, and the forest is not checked."""
        return _CODEC.outline(check_present(data))


_CODEC = Codec(Trajectory, magic=b"RWT", version=1)


def children(turns: Sequence[Turn]) -> dict[int | None, list[int]]:
    """Ids of the turns that follow each turn; the roots are under `None`."""
    found: dict[int | None, list[int]] = {}
    for turn in turns:
        found.setdefault(turn.after, []).append(turn.id)
    return found


def turn_weights(turns: Sequence[Turn]) -> list[float]:
    """Weight of each turn: roots share 1, and children share their parent's weight in proportion to their counts. The
    weights of the leaves sum to 1."""
    shares: dict[int | None, int] = {}
    for turn in turns:
        shares[turn.after] = shares.get(turn.after, 0) + turn.count
    weights: list[float] = []
    for turn in turns:
        above = 1.0 if turn.after is None else weights[turn.after]
        weights.append(above * turn.count / shares[turn.after])
    return weights


def leaves(turns: Sequence[Turn]) -> list[int]:
    """Ids of the turns that no other turn follows, in order."""
    inner = {turn.after for turn in turns}
    return [turn.id for turn in turns if turn.id not in inner]


def path(turns: Sequence[Turn], end: int) -> list[Turn]:
    """Turns from a root to `end` along `after`."""
    return _walk(turns, end, "after")


def sequence(turns: Sequence[Turn], end: int) -> list[Turn]:
    """Turns along `extends` whose joined ids are the full token sequence that ends with turn `end`."""
    return _walk(turns, end, "extends")


def _walk(turns: Sequence[Turn], end: int, link: str) -> list[Turn]:
    walked = [turns[end]]
    while (before := getattr(walked[-1], link)) is not None:
        walked.append(turns[before])
    walked.reverse()
    return walked


def full_prompt(turns: Sequence[Turn], end: int) -> TokenIds:
    """The exact prompt ids that the engine received for turn `end`."""
    ids = token_ids()
    for turn in sequence(turns, end)[:-1]:
        ids += turn.prompt_ids
        ids += turn.sampled_ids
    ids += turns[end].prompt_ids
    return ids


def renumber(turns: Sequence[Turn], order: Sequence[int]) -> list[Turn]:
    """The forest with its turns in another order, in which both links must still point to earlier turns."""
    place = {old: new for new, old in enumerate(order)}
    return [
        msgspec.structs.replace(
            turns[old],
            id=new,
            after=None if (after := turns[old].after) is None else place[after],
            extends=None if (extends := turns[old].extends) is None else place[extends],
        )
        for new, old in enumerate(order)
    ]


def split(trajectory: Trajectory) -> list[Trajectory]:
    """One part per leaf, with the turns that its sequences need; turn ids are kept.

    A part is for storage or transport and not a valid forest: `merge` restores the forest from all parts.
    """
    parts = []
    for leaf in leaves(trajectory.turns):
        needed: set[int] = set()
        for turn in path(trajectory.turns, leaf):
            needed.update(earlier.id for earlier in sequence(trajectory.turns, turn.id))
        part = msgspec.structs.replace(trajectory, turns=[trajectory.turns[i] for i in sorted(needed)])
        parts.append(part)
    return parts


def merge(parts: Iterable[Trajectory]) -> Trajectory:
    """The forest whose parts `split` returned; parts may overlap and come in any order."""
    parts = list(parts)
    if not parts:
        raise FormatError("nothing to merge: no parts were given")
    found: dict[int, Turn] = {}
    for part in parts:
        if part.rollout_id != parts[0].rollout_id or part.attempt_id != parts[0].attempt_id:
            raise FormatError(f"parts of different attempts: {parts[0].attempt_id} and {part.attempt_id}")
        for turn in part.turns:
            if found.setdefault(turn.id, turn) != turn:
                raise FormatError(f"two different turns {turn.id} in attempt {part.attempt_id}")
    return check(msgspec.structs.replace(parts[0], turns=[found[i] for i in sorted(found)]))


def check(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory, or raises a `FormatError` that names the turn that violates the forest's invariants."""
    for place, turn in enumerate(trajectory.turns):
        where = f"trajectory {trajectory.rollout_id}, turn {place}"
        if turn.id != place:
            raise FormatError(f"{where}: has id {turn.id}")
        for link in (turn.after, turn.extends):
            if link is not None and not 0 <= link < place:
                raise FormatError(f"{where}: links to turn {link}, which is not an earlier one")
        sampled = len(turn.sampled_ids)
        if turn.exact and len(turn.logprobs) != sampled:
            raise FormatError(f"{where}: {sampled} sampled ids but {len(turn.logprobs)} log-probabilities")
        if any(run.count <= 0 for run in turn.versions) or sum(r.count for r in turn.versions) != sampled:
            raise FormatError(f"{where}: version stamps do not cover its {sampled} sampled ids")
    return trajectory
