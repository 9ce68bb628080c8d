"""Does anything wait that need not? Throughput and makespan against the bound that no scheduler can beat.

    python bench/no_barrier.py

1,024 FrozenLake environments share a simulated engine of 64 slots whose completions have heavy-tailed lengths.
Three arms play the same episodes with the same draws, on a virtual clock, so that the figures are exact and do not
depend on the machine: rollwright with all environments in flight, rollwright with the limit it finds by itself, and
a batch-synchronous loop, in which all environments wait for the slowest answer of each turn.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.aio import run_virtual
from rollwright.cli.console import console
from rollwright.config import RunConfig, build
from rollwright.envs.base import Env
from rollwright.rollout.episode import Episode, EpisodeSettings, level_seed, new_session
from rollwright.run.build import SettingsTable, make_env
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import SkilledPlayer
from rollwright.trajectory import Trajectory

SLOTS, SPEED = 64, 50.0
ENVIRONMENTS, GROUP_SIZE, EPISODES = 1024, 8, 8192
MEAN_TOKENS, SIGMA = 80.0, 1.0

OCCUPANCY_TARGET = 0.95
MAKESPAN_TARGET = 1.05
STEADY = (0.1, 0.8)
"""Between these shares of the turns: after the start, before the last episodes run dry."""


@dataclass(frozen=True)
class Figures:
    arm: str
    makespan: float
    bound: float
    """max(total work / slots, longest episode), of the work that was done."""
    occupancy: float
    """Of the slots, in steady state."""
    tokens_per_second: float
    """In steady state."""
    turns: int
    successes: int

    @property
    def over_bound(self) -> float:
        return self.makespan / self.bound


def engine() -> SimulatedEngine:
    lengths = LogNormalLength(MEAN_TOKENS, SIGMA, longest=1024)
    return SimulatedEngine(slots=SLOTS, tokens_per_second=SPEED, lengths=lengths, player=SkilledPlayer(0.7))


def configuration(max_inflight: int | None) -> RunConfig:
    return build(
        {
            "name": "bench",
            "rollout_batch_size": EPISODES,
            "max_inflight": max_inflight,
            "limits": {"generate_timeout": 1e6, "episode_timeout": 1e6},
            "custom_envs": {"FrozenLake": {"max_tokens_per_step": 1024}},
            "train_env_manager": {
                "num_env_groups": ENVIRONMENTS // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "tags": ["FrozenLake"],
            },
        }
    )


class SteadyWatch:
    """Looks at the engine when a tenth and when most of the work is done."""

    def __init__(self, served: SimulatedEngine, turns: int | None) -> None:
        self._engine = served
        self._turns = turns
        self.occupancy = self.speed = 0.0

    async def run(self) -> None:
        if self._turns is None:
            return
        first, last = (int(self._turns * share) for share in STEADY)
        while self._engine.usage().completed < first:
            await asyncio.sleep(1.0)
        before = self._engine.usage()
        while self._engine.usage().completed < last:
            await asyncio.sleep(1.0)
        after = self._engine.usage()
        self.occupancy = self._engine.occupancy(before)
        self.speed = (after.tokens - before.tokens) / (after.time - before.time)


async def measured(
    arm: str, turns: int | None, play: Callable[[SimulatedEngine], Coroutine[Any, Any, list[Trajectory]]]
) -> tuple[Figures, list[Any]]:
    served = engine()
    watch = SteadyWatch(served, turns)
    watching = asyncio.create_task(watch.run())
    started = asyncio.get_running_loop().time()
    trajectories = await play(served)
    makespan = asyncio.get_running_loop().time() - started
    await watching
    figures = Figures(
        arm=arm,
        makespan=makespan,
        bound=served.lower_bound(),
        occupancy=watch.occupancy,
        tokens_per_second=watch.speed,
        turns=sum(len(each.turns) for each in trajectories),
        successes=sum(bool(each.success) for each in trajectories),
    )
    transcript = [(each.seed, [turn.sampled_ids.tobytes() for turn in each.turns]) for each in trajectories]
    return figures, transcript


def with_rollwright(
    max_inflight: int | None,
) -> Callable[[SimulatedEngine], Coroutine[Any, Any, list[Trajectory]]]:
    async def play(served: SimulatedEngine) -> list[Trajectory]:
        async with Run(configuration(max_inflight), policy=served) as run:
            return (await run.get_batch()).trajectories

    return play


async def batch_synchronous(served: SimulatedEngine) -> list[Trajectory]:
    """All environments take their turns together, batch after batch: what a barrier costs."""
    config = configuration(None)
    table = SettingsTable(config)
    done: list[Trajectory] = []
    for start in range(0, EPISODES, ENVIRONMENTS):
        done += await _one_batch(served, config, table, range(start, start + ENVIRONMENTS))
    return done


async def _one_batch(
    served: SimulatedEngine, config: RunConfig, table: SettingsTable, numbers: range
) -> list[Trajectory]:
    playing = []
    for number in numbers:
        group, member = divmod(number, GROUP_SIZE)
        episode = Episode(
            tag="FrozenLake",
            seed=level_seed(config.seed, "train", group),
            mode="train",
            group_id=f"g{group}",
            group=group,
            member=member,
            run_seed=config.seed,
        )
        settings = table(episode)
        env = make_env(settings)
        session = new_session(episode, served, settings, env, rollout_id=f"{number}", attempt_id="1")
        first = await env.reset(episode.seed)
        session.trajectory.opening = settings.agent.opening(env, first.observation)
        playing.append((session, env, settings))
    done = [session.trajectory for session, _, _ in playing]
    while playing:
        turns = await asyncio.gather(
            *(settings.agent.act(session, env, session.last) for session, env, settings in playing)
        )
        left: list[tuple[Any, Env, EpisodeSettings]] = []
        for (session, env, settings), turn in zip(playing, turns, strict=True):
            step = await env.step(turn.text)
            session.observe(turn, step)
            if not (step.terminated or step.truncated):
                left.append((session, env, settings))
        playing = left
    return done


def main() -> None:
    screen = console()
    arms = {
        "rollwright, 1,024 in flight": with_rollwright(ENVIRONMENTS),
        "rollwright, finds its own limit": with_rollwright(None),
        "batch-synchronous": batch_synchronous,
    }
    turns: int | None = None
    results: list[Figures] = []
    transcripts: list[Any] = []
    with screen.status("playing on a virtual clock …"):
        dry, _ = run_virtual(measured("count", None, with_rollwright(ENVIRONMENTS)))
        turns = dry.turns
        for arm, play in arms.items():
            figures, transcript = run_virtual(measured(arm, turns, play))
            results.append(figures)
            transcripts.append(transcript)
    equal = all(each == transcripts[0] for each in transcripts)
    limit = SLOTS * SPEED
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{EPISODES:,} episodes, {SLOTS} slots, {turns:,} turns",
        title_justify="left",
    )
    table.add_column("arm")
    for name in ("makespan s", "bound s", "ratio", "occupancy", "tokens/s", "limit", "share"):
        table.add_column(name, justify="right")
    for each in results:
        table.add_row(
            each.arm,
            f"{each.makespan:,.0f}",
            f"{each.bound:,.0f}",
            f"{each.over_bound:.3f}",
            f"{each.occupancy:.3f}",
            f"{each.tokens_per_second:,.0f}",
            f"{limit:,.0f}",
            f"{each.tokens_per_second / limit:.3f}",
        )
    screen.print(table)
    ours, own_limit, barrier = results
    screen.print(f"transcripts of all arms are {'equal' if equal else 'NOT equal'}")
    screen.print(
        f"against batch-synchronous: {barrier.makespan / ours.makespan:.2f}x faster; "
        f"occupancy target >= {OCCUPANCY_TARGET}: {'met' if ours.occupancy >= OCCUPANCY_TARGET else 'NOT met'}; "
        f"makespan target <= {MAKESPAN_TARGET} x bound: {'met' if ours.over_bound <= MAKESPAN_TARGET else 'NOT met'}"
    )
    file = write_results(
        "no_barrier",
        {
            "slots": SLOTS,
            "episodes": EPISODES,
            "transcripts_equal": equal,
            "arms": [{**asdict(each), "over_bound": each.over_bound} for each in results],
            "speedup_over_batch_synchronous": barrier.makespan / ours.makespan,
            "own_limit_over_bound": own_limit.over_bound,
        },
    )
    screen.print(f"written: {file.name}")


if __name__ == "__main__":
    main()
