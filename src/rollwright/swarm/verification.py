"""Nothing that a peer says about its rollouts is believed: the task is made again, and the actions are played again.

True of what `verify` returns: every member was played in this node's own environment, made from the recipe with this
node's own settings, and earned there exactly what was claimed; its prompts are this node's own rendering; its
log-probabilities are those of this node's own policy; and its token ids say what its text says, or were made here from
the text (`off_policy`). So a foreign group is a group like any other, for the same trainer.

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
from rollwright.envs.base import Env
from rollwright.errors import ConfigError
from rollwright.policies.base import Generation, Policy, Prompt, Renderer, Sampling
from rollwright.rollout.episode import Episode, EpisodeSettings, end_of, new_session, play
from rollwright.swarm.content import Action, Member, SharedGroup
from rollwright.swarm.envelope import Manifest
from rollwright.swarm.recipes import TaskBook, task_digest, task_level, task_seed
from rollwright.swarm.refusals import Refusal, Refused
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
"""What two machines may differ by in a sum of floats."""

VERIFY_SECONDS = 20.0
"""For one group, without the time that this node's own policy takes; an honest one takes milliseconds."""

_CLOSE_SECONDS = 5.0

FOREIGN, OFF_POLICY = "foreign", "off_policy"
"""Metrics of a foreign trajectory: that it is one, and that its ids were made from its text here."""

SCORER_KILLED = "scorer_killed"
"""Metric of an environment whose scorer had to be stopped: its 0 is no verdict on the answer."""


class Scorer(Protocol):
    """This node's policy, as far as checking needs it."""

    @property
    def renderer(self) -> Renderer: ...

    @property
    def version(self) -> int:
        """Of the weights that `logprobs` uses now."""
        ...

    @property
    def tokenizer(self) -> str:
        """Nodes that say the same here mean the same by a token id, see `tokenizer_digest`."""
        ...

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        """One for each sampled id, under the current weights."""
        ...

    def encode(self, text: str) -> TokenIds:
        """A whole completion, with the id that ends a turn."""
        ...


def tokenizer_digest(tokenizer: Any) -> str:
    """Of a fast tokenizer of transformers: its vocabulary and rules, not its name or how it pads."""
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
    """Pure: whether the content is what its manifest says, and the task one that the peer may share."""
    recipe = group.recipe
    said = (manifest.peer, manifest.env, manifest.env_version, manifest.index, manifest.rewards)
    if said != (group.peer, recipe.env, recipe.env_version, recipe.index, group.rewards):
        raise Refused(Refusal.CONTENT_DIFFERS, "peer, task or rewards are not those that the manifest names")
    if recipe.seed != task_seed(swarm, group.peer):
        raise Refused(Refusal.FOREIGN_SEED, f"seed {recipe.seed} is not the peer's")


class Replayed(NamedTuple):
    """One member after it was played again."""

    trajectory: Trajectory
    """As it went here."""
    member: Member
    """As it is said to have gone there."""
    task: str
    """Digest of the task as the peer saw it."""
    sequence_length: int
    """This node's limit."""


def check_replay(replayed: Replayed) -> None:
    """Pure: whether the episode went here as it is said to have gone there; raises `Refused`."""
    trajectory, member = replayed.trajectory, replayed.member
    if task_digest(trajectory.observation) != replayed.task:
        raise Refused(Refusal.OTHER_TASK, f"{trajectory.tag}, seed {trajectory.seed}: another task here")
    missing = len(member.actions) - len(trajectory.turns)
    longest = max((turn.prompt_tokens + turn.completion_tokens for turn in trajectory.turns), default=0)
    if longest > replayed.sequence_length or (missing and trajectory.stop is StopReason.MAX_LENGTH):
        raise Refused(Refusal.TOO_LONG, f"does not fit into sequence_length {replayed.sequence_length}")
    if trajectory.metrics.get(SCORER_KILLED):
        raise Refused(Refusal.UNVERIFIABLE, "scoring an answer took too long or too much")
    if missing:
        raise Refused(Refusal.WRONG_ACTIONS, f"the episode ends {missing} actions sooner")
    if not abs(trajectory.reward - member.reward) <= REWARD_TOLERANCE:
        claimed, earned = f"{member.reward:g}", f"{trajectory.reward:g}"
        raise Refused(Refusal.WRONG_REWARD, f"{trajectory.rollout_id} claims {claimed}, earns {earned}")


async def verify(
    group: SharedGroup,
    digest: str,
    book: TaskBook,
    scorer: Scorer,
    seconds: float = VERIFY_SECONDS,
    *,
    check: Callable[[Replayed], None] = check_replay,
) -> Verified:
    """Plays the group again; raises `Refused` for whatever is not as claimed."""
    settings = book.settings(group.recipe.env)
    tokens = _Tokens(scorer, settings.sampling.stop, same=group.tokenizer == scorer.tokenizer)
    recorded = [tokens.of(member) for member in group.members]
    env = book.make_env(settings)
    trajectories = []
    try:
        async with asyncio.timeout(seconds) as limit:
            for place, ids in enumerate(recorded):
                await asyncio.sleep(
                    0
                )  # an environment that never waits would keep the time limit from striking
                trajectory = await _replayed(
                    group,
                    digest,
                    place,
                    settings,
                    env,
                    _Recorded(scorer, limit, group.members[place].actions, ids),
                )
                check(Replayed(trajectory, group.members[place], group.recipe.task, settings.sequence_length))
                trajectories.append(trajectory)
    except TimeoutError as error:
        raise Refused(Refusal.UNVERIFIABLE, f"not done in {seconds:g} s") from error
    except EpisodeFailure as failure:
        raise _refusal(failure) from failure
    finally:
        await _closed(env)
    for trajectory in trajectories:
        trajectory.metrics[FOREIGN] = 1.0
        trajectory.metrics[OFF_POLICY] = float(tokens.made_here)
    return Verified(trajectories, tokens.made_here)


