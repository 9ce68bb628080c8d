"""What does a barrier between agents cost a team? Samples per second against a batch-synchronous team.

    python bench/orchestra.py [--quick]

The math team and the search team play batches of 8, 64 and 256 samples, with verdicts that approve most samples or
few, on a simulated engine of 64 slots. Both arms run the same team code with the same keyed draws, so their transcripts
are equal, which is checked first. In one, each sample is a coroutine that waits for nobody. In the other, calls are
held until every sample that is not done has asked, then served agent after agent, and answered together: what a loop
over agents with a batch of active samples does. Times are on a virtual clock and exact; CPU time is real.

Then the segment cache: CPU time for the prompts of a search team with and without it, with equal ids. The texts are pages
of Python's language reference, on which the tokenizer is trained here, too.
"""

import asyncio
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pydoc_data.topics import topics
from statistics import mean, quantiles, stdev
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.agents import ChatAgent
from rollwright.aio import run_virtual
from rollwright.cli.console import console
from rollwright.engines.base import Generation, Policy, Prompt, Sampling
from rollwright.engines.rendering import Tokenizer, make_renderer
from rollwright.envs.base import Env, Reset, Step
from rollwright.models.tiny import tiny_tokenizer
from rollwright.rng import generator, uniform
from rollwright.rollout.episode import Episode, EpisodeSettings, new_session, play_episode
from rollwright.rollout.settings import LimitsConfig
from rollwright.run.gc_tuning import rare_collections
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import FixedLength, Lengths, LogNormalLength, lognormal
from rollwright.teams import SegmentTokenizer, SimulatedTeam, Situation, Team, math_team, search_team
from rollwright.teams.toy_envs import Lookup, Sums
from rollwright.trajectory import Message, Trajectory

PAGES = 40
"""Pages of the language reference, which Python brings along for `help()`."""

SLOTS, SPEED = 64, 60.0
BATCHES, APPROVALS = (8, 64, 256), (0.85, 0.25)
SEEDS = (1, 2, 3, 4, 5)
MAX_STEPS, MAX_LOOPS = 4, 3
SIGMA = 0.6
TOKENS = {
    "math/solver": 900.0,
    "math/verifier": 350.0,
    "search/verifier": 250.0,
    "search/search": 120.0,
    "search/answer": 150.0,
}
"""Mean lengths of completions, as models of this kind write."""
RETRIEVER_SECONDS, RETRIEVER_SIGMA = 0.4, 0.7
TARGETS = {
    ("math", 256): 1.4,
    ("search", 256): 1.8,
    ("math", 64): 1.6,
    ("search", 64): 2.1,
    ("math", 8): 1.0,
    ("search", 8): 1.0,
}
"""Least ratio of samples per second; of 8 samples only that they are not slower."""
OVERHEAD_TARGET = 0.01
"""Most CPU time for a second of the batch's own time."""


class Retriever(Lookup):
    """Facts that take a while to be found."""

    async def reset(self, seed: int) -> Reset:
        self._level = seed
        return await super().reset(seed)

    async def step(self, answer: str) -> Step:
        if "<search>" in answer:
            share = uniform("retriever", self._level, answer, self._steps)
            await asyncio.sleep(lognormal(RETRIEVER_SECONDS, RETRIEVER_SIGMA, share))
        return await super().step(answer)


TEAMS: dict[str, tuple[Team, type[Any]]] = {
    "math": (math_team(max_loops=MAX_LOOPS), Sums),
    "search": (search_team(), Retriever),
}


