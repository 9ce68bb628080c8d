"""The simulated engine: drawn lengths, exact ids, slots and queue, failures, versions, accounts."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.engines import EngineError, Generation, Prompt, RateLimited, Sampling
from rollwright.errors import ConfigError
from rollwright.simulation.engine import SimulatedEngine, VersionChange, version_runs
from rollwright.simulation.lengths import FixedLength, LogNormalLength, UniformLength
from rollwright.simulation.players import OraclePlayer, RandomPlayer
from rollwright.trajectory import FinishReason, VersionRun, expand_versions, token_ids

ROOMY = Sampling(max_tokens=100_000)
Result = TypeVar("Result")


class Board:
    def actions(self) -> tuple[str, ...]:
        return ("Left", "Down", "Right", "Up")

    def best_action(self) -> str | None:
        return "Down"

    def answer(self, action: str) -> str:
        return f"<answer>{action}</answer>"


def prompt(*key: str | int, episode: str = "e", **fields: Any) -> Prompt:
    return Prompt(episode=episode, key=key, messages=(), env=Board(), **fields)


def with_engine(body: Callable[[SimulatedEngine], Awaitable[Result]], **options: Any) -> Result:
    """Runs `body` in virtual time. By default a call takes 10 s: 100 tokens at 10 tokens a second."""

    async def main() -> Result:
        settings: dict[str, Any] = {"lengths": FixedLength(100), "tokens_per_second": 10.0, **options}
        return await body(SimulatedEngine(**settings))

    return run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time()


@given(st.integers(1, 400), st.integers(1, 300), st.integers())
def test_a_completion_has_exactly_the_drawn_number_of_tokens(length: int, limit: int, key: int) -> None:
    async def body(engine: SimulatedEngine) -> Generation:
        return await engine.generate(prompt(key), Sampling(max_tokens=limit))

    made = with_engine(body, lengths=FixedLength(length), player=OraclePlayer())
    whole = max(length, len("<answer>Down</answer>") + 1)
    assert len(made.sampled_ids) == len(made.logprobs) == made.completion_tokens == min(whole, limit)
    assert made.text == SimulatedEngine().renderer.decode(made.sampled_ids)
    assert made.finish is (FinishReason.LENGTH if whole > limit else FinishReason.STOP)
    assert made.text.endswith("<answer>Down</answer>") == (whole - 1 <= limit)
    assert made.exact
    assert sum(run.count for run in made.versions) == len(made.sampled_ids)
    assert all(-20 < logprob < 0 for logprob in made.logprobs)


def test_a_very_long_completion_is_still_exact() -> None:
    made = with_engine(lambda engine: engine.generate(prompt("k"), ROOMY), lengths=FixedLength(20_000))
    assert len(made.sampled_ids) == len(made.logprobs) == 20_000


def test_the_same_prompts_give_the_same_generations_at_any_concurrency_and_in_any_order() -> None:
    asked = [prompt("run", place, "agent") for place in range(80)]

    async def one_by_one(engine: SimulatedEngine) -> list[Generation]:
        return [await engine.generate(each, ROOMY) for each in asked]

    async def shuffled(engine: SimulatedEngine) -> list[Generation]:
        order = random.Random(1).sample(range(len(asked)), len(asked))
        made = await asyncio.gather(*(engine.generate(asked[place], ROOMY) for place in order))
        return [made[order.index(place)] for place in range(len(asked))]

    lengths = LogNormalLength(80, 1.0)
    alone = with_engine(one_by_one, lengths=lengths, slots=1)
    assert alone == with_engine(shuffled, lengths=lengths, slots=7)
    assert len({len(made.sampled_ids) for made in alone}) > 30
    assert len({made.text.rpartition("<answer>")[2] for made in alone}) == 4


def test_at_temperature_0_equal_prompts_give_equal_generations() -> None:
    greedy = Sampling(temperature=0.0, max_tokens=1000)

    async def body(engine: SimulatedEngine) -> list[Generation]:
        same = [prompt("run", place, ids=token_ids([1, 2])) for place in range(10)]
        other = prompt("run", 0, ids=token_ids([3]))
        return [await engine.generate(each, greedy) for each in (*same, other)]

    *same, other = with_engine(body, lengths=UniformLength(30, 900), player=RandomPlayer())
    assert all(made == same[0] for made in same)
    assert other != same[0]


def test_calls_beyond_the_slots_wait_in_line() -> None:
    async def body(engine: SimulatedEngine) -> list[tuple[float, int]]:
        ended: list[tuple[float, int]] = []

        async def call(place: int) -> None:
            await engine.generate(prompt(place), ROOMY)
            ended.append((now(), place))

        await asyncio.gather(*(call(place) for place in range(7)))
        return ended

    ends = with_engine(body, slots=3)
    assert ends == [(10, 0), (10, 1), (10, 2), (20, 3), (20, 4), (20, 5), (30, 6)]


def test_a_prompt_costs_prefill_time_where_a_prefill_speed_is_given() -> None:
    async def body(engine: SimulatedEngine) -> float:
        await engine.generate(prompt("k", ids=token_ids([7]) * 50), ROOMY)
        return now()

    assert with_engine(body) == 10.0
    assert with_engine(body, prefill_tokens_per_second=25.0) == 12.0


def test_a_limit_on_tokens_saves_their_time() -> None:
    async def body(engine: SimulatedEngine) -> float:
        await engine.generate(prompt("k"), Sampling(max_tokens=30))
        return now()

    assert with_engine(body) == 3.0


@pytest.mark.parametrize("when", [3.0, 13.0], ids=["served", "waiting"])
def test_a_cancelled_call_makes_room_at_once(when: float) -> None:
    async def body(engine: SimulatedEngine) -> float:
        first = asyncio.create_task(engine.generate(prompt(1), ROOMY))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.generate(prompt(2), ROOMY))
        third = asyncio.create_task(engine.generate(prompt(3), ROOMY))
        await asyncio.sleep(when)
        (first if when < 10 else second).cancel()
        await third
        usage = engine.usage()
        await asyncio.wait([first, second])
        assert (usage.cancelled, usage.completed, usage.running, usage.queued) == (1, 2, 0, 0)
        return now()

    assert with_engine(body, slots=1) == when + (20 if when < 10 else 10)


def test_a_waiting_call_that_is_cancelled_leaves_the_line() -> None:
    async def body(engine: SimulatedEngine) -> None:
        running = asyncio.create_task(engine.generate(prompt(1), ROOMY))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(engine.generate(prompt(2), ROOMY))
        await asyncio.sleep(1)
        assert (engine.usage().running, engine.usage().queued) == (1, 1)
        waiting.cancel()
        await asyncio.sleep(1)
        assert (engine.usage().running, engine.usage().queued) == (1, 0)
        await running
        assert now() == 10

    with_engine(body, slots=1)


def test_failures_come_at_their_rate_depend_on_the_attempt_and_free_their_slots() -> None:
    async def failed(engine: SimulatedEngine, attempt: int) -> set[int]:
        made = await asyncio.gather(
            *(engine.generate(prompt(place, attempt=attempt), ROOMY) for place in range(400)),
            return_exceptions=True,
        )
        assert all(isinstance(each, Generation | EngineError) for each in made)
        assert (engine.usage().running, engine.usage().queued) == (0, 0)
        return {place for place, each in enumerate(made) if isinstance(each, EngineError)}

    first = with_engine(lambda engine: failed(engine, 1), failure_rate=0.3, slots=16)
    again = with_engine(lambda engine: failed(engine, 1), failure_rate=0.3, slots=2)
    later = with_engine(lambda engine: failed(engine, 2), failure_rate=0.3, slots=16)
    assert first == again
    assert 80 < len(first) < 160
    assert first - later
    assert later - first


def test_a_call_that_did_not_fail_is_the_same_as_without_failures() -> None:
    async def body(engine: SimulatedEngine) -> list[Generation | BaseException]:
        calls = (engine.generate(prompt(place), ROOMY) for place in range(50))
        return await asyncio.gather(*calls, return_exceptions=True)

    sound = with_engine(body)
    for place, made in enumerate(with_engine(body, failure_rate=0.5)):
        assert isinstance(made, EngineError) or made == sound[place]


def test_a_hanging_call_holds_its_slot_until_it_is_cancelled() -> None:
    async def body(engine: SimulatedEngine) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await engine.generate(prompt(1), ROOMY)
        assert engine.usage().running == 0
        assert engine.usage().busy_slot_seconds == 500
        assert engine.usage().cancelled == 1

    with_engine(body, hang_rate=1.0, slots=1)


def test_a_full_queue_refuses_more_and_says_when_to_come_back() -> None:
    async def body(engine: SimulatedEngine) -> None:
        taken = [asyncio.create_task(engine.generate(prompt(place), ROOMY)) for place in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited, match="3 calls waiting") as refusal:
            await engine.generate(prompt(9), ROOMY)
        assert refusal.value.retry_after == 7.0
        await asyncio.gather(*taken)
        await engine.generate(prompt(9), ROOMY)
        assert (engine.usage().refused, engine.usage().completed, engine.pressure) == (1, 6, 1)

    with_engine(body, slots=2, max_queue=3, retry_after=7.0)


def test_tokens_are_stamped_with_the_version_that_made_them() -> None:
    async def body(engine: SimulatedEngine) -> tuple[VersionRun, ...]:
        call = asyncio.create_task(engine.generate(prompt(1, ids=token_ids([1]) * 20), ROOMY))
        await asyncio.sleep(5)  # 2 s of prefill, then 30 tokens
        engine.set_version(4)
        await asyncio.sleep(0.7)
        engine.set_version(5)
        engine.set_version(6)
        assert engine.version == 6
        return (await call).versions

    runs = with_engine(body, version=3, prefill_tokens_per_second=10.0)
    assert runs == (VersionRun(3, 30), VersionRun(4, 7), VersionRun(6, 63))


def test_a_version_from_before_the_call_leaves_no_stamp() -> None:
    async def body(engine: SimulatedEngine) -> tuple[VersionRun, ...]:
        engine.set_version(1)
        await asyncio.sleep(1)
        engine.set_version(2)
        return (await engine.generate(prompt(1), ROOMY)).versions

    assert with_engine(body) == (VersionRun(2, 100),)


@given(st.lists(st.floats(-10, 100), max_size=6), st.integers(0, 200), st.floats(0.1, 50))
def test_version_runs_cover_every_token_in_order(times: list[float], tokens: int, speed: float) -> None:
    changes = [VersionChange(float("-inf"), 0)]
    changes += [VersionChange(time, version + 1) for version, time in enumerate(sorted(times))]
    stamps = expand_versions(version_runs(changes, 0.0, speed, tokens))
    assert len(stamps) == tokens
    assert stamps == sorted(stamps)
    for place, stamp in enumerate(stamps):
        done = (place + 1) / speed
        before, after = (
            max(change.version for change in changes if change.time < done + margin)
            for margin in (-1e-6, 1e-6)
        )
        assert before <= stamp <= after


def test_occupancy_is_the_busy_share_of_the_slots_time() -> None:
    async def body(engine: SimulatedEngine) -> None:
        await asyncio.sleep(100)
        assert engine.occupancy() == 0
        await engine.generate(prompt(1), ROOMY)
        assert engine.occupancy() == pytest.approx(1 / 4)  # one of four slots, since the first request
        mark = engine.usage()
        await asyncio.gather(*(engine.generate(prompt(place), ROOMY) for place in range(4)))
        assert engine.occupancy(mark) == pytest.approx(1)
        assert engine.occupancy() == pytest.approx(5 / 8)
        await asyncio.sleep(20)
        assert engine.occupancy(mark) == pytest.approx(1 / 3)

    with_engine(body, slots=4)


def test_usage_counts_requests_and_tokens() -> None:
    async def body(engine: SimulatedEngine) -> None:
        await asyncio.gather(*(engine.generate(prompt(place), ROOMY) for place in range(6)))
        usage = engine.usage()
        assert (usage.requests, usage.completed, usage.tokens) == (6, 6, 600)
        assert usage.busy_slot_seconds == pytest.approx(60)
        assert usage.time == pytest.approx(20)

    with_engine(body, slots=3)


async def test_it_works_on_the_real_clock_too() -> None:
    engine = SimulatedEngine(slots=2, tokens_per_second=1e4, lengths=FixedLength(100))
    start = now()
    await asyncio.gather(*(engine.generate(prompt(place), ROOMY) for place in range(6)))
    assert now() - start >= engine.lower_bound() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots: 0"),
        ({"tokens_per_second": 0}, "tokens_per_second: 0"),
        ({"prefill_tokens_per_second": -1}, "prefill_tokens_per_second: -1"),
        ({"failure_rate": 0.6, "hang_rate": 0.6}, "failure_rate 0.6, hang_rate 0.6"),
        ({"hang_rate": -0.1}, "hang_rate -0.1"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulatedEngine(**options)