def _refusal(failure: EpisodeFailure) -> Refused:
    """What a failure of the replay means: nothing that a peer sends may end more than its own group. When this node's
    own policy or agent fails, the peer is not to blame; if it fails for good, own rollouts show it."""
    of_env = failure.record.boundary is Boundary.ENVIRONMENT
    reason = Refusal.UNVERIFIABLE if of_env and failure.record.turn else Refusal.CANNOT_CHECK
    return Refused(reason, str(failure))


async def _closed(env: Env) -> None:
    try:
        await bounded(env.close(), _CLOSE_SECONDS, Boundary.ENVIRONMENT, 0)
    except EpisodeFailure:
        return  # it is left behind; the verdict stands


async def _replayed(
    group: SharedGroup,
    digest: str,
    place: int,
    settings: EpisodeSettings,
    env: Env,
    policy: "_Recorded",
) -> Trajectory:
    """One member, played by the same code as own rollouts."""
    member, recipe = group.members[place], group.recipe
    own = replace(settings, strategy=_Replay(len(member.actions)), filters=(), max_staleness=None)
    group_id = f"swarm-{group.peer[:16]}-{digest[:16]}"
    level = task_level(recipe.seed, recipe.index)
    episode = Episode(recipe.env, level, "train", group_id, recipe.index, place, recipe.seed)
    name = f"{group_id}-m{place}"
    session = new_session(episode, policy, own, env, rollout_id=name, attempt_id=f"{name}-a1")
    return await play(session, env, own, policy, lambda: env)


@dataclass(frozen=True)
class _Replay:
    """A strategy: takes the recorded actions, one after the other."""

    actions: int

    async def play(
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
        # A peer with less room ends an episode sooner; what it earned until then is what counts.
        return StopReason.MAX_STEPS if self.actions >= settings.max_steps else StopReason.MAX_LENGTH


class _Recorded:
    """A policy that says what the peer's said, and what this node's own would have thought of it."""

    pressure = 0

    def __init__(
        self, scorer: Scorer, limit: asyncio.Timeout, actions: Sequence[Action], ids: Sequence[TokenIds]
    ) -> None:
        """`limit` stands still while this node's own policy computes: a slow machine is not the peer's fault."""
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
        with _standing_still(self._limit):
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
        """Nothing is its own."""


@contextmanager
def _standing_still(limit: asyncio.Timeout) -> Iterator[None]:
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
    """Token ids for a peer's completions: its own where they can be believed, else made here from the text."""

    def __init__(self, scorer: Scorer, stop: Sequence[str], *, same: bool) -> None:
        self._scorer = scorer
        self._stop = stop
        self._same = same
        self._probe = scorer.encode("a")[:1]
        """Decoded before an id, because some tokenizers treat the first of what they decode differently."""
        self._alone = scorer.renderer.decode(self._probe)
        self._speaking: dict[int, bool] = {}
        self.made_here = False

    def of(self, member: Member) -> list[TokenIds]:
        return [self._ids(action) for action in member.actions]

    def _ids(self, action: Action) -> TokenIds:
        if not self._same or not action.ids:
            self.made_here = True
            made = self._scorer.encode(action.text)
            if self._said(made) != action.text:
                raise Refused(Refusal.CANNOT_CHECK, "its text cannot be said in this node's tokens")
            return made
        ids = action.token_ids
        try:
            says_it = self._said(ids) == action.text and all(map(self._speaks, set(self._within_turn(ids))))
        except (ValueError, OverflowError, IndexError, KeyError, TypeError) as error:
            raise Refused(Refusal.WRONG_TOKENS, f"ids that no tokenizer has: {error}") from error
        if not says_it:
            raise Refused(Refusal.WRONG_TOKENS, "the token ids do not say what the text says")
        return ids

    def _said(self, ids: TokenIds) -> str:
        """The text of the ids up to where a stop string begins, as an engine gives it."""
        said = self._scorer.renderer.decode(ids)
        return said[
            : min((place for each in self._stop if (place := said.find(each)) >= 0), default=len(said))
        ]

    def _within_turn(self, ids: TokenIds) -> TokenIds:
        """All but the id that ends the turn, which alone may be silent."""
        return ids[:-1] if ids[-1] in self._scorer.renderer.stop_ids else ids

    def _speaks(self, each: int) -> bool:
        """Whether an id shows in the text: marks of roles and ends do not, and could hide anything."""
        if each not in self._speaking:
            self._speaking[each] = (
                self._scorer.renderer.decode(self._probe + token_ids([each])) != self._alone
            )
        return self._speaking[each]
