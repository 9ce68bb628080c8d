"""Verification of foreign groups by replay: the task is made again, and the actions are played again.

Invariants of the result of `verify`: every member was played in this node's own environment, made from the recipe with this
node's own settings, and earned exactly the claimed reward; prompts are this node's own rendering; log-probabilities are
those of this node's own policy; token ids decode to the text, or were encoded here from it (`off_policy`). So a foreign
group is a group like any other for the trainer.

No answer is evaluated as code: `rollwright.envs.scoring` judges it like those of own rollouts.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import msgspec

from rollwright.agents import EpisodeFailure, OutOfRoom, Session, bounded
from rollwright.engines.base import Generation, Policy, Prompt, Renderer, Sampling
from rollwright.envs.base import Env
from rollwright.errors import ConfigError
from rollwright.rollout.episode import Episode, EpisodeSettings, end_of, new_session, play_episode
from rollwright.rollout.scoring import task_of
from rollwright.swarm.content import SharedAction, SharedGroup, SharedMember
from rollwright.swarm.recipes import TaskBook, task_digest, task_seed
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.signed import Manifest
from rollwright.trajectory import (
    Boundary,
    Floats,
    StopReason,
    TokenIds,
    Trajectory,
    Turn,
    VersionRun,
    token_ids,
)

REWARD_TOLERANCE = 1e-6
"""Difference of two machines in a sum of floats."""

VERIFY_SECONDS = 20.0
"""Deadline for one group, this node's own policy excluded; an honest group takes milliseconds."""

_CLOSE_SECONDS = 5.0

FOREIGN, OFF_POLICY = "foreign", "off_policy"
"""Metrics of a foreign trajectory: that it is foreign, and that its ids were encoded from its text here."""

SCORER_KILLED = "scorer_killed"
"""Metric of an episode whose scorer was killed: its reward of 0 says nothing about the answer."""


class Scorer(Protocol):
    """The part of this node's policy that verification needs."""

    @property
    def renderer(self) -> Renderer: ...

    @property
    def version(self) -> int:
        """Version of the weights that `logprobs` uses."""
        ...

    @property
    def tokenizer(self) -> str:
        """Equal on nodes with the same token ids, see `tokenizer_digest`."""
        ...

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        """Log-probabilities of the sampled ids under the current weights."""
        ...

    def encode(self, text: str) -> TokenIds:
        """Encode a complete turn, with the id that ends it."""
        ...


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a fast tokenizer's vocabulary and rules; its name and padding do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no digest; a fast tokenizer is needed to share token ids"
        )
    rules = json.loads(backend.to_str())
    rules = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}
    return sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


class Verified(msgspec.Struct, frozen=True):
    """A foreign group that may be trained on."""

    trajectories: list[Trajectory]
    off_policy: bool
    """Whether its token ids were made here, because the peer has another tokenizer."""


def check_claims(group: SharedGroup, manifest: Manifest, swarm: str) -> None:
    """Check that the content agrees with its manifest, and that the task is from the peer's stream. Pure."""
    recipe = group.recipe
    said = (manifest.peer, manifest.env, manifest.env_version, manifest.index, manifest.rewards)
    if said != (group.peer, recipe.env, recipe.env_version, recipe.index, group.rewards):
        raise PeerRefused(
            PeerRefusal.CONTENT_DIFFERS, "peer, task or rewards are not those that the manifest names"
        )
    if recipe.seed != task_seed(swarm, group.peer):
        raise PeerRefused(PeerRefusal.FOREIGN_SEED, f"seed {recipe.seed} is not the peer's")


class Replayed(NamedTuple):
    """One member after its replay."""

    trajectory: Trajectory
    """The replay on this node."""
    member: SharedMember
    """The member as claimed."""
    task: str
    """Digest of the task as the peer saw it."""
    sequence_length: int
    """This node's limit."""


