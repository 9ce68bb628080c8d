"""What does a tree give for the same tokens? Chains against trees of as many leaves, at an equal token budget.

    python bench/tree.py

FrozenLake and Sokoban, with a simulated engine whose player knows the best action and takes it with a given probability. Every arm plays groups of eight leaves until it has sampled its budget, on a virtual clock and with keyed
draws, so that the figures are exact and do not depend on the machine. Chains are compared by `rloo`, trees by `tree`,
which for chains is the same. Beside the turns per leaf stands what arithmetic gives for paths of the measured length
that all reach the last branch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.aio import run_virtual
from rollwright.cli.console import console
from rollwright.config import RunConfig, build
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import SkilledPlayer
from rollwright.training.advantages import TurnTree
from rollwright.training.rows import build_rows
from rollwright.trajectory import Trajectory, leaves, path

TOKENS = 200_000
"""Sampled by each arm, give or take a batch."""
LEAVES = 8
TAGS = {"FrozenLake": 10, "SimpleSokoban": 10, "LargerSokoban": 30}
"""Most actions in an episode; those of the last are long against the part of a path that is branched."""
SKILLS = (0.3, 0.6, 0.9)
"""Probability of the best action: mostly failing, in between, mostly solving."""
MEAN_TOKENS, SIGMA = 40.0, 0.8
WIDTH, DEPTH = 2, 3
CHAINS, NODES = 2, 3
GROUPS_AT_ONCE = 8


@dataclass(frozen=True)
class Arm:
    name: str
    strategy: dict[str, Any]
    group_size: int
    turns_per_leaf: Callable[[float, float], float]
    """By arithmetic, from the mean length of a path and the turns of it that may branch."""


ARMS = (
    Arm("chain", {"kind": "chain"}, LEAVES, lambda turns, depth: turns),
    Arm(
        "tree, fixed",
        {"kind": "tree", "width": WIDTH, "depth": DEPTH, "branch": "fixed"},
        LEAVES // WIDTH**DEPTH,
        lambda turns, depth: sum(WIDTH ** (1 + level) for level in range(DEPTH)) / LEAVES + turns - DEPTH,
    ),
    Arm(
        "two trees, fixed",
        {"kind": "tree", "width": WIDTH, "depth": DEPTH - 1, "branch": "fixed"},
        LEAVES // WIDTH ** (DEPTH - 1),
        lambda turns, depth: (
            sum(2 * WIDTH ** (1 + level) for level in range(DEPTH - 1)) / LEAVES + turns - DEPTH + 1
        ),
    ),
    Arm(
        "tree, random",
        {
            "kind": "tree",
            "branch": {"kind": "random", "chains": CHAINS, "nodes": NODES, "rounds": 1},
        },
        LEAVES // (CHAINS * (1 + NODES)),
        lambda turns, depth: CHAINS * (turns + NODES * (turns - (depth - 1) / 2)) / LEAVES,
    ),
)


@dataclass(frozen=True)
class Figures:
    tag: str
    skill: float
    arm: str
    groups: int
    leaves_per_group: float
    """Fewer than asked for where paths end before they branch, or answers come out the same."""
    tokens: int
    """Sampled."""
    tokens_per_leaf: float
    turns_per_leaf: float
    arithmetic: float
    """Turns per leaf that were to be expected."""
    mixed: float
    """Share of the groups in which some leaves solved the task and some did not."""
    samples_per_1000: float
    """Rows with an advantage that is not zero, for 1,000 sampled tokens."""
    turns_per_1000: float
    """Decisions with an advantage that is not zero, for 1,000 sampled tokens."""


def branching_turns(tag: str) -> int:
    """Where random expansion may branch: questions that most paths come to."""
    return TAGS[tag] // 2


def configuration(arm: Arm, tag: str) -> RunConfig:
    strategy = dict(arm.strategy)
    if strategy["kind"] == "tree":
        strategy.setdefault("depth", branching_turns(tag))
    return build(
        {
            "name": "bench",
            "strategy": strategy,
            "max_inflight": 1024,
            "custom_envs": {tag: {"max_steps": TAGS[tag]}},
            "limits": {"generate_timeout": 1e6, "episode_timeout": 1e6},
            "train_env_manager": {
                "num_env_groups": GROUPS_AT_ONCE,
                "group_size": arm.group_size,
                "tags": [tag],
            },
        }
    )


async def played(arm: Arm, tag: str, skill: float) -> list[list[Trajectory]]:
    engine = SimulatedEngine(
        slots=64,
        tokens_per_second=50.0,
        lengths=LogNormalLength(MEAN_TOKENS, SIGMA),
        player=SkilledPlayer(skill),
    )
    groups: list[list[Trajectory]] = []
    tokens = 0
    async with Run(configuration(arm, tag), policy=engine) as run:
        while tokens < TOKENS:
            batch = await run.get_batch()
            groups += [group.trajectories for group in batch.groups]
            tokens += sum(each.paid_tokens for each in batch.trajectories)
    return groups


def measured(arm: Arm, tag: str, skill: float, groups: Sequence[Sequence[Trajectory]]) -> Figures:
    every = [each for group in groups for each in group]
    tokens = sum(each.paid_tokens for each in every)
    ways = [path(each.turns, leaf) for each in every for leaf in leaves(each.turns)]
    turns = sum(len(each.turns) for each in every)
    length = sum(map(len, ways)) / len(ways)
    mixed = [_mixed(group) for group in groups]
    rows = build_rows(groups, TurnTree())
    decisions = sum(value != 0 for group in TurnTree()(groups) for own in group for value in own)
    return Figures(
        tag=tag,
        skill=skill,
        arm=arm.name,
        groups=len(groups),
        leaves_per_group=len(ways) / len(groups),
        tokens=tokens,
        tokens_per_leaf=tokens / len(ways),
        turns_per_leaf=turns / len(ways),
        arithmetic=arm.turns_per_leaf(length, min(length, branching_turns(tag))),
        mixed=sum(mixed) / len(mixed),
        samples_per_1000=1000 * sum(any(row.advantages) for row in rows) / tokens,
        turns_per_1000=1000 * decisions / tokens,
    )


def _mixed(group: Sequence[Trajectory]) -> bool:
    ends = {
        outcome.success
        for each in group
        for leaf in leaves(each.turns)
        if (outcome := each.turns[leaf].outcome) is not None
    }
    return len(ends) > 1


def main() -> None:
    screen = console()
    results: list[Figures] = []
    with screen.status("playing on a virtual clock …"):
        for tag in TAGS:
            for skill in SKILLS:
                for arm in ARMS:
                    groups = run_virtual(played(arm, tag, skill))
                    results.append(measured(arm, tag, skill, groups))
    screen.print(f"groups of {LEAVES} leaves, {TOKENS:,} sampled tokens for each line")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("environment", "skill", "arm"):
        table.add_column(name, no_wrap=True)
    for name in ("leaves", "tokens a leaf", "to chain", "turns a leaf", "by sums", "mixed"):
        table.add_column(name, justify="right", max_width=6)
    for name in ("samples per 1,000", "to chain"):
        table.add_column(name, justify="right", max_width=8)
    rows = []
    for each in results:
        [chain] = [r for r in results if (r.tag, r.skill, r.arm) == (each.tag, each.skill, ARMS[0].name)]
        against = {
            "tokens_to_chain": each.tokens_per_leaf / chain.tokens_per_leaf,
            "samples_to_chain": each.samples_per_1000 / chain.samples_per_1000,
            "turns_to_chain": each.turns_per_1000 / chain.turns_per_1000,
        }
        rows.append({**asdict(each), **against})
        table.add_row(
            each.tag,
            f"{each.skill}",
            each.arm,
            f"{each.leaves_per_group:.1f}",
            f"{each.tokens_per_leaf:.0f}",
            f"{against['tokens_to_chain']:.2f}",
            f"{each.turns_per_leaf:.2f}",
            f"{each.arithmetic:.2f}",
            f"{100 * each.mixed:.0f} %",
            f"{each.samples_per_1000:.2f}",
            f"{against['samples_to_chain']:.2f}",
        )
    screen.print(table)
    file = write_results("tree", {"tokens": TOKENS, "leaves": LEAVES, "arms": rows})
    screen.print(f"written: {file.name}")


if __name__ == "__main__":
    main()
