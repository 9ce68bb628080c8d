"""The trajectory: all turns of one attempt, as a forest.

What is always true of it: `turns[i].id == i`; both links of a turn point to earlier turns; a turn has as
many log-probabilities and version stamps as sampled ids. So walking either link ends, and the size is
linear in the number of turns, because a turn stores only the ids that its prompt adds.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rollwright.errors import FormatError
from rollwright.trajectory.arrays import TokenIds, token_ids
from rollwright.trajectory.codec import Codec
from rollwright.trajectory.timing import Timing
from rollwright.trajectory.turn import UNDELIVERED, ErrorRecord, SamplingParams, StopReason, ToolCall, Turn


class Message(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    reasoning: str = ""
    """What an assistant thought before its answer, where the model keeps that apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant asked for."""
    tool_call_id: str | None = None
    """Which call a `tool` message answers."""
    name: str | None = None
    """Which tool a `tool` message comes from."""

    @property
    def length(self) -> int:
        """Characters of all its texts, those that a prompt may leave out included."""
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
    """Which environment was played."""
    seed: int
    """The level: the same for every member of the group."""
    opening: tuple[Message, ...] = ()
    """The messages before the first turn, as the agent wrote them."""
    observation: str = ""
    """What `reset` showed."""
    turns: list[Turn] = msgspec.field(default_factory=list)
    stop: StopReason | None = None
    """`None` while the episode runs."""
    success: bool | None = None
    """Whether the task was solved; `None` where the environment does not say, or the leaves of a tree differ."""
    episode_reward: float = 0.0
    """Reward for the episode as a whole, beside those of its turns."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Figures of the environment's own, summed over the turns."""
    filtered: str | None = None
    """The filter that took all its turns out of the loss; `None`: none did."""
    in_baseline: bool = True
    """Whether its reward counts where others of its group are compared with it."""
    penalties: dict[str, float] = msgspec.field(default_factory=dict)
    """What filters took off, by name; part of the outcomes' penalties already."""
    error: ErrorRecord | None = None
    duration: float = 0.0
    """Seconds from the first `reset` to the end."""
    timing: Timing | None = None
    """What the attempt waited for; `None` where nobody measured."""
    sampling: SamplingParams | None = None
    """How tokens were drawn in all turns that do not say otherwise; `None`: a release that did not record it."""
    components: dict[str, float] = msgspec.field(default_factory=dict)
    """The values of the named rewards that `episode_reward` was computed from, before their weights; empty where none
    were."""
    returned: str | None = None
    """The value that the agent's own function returned, as JSON text; `None`: it returned nothing."""
    conversation: tuple[Message, ...] = ()
    """The messages of the last conversation, the final answer included, where `opening`, turns and observations do not
    tell it (an agent that keeps its own history); empty: they do."""

    @property
    def reward(self) -> float:
        """The task's reward: the turns' summed along each path, the leaves taken by their weights; a chain gives its
        sum, a tree the mean over its roots of the mean over their children, and so on."""
        return self.episode_reward + self._over_leaves("reward")

    @property
    def penalty(self) -> float:
        """Format penalties, summed like the reward and kept apart from it."""
        return self._over_leaves("penalty")

    @property
    def score(self) -> float:
        return self.reward + self.penalty

    @property
    def success_share(self) -> float | None:
        """The leaves that solved the task, by their weights; `None` where the environment does not say."""
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
        """Of its turns, each counted once."""
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def paid_tokens(self) -> int:
        """What was sampled for it: a turn that stands for several equal answers was sampled as often."""
        return sum(turn.completion_tokens * turn.count for turn in self.turns)

    @property
    def not_trainable(self) -> str | None:
        """Why nothing here may be trained on; `None` when it may."""
        if self.error is not None:
            return f"{self.error.boundary} failure: {self.error.kind}"
        if any(not turn.exact for turn in self.turns if turn.filtered is None):
            return "the engine returned no exact token ids and log-probabilities"
        sampled = [turn for turn in self.turns if turn.sampled_ids]
        if not sampled:
            return "no token was sampled"
        whys = [self._never_trained(turn) for turn in sampled]
        return whys[0] if all(whys) else None

    def sampling_of(self, turn: Turn) -> SamplingParams | None:
        """How a turn's tokens were drawn; `None`: nobody recorded it."""
        return self.sampling if turn.sampling is None else turn.sampling

    def untrained(self, turn: Turn) -> str | None:
        """Why a turn's tokens are out of the loss; `None`: they are in it."""
        return self.filtered or turn.filtered or self._never_trained(turn)

    def never_trained(self) -> list[str]:
        """Of each turn that no trainer could use, whatever the filters say, why."""
        whys = (self._never_trained(turn) for turn in self.turns if turn.sampled_ids)
        return [why for why in whys if why is not None]

    def _never_trained(self, turn: Turn) -> str | None:
        """What is no filter's doing: an answer that nobody got, or a distribution that no trainer computes."""
        if turn.filtered == UNDELIVERED:
            return "no answer reached the agent"
        sampling = self.sampling_of(turn)
        return None if sampling is None else sampling.not_modelled

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens of turns that are in the loss; `None`: there are none."""
        return min(
            (turn.oldest_version for turn in self.turns if turn.versions and turn.filtered is None),
            default=None,
        )

    def to_bytes(self) -> bytes:
        return _CODEC.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "Trajectory":
        """Refuses, with a `FormatError`, what is not a whole and consistent trajectory of this format."""
        return check(_CODEC.decode(data))


_CODEC = Codec(Trajectory, magic=b"RWT", version=1)


def children(turns: Sequence[Turn]) -> dict[int | None, list[int]]:
    """The turns that follow each turn; the roots under `None`."""
    found: dict[int | None, list[int]] = {}
    for turn in turns:
        found.setdefault(turn.after, []).append(turn.id)
    return found


def turn_weights(turns: Sequence[Turn]) -> list[float]:
    """Roots share 1; the children of a turn share its weight, by their counts; so the weights of the leaves sum to 1."""
    shares: dict[int | None, int] = {}
    for turn in turns:
        shares[turn.after] = shares.get(turn.after, 0) + turn.count
    weights: list[float] = []
    for turn in turns:
        above = 1.0 if turn.after is None else weights[turn.after]
        weights.append(above * turn.count / shares[turn.after])
    return weights


def leaves(turns: Sequence[Turn]) -> list[int]:
    """The turns that no decision follows, in order."""
    inner = {turn.after for turn in turns}
    return [turn.id for turn in turns if turn.id not in inner]


def path(turns: Sequence[Turn], end: int) -> list[Turn]:
    """The decisions from a root to `end`."""
    return _walk(turns, end, "after")


def sequence(turns: Sequence[Turn], end: int) -> list[Turn]:
    """The turns whose ids, joined, are the full token sequence that ends with turn `end`."""
    return _walk(turns, end, "extends")


def _walk(turns: Sequence[Turn], end: int, link: str) -> list[Turn]:
    walked = [turns[end]]
    while (before := getattr(walked[-1], link)) is not None:
        walked.append(turns[before])
    walked.reverse()
    return walked


def full_prompt(turns: Sequence[Turn], end: int) -> TokenIds:
    """Exactly the ids that the engine was given for turn `end`."""
    ids = token_ids()
    for turn in sequence(turns, end)[:-1]:
        ids += turn.prompt_ids
        ids += turn.sampled_ids
    ids += turns[end].prompt_ids
    return ids


def renumbered(turns: Sequence[Turn], order: Sequence[int]) -> list[Turn]:
    """The same forest with its turns in another order; both links of every turn must still point back."""
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
    """One trajectory for each leaf, holding the turns its sequences need, in order, with their ids kept.

    A part is a view for storage or sending, not a forest of its own: only `merge` gives one back.
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
    """The forest that `split` took apart; parts may overlap, and come in any order."""
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
    """The same trajectory, or a `FormatError` that names the turn that breaks the forest's rules."""
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
