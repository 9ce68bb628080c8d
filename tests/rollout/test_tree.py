"""Trees: branches share nothing, grow the same every time, and a tree of width 1 is the chain."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.engines.base import Policy
from rollwright.envs import registry
from rollwright.envs.base import Env, Reset, Step
from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.errors import ConfigError
from rollwright.rollout import Activity, Assignment, EnvManager, InflightLimit, RolloutContext
from rollwright.rollout.branching import FixedFanOut, KeepAlive, RandomExpansion, Split, Uncertainty
from rollwright.rollout.episode import CHAIN, Episode, Strategy, new_session, play_episode, read_episode
from rollwright.rollout.settings.strategies import (
    KeepAliveBranchConfig,
    RandomBranchConfig,
    SplitBranchConfig,
    UncertaintyBranchConfig,
)
from rollwright.rollout.tree import BudgetUnit, ForkMode, TreeStrategy
from rollwright.run.build import SettingsTable, make_env
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import SkilledPlayer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptedRollout, RolloutConfig
from rollwright.trajectory import Trajectory, check, leaves, path, turn_weights

TAGS = ("FrozenLake", "SimpleSokoban")
UNSURE = UncertaintyBranchConfig(kind="uncertainty", threshold=0.5, change=0.2)
RANDOM = RandomBranchConfig(kind="random", chains=2, nodes=3, rounds=2)
KEEP_ALIVE = KeepAlive(4, 5, KeepAliveBranchConfig(kind="keep_alive", alive=4))
SPLIT = Split(3, 5, SplitBranchConfig(kind="split", roots=3, at=2))


def engine(skill: float = 0.6) -> SimulatedEngine:
    return SimulatedEngine(
        slots=8, tokens_per_second=10, lengths=LogNormalLength(20, 0.8), player=SkilledPlayer(skill)
    )


def grown(
    strategy: Strategy,
    *,
    tag: str = "FrozenLake",
    seed: int = 5,
    policy: Policy | None = None,
    wrap: Callable[[Env], Any] = lambda env: env,
) -> Trajectory:
    config = build({"train_env_manager": {"num_env_groups": 1, "tags": [tag]}})
    episode = Episode(tag, seed=seed, mode="train", group_id="g", group=0, member=0, run_seed=1)
    settings = replace(SettingsTable(config)(episode), strategy=strategy)
    player = policy or engine()

    async def run() -> Trajectory:
        env = wrap(make_env(settings))
        session = new_session(episode, player, settings, env, rollout_id="r", attempt_id="a")
        return await play_episode(session, env, settings, player, lambda: wrap(make_env(settings)))

    return check(run_virtual(run()))


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("branching", [FixedFanOut(1, 9), FixedFanOut(3, 0), Uncertainty(1, 9, UNSURE)])
def test_a_tree_of_width_one_is_the_chain(tag: str, seed: int, branching: Any) -> None:
    chain, tree = grown(CHAIN, tag=tag, seed=seed), grown(TreeStrategy(branching), tag=tag, seed=seed)
    assert tree.turns == chain.turns
    assert (tree.stop, tree.success, tree.reward) == (chain.stop, chain.success, chain.reward)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("seed", range(6))
def test_every_path_of_a_tree_is_what_a_fresh_environment_answers_to_its_actions(tag: str, seed: int) -> None:
    """No branch has touched another's environment."""
    tree = grown(TreeStrategy(FixedFanOut(2, 4)), tag=tag, seed=seed)
    assert len(leaves(tree.turns)) > 2

    async def replayed(leaf: int) -> None:
        env = registry.make(tag, registry.spec(tag).config)
        assert (await env.reset(seed)).observation == tree.observation
        for turn in path(tree.turns, leaf):
            step = await env.step(turn.text)
            assert turn.outcome is not None
            assert (step.observation, step.reward, step.terminated) == (
                turn.outcome.observation,
                turn.outcome.reward,
                turn.outcome.terminated,
            )
        await env.close()

    for leaf in leaves(tree.turns):
        asyncio.run(replayed(leaf))


@pytest.mark.parametrize("seed", range(4))
def test_replayed_copies_give_the_same_tree_as_forked_ones(seed: int) -> None:
    forked = grown(TreeStrategy(FixedFanOut(2, 3), fork=ForkMode.FORK), seed=seed)
    replayed = grown(TreeStrategy(FixedFanOut(2, 3), fork=ForkMode.REPLAY), seed=seed)
    assert replayed.turns == forked.turns
    assert replayed.metrics["tree_replayed_steps"] > 0
    assert "tree_replay_mismatches" not in replayed.metrics


def test_a_tree_that_branches_at_the_root_only_is_so_many_chains() -> None:
    tree = grown(TreeStrategy(FixedFanOut(3, 9), fork=ForkMode.ROOT))
    roots = [turn for turn in tree.turns if turn.after is None]
    assert len(leaves(tree.turns)) == len(roots)
    assert sum(turn.count for turn in roots) == 3


