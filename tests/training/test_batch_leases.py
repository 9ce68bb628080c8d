"""Leases of offered batches: one trainer at a time, one acknowledgement, whatever happens in which order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollwright.training.service.leases import BatchLeases, LeaseLost

SECONDS = 10.0


def test_a_batch_goes_to_one_trainer_and_to_the_next_when_its_lease_has_run_out() -> None:
    leases = BatchLeases(SECONDS)
    assert leases.take("none", "a", 0) is None
    leases.offer(0)
    assert leases.take("one", "a", 0) is not None
    assert leases.take("two", "b", 9.9) is None
    assert leases.take("two", "b", 10.0) is not None
    with pytest.raises(LeaseLost):
        leases.finish("one", 10.0)
    assert leases.finish("two", 11.0).step == 0
    assert leases.finished_step("two") == 0
    assert leases.lost == 1


def test_a_late_acknowledgement_is_refused_even_if_nobody_else_took_the_batch() -> None:
    leases = BatchLeases(SECONDS)
    leases.offer(0)
    leases.take("one", "a", 0)
    leases.renew("one", 9)
    leases.renew("one", 18)
    with pytest.raises(LeaseLost):
        leases.finish("one", 28)


def test_a_trainer_that_asks_again_loses_its_earlier_lease() -> None:
    leases = BatchLeases(SECONDS)
    leases.offer(3)
    leases.take("one", "a", 0)
    leases.take_back("b")
    assert leases.take("two", "b", 1) is None
    leases.take_back("a")
    assert leases.take("three", "a", 1) is not None
    with pytest.raises(LeaseLost):
        leases.renew("one", 1)


def test_a_lease_does_not_run_out_while_its_acknowledgement_is_examined() -> None:
    leases = BatchLeases(SECONDS)
    leases.offer(0)
    leases.take("one", "a", 0)
    leases.pin("one", 5)
    leases.take_back("a")
    assert leases.take("two", "a", 500) is None
    assert leases.finish("one", 500).step == 0


class Trainers(RuleBasedStateMachine):
    """Trainers that take, renew, give back, crash and acknowledge at any moment."""

    @initialize()
    def begin(self) -> None:
        self.leases = BatchLeases(SECONDS)
        self.now, self.count, self.step = 0.0, 0, 0
        self.known: list[str] = []
        self.finished: list[int] = []
        self.leases.offer(0)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(trainer=st.sampled_from(["", "a", "b"]))
    def ask(self, trainer: str) -> None:
        self.leases.take_back(trainer)
        self.count += 1
        if (lease := self.leases.take(str(self.count), trainer, self.now)) is not None:
            assert lease.step == self.step
            self.known.append(lease.id)

    @rule(data=st.data(), what=st.sampled_from(["renew", "release", "finish"]))
    def act(self, data: st.DataObject, what: str) -> None:
        if not self.known:
            return
        lease = data.draw(st.sampled_from(self.known))
        try:
            found = getattr(self.leases, what)(lease, self.now)
        except LeaseLost:
            return
        assert lease == self.known[-1], "only the last one handed out may act"
        if what == "finish":
            self.finished.append(found.step)
            self.step += 1
            self.leases.offer(self.step)

    @invariant()
    def every_batch_is_acknowledged_once_and_in_order(self) -> None:
        if hasattr(self, "finished"):
            assert self.finished == list(range(self.step))


TestTrainers = Trainers.TestCase
TestTrainers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
