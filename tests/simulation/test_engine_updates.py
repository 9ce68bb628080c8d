"""New weights in the simulated engine, in each mode, on the virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.engines.base import Generation, Probed, Prompt, Sampling, Updatable, UpdateMode, Weights
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import FixedLength
from rollwright.simulation.slots import Slots
from rollwright.trajectory import VersionRun, expand_versions

ROOMY = Sampling(max_tokens=1000)
Body = Callable[[SimulatedEngine], Awaitable[Any]]


class Board:
    def actions(self) -> tuple[str, ...]:
        return ("Left", "Right")

    def best_action(self) -> str | None:
        return "Left"

    def answer(self, action: str) -> str:
        return f"<answer>{action}</answer>"


def prompt(place: int) -> Prompt:
    return Prompt(episode=f"e{place}", key=("run", place), messages=(), env=Board())


def with_engine(body: Body, **options: Any) -> Any:
    """Runs `body` in virtual time. By default a call takes 10 s: 100 tokens at 10 tokens a second."""

    async def main() -> Any:
        return await body(
            SimulatedEngine(**{"lengths": FixedLength(100), "tokens_per_second": 10.0, **options})
        )

    return run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def serve(
    engine: SimulatedEngine, calls: int, mode: UpdateMode, when: float
) -> list[tuple[Generation, float]]:
    """So many calls at once, and new weights at a moment; each call's result and when it ended."""

    async def call(place: int) -> tuple[Generation, float]:
        made = await engine.generate(prompt(place), ROOMY)
        return made, now()

    tasks = [asyncio.create_task(call(place)) for place in range(calls)]
    await asyncio.sleep(when)
    await engine.update_weights(Weights(7), mode)
    assert engine.version == 7
    return list(await asyncio.gather(*tasks))


def test_drain_lets_calls_in_service_finish_and_those_in_line_wait_for_the_new_weights() -> None:
    made = with_engine(lambda engine: serve(engine, 3, UpdateMode.DRAIN, 4.0), slots=2)
    assert [each.versions for each, _ in made] == [(VersionRun(0, 100),)] * 2 + [(VersionRun(7, 100),)]
    assert [end for _, end in made] == [10, 10, 20]


def test_drain_lets_nobody_in_even_where_slots_are_free() -> None:
    async def body(engine: SimulatedEngine) -> tuple[VersionRun, ...]:
        first = asyncio.create_task(engine.generate(prompt(0), ROOMY))
        await asyncio.sleep(1)
        update = asyncio.create_task(engine.update_weights(Weights(1), UpdateMode.DRAIN))
        await asyncio.sleep(1)
        late = await engine.generate(prompt(1), ROOMY)
        assert now() == 20
        assert (await first).versions == (VersionRun(0, 100),)
        await update
        return late.versions

    assert with_engine(body, slots=4) == (VersionRun(1, 100),)


def test_abort_and_resume_keeps_the_tokens_and_stamps_each_with_its_own_version() -> None:
    made = with_engine(lambda engine: serve(engine, 1, UpdateMode.ABORT_AND_RESUME, 4.0))
    assert made[0][0].versions == (VersionRun(0, 40), VersionRun(7, 60))
    assert made[0][1] == 10


def test_restart_turn_begins_anew_and_counts_what_is_thrown_away() -> None:
    async def body(engine: SimulatedEngine) -> None:
        (made, end), (waited, later) = await serve(engine, 2, UpdateMode.RESTART_TURN, 4.0)
        assert made.versions == waited.versions == (VersionRun(7, 100),)
        assert (end, later) == (14, 24)
        assert (engine.usage().restarted, engine.usage().discarded_tokens) == (1, 40)
        assert engine.usage().completed == 2

    with_engine(body, slots=1)


def test_a_call_may_be_restarted_twice_and_then_resumed() -> None:
    async def body(engine: SimulatedEngine) -> None:
        call = asyncio.create_task(engine.generate(prompt(0), ROOMY))
        await asyncio.sleep(4)
        await engine.update_weights(Weights(1), UpdateMode.RESTART_TURN)
        await asyncio.sleep(3)
        await engine.update_weights(Weights(2), UpdateMode.RESTART_TURN)
        await asyncio.sleep(6)
        await engine.update_weights(Weights(3), UpdateMode.ABORT_AND_RESUME)
        assert (await call).versions == (VersionRun(2, 60), VersionRun(3, 40))
        assert now() == 17
        assert engine.usage().discarded_tokens == 70

    with_engine(body)


@given(
    st.lists(st.tuples(st.floats(0.1, 6), st.sampled_from(UpdateMode)), max_size=6),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_no_call_is_dropped_and_every_token_has_a_version_in_order(
    updates: list[tuple[float, UpdateMode]], slots: int, calls: int
) -> None:
    async def body(engine: SimulatedEngine) -> list[Generation]:
        tasks = [asyncio.create_task(engine.generate(prompt(place), ROOMY)) for place in range(calls)]
        for version, (pause, mode) in enumerate(updates, 1):
            await asyncio.sleep(pause)
            await engine.update_weights(Weights(version), mode)
        return list(await asyncio.gather(*tasks))

    changed = with_engine(body, slots=slots)
    unchanged = with_engine(
        lambda engine: asyncio.gather(*(engine.generate(prompt(place), ROOMY) for place in range(calls))),
        slots=slots,
    )
    assert [made.sampled_ids for made in changed] == [made.sampled_ids for made in unchanged]
    modes = [mode for _, mode in updates]
    for made in changed:
        stamps = expand_versions(made.versions)
        assert len(stamps) == len(made.sampled_ids)
        assert stamps == sorted(stamps)
        if UpdateMode.ABORT_AND_RESUME not in modes:
            assert len(set(stamps)) == 1


def test_a_drain_that_is_given_up_lets_others_in_again() -> None:
    async def body(engine: SimulatedEngine) -> None:
        stuck = asyncio.create_task(engine.generate(prompt(0), ROOMY))
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await engine.update_weights(Weights(1), UpdateMode.DRAIN)
        await engine.generate(prompt(1), ROOMY)
        assert (now(), engine.version) == (12, 0)
        await stuck

    with_engine(body, slots=2)


def test_held_slots_go_to_those_that_waited_in_their_order() -> None:
    async def main() -> list[int]:
        slots = Slots(2)
        served: list[int] = []

        async def use(place: int) -> None:
            await slots.acquire()
            served.append(place)
            await asyncio.sleep(1)
            slots.release()

        await slots.drain()
        users = [asyncio.create_task(use(place)) for place in range(5)]
        await asyncio.sleep(3)
        assert (served, slots.running, slots.queued) == ([], 0, 5)
        slots.resume()
        await asyncio.gather(*users)
        assert now() == 6
        assert slots.busy_seconds(now()) == pytest.approx(5)
        return served

    assert run_virtual(main()) == list(range(5))


async def test_it_says_what_it_can_do() -> None:
    engine = SimulatedEngine()
    assert isinstance(engine, Updatable)
    assert isinstance(engine, Probed)
    assert (await engine.probe()).update_modes == tuple(UpdateMode)