def check_replay(replayed: Replayed) -> None:
    """Check that the replay agrees with the claims; raise `PeerRefused` if not. Pure."""
    trajectory, member = replayed.trajectory, replayed.member
    if task_digest(trajectory.observation) != replayed.task:
        raise PeerRefused(
            PeerRefusal.OTHER_TASK, f"{trajectory.tag}, seed {trajectory.seed}: another task here"
        )
    missing = len(member.actions) - len(trajectory.turns)
    longest = max((turn.prompt_tokens + turn.completion_tokens for turn in trajectory.turns), default=0)
    if longest > replayed.sequence_length or (missing and trajectory.stop is StopReason.MAX_LENGTH):
        raise PeerRefused(
            PeerRefusal.TOO_LONG, f"does not fit into sequence_length {replayed.sequence_length}"
        )
    if trajectory.metrics.get(SCORER_KILLED):
        raise PeerRefused(PeerRefusal.UNVERIFIABLE, "scoring an answer took too long or too much")
    if missing:
        raise PeerRefused(PeerRefusal.WRONG_ACTIONS, f"the episode ends {missing} actions sooner")
    if not abs(trajectory.reward - member.reward) <= REWARD_TOLERANCE:
        claimed, earned = f"{member.reward:g}", f"{trajectory.reward:g}"
        raise PeerRefused(
            PeerRefusal.WRONG_REWARD, f"{trajectory.rollout_id} claims {claimed}, earns {earned}"
        )


async def verify(
    group: SharedGroup,
    digest: str,
    book: TaskBook,
    scorer: Scorer,
    seconds: float = VERIFY_SECONDS,
    *,
    check: Callable[[Replayed], None] = check_replay,
) -> Verified:
    """Replay the group; raise `PeerRefused` for any difference from the claims."""
    settings = book.settings(group.recipe.env)
    tokens = _Tokens(scorer, settings.sampling.stop, same=group.tokenizer == scorer.tokenizer)
    recorded = [tokens.of(member) for member in group.members]
    env = book.make_env(settings)
    trajectories = []
    try:
        async with asyncio.timeout(seconds) as limit:
            for place, ids in enumerate(recorded):
                # An environment that never awaits would keep the timeout from firing.
                await asyncio.sleep(0)
                trajectory = await _replay_member(
                    group,
                    f"swarm-{group.peer[:16]}-{digest[:16]}",
                    place,
                    book,
                    env,
                    _Recorded(scorer, limit, group.members[place].actions, ids),
                )
                check(Replayed(trajectory, group.members[place], group.recipe.task, settings.sequence_length))
                trajectories.append(trajectory)
    except TimeoutError as error:
        raise PeerRefused(PeerRefusal.UNVERIFIABLE, f"not done in {seconds:g} s") from error
    except EpisodeFailure as failure:
        raise _refusal(failure) from failure
    finally:
        await _close(env)
    for trajectory in trajectories:
        trajectory.metrics[FOREIGN] = 1.0
        trajectory.metrics[OFF_POLICY] = float(tokens.made_here)
    return Verified(trajectories, tokens.made_here)


def _refusal(failure: EpisodeFailure) -> PeerRefused:
    """Translate a failure of the replay: it ends the one group only. If this node's own policy or agent failed, the peer is
    not to blame; a permanent failure shows in own rollouts."""
    of_env = failure.record.boundary is Boundary.ENVIRONMENT
    reason = PeerRefusal.UNVERIFIABLE if of_env and failure.record.turn else PeerRefusal.CANNOT_CHECK
    return PeerRefused(reason, str(failure))


async def _close(env: Env) -> None:
    try:
        await bounded(env.close(), _CLOSE_SECONDS, Boundary.ENVIRONMENT, 0)
    except EpisodeFailure:
        return  # the environment is abandoned; the verdict stands


async def _replay_member(
    group: SharedGroup,
    group_id: str,
    place: int,
    book: TaskBook,
    env: Env,
    policy: "_Recorded",
) -> Trajectory:
    """Replay one member with the code that plays own rollouts, and judge it by this node's own rewards."""
    member, recipe = group.members[place], group.recipe
    settings = book.settings(recipe.env)
    own = replace(settings, strategy=_Replay(len(member.actions)), filters=(), max_staleness=None)
    level = book.level_of(recipe.env, recipe.seed, recipe.index)
    episode = Episode(recipe.env, level, "train", group_id, recipe.index, place, recipe.seed)
    name = f"{group_id}-m{place}"
    session = new_session(episode, policy, own, env, rollout_id=name, attempt_id=f"{name}-a1")
    trajectory = await play_episode(session, env, own, policy, lambda: env)
    return trajectory if own.rewards is None else await own.rewards.score(task_of(env), trajectory)


