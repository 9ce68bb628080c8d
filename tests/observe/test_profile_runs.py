"""What runs leave behind says where their time went, and what held them up."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollwright.agents import JournalEntry, Phase, Session
from rollwright.aio import run_virtual
from rollwright.config import RunConfig
from rollwright.engines.base import NO_ACTIONS, Generation, Prompt, Sampling
from rollwright.engines.partial import PartialCompletion
from rollwright.engines.sglang import SglangDialect
from rollwright.envs.base import Step
from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.observe.advice import RunSetup
from rollwright.observe.attribution import exclusive
from rollwright.observe.profile import Profile
from rollwright.observe.verdict import BottleneckVerdict, Cause, Figures, judge
from rollwright.run.folder import RunReader
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.players import SkilledPlayer
from rollwright.store.memory import MemoryStore
from rollwright.trajectory import Message, Timing, Trajectory, token_ids

STEP_SECONDS = 2.0
RESET_SECONDS = 0.5


class SlowLake(FrozenLake):
    async def reset(self, seed: int) -> Any:
        await asyncio.sleep(RESET_SECONDS)
        return await super().reset(seed)

    async def step(self, answer: str) -> Step:
        await asyncio.sleep(STEP_SECONDS)
        return await super().step(answer)


SLOW_LAKE = f"{__name__}:SlowLake"


class SlowStore(MemoryStore):
    """A store at the other end of a slow line."""

    async def append_journal(self, rollout_id: str, attempt_id: str, entries: Any) -> None:
        await asyncio.sleep(1.0)
        await super().append_journal(rollout_id, attempt_id, entries)


class FarEngine(SimulatedEngine):
    """An engine at the other end of a slow line, which says what it took itself."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        await asyncio.sleep(1.0)
        before = asyncio.get_running_loop().time()
        made = await super().generate(prompt, sampling)
        served = asyncio.get_running_loop().time() - before
        return Generation(
            made.text,
            made.sampled_ids,
            made.logprobs,
            made.versions,
            completion_tokens=made.completion_tokens,
            served=served,
        )


def config(tag: str = "FrozenLake", groups: int = 8, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "max_inflight": groups * 4,
            "train_env_manager": {"num_env_groups": groups, "group_size": 4, "tags": [tag]},
            **more,
        }
    )


def engine(slots: int, kind: type[SimulatedEngine] = SimulatedEngine) -> SimulatedEngine:
    return kind(slots=slots, tokens_per_second=100.0, player=SkilledPlayer(0.5))


def played(settings: RunConfig, policy: SimulatedEngine, **more: Any) -> list[Trajectory]:
    async def play() -> list[Trajectory]:
        async with Run(settings, policy=policy, **more) as run:
            return list((await run.get_batch()).trajectories)

    return run_virtual(play())


def verdict(trajectories: list[Trajectory], slots: int | None) -> BottleneckVerdict:
    return judge(Figures.of(Profile.of(trajectories), slots), RunSetup.of(RunConfig()))


def test_too_few_slots_are_engine_bound_whether_the_slots_are_known_or_not() -> None:
    trajectories = played(config(), engine(slots=4))
    assert verdict(trajectories, 4).causes == (Cause.ENGINE,)
    assert verdict(trajectories, None).causes == (Cause.ENGINE,)


def test_a_slow_environment_is_environment_bound() -> None:
    assert verdict(played(config(SLOW_LAKE), engine(slots=16)), 16).causes == (Cause.ENVIRONMENT,)


def test_fewer_rollouts_than_slots_are_too_small_a_batch() -> None:
    assert verdict(played(config(groups=1), engine(slots=64)), 64).causes == (Cause.BATCH,)


def test_a_slow_environment_and_few_rollouts_are_named_together() -> None:
    found = verdict(played(config(SLOW_LAKE, groups=1), engine(slots=64)), 64)
    assert found.causes == (Cause.ENVIRONMENT, Cause.BATCH)


def test_a_slow_way_to_the_store_is_store_bound() -> None:
    found = verdict(played(config(), engine(slots=32), store=SlowStore()), 32)
    assert Cause.STORE in found.causes


def test_a_slow_way_to_the_engine_is_transport_bound_and_not_the_engines_time() -> None:
    trajectories = played(config(), engine(slots=32, kind=FarEngine))
    assert Cause.TRANSPORT in verdict(trajectories, 32).causes
    profile = Profile.of(trajectories)
    turns = sum(len(each.turns) for each in trajectories)
    assert profile.seconds(Phase.TRANSPORT) == pytest.approx(turns * 1.0)