class Watched:
    """Notes how long each agent's calls took."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.renderer = policy.renderer
        self.version = self.pressure = 0
        self.seconds: dict[str, list[float]] = defaultdict(list)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        loop = asyncio.get_running_loop()
        started = loop.time()
        made = await self._policy.generate(prompt, sampling)
        self.seconds[str(prompt.key[-2])].append(loop.time() - started)
        return made

    async def close(self) -> None:
        await self._policy.close()


class Barrier(Watched):
    """A batch-synchronous engine: serves nobody before every sample that is not done has asked."""

    def __init__(self, policy: Policy, samples: int, order: Sequence[str]) -> None:
        super().__init__(policy)
        self._active = samples
        self._order = order
        self._waiting: list[tuple[Prompt, Sampling, asyncio.Future[Generation]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, sampling, answer))
        self._serve_if_all_have_asked()
        return await answer

    def done(self) -> None:
        """A sample will not ask again."""
        self._active -= 1
        self._serve_if_all_have_asked()

    def _serve_if_all_have_asked(self) -> None:
        if self._waiting and len(self._waiting) == self._active:
            batch, self._waiting = self._waiting, []
            self._serving = asyncio.ensure_future(self._serve(batch))

    async def _serve(self, batch: list[tuple[Prompt, Sampling, asyncio.Future[Generation]]]) -> None:
        """Agent after agent; the next one starts when the slowest call of the one before is done."""
        made: list[tuple[asyncio.Future[Generation], Generation]] = []
        for agent in self._order:
            calls = [each for each in batch if each[0].key[-2] == agent]
            answers = await asyncio.gather(*(Watched.generate(self, each[0], each[1]) for each in calls))
            made += [(each[2], answer) for each, answer in zip(calls, answers, strict=True)]
        for future, answer in made:
            future.set_result(answer)


@dataclass(frozen=True)
class Figures:
    """One batch of one arm."""

    seconds: float
    latencies: list[float]
    """When each sample was done."""
    per_agent: dict[str, float]
    """Mean seconds of a call."""
    occupancy: float
    bound: float
    """Seconds that the calls need on these slots on any schedule."""
    cpu: float
    """Of the whole process, seconds."""
    calls: int
    transcript: str


def engine(team: Team, approval: float) -> SimulatedEngine:
    lengths: dict[str, Lengths] = {agent: LogNormalLength(tokens, SIGMA) for agent, tokens in TOKENS.items()}
    player = SimulatedTeam.of(team, skill=0.6, approval=approval, lengths=lengths)
    return SimulatedEngine(slots=SLOTS, tokens_per_second=SPEED, lengths=FixedLength(1), player=player)


def settings(team: Team, env: Env) -> EpisodeSettings:
    return EpisodeSettings(
        env_type=team.name,
        env_config={},
        agent=ChatAgent(env.prompts),
        sampling=Sampling(max_tokens=1 << 14),
        max_steps=MAX_STEPS,
        sequence_length=1 << 17,
        limits=LimitsConfig(step_timeout=1e6, generate_timeout=1e6, episode_timeout=1e6),
        strategy=team,
    )


async def batch(kind: str, size: int, approval: float, seed: int, *, barrier: bool) -> Figures:
    team, make_env = TEAMS[kind]
    served = engine(team, approval)
    order = [
        team.agent_id(name) for name in ("solver", "verifier", "search", "answer") if name in team.agents
    ]
    policy = Barrier(served, size, order) if barrier else Watched(served)
    how = settings(team, make_env())
    loop = asyncio.get_running_loop()

    async def sample(number: int) -> tuple[Trajectory, float]:
        env: Env = make_env()
        episode = Episode(kind, number, "train", f"g{number}", number, 0, seed)
        session = new_session(episode, policy, how, env, rollout_id=f"{number}", attempt_id="1")
        trajectory = await play_episode(session, env, how, policy, make_env)
        if isinstance(policy, Barrier):
            policy.done()
        return trajectory, loop.time()

    cpu = time.process_time()
    done = await asyncio.gather(*(sample(number) for number in range(size)))
    cpu = time.process_time() - cpu
    transcript = blake2b()
    for trajectory, _ in done:
        for turn in trajectory.turns:
            transcript.update(f"{turn.agent}\x1f{turn.text}\x1f{turn.prompt_ids.tobytes()!r}".encode())
    return Figures(
        seconds=loop.time(),
        latencies=[latency for _, latency in done],
        per_agent={agent: mean(seconds) for agent, seconds in policy.seconds.items()},
        occupancy=served.occupancy(),
        bound=served.lower_bound(),
        cpu=cpu,
        calls=sum(len(trajectory.turns) for trajectory, _ in done),
        transcript=transcript.hexdigest(),
    )


@dataclass(frozen=True)
class Cell:
    """One cell of the grid, over all seeds."""

    team: str
    batch: int
    approval: float
    samples_per_second: float
    barrier_samples_per_second: float
    limit_samples_per_second: float
    """max(total work / slots, longest sample): the best that any schedule could do."""
    ratio: float
    ratio_spread: float
    """Standard deviation over the seeds."""
    limit_ratio: float
    """What no schedule of the same calls can exceed."""
    target: float
    p50: float
    p95: float
    barrier_p50: float
    barrier_p95: float
    per_agent: dict[str, float]
    occupancy: float
    barrier_occupancy: float
    calls_per_sample: float
    cpu_ms_per_sample: float
    overhead: float
    """CPU seconds for a second of the batch's time."""
    transcripts_equal: bool
    rss_mb: float