class Moody:
    """An environment that answers by how often any of its kind was stepped: no replay comes the same way."""

    steps = 0

    def __init__(self, env: Env) -> None:
        self._env = env
        self.instruction, self.prompts = env.instruction, env.prompts

    async def reset(self, seed: int) -> Reset:
        return await self._env.reset(seed)

    async def step(self, answer: str) -> Step:
        Moody.steps += 1
        step = await self._env.step(answer)
        return step._replace(observation=f"{step.observation} {Moody.steps}")

    async def close(self) -> None:
        await self._env.close()

    def actions(self) -> Any:
        return self._env.actions()  # type: ignore[attr-defined]

    def best_action(self) -> Any:
        return self._env.best_action()  # type: ignore[attr-defined]

    def answer(self, action: str) -> Any:
        return self._env.answer(action)  # type: ignore[attr-defined]


def test_an_environment_that_does_not_replay_is_noticed_and_not_branched_there() -> None:
    tree = grown(TreeStrategy(FixedFanOut(2, 3)), wrap=Moody)
    assert tree.metrics["tree_replay_mismatches"] > 0
    inner = [turn for turn in tree.turns if turn.after is not None]
    assert len({turn.after for turn in inner}) == len(inner)


class Unforkable(FrozenLake):
    fork = None  # type: ignore[assignment]


def test_a_fork_that_an_environment_cannot_make_is_refused_before_anything_is_played() -> None:
    manager = {"num_env_groups": 1, "tags": ["Lake"]}
    content = {"custom_envs": {"Lake": {"env_type": f"{__name__}:Unforkable"}}}
    by_fork = {**content, "strategy": {"kind": "tree", "fork": "fork"}}
    says = "strategy.fork: `Lake` cannot copy itself; accepted for it: auto, replay, root"
    with pytest.raises(ConfigError, match=says):
        SettingsTable(build({**by_fork, "train_env_manager": manager}))
    SettingsTable(build({**by_fork, "val_env_manager": manager}))  # validation plays chains
    for other in ("auto", "replay", "root"):
        strategy = {"kind": "tree", "fork": other}
        SettingsTable(build({**content, "strategy": strategy, "train_env_manager": manager}))


def test_the_answers_to_one_question_are_asked_for_at_the_same_time() -> None:
    policy = SimulatedEngine(slots=64, tokens_per_second=10)
    inflight: list[int] = []
    ask = policy.generate

    async def watched(*args: Any) -> Any:
        inflight.append(policy.usage().running)
        return await ask(*args)

    policy.generate = watched  # type: ignore[method-assign]
    grown(TreeStrategy(FixedFanOut(4, 1)), policy=policy)
    assert inflight[:4] == [0, 1, 2, 3]


def test_answers_that_come_out_the_same_are_one_turn_that_counts_for_all() -> None:
    policy = SimulatedEngine(slots=8, tokens_per_second=10, player=SkilledPlayer(1.0))
    tree = grown(TreeStrategy(FixedFanOut(4, 1)), policy=policy)
    roots = [turn for turn in tree.turns if turn.after is None]
    assert len(roots) < 4
    assert sum(turn.count for turn in roots) == 4
    assert tree.metrics["tree_merged"] == 4 - len(roots)
    weights = turn_weights(tree.turns)
    assert [weights[turn.id] for turn in roots] == [turn.count / 4 for turn in roots]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "branching",
    [FixedFanOut(3, 3), RandomExpansion(2, 4, RANDOM), Uncertainty(3, 5, UNSURE), KEEP_ALIVE, SPLIT],
)
def test_the_weights_of_the_leaves_sum_to_one_and_the_reward_is_the_mean_of_means(
    seed: int, branching: Any
) -> None:
    tree = grown(TreeStrategy(branching), seed=seed)
    weights = turn_weights(tree.turns)
    assert sum(weights[leaf] for leaf in leaves(tree.turns)) == pytest.approx(1)

    def value(after: int | None) -> float:
        below = [turn for turn in tree.turns if turn.after == after]
        if not below:
            return 0.0
        own = [(turn.outcome.reward if turn.outcome else 0.0) + value(turn.id) for turn in below]
        return sum(each * turn.count for each, turn in zip(own, below, strict=True)) / sum(
            t.count for t in below
        )

    assert tree.reward == pytest.approx(value(None))


@pytest.mark.parametrize("unit", list(BudgetUnit))
def test_a_budget_bounds_the_tree_and_says_what_it_refused(unit: BudgetUnit) -> None:
    free = grown(TreeStrategy(FixedFanOut(3, 4)))
    limit = {BudgetUnit.TOKENS: 400, BudgetUnit.TURNS: 20, BudgetUnit.TOOL_CALLS: 20, BudgetUnit.LEAVES: 6}[
        unit
    ]
    bounded = grown(TreeStrategy(FixedFanOut(3, 4), budget=limit, unit=unit))
    assert len(bounded.turns) < len(free.turns)
    assert bounded.metrics["tree_refused"] > 0
    if unit is BudgetUnit.LEAVES:
        assert len(leaves(bounded.turns)) <= limit


CONFIG = {
    "name": "trees",
    "strategy": {"kind": "tree", "width": 2, "depth": 3, "branch": "fixed"},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
}