def test_sglang_says_what_it_took_itself() -> None:
    answer = {
        "output_ids": [5],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5, None]],
            "e2e_latency": 0.25,
        },
    }
    asked = PartialCompletion(token_ids([1]), Sampling(max_tokens=8))
    assert SglangDialect().response(json.dumps(answer).encode(), asked).served == 0.25


def test_what_episodes_wait_for_now_and_what_their_commits_took_can_be_read_from_a_run() -> None:
    class SlowCommits(MemoryStore):
        async def update_attempt(self, *held: Any, **more: Any) -> Any:
            await asyncio.sleep(0.5)
            return await super().update_attempt(*held, **more)

        async def finish_and_dequeue(self, *held: Any, **more: Any) -> Any:
            await asyncio.sleep(0.5)
            return await super().finish_and_dequeue(*held, **more)

    async def play() -> tuple[Counter[Phase], float]:
        settings = config(SLOW_LAKE, groups=1)
        async with Run(settings, policy=engine(slots=64), store=SlowCommits()) as run:
            batch = asyncio.create_task(run.get_batch())
            await asyncio.sleep(RESET_SECONDS / 2)
            waiting = run.activity.waiting_on()
            await batch
            return waiting, run.activity.commit_seconds

    waiting, committing = run_virtual(play())
    assert waiting == {Phase.ENVIRONMENT: 4}
    assert committing == pytest.approx(4 * 0.5)


def test_a_rollouts_intervals_say_what_each_wait_took() -> None:
    trajectories = played(config(SLOW_LAKE, groups=2), engine(slots=64))
    assert len(trajectories) >= 2
    for trajectory in trajectories:
        timing = trajectory.timing
        assert timing is not None
        seconds = dict.fromkeys(Phase, 0.0)
        for interval in exclusive(timing):
            seconds[interval.phase] += interval.stop - interval.start
        turns = trajectory.turns
        assert seconds[Phase.ENVIRONMENT] == pytest.approx(RESET_SECONDS + STEP_SECONDS * len(turns))
        assert seconds[Phase.ENGINE] == pytest.approx(sum(each.completion_tokens for each in turns) / 100)
        assert sum(seconds.values()) == pytest.approx(timing.wall) == pytest.approx(trajectory.duration)


def test_a_trees_calls_at_the_same_time_still_sum_to_its_wall_time() -> None:
    tree = {"kind": "tree", "fork": "replay", "width": 3}
    settings = config(SLOW_LAKE, groups=1, strategy=tree)
    trajectories = played(settings, engine(slots=64))
    waited = [sum(wait.seconds for wait in each.timing.waits) for each in trajectories if each.timing]
    assert sum(waited) > 1.1 * sum(each.duration for each in trajectories)
    for trajectory in trajectories:
        timing = trajectory.timing
        assert timing is not None
        found = exclusive(timing)
        assert sum(each.stop - each.start for each in found) == pytest.approx(trajectory.duration)
        assert {wait.name for wait in timing.waits} >= {"reset", "step", "copy"}


async def test_in_real_time_the_intervals_sum_to_what_the_store_saw_within_two_percent() -> None:
    store = MemoryStore()
    trajectories: list[Trajectory] = []
    settings = config(groups=4)
    policy = SimulatedEngine(slots=16, tokens_per_second=400.0, player=SkilledPlayer(0.5))
    saw = 0.0
    async with Run(settings, policy=policy, store=store) as run:
        trajectories = list((await run.get_batch()).trajectories)
        for each in trajectories:
            (attempt,) = await store.query_attempts(each.rollout_id)
            assert attempt.end_time is not None
            saw += attempt.end_time - attempt.start_time
    profile = Profile.of(trajectories)
    assert sum(profile.seconds(phase) for phase in Phase) == pytest.approx(saw, rel=0.02)


def _session(journal: Any = None) -> Session:
    trajectory = Trajectory("r", "a", "g", "Lab", seed=1)
    return Session(
        trajectory,
        SimulatedEngine(slots=8, tokens_per_second=10.0),
        Sampling(),
        ("key",),
        sequence_length=10_000,
        generate_timeout=1e6,
        env=NO_ACTIONS,
        journal=journal,
    )


