"""Filters: what they catch, what follows from it, and that nothing else does."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.errors import ConfigError
from rollwright.rng import digest
from rollwright.rollout import Fate, GroupBook, GroupRules
from rollwright.rollout.filters import (
    AccuracyBand,
    Action,
    Catches,
    Duplicate,
    Filter,
    NoTrainableToken,
    Overlong,
    Repetition,
    VoidTurn,
    WrongFormat,
    ZeroVariance,
    build_filters,
    judge,
    judge_group,
)
from rollwright.rollout.filters.settings import (
    AccuracyBandConfig,
    OverlongConfig,
    RepetitionConfig,
    ZeroVarianceConfig,
)
from rollwright.run.run import Run
from rollwright.simulation.players import RandomPlayer
from rollwright.trajectory import (
    FinishReason,
    Outcome,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    samples,
    token_ids,
    turn_samples,
)


def turn(
    number: int,
    *,
    after: int | None = None,
    ids: Sequence[int] = (1, 2),
    text: str = "go",
    finish: FinishReason = FinishReason.STOP,
    **outcome: Any,
) -> Turn:
    return Turn(
        number,
        after,
        after,
        prompt_ids=token_ids([9]),
        sampled_ids=token_ids(ids),
        logprobs=floats([-0.5] * len(ids)),
        versions=(VersionRun(0, len(ids)),),
        text=text,
        finish=finish,
        completion_tokens=len(ids),
        outcome=Outcome("seen", **{"reward": 0.0, "action": "Up", **outcome}),
    )


def chain(*turns: Turn, member: int = 0, **fields: Any) -> Trajectory:
    linked = [each if number == 0 else turn_after(each, number) for number, each in enumerate(turns)]
    return Trajectory(f"g-m{member}", "a", "g", "Lab", 1, turns=linked, **fields)


def turn_after(each: Turn, number: int) -> Turn:
    return msgspec.structs.replace(each, id=number, after=number - 1, extends=number - 1)


def trained(trajectory: Trajectory) -> int:
    rows = samples(trajectory)
    assert sum(sum(row.mask) for row in turn_samples(trajectory)) == sum(sum(row.mask) for row in rows)
    return sum(sum(row.mask) for row in rows)


@pytest.mark.parametrize(
    ("outcome", "void"),
    [
        ({"action": None}, True),
        ({"action": None, "terminated": True}, False),
        ({"action": None, "truncated": True}, False),
        ({"action": "search"}, False),
        ({"action": "search", "valid": False}, False),
    ],
)
def test_a_void_turn_does_nothing_and_ends_nothing(outcome: dict[str, Any], void: bool) -> None:
    assert VoidTurn().catches_turn(turn(0, **outcome)) is void


def test_a_format_error_is_an_answer_that_was_not_valid() -> None:
    assert WrongFormat().catches_turn(turn(0, valid=False))
    assert not WrongFormat().catches_turn(turn(0))


def test_repetition_is_text_that_shrinks_too_much() -> None:
    assert Repetition().catches_turn(turn(0, text="again and " * 300))
    assert not Repetition().catches_turn(turn(0, text="again and " * 10))
    varied = " ".join(f"step {digest(n):x}" for n in range(200))
    assert not Repetition().catches_turn(turn(0, text=varied))


def test_overlong_is_what_was_cut_off() -> None:
    assert Overlong().catches(chain(turn(0), turn(1, finish=FinishReason.LENGTH)))
    assert not Overlong().catches(chain(turn(0, finish=FinishReason.LENGTH), turn(1)))
    assert Overlong().catches(chain(turn(0), stop=StopReason.MAX_LENGTH))


@pytest.mark.parametrize(("tokens", "penalty"), [(60, 0.0), (80, 0.0), (90, -1.0), (100, -2.0), (150, -2.0)])
def test_a_soft_penalty_grows_over_the_slack(tokens: int, penalty: float) -> None:
    long = chain(turn(0, ids=[1] * tokens))
    found = Overlong(OverlongConfig(kind="overlong", limit=100, slack=20, cost=2.0)).penalties(long)
    assert found == ({0: pytest.approx(penalty)} if penalty else {})


def test_in_a_tree_only_the_long_paths_cost() -> None:
    each = Filter(Overlong(OverlongConfig(kind="overlong", limit=4, slack=2, cost=1.0)), Action.PENALISE)
    tree = chain(turn(0, ids=[1]), turn(1, ids=[1]), turn(2, ids=[1, 2, 3]))
    tree.turns[2] = msgspec.structs.replace(tree.turns[2], after=0, extends=0)
    judged = judge([each], tree, Catches()).trajectory
    assert [each.outcome.penalty for each in judged.turns if each.outcome] == [0.0, 0.0, -1.0]
    assert judged.penalty == judged.penalties["overlong"] == -0.5


def test_in_a_tree_a_stop_takes_out_the_path_and_not_what_others_share() -> None:
    tree = chain(turn(0), turn(1), turn(2, action=None))
    tree.turns[2] = msgspec.structs.replace(tree.turns[2], after=0, extends=0)
    judged = judge([Filter(VoidTurn(), Action.STOP)], tree, Catches()).trajectory
    assert judged.filtered is None
    assert [each.filtered for each in judged.turns] == [None, None, "void_turn"]


def test_a_soft_penalty_is_kept_apart_from_the_reward_and_taken_once() -> None:
    each = Filter(Overlong(OverlongConfig(kind="overlong", limit=1, slack=1, cost=0.5)), Action.PENALISE)
    judged = judge([each], chain(turn(0), turn(1, reward=1.0)), Catches()).trajectory
    again = judge([each], judged, Catches()).trajectory
    assert (judged.reward, judged.penalty) == (1.0, -0.5)
    assert again == judged
    assert trained(judged) == 4


def test_a_masked_turn_stays_in_the_prompt_and_out_of_the_loss() -> None:
    catches = Catches()
    judged = judge(
        [Filter(VoidTurn(), Action.MASK)], chain(turn(0), turn(1, action=None), turn(2)), catches
    ).trajectory
    assert [each.filtered for each in judged.turns] == [None, "void_turn", None]
    assert trained(judged) == 4
    assert [len(row.token_ids) for row in samples(judged)] == [9]
    assert catches.by_filter["void_turn"].count == 1
    assert catches.by_filter["void_turn"].example == "g-m0"


def test_a_stopped_trajectory_is_out_of_the_loss_as_a_whole() -> None:
    judged = judge(
        [Filter(VoidTurn(), Action.STOP)], chain(turn(0), turn(1, action=None)), Catches()
    ).trajectory
    assert judged.filtered == "void_turn"
    assert trained(judged) == 0
    assert judged.in_baseline


def test_counting_changes_nothing() -> None:
    play = chain(turn(0, valid=False, action=None))
    catches = Catches()
    filters = [Filter(VoidTurn(), Action.COUNT), Filter(WrongFormat(), Action.COUNT)]
    assert judge(filters, play, catches) == (play, None)
    assert {name: catch.count for name, catch in catches.by_filter.items()} == {
        "void_turn": 1,
        "format_error": 1,
    }


def test_what_no_token_was_sampled_in_is_dropped() -> None:
    assert judge([Filter(NoTrainableToken(), Action.DROP)], chain(turn(0, ids=[])), Catches()).dropped


def test_the_second_of_two_equal_members_is_masked() -> None:
    group = [chain(turn(0, ids=ids), member=m) for m, ids in enumerate([[1], [2], [1]])]
    members, dropped = judge_group([Filter(Duplicate(), Action.MASK, baseline=False)], group, Catches())
    assert dropped is None
    assert [each.filtered for each in members] == [None, None, "duplicate"]
    assert [each.in_baseline for each in members] == [True, True, False]


def test_counting_members_changes_none() -> None:
    group = [chain(turn(0), member=m) for m in range(3)]
    catches = Catches()
    assert judge_group([Filter(Duplicate(), Action.COUNT)], group, catches) == (group, None)
    assert catches.by_filter["duplicate"].count == 2


def test_group_filters_look_at_the_members_in_the_baseline() -> None:
    group = [
        chain(turn(0, reward=1.0), success=True),
        chain(turn(0, reward=1.0), member=1, success=True),
        chain(turn(0), member=2, success=False, filtered="overlong", in_baseline=False),
    ]
    assert ZeroVariance().catches_group(group)
    assert AccuracyBand(AccuracyBandConfig(kind="accuracy_band", low=0.0, high=0.9)).catches_group(group)
    group[2].in_baseline = True
    assert not ZeroVariance().catches_group(group)
    assert not AccuracyBand(AccuracyBandConfig(kind="accuracy_band", low=0.0, high=0.9)).catches_group(group)


@pytest.mark.parametrize(
    ("rewards", "caught"), [([1.0, 1.0], True), ([1.0, 0.0], False), ([1.0], False), ([0.5, 0.5005], False)]
)
def test_zero_variance_is_a_group_without_a_difference(rewards: list[float], caught: bool) -> None:
    group = [chain(turn(0, reward=reward), member=m) for m, reward in enumerate(rewards)]
    assert ZeroVariance().catches_group(group) is caught
    assert ZeroVariance(ZeroVarianceConfig(kind="zero_variance", tolerance=0.01)).catches_group(group) is (
        caught or rewards == [0.5, 0.5005]
    )


def test_a_tree_whose_leaves_differ_has_variance_of_its_own() -> None:
    tree = chain(turn(0), turn(1, reward=1.0))
    tree.turns.append(turn_after(turn(2), 2))
    tree.turns[2] = msgspec.structs.replace(tree.turns[2], after=0, extends=0)
    assert not ZeroVariance().catches_group([tree])


def test_the_accuracy_band_leaves_out_what_is_too_hard_or_too_easy() -> None:
    def group(*solved: bool) -> list[Trajectory]:
        return [chain(turn(0), member=m, success=each) for m, each in enumerate(solved)]

    band = AccuracyBand(AccuracyBandConfig(kind="accuracy_band", low=0.2, high=0.8))
    assert band.catches_group(group(True, True))
    assert band.catches_group(group(False, False))
    assert not band.catches_group(group(True, False))
    assert not band.catches_group([chain(turn(0))])


TESTS = st.sampled_from(
    [
        VoidTurn(),
        WrongFormat(),
        Repetition(RepetitionConfig(kind="repetition", ratio=2.0, shortest=10)),
        Overlong(),
        NoTrainableToken(),
    ]
)
FILTERS = st.lists(
    st.builds(Filter, TESTS, st.sampled_from([Action.COUNT, Action.MASK]), st.booleans()), max_size=4
)
PLAY = st.lists(
    st.builds(
        lambda valid, action, text: turn(0, valid=valid, action=action, text=text),
        st.booleans(),
        st.sampled_from([None, "Up"]),
        st.sampled_from(["go", "go on " * 40]),
    ),
    min_size=1,
    max_size=5,
)


@given(FILTERS, PLAY, st.randoms())
def test_masks_are_the_same_twice_and_in_any_order(
    filters: list[Filter], play: list[Turn], random: Any
) -> None:
    once = judge(filters, chain(*play), Catches()).trajectory
    assert judge(filters, once, Catches()).trajectory == once
    shuffled = filters[:]
    random.shuffle(shuffled)
    other = judge(shuffled, chain(*play), Catches()).trajectory
    assert [row.mask for row in samples(other)] == [row.mask for row in samples(once)]
    assert other.in_baseline == once.in_baseline


def test_a_dropped_trajectory_gets_a_replacement_on_the_same_level() -> None:
    rules = GroupRules(2, filters=(Filter(NoTrainableToken(), Action.DROP),))
    book = GroupBook(rules, ["Lab"], run_seed=1, mode="train", prefix="r")
    first, second = (rollout for rollout, _ in book.open_group().enqueue)
    decision = book.finish(first, chain(turn(0, ids=[])))
    [(replacement, episode)] = decision.enqueue
    assert episode.member == 2
    assert book.ledger.counts[Fate.FILTERED] == 1
    book.finish(second, chain(turn(0)))
    book.finish(replacement, chain(turn(0)))
    assert book.ready == 2


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        (["void_turns"], "filters"),
        ([{"kind": "zero_variance", "action": "stop"}], "action"),
        ([{"kind": "overlong", "action": "penalise"}], "limit"),
        ([{"kind": "accuracy_band", "low": 2}], "low"),
    ],
)
def test_a_wrong_filter_is_refused_in_one_line(filters: list[Any], says: str) -> None:
    manager = {"num_env_groups": 1, "tags": ["FrozenLake"], "filters": filters}
    with pytest.raises(ConfigError, match=says) as refused:
        build({"train_env_manager": manager})
    assert "\n" not in str(refused.value)


class Mumbler(RandomPlayer):
    """Says nothing that is an action, every third time."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        made = await super().generate(prompt, sampling)
        if int(str(prompt.key[-1])) % 3:
            return made
        ids = self.renderer.encode("hm")
        return Generation("hm", ids, floats([-1.0]) * len(ids), (VersionRun(0, len(ids)),))


