"""The number of workers follows the waiting rollouts, up to a maximum, and comes down only after a while (C9)."""

from hypothesis import given
from hypothesis import strategies as st

from rollwright.run.fleet import Autoscaler, ScaleRules

COUNTS = st.integers(0, 10_000)
RULES = st.builds(
    ScaleRules,
    envs_per_worker=st.integers(1, 64),
    maximum=st.integers(1, 50),
    minimum=st.just(1),
    cool_down=st.floats(0.1, 100),
)


@given(RULES, st.lists(st.tuples(COUNTS, COUNTS, st.floats(0, 50)), max_size=30))
def test_never_above_the_maximum_and_never_below_the_minimum_C9(
    rules: ScaleRules, looks: list[tuple[int, int, float]]
) -> None:
    scaler, workers, now = Autoscaler(rules), 0, 0.0
    for waiting, claimed, passed in looks:
        now += passed
        workers = scaler.wanted(waiting, claimed, workers, now)
        assert rules.minimum <= workers <= rules.maximum


@given(RULES, COUNTS, COUNTS)
def test_it_grows_at_once_to_what_all_open_rollouts_need_C9(
    rules: ScaleRules, waiting: int, claimed: int
) -> None:
    wanted = Autoscaler(rules).wanted(waiting, claimed, 0, 0.0)
    enough = wanted * rules.envs_per_worker >= waiting + claimed
    assert enough or wanted == rules.maximum
    one_less = (wanted - 1) * rules.envs_per_worker
    assert one_less < waiting + claimed or wanted == rules.minimum


@given(RULES, COUNTS, COUNTS, st.integers(0, 50))
def test_more_waiting_never_means_fewer_workers_C9(
    rules: ScaleRules, waiting: int, more: int, claimed: int
) -> None:
    few = Autoscaler(rules).wanted(waiting, claimed, 0, 0.0)
    many = Autoscaler(rules).wanted(waiting + more, claimed, 0, 0.0)
    assert many >= few


RULES_OF_TEN = ScaleRules(envs_per_worker=4, maximum=10, cool_down=30.0)


def test_claimed_rollouts_keep_their_workers() -> None:
    scaler = Autoscaler(RULES_OF_TEN)
    assert scaler.wanted(waiting=0, claimed=16, workers=4, now=0.0) == 4
    assert scaler.wanted(waiting=0, claimed=16, workers=4, now=1000.0) == 4


def test_it_shrinks_only_when_fewer_were_enough_for_the_whole_cool_down() -> None:
    scaler = Autoscaler(RULES_OF_TEN)
    assert scaler.wanted(0, 4, workers=8, now=0.0) == 8
    assert scaler.wanted(0, 4, workers=8, now=29.0) == 8
    assert scaler.wanted(0, 4, workers=8, now=31.0) == 1


def test_a_need_in_between_starts_the_cool_down_anew() -> None:
    scaler = Autoscaler(RULES_OF_TEN)
    assert scaler.wanted(0, 4, workers=8, now=0.0) == 8
    assert scaler.wanted(40, 4, workers=8, now=20.0) == 10
    assert scaler.wanted(0, 4, workers=10, now=35.0) == 10
    assert scaler.wanted(0, 4, workers=10, now=66.0) == 1
