"""The verdict follows from the figures, and says which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.observe.advice import Cause, RunSetup
from rollwright.observe.load import BusySpan, EngineCall, measure, stretch
from rollwright.observe.verdict import Figures, judge
from rollwright.trajectory import Phase

SETUP = RunSetup(environments=16, batch_size=16, max_inflight=3)


def figures(
    *,
    rollouts: float = 16.0,
    most: int | None = None,
    calls: int = 0,
    slots: int | None = 8,
    occupancy: float | None = 0.5,
    stretch: float | None = None,
    seen_quiet: float = 0.0,
    **shares: float,
) -> Figures:
    known = {Phase(name): share for name, share in shares.items()}
    return Figures(
        shares={**dict.fromkeys(Phase, 0.0), **known},
        rollouts=rollouts,
        most_rollouts=round(rollouts) if most is None else most,
        calls=rollouts * known.get(Phase.ENGINE, 0.0),
        most_calls=calls,
        slots=slots,
        occupancy=None if slots is None else occupancy,
        in_line=None if slots is None else 0.1,
        stretch=stretch,
        seen_quiet=seen_quiet,
    )


@pytest.mark.parametrize(
    ("given", "causes"),
    [
        (figures(occupancy=0.95, engine=0.9), (Cause.ENGINE,)),
        (figures(occupancy=0.95, engine=0.3, environment=0.7), (Cause.ENGINE,)),
        (figures(rollouts=3, occupancy=0.3, engine=0.95), (Cause.BATCH,)),
        (figures(engine=0.2, environment=0.8), (Cause.ENVIRONMENT,)),
        (figures(engine=0.2, tool=0.3, lock=0.5), (Cause.TOOL,)),
        (figures(engine=0.5, store=0.1, transport=0.4), (Cause.TRANSPORT,)),
        (figures(engine=0.5, store=0.4, transport=0.1), (Cause.STORE,)),
        (figures(engine=0.4, agent=0.6), (Cause.AGENT,)),
        (figures(engine=0.3, environment=0.3, tool=0.4), (Cause.TOOL, Cause.ENVIRONMENT)),
        (figures(rollouts=3, engine=0.2, environment=0.8), (Cause.ENVIRONMENT, Cause.BATCH)),
        (figures(rollouts=3, engine=0.6, environment=0.4), (Cause.BATCH, Cause.ENVIRONMENT)),
        (figures(occupancy=0.8, engine=0.9, environment=0.1), (Cause.ENGINE,)),
        (figures(rollouts=6, most=16, occupancy=0.7, engine=0.9, environment=0.1), (Cause.STRAGGLERS,)),
        (figures(rollouts=3, calls=24, occupancy=0.7, engine=0.95), (Cause.STRAGGLERS,)),
        (figures(rollouts=6, most=16, engine=0.3, environment=0.7), (Cause.ENVIRONMENT,)),
        (figures(slots=None, stretch=2.5, engine=0.9), (Cause.ENGINE,)),
        (figures(slots=None, stretch=1.1, seen_quiet=0.3, engine=0.9), (Cause.BATCH,)),
        (figures(slots=None, stretch=1.1, engine=0.9), (Cause.ENGINE_OR_BATCH,)),
        (figures(slots=None, stretch=1.1, engine=0.3, environment=0.7), (Cause.ENVIRONMENT,)),
    ],
)
def test_the_causes_follow_from_the_figures(given: Figures, causes: tuple[Cause, ...]) -> None:
    assert judge(given, SETUP).causes == causes


def test_a_combination_is_named_and_each_part_has_its_figures_and_its_advice() -> None:
    verdict = judge(figures(rollouts=3, occupancy=0.31, engine=0.25, environment=0.75), SETUP)
    assert str(verdict) == "environment-bound and batch too small"
    environment, batch = verdict.findings
    assert "environment 75% of the rollouts' time" in environment.because
    assert "3 rollouts at once at most and 3.0 in the mean, for 8 slots" in batch.because
    assert "31% of 8 slots busy" in batch.because
    assert "`max_inflight` (now 3)" in batch.advice


parts = st.lists(st.floats(0.01, 1), min_size=len(Phase), max_size=len(Phase))


@given(
    parts,
    st.floats(0, 100),
    st.one_of(st.none(), st.integers(1, 64)),
    st.floats(0, 1),
    st.one_of(st.none(), st.floats(1, 9)),
    st.floats(0, 1),
)
def test_there_is_always_a_verdict_without_repetition(
    weights: list[float],
    rollouts: float,
    slots: int | None,
    occupancy: float,
    stretched: float | None,
    quiet: float,
) -> None:
    shares = {phase.value: weight / sum(weights) for phase, weight in zip(Phase, weights, strict=True)}
    verdict = judge(
        figures(
            rollouts=rollouts,
            slots=slots,
            occupancy=occupancy,
            stretch=stretched,
            seen_quiet=quiet,
            **shares,
        ),
        SETUP,
    )
    assert verdict.causes
    assert len(set(verdict.causes)) == len(verdict.causes)
    assert all(finding.because for finding in verdict.findings)


spans = st.lists(
    st.builds(
        lambda start, length: (float(start), float(start + length)), st.integers(0, 50), st.integers(1, 9)
    ),
    min_size=1,
    max_size=15,
)


@given(spans, st.integers(1, 8))
def test_occupancy_and_line_account_for_every_second_of_every_call(
    calls: list[tuple[float, float]], slots: int
) -> None:
    load = measure([BusySpan(0.0, 60.0)], [EngineCall(*each, tokens=1) for each in calls])
    waited = sum(stop - start for start, stop in calls)
    assert load.calls * load.seconds == pytest.approx(waited)
    served = load.occupancy(slots) * slots * load.seconds
    assert served + load.in_line(slots) * waited == pytest.approx(waited)


@given(spans)
def test_time_with_no_rollout_under_way_is_idle_and_counts_for_nothing(
    rollouts: list[tuple[float, float]],
) -> None:
    load = measure([BusySpan(*each) for each in rollouts], [])
    first, last = min(start for start, _ in rollouts), max(stop for _, stop in rollouts)
    assert load.seconds + load.idle == pytest.approx(last - first)
    assert load.rollouts * load.seconds == pytest.approx(sum(stop - start for start, stop in rollouts))
    assert load.rollouts >= 1


def test_tokens_that_take_longer_under_load_show_as_a_stretch() -> None:
    even = [EngineCall(0, 2, 20) for _ in range(10)]
    assert stretch(even) == pytest.approx(1)
    assert stretch([EngineCall(0, 2, 20), *[EngineCall(0, 6, 20) for _ in range(9)]]) == pytest.approx(2.8)
    assert stretch([EngineCall(0, 2, 0)]) is None