@pytest.mark.parametrize("action", ["stop", "mask", "count"])
def test_a_run_filters_as_its_configuration_says(action: str) -> None:
    config = build(
        {
            "train_env_manager": {
                "num_env_groups": 4,
                "group_size": 4,
                "tags": ["FrozenLake"],
                "filters": [{"kind": "void_turn", "action": action}],
            }
        }
    )
    assert config.train_env_manager is not None
    assert build_filters(config.train_env_manager) == (Filter(VoidTurn(), Action(action)),)

    async def run() -> tuple[list[Trajectory], Catches]:
        async with Run(config, policy=Mumbler()) as run:
            batch = await run.get_batch()
            return batch.trajectories, batch.ledger.catches

    trajectories, catches = run_virtual(run())
    void = [each for each in trajectories if any(VoidTurn().catches_turn(turn) for turn in each.turns)]
    assert void
    assert catches.by_filter["void_turn"].example in {each.rollout_id for each in void}
    for each in void:
        stopped = [VoidTurn().catches_turn(turn) for turn in each.turns]
        if action == "stop":
            assert each.stop is StopReason.FILTERED
            assert stopped.index(True) == len(stopped) - 1
            assert trained(each) == 0
        elif action == "mask":
            assert trained(each) == sum(len(turn.sampled_ids) for turn in each.turns if not turn.filtered)
            assert sum(bool(turn.filtered) for turn in each.turns) > 0
        else:
            assert trained(each) == sum(len(turn.sampled_ids) for turn in each.turns)