def _timing(session: Session) -> Timing:
    timing = session.seal().timing
    assert timing is not None
    return timing


def test_a_tool_is_timed_by_whoever_calls_it_for_the_agent_it_is_called_for() -> None:
    async def play() -> tuple[Timing, list[Phase]]:
        session = _session()
        seen = [session.phase]

        async def search() -> None:
            with session.waiting(Phase.TOOL, "search", agent="solver"):
                seen.append(session.phase)
                await asyncio.sleep(50.0)

        call = session.generate([Message("user", "think")], agent="planner")
        await asyncio.gather(search(), call)
        return _timing(session), seen

    timing, seen = run_virtual(play())
    assert seen == [Phase.AGENT, Phase.TOOL]
    profile = Profile()
    profile.add("Lab", timing)
    planner, solver = sorted(profile.agents(), key=lambda row: row.agent)
    assert (planner.calls.count, solver.calls.count) == (1, 0)
    generation = planner.waited[Phase.ENGINE]
    assert 0 < generation < 50
    assert solver.waited[Phase.TOOL] == pytest.approx(50 - generation)
    (search,) = profile.things()
    assert (search.name, search.tally.count, search.tally.mean) == ("search", 1, pytest.approx(50))


def test_a_wait_that_fails_is_noted_too() -> None:
    async def play() -> Timing:
        session = _session()

        async def search() -> None:
            with session.waiting(Phase.TOOL, "search"):
                await asyncio.sleep(3.0)
                raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await search()
        assert session.phase is Phase.AGENT
        return _timing(session)

    (wait,) = run_virtual(play()).waits
    assert wait.seconds == pytest.approx(3.0)


def test_a_replayed_turn_costs_the_new_attempt_no_engine_time() -> None:
    class Records:
        def __init__(self) -> None:
            self.recorded: dict[int, JournalEntry] = {}
            self.appended: list[JournalEntry] = []

        async def append(self, entry: JournalEntry) -> None:
            self.appended.append(entry)

    async def play() -> tuple[Timing, Timing]:
        first, again = Records(), Records()
        one = _session(first)
        await one.generate([Message("user", "think")])
        again.recorded = {entry.place: entry for entry in first.appended}
        other = _session(again)
        await other.generate([Message("user", "think")])
        assert len(other.trajectory.turns) == 1
        return _timing(one), _timing(other)

    paid, replayed = run_virtual(play())
    assert [wait.phase for wait in paid.waits] == [Phase.ENGINE, Phase.STORE]
    assert replayed.waits == ()


CONFIG = """
name: timed
max_steps: 4
profile_steps: 2
rollout_batch_size: 16
train_env_manager: {num_env_groups: 4, group_size: 4, tags: [FrozenLake]}
policy: {kind: simulated, slots: 1, tokens_per_second: 4000}
limits: {heartbeat_interval: 0.5}
"""


def rollwright(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollwright", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_a_run_with_worker_processes_is_profiled_from_its_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "timed.yaml").write_text(CONFIG, encoding="utf-8")
    ran = rollwright("run", "timed.yaml", "--workers", "2", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("verdict: ") == 2, "once after two steps, once at the end"
    folder = tmp_path / "runs" / "timed"
    for kept in folder.iterdir():
        if kept.name not in ("config.yaml", "trajectories.rwlog"):
            kept.unlink()
    told = rollwright("profile", "runs/timed", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "FrozenLake step" in told.stdout
    assert "journal" in told.stdout
    assert "verdict: " in told.stdout
    trajectories = list(RunReader(folder).trajectories())
    profile = Profile.of(trajectories)
    assert (profile.rollouts, profile.untimed) == (64, 0)
    drawn = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    workers = {event["args"]["name"] for event in drawn if event["ph"] == "M"}
    assert workers == {each.timing.worker for each in trajectories if each.timing}
    assert f"of {len(profile.processes)} slots" in " ".join(told.stdout.split())
    assert sum(event["ph"] == "X" and event["cat"] == "rollout" for event in drawn) == 64


def test_a_folder_without_timings_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "trajectories.rwlog").write_bytes(b"RWLOG\x01\n")
    told = rollwright("profile", ".", cwd=tmp_path)
    assert told.returncode == 2
    assert "nothing to profile" in told.stderr
    assert not (tmp_path / "timeline.json").exists()