def test_a_run_grows_the_same_trees_every_time() -> None:
    async def run() -> list[Trajectory]:
        async with Run(build(CONFIG), policy=engine()) as run:
            return (await run.get_batch()).trajectories

    trees, again = run_virtual(run()), run_virtual(run())
    assert [each.turns for each in trees] == [each.turns for each in again]
    assert all(each.metrics["tree_leaves"] > 1 for each in trees)


async def killed_then_resumed(
    after: float, config: dict[str, Any] = CONFIG
) -> tuple[Trajectory, int, Activity]:
    """One tree; its first worker dies after some seconds without a word, a second one takes over."""
    table, policy, activity = SettingsTable(build(config)), engine(), Activity()

    async def role(claimed: AttemptedRollout) -> Assignment:
        return Assignment(table(read_episode(claimed.input)), policy)

    store = MemoryStore()
    context = RolloutContext(store, role, make_env, InflightLimit(10), activity)
    episode = Episode("FrozenLake", seed=5, mode="train", group_id="g", group=0, member=0, run_seed=1)
    retries = RolloutConfig(unresponsive_seconds=30.0, max_attempts=3)
    await store.enqueue_rollout(msgspec.to_builtins(episode), rollout_id="r", config=retries)
    for name, seconds in (("first", after), ("second", 3600.0)):
        playing = asyncio.create_task(EnvManager(context, name).run_rollout_loop())
        await store.wait_for_rollouts(["r"], timeout=seconds)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        if name == "first":
            recorded = len(await store.read_journal("r"))
    tree = Trajectory.from_bytes((await store.get_trajectories(["r"]))["r"])
    await store.close()
    return tree, recorded, activity


@pytest.mark.parametrize("after", [3.0, 6.0, 9.0, 12.0])
def test_a_half_grown_tree_goes_on_growing_from_its_journal(after: float) -> None:
    whole, _, alone = run_virtual(killed_then_resumed(10_000.0))
    tree, recorded, activity = run_virtual(killed_then_resumed(after))
    assert 0 < recorded < alone.turns
    assert activity.replayed_turns == recorded
    assert activity.tokens == alone.tokens
    assert tree.turns == whole.turns


UNSURE_CONFIG = {
    **CONFIG,
    "strategy": {
        "kind": "tree",
        "width": 3,
        "depth": 4,
        # the player of skill 0.6 has 0.94 nats where a best action is known, and log 4 = 1.39 elsewhere
        "branch": {"kind": "uncertainty", "threshold": 0.9, "change": 9.0},
    },
}


@pytest.mark.parametrize("after", [3.0, 6.0, 9.0, 12.0])
def test_a_tree_that_branches_by_entropy_goes_on_from_its_journal(after: float) -> None:
    whole, _, alone = run_virtual(killed_then_resumed(10_000.0, UNSURE_CONFIG))
    tree, recorded, activity = run_virtual(killed_then_resumed(after, UNSURE_CONFIG))
    assert len(leaves(whole.turns)) > 3
    assert 0 < recorded < alone.turns
    assert activity.replayed_turns == recorded
    assert activity.tokens == alone.tokens
    assert tree.turns == whole.turns


class Telling(SkilledPlayer):
    """Tells an entropy of its own, and none after a resumption."""

    async def generate(self, prompt: Any, sampling: Any) -> Any:
        made = await super().generate(prompt, sampling)
        return msgspec.structs.replace(made, entropy=self.told if sampling.top_logprobs else None)

    told: float | None = None


@pytest.mark.parametrize(("told", "width"), [(2.0, 3), (0.1, 1)])
def test_a_question_branches_by_the_entropy_that_the_engine_tells(told: float, width: int) -> None:
    player = Telling(0.6)
    object.__setattr__(player, "told", told)
    rules = UncertaintyBranchConfig(kind="uncertainty", threshold=1.0, change=9.0)
    tree = grown(TreeStrategy(Uncertainty(3, 2, rules)), policy=player)
    assert sum(turn.count for turn in tree.turns if turn.after is None) == width
    assert {turn.entropy for turn in tree.turns if turn.after is None} == {told}
    deep = {turn.entropy for turn in tree.turns if len(path(tree.turns, turn.id)) > 2}
    assert deep == {None}, "beyond `depth` no entropy is asked for"


def test_an_engine_that_tells_nothing_is_named_once_and_the_turn_before_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = UncertaintyBranchConfig(kind="uncertainty", threshold=0.0, change=9.0)
    player = Telling(0.6)
    tree = grown(TreeStrategy(Uncertainty(3, 2, rules)), policy=player)
    grown(TreeStrategy(Uncertainty(3, 2, rules)), policy=player, seed=6)
    assert sum(turn.count for turn in tree.turns if turn.after is None) == 3
    assert [each.getMessage() for each in caplog.records if "Telling" in each.getMessage()] == [
        "strategy.branch uncertainty: Telling tells no likeliest tokens; the -log p of the turn before a question counts "
        "instead of the question's entropy"
    ]