@dataclass(frozen=True)
class _Replay:
    """A rollout strategy that takes the recorded actions in order."""

    actions: int

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: EpisodeSettings,
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        turn: Turn | None = None
        for _ in range(min(self.actions, settings.max_steps)):
            try:
                turn = await settings.agent.act(session, env, turn)
            except OutOfRoom:
                return StopReason.MAX_LENGTH
            step = await bounded(
                env.step(turn.text), settings.limits.step_timeout, Boundary.ENVIRONMENT, turn.id + 1
            )
            turn = session.observe(turn, step)
            if (end := end_of(turn)) is not None:
                return end
        # A peer with a smaller context ends an episode sooner; the reward up to there counts.
        return StopReason.MAX_STEPS if self.actions >= settings.max_steps else StopReason.MAX_LENGTH


class _Recorded:
    """A policy that returns the peer's completions with this node's log-probabilities."""

    pressure = 0

    def __init__(
        self, scorer: Scorer, limit: asyncio.Timeout, actions: Sequence[SharedAction], ids: Sequence[TokenIds]
    ) -> None:
        """`limit` is paused while this node's own policy computes: a slow machine is not the peer's fault."""
        self._scorer = scorer
        self._limit = limit
        self._left = list(zip(actions, ids, strict=True))

    @property
    def renderer(self) -> Renderer:
        return self._scorer.renderer

    @property
    def version(self) -> int:
        return self._scorer.version

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        action, ids = self._left.pop(0)
        assert prompt.ids is not None, "a scorer has a renderer"
        version = self.version
        with _paused(self._limit):
            logprobs = await self._scorer.logprobs(prompt.ids, ids)
        return Generation(
            text=action.text,
            sampled_ids=ids,
            logprobs=logprobs,
            versions=(VersionRun(version, len(ids)),) if ids else (),
            finish=action.finish,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(ids),
        )

    async def close(self) -> None:
        """Holds nothing."""


@contextmanager
def _paused(limit: asyncio.Timeout) -> Iterator[None]:
    clock = asyncio.get_running_loop().time
    ends = limit.when()
    assert ends is not None
    left = ends - clock()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(clock() + left)


class _Tokens:
    """Token ids of a peer's completions: its own ids where they decode to the text, else encoded here."""

    def __init__(self, scorer: Scorer, stop: Sequence[str], *, same: bool) -> None:
        self._scorer = scorer
        self._stop = stop
        self._same = same
        self._probe = scorer.encode("a")[:1]
        """Prefix for decoding single ids, because some tokenizers decode the first id differently."""
        self._alone = scorer.renderer.decode(self._probe)
        self._speaking: dict[int, bool] = {}
        self.made_here = False

    def of(self, member: SharedMember) -> list[TokenIds]:
        return [self._ids(action) for action in member.actions]

    def _ids(self, action: SharedAction) -> TokenIds:
        if not self._same or not action.ids:
            self.made_here = True
            made = self._scorer.encode(action.text)
            if self._said(made) != action.text:
                raise PeerRefused(
                    PeerRefusal.CANNOT_CHECK, "its text cannot be encoded with this node's tokenizer"
                )
            return made
        ids = action.token_ids
        try:
            says_it = self._said(ids) == action.text and all(map(self._speaks, set(self._within_turn(ids))))
        except (ValueError, OverflowError, IndexError, KeyError, TypeError) as error:
            raise PeerRefused(PeerRefusal.WRONG_TOKENS, f"ids that no tokenizer has: {error}") from error
        if not says_it:
            raise PeerRefused(PeerRefusal.WRONG_TOKENS, "the token ids do not decode to the text")
        return ids

    def _said(self, ids: TokenIds) -> str:
        """The decoded text up to the first stop string, as an engine returns it."""
        said = self._scorer.renderer.decode(ids)
        return said[
            : min((place for each in self._stop if (place := said.find(each)) >= 0), default=len(said))
        ]

    def _within_turn(self, ids: TokenIds) -> TokenIds:
        """All ids but the one that ends the turn, which alone may decode to nothing."""
        return ids[:-1] if ids[-1] in self._scorer.renderer.stop_ids else ids

    def _speaks(self, each: int) -> bool:
        """Whether an id shows in the text: ids of roles and ends do not, and could hide anything."""
        if each not in self._speaking:
            self._speaking[each] = (
                self._scorer.renderer.decode(self._probe + token_ids([each])) != self._alone
            )
        return self._speaking[each]
