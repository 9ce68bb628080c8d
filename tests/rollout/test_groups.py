"""The book of groups: every opened rollout is in exactly one place, and only whole groups are handed out."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.rollout import Fate, Group, GroupBook, GroupRules
from rollwright.rollout.accounting import MAX_REASONS, Ledger
from rollwright.rollout.filters import Action, Filter, ZeroVariance, group_filter
from rollwright.rollout.groups import Decision, Draw
from rollwright.trajectory import Outcome, Trajectory, Turn, VersionRun, floats, token_ids


def finished(rollout_id: str, reward: float = 0.0, version: int = 0) -> Trajectory:
    turn = Turn(
        id=0,
        after=None,
        extends=None,
        sampled_ids=token_ids([1]),
        logprobs=floats([0.0]),
        versions=(VersionRun(version, 1),),
        outcome=Outcome("", reward),
    )
    return Trajectory(rollout_id, "at", rollout_id.rpartition("-")[0], "FrozenLake", 0, turns=[turn])


def book(**rules: object) -> GroupBook:
    chosen = GroupRules(**{"group_size": 4, **rules})  # type: ignore[arg-type]
    return GroupBook(
        chosen,
        ["FrozenLake", "SimpleSokoban"],
        run_seed=1,
        mode="train",
        prefix="run.train",
        keep_accounts=True,
    )


def opened(decision: Decision) -> list[str]:
    return [rollout_id for rollout_id, _ in decision.enqueue]


def finish_all(groups: GroupBook, rollouts: list[str], reward: float = 0.0, version: int = 0) -> None:
    for rollout_id in rollouts:
        groups.finish(rollout_id, finished(rollout_id, reward, version))


def counts(groups: GroupBook) -> dict[str, int]:
    return {str(place): count for place, count in groups.ledger.counts.items() if count}


def test_all_members_of_a_group_face_the_same_level_and_other_groups_another_B6() -> None:
    groups = book()
    first, second = groups.open_group().enqueue, groups.open_group().enqueue
    assert len({(episode.tag, episode.seed) for _, episode in first}) == 1
    assert first[0][1].seed != second[0][1].seed
    assert [episode.member for _, episode in first] == [0, 1, 2, 3]
    assert (first[0][1].tag, second[0][1].tag) == ("FrozenLake", "SimpleSokoban")


def test_ids_and_levels_are_the_same_in_every_run_with_the_same_seed() -> None:
    groups = book()
    opened_first = [groups.open_group().enqueue for _ in range(2)]
    assert [(name, episode.tag, episode.seed) for each in opened_first for name, episode in each] == [
        *((f"run.train-g0-m{member}", "FrozenLake", 479695271) for member in range(4)),
        *((f"run.train-g1-m{member}", "SimpleSokoban", 1441051335) for member in range(4)),
    ]


def test_a_slow_group_holds_nobody_up() -> None:
    groups = book()
    members = [opened(groups.open_group()) for _ in range(4)]
    for late in (3, 1, 2):
        finish_all(groups, members[late])
    taken = groups.take(12, version=0)
    assert taken is not None
    assert [group.index for group in taken] == [3, 1, 2]
    assert counts(groups) == {"running": 4, "delivered": 12}


def test_nothing_is_handed_out_before_enough_groups_are_complete() -> None:
    groups = book()
    first, second = opened(groups.open_group()), opened(groups.open_group())
    finish_all(groups, first + second[:3])
    assert groups.take(8, version=0) is None
    finish_all(groups, second[3:])
    assert groups.take(8, version=0) is not None
    assert groups.take(4, version=0) is None


def test_the_first_finishers_win_and_the_redundant_rest_is_cancelled_and_counted() -> None:
    groups = book(redundancy=2)
    members = opened(groups.open_group())
    assert len(members) == 6
    finish_all(groups, members[2:5])
    decision = groups.finish(members[5], finished(members[5]))
    assert sorted(decision.cancel) == members[:2]
    taken = groups.take(4, version=0)
    assert taken is not None
    assert [each.rollout_id for each in taken[0].trajectories] == members[2:]
    assert counts(groups) == {"delivered": 4, "cancelled": 2}
    assert groups.finish(members[0], finished(members[0])) == Decision()


def test_a_member_that_fails_for_good_is_replaced_on_the_same_level() -> None:
    groups = book()
    first = groups.open_group().enqueue
    members = [rollout_id for rollout_id, _ in first]
    decision = groups.fail(members[1], "environment: RuntimeError")
    [(replacement, episode)] = decision.enqueue
    assert episode.seed == first[0][1].seed
    assert episode.member == 4
    finish_all(groups, [members[0], members[2], members[3], replacement])
    taken = groups.take(4, version=0)
    assert taken is not None
    assert members[1] not in [each.rollout_id for each in taken[0].trajectories]
    assert counts(groups) == {"delivered": 4, "failed": 1}
    assert groups.ledger.reasons == {"failed: environment: RuntimeError": 1}


def test_a_group_that_keeps_failing_is_filtered_with_the_reason_when_too_few_are_left() -> None:
    groups = book()
    waiting = opened(groups.open_group())
    finish_all(groups, waiting[:1])
    waiting = waiting[1:]
    while waiting:
        decision = groups.fail(waiting.pop(), "engine: timeout")
        waiting += opened(decision)
        waiting = [each for each in waiting if each not in decision.cancel]
    assert counts(groups)["filtered"] == 1
    assert groups.open_groups == 0
    assert groups.dropped_in_a_row == 1
    assert any(
        "below min_group_size" in reason and "engine: timeout" in reason for reason in groups.ledger.reasons
    )


def test_a_short_group_stands_when_min_group_size_allows_it() -> None:
    groups = book(min_group_size=2)
    waiting = opened(groups.open_group())
    finish_all(groups, waiting[:2])
    waiting = waiting[2:]
    while waiting:
        waiting += opened(groups.fail(waiting.pop(), "engine: timeout"))
    assert groups.take(4, version=0) is None
    taken = groups.take(2, version=0)
    assert taken is not None
    assert len(taken[0].trajectories) == 2


def test_a_filtered_group_leaves_with_its_reason_and_its_runners_are_cancelled() -> None:
    groups = book(redundancy=1, filters=(Filter(ZeroVariance(), Action.DROP),))
    members = opened(groups.open_group())
    finish_all(groups, members[:3], reward=1.0)
    decision = groups.finish(members[3], finished(members[3], reward=1.0))
    assert decision.cancel == [members[4]]
    assert counts(groups) == {"filtered": 4, "cancelled": 1}
    assert groups.ledger.reasons["filtered: zero_variance"] == 4
    kept = opened(groups.open_group())
    finish_all(groups, kept[:2], reward=1.0)
    finish_all(groups, kept[2:4], reward=0.0)
    assert groups.ready == 4


def too_easy(group: Sequence[Trajectory]) -> str | None:
    return "nobody failed" if all(each.reward > 0 for each in group) else None


def test_the_reason_that_a_users_own_filter_gives_is_the_reason_that_is_counted() -> None:
    own = f"{__name__}:too_easy"
    groups = book(filters=(group_filter(own),))
    easy = opened(groups.open_group())
    finish_all(groups, easy, reward=1.0)
    assert groups.ledger.reasons == {f"filtered: {own}: nobody failed": 4}
    caught = groups.ledger.catches.by_filter[own]
    assert (caught.count, caught.example) == (1, easy[0].rpartition("-")[0])
    finish_all(groups, opened(groups.open_group()), reward=0.0)
    assert groups.ready == 4


def test_staleness_is_counted_from_the_oldest_token_at_hand_over() -> None:
    groups = book(max_staleness=1)
    old, fresh = opened(groups.open_group()), opened(groups.open_group())
    finish_all(groups, old[:3], version=5)
    finish_all(groups, old[3:], version=3)
    finish_all(groups, fresh, version=4)
    taken = groups.take(4, version=5)
    assert taken is not None
    assert taken[0].index == 1
    assert counts(groups) == {"stale": 4, "delivered": 4}
    assert groups.ledger.reasons == {"stale: too old": 4}


def test_a_member_that_gave_up_as_too_old_takes_its_group_with_it() -> None:
    groups = book()
    members = opened(groups.open_group())
    finish_all(groups, members[:1])
    decision = groups.grow_stale(members[1])
    assert sorted(decision.cancel) == members[2:]
    assert counts(groups) == {"stale": 2, "cancelled": 2}
    assert groups.supply == 0


def test_reasons_are_told_apart_up_to_a_number_and_none_is_lost() -> None:
    ledger = Ledger()
    for number in range(MAX_REASONS + 50):
        ledger.move(Fate.WAITING, Fate.FILTERED, f"mean reward {number}")
        ledger.move(Fate.RUNNING, Fate.FAILED, "engine: EngineError")
    assert len(ledger.reasons) <= MAX_REASONS + len(Fate)
    assert ledger.reasons["filtered: other reasons"] > 40
    assert ledger.reasons["failed: engine: EngineError"] == MAX_REASONS + 50
    assert sum(ledger.reasons.values()) == 2 * (MAX_REASONS + 50)


def plain(ledger: Ledger) -> tuple[object, ...]:
    caught = {name: catch.count for name, catch in ledger.catches.by_filter.items()}
    return ledger.counts, ledger.reasons, caught


def added_up(groups: GroupBook, gone: Ledger) -> tuple[object, ...]:
    """What was forgotten, and the accounts of all groups that were not."""
    total = Ledger()
    assert groups._accounts is not None
    unsettled = [each.account for each in (*groups._open.values(), *groups._complete)]
    for account in (gone, *groups._accounts.values(), *unsettled):
        total.add(account)
    return plain(total)


@settings(max_examples=200)
@given(st.data())
def test_everything_opened_is_accounted_for_at_every_moment(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    groups = book(
        group_size=size,
        redundancy=data.draw(st.integers(0, 2)),
        min_group_size=data.draw(st.integers(1, size)),
        max_staleness=data.draw(st.integers(0, 2)),
        filters=data.draw(st.sampled_from([(), (Filter(ZeroVariance(), Action.DROP),)])),
    )
    running: set[str] = set()
    ever: set[str] = set()
    given_out: list[Group] = []
    gone = Ledger()
    for _ in range(data.draw(st.integers(0, 60))):
        event = data.draw(st.sampled_from(["open", "finish", "finish", "fail", "stale", "take", "forget"]))
        decision = Decision()
        if event == "open":
            decision = groups.open_group()
        elif event == "take":
            given_out += groups.take(size, version=data.draw(st.integers(0, 5))) or []
        elif event == "forget":
            gone.add(groups.forget(data.draw(st.integers(0, groups.first_unsettled))))
            assert gone.counts[Fate.RUNNING] == gone.counts[Fate.WAITING] == 0, "all of it is settled"
        elif running:
            chosen = data.draw(st.sampled_from(sorted(running)))
            running.discard(chosen)
            if event == "finish":
                result = finished(
                    chosen, data.draw(st.sampled_from([0.0, 1.0])), data.draw(st.integers(0, 5))
                )
                decision = groups.finish(chosen, result)
            elif event == "fail":
                decision = groups.fail(chosen, "engine: EngineError")
            else:
                decision = groups.grow_stale(chosen)
        assert not set(opened(decision)) & ever
        running |= set(opened(decision))
        ever |= set(opened(decision))
        running -= set(decision.cancel)
        ledger = groups.ledger
        assert ledger.opened == len(ever)
        assert min(ledger.counts.values()) >= 0
        assert ledger.counts[Fate.RUNNING] == len(running)
        assert ledger.counts[Fate.DELIVERED] == sum(len(group.trajectories) for group in given_out)
        assert added_up(groups, gone) == plain(ledger)
        assert plain(Ledger.of(ledger.row())) == plain(ledger)
    handed = [each.rollout_id for group in given_out for each in group.trajectories]
    assert len(handed) == len(set(handed))


def test_a_users_own_group_filter_is_found_by_its_path() -> None:
    with pytest.raises(ConfigError, match="unknown `sharp`; known: zero_variance, or module:function"):
        group_filter("sharp")
    with pytest.raises(ConfigError, match="cannot be imported"):
        group_filter("rollwright.nowhere:f")
    with pytest.raises(ConfigError, match="is a str, not a function"):
        group_filter("rollwright:__version__")
    assert group_filter("rollwright.trajectory:leaves") is not None


def test_the_supply_counts_what_is_ready_and_what_open_groups_will_give() -> None:
    """By a count that is kept: groups that are completed, dropped and settled as delivered leave it."""
    sizes = [4, 2, 6]
    rules = GroupRules(group_size=4)
    groups = GroupBook(
        rules,
        ["A"],
        run_seed=1,
        mode="train",
        prefix="run.train",
        draw=lambda tag, index: Draw(tag, index, sizes[index]),
    )
    whole, dropped, delivered = (opened(groups.open_group()) for _ in sizes)
    assert groups.supply == 12
    finish_all(groups, whole)
    assert (groups.ready, groups.supply) == (4, 12)
    for rollout_id in list(dropped):
        groups.grow_stale(rollout_id)
    assert groups.supply == 10
    groups.settle_as_delivered(delivered[0].rpartition("-m")[0])
    assert groups.supply == groups.ready == 4