def cell(kind: str, size: int, approval: float, seeds: Sequence[int]) -> Cell:
    run_virtual(
        batch(kind, size, approval, seeds[0], barrier=False)
    )  # so that nothing is first used while measured
    ours = [run_virtual(batch(kind, size, approval, seed, barrier=False)) for seed in seeds]
    theirs = [run_virtual(batch(kind, size, approval, seed, barrier=True)) for seed in seeds]
    ratios = [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]
    mine, held = (_percentiles(arm) for arm in (ours, theirs))
    return Cell(
        team=kind,
        batch=size,
        approval=approval,
        samples_per_second=mean(size / each.seconds for each in ours),
        barrier_samples_per_second=mean(size / each.seconds for each in theirs),
        limit_samples_per_second=mean(size / each.bound for each in ours),
        ratio=mean(ratios),
        ratio_spread=stdev(ratios) if len(ratios) > 1 else 0.0,
        limit_ratio=mean(b.seconds / a.bound for a, b in zip(ours, theirs, strict=True)),
        target=TARGETS[kind, size],
        p50=mine[0],
        p95=mine[1],
        barrier_p50=held[0],
        barrier_p95=held[1],
        per_agent={
            agent: mean(each.per_agent[agent] for each in ours if agent in each.per_agent)
            for agent in sorted({agent for each in ours for agent in each.per_agent})
        },
        occupancy=mean(each.occupancy for each in ours),
        barrier_occupancy=mean(each.occupancy for each in theirs),
        calls_per_sample=mean(each.calls / size for each in ours),
        cpu_ms_per_sample=1000 * mean(each.cpu / size for each in ours),
        overhead=mean(each.cpu / each.seconds for each in ours),
        transcripts_equal=[a.transcript for a in ours] == [b.transcript for b in theirs],
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


@dataclass(frozen=True)
class CacheFigures:
    """Making the prompts of a search team."""

    prompts: int
    tokens: float
    """Of a prompt."""
    plain_ms: float
    """CPU for a prompt."""
    cached_ms: float
    encoded_share: float
    """Of the ids, those that the tokenizer had to make."""
    ids_equal: bool


def segment_cache() -> CacheFigures:
    pages = [topics[name] for name in sorted(topics)[:PAGES]]
    plain = make_renderer(tiny_tokenizer(pages, 4096), "template")  # type: ignore[arg-type]
    remembering: list[SegmentTokenizer] = []

    def remember(tokenizer: Tokenizer) -> Tokenizer:
        remembering.append(SegmentTokenizer(tokenizer))
        return remembering[-1]

    cached = plain.with_tokenizer(remember)  # type: ignore[attr-defined]
    prompts = list(_prompts([paragraph for page in pages for paragraph in page.split("\n\n")]))
    made, cost = [], []
    for renderer in (plain, cached):
        started = time.process_time()
        made.append([renderer.open(messages) for messages in prompts])
        cost.append(1000 * (time.process_time() - started) / len(prompts))
    figures = remembering[0].figures
    return CacheFigures(
        prompts=len(prompts),
        tokens=mean(map(len, made[0])),
        plain_ms=cost[0],
        cached_ms=cost[1],
        encoded_share=figures.encoded_ids / figures.asked_ids,
        ids_equal=made[0] == made[1],
    )


def _prompts(found: Sequence[str]) -> Iterator[list[Message]]:
    """What 64 samples of a search team ask in four steps, each of which finds two paragraphs."""
    agents = search_team().agents
    for sample in range(64):
        luck = generator("found", sample)
        situation = Situation(f"Question {sample}?", f"Question {sample}?", max_steps=MAX_STEPS)
        for step in range(1, MAX_STEPS + 1):
            for agent in ("verifier", "search", "answer"):
                yield agents[agent].messages(situation.values(), "")
            seen = " ".join(luck.choices(found, k=2))
            history = (*situation.history, ("<search>q</search>", seen))
            situation = replace(situation, history=history, observation=seen, step=step + 1)


def _percentiles(arm: Sequence[Figures]) -> tuple[float, float]:
    cuts = quantiles([latency for each in arm for latency in each.latencies], n=20, method="inclusive")
    return cuts[9], cuts[18]


def main() -> None:
    screen = console()
    seeds = SEEDS[:1] if "--quick" in sys.argv[1:] else SEEDS
    with screen.status("playing on a virtual clock …"), rare_collections():  # as in a run
        cells = [cell(kind, size, share, seeds) for kind in TEAMS for size in BATCHES for share in APPROVALS]
    title = f"{SLOTS} slots, {len(seeds)} seeds"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    heads = (
        "team",
        "approve",
        "ours/s",
        "barrier/s",
        "limit/s",
        "ratio",
        "target",
        "p50, p95 s",
        "busy",
        "CPU ms",
        "own",
    )
    for name in heads:
        table.add_column(name, justify="left" if name == "team" else "right", no_wrap=True)
    for each in cells:
        table.add_row(
            f"{each.team} {each.batch}",
            f"{each.approval:.2f}",
            f"{each.samples_per_second:.2f}",
            f"{each.barrier_samples_per_second:.2f}",
            f"{each.limit_samples_per_second:.2f}",
            f"{each.ratio:.2f}±{each.ratio_spread:.2f}",
            f"{each.target:.1f} {'met' if each.ratio >= each.target else 'NOT'}",
            f"{each.p50:.0f}, {each.p95:.0f}",
            f"{each.occupancy:.2f} ({each.barrier_occupancy:.2f})",
            f"{each.cpu_ms_per_sample:.2f}",
            f"{each.overhead:.2%}",
        )
    screen.print(table)
    screen.print("busy: share of the slots' time (with barriers); CPU ms: for a sample; own: CPU over wall")
    for each in cells:
        if each.ratio < each.target:
            screen.print(
                f"{each.team} {each.batch} at {each.approval}: {each.ratio:.2f} is below {each.target}; "
                f"no schedule of the same calls exceeds {each.limit_ratio:.2f}"
            )
    equal = all(each.transcripts_equal for each in cells)
    worst = max(each.overhead for each in cells)
    screen.print(f"transcripts of both arms are {'equal' if equal else 'NOT equal'}")
    screen.print(
        f"own overhead at most {worst:.2%} of the time; target < {OVERHEAD_TARGET:.0%}: "
        f"{'met' if worst < OVERHEAD_TARGET else 'NOT met'}; memory at its peak {cells[-1].rss_mb:.0f} MB"
    )
    cache = segment_cache()
    screen.print(
        f"segment cache: {cache.cached_ms:.2f} ms CPU for a prompt of {cache.tokens:.0f} tokens, {cache.plain_ms:.2f} ms "
        f"without; {cache.encoded_share:.0%} of the ids were made; ids are {'equal' if cache.ids_equal else 'NOT equal'}"
    )
    figures = {
        "slots": SLOTS,
        "seeds": len(seeds),
        "transcripts_equal": equal,
        "overhead": worst,
        "overhead_target": OVERHEAD_TARGET,
        "cells": [asdict(each) for each in cells],
        "segment_cache": asdict(cache),
    }
    screen.print(f"written: {write_results('orchestra', figures).name}")


if __name__ == "__main__":
    main()
