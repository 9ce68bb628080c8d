"""Which shape teaches most for its tokens? Signal to noise of the gradient per sampled token, against the exact gradient.

    python bench/tree_signal.py

Small games whose gradient is known in closed form: in each of T turns the policy is right with a given probability, and an
episode is worth 1 if it was right in every turn that matters. A mistake ends the episode, or shows only at the end. Shapes
are grown by the package's branch policies and valued by its advantages; a decision is one token, and equal answers are not
merged, as long answers never are. For each shape: the mean squared distance of a group's estimate from the exact gradient,
the tokens at which that noise is as large as the gradient itself, and the gain, which is the tokens that groups of eight
chains need for this over the tokens of the shape. *Silent* is the share of groups without any gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.rollout.branching import TRUNK, Branching, FixedFanOut, KeepAlive, Node, Split
from rollwright.rollout.settings.strategies import KeepAliveBranchConfig, SplitBranchConfig
from rollwright.training.advantages import RLOO, Remembering, TurnTree
from rollwright.trajectory import Outcome, Trajectory, Turn, VersionRun, floats, token_ids, turn_weights

GROUPS = 2000
KAPPA = 2.0
CHAIN = FixedFanOut(1, 1)


@dataclass(frozen=True)
class Game:
    name: str
    turns: int
    right: float
    """Probability of the right decision in a turn."""
    ends: bool
    """Whether a mistake ends the episode."""
    matters: Callable[[int], bool] = lambda turn: True
    """Whether a mistake in this turn fails the episode."""

    @property
    def value(self) -> float:
        return math.prod(self.right for turn in range(self.turns) if self.matters(turn))

    def gradient(self) -> list[float]:
        """Of the value, by the logit of each turn's right decision."""
        return [self.value * (1 - self.right) if self.matters(turn) else 0.0 for turn in range(self.turns)]


GAMES = (
    Game("5 turns, a mistake ends it", 5, 0.8, True),
    Game("20 turns, a mistake ends it", 20, 0.9, True),
    Game("20 turns, a mistake ends it, rare", 20, 0.8, True),
    Game("20 turns, silent failure", 20, 0.9, False),
    Game("3 of 24 turns matter", 24, 0.5, False, lambda turn: turn in (4, 12, 20)),
)


@dataclass(frozen=True)
class Shape:
    name: str
    members: int
    branching: Callable[[Game], Branching]
    advantage: Any
    knows: bool = False
    """Whether the value of the tag is known from earlier batches."""


def _split(game: Game) -> Branching:
    return Split(4, game.turns, SplitBranchConfig(kind="split", at=game.turns // 2))


def _alive(game: Game) -> Branching:
    return KeepAlive(16, game.turns, KeepAliveBranchConfig(kind="keep_alive", alive=8))


SHAPES = (
    Shape("chains, 8", 8, lambda game: CHAIN, RLOO),
    Shape("chains, 4", 4, lambda game: CHAIN, RLOO),
    Shape("chains, 24", 24, lambda game: CHAIN, RLOO),
    Shape("chains, 8, running value", 8, lambda game: CHAIN, lambda: RLOO(kappa=KAPPA), knows=True),
    Shape("fixed, 2 answers in 3 turns", 1, lambda game: FixedFanOut(2, 3), TurnTree),
    Shape("8 roots, split in 4", 8, _split, TurnTree),
    Shape("8 roots, split in 4, κ 2", 8, _split, lambda: TurnTree(kappa=KAPPA)),
    Shape("16 roots, 8 kept alive", 1, _alive, TurnTree),
    Shape("16 roots, 8 kept alive, κ 2", 1, _alive, lambda: TurnTree(kappa=KAPPA)),
    Shape("16 roots, 8 kept alive, κ 2, running value", 1, _alive, lambda: TurnTree(kappa=KAPPA), knows=True),
)


def play(game: Game, branching: Branching, name: str, dice: Random) -> Trajectory:
    """One rollout; the id of a decision's token says whether it was right."""
    turns: list[Turn] = []
    live: list[tuple[int | None, bool]] = [(None, True)]
    for depth in range(game.turns):
        nodes = [
            Node(depth, TRUNK if last is None else 0, (name,), None if last is None else turns[last])
            for last, _ in live
        ]
        grown: list[tuple[int | None, bool]] = []
        for (last, whole), labels in zip(live, branching.level(nodes), strict=True):
            for _ in labels:
                right = dice.random() < game.right
                good = whole and (right or not game.matters(depth))
                over = depth == game.turns - 1 or (game.ends and not good)
                turns.append(_turn(len(turns), last, right, float(good and depth == game.turns - 1)))
                if not over:
                    grown.append((len(turns) - 1, good))
        live = grown
        if not live:
            break
    return Trajectory(name, "a", "g", "T", 1, turns=turns)


def _turn(number: int, after: int | None, right: bool, reward: float) -> Turn:
    return Turn(
        number,
        after,
        after,
        prompt_ids=token_ids([9]),
        sampled_ids=token_ids([int(right)]),
        logprobs=floats([-0.5]),
        versions=(VersionRun(0, 1),),
        completion_tokens=1,
        outcome=Outcome("", reward),
    )


def estimate(game: Game, group: Sequence[Trajectory], advantages: Sequence[Sequence[float]]) -> list[float]:
    """The policy gradient that a trainer would get from one group."""
    found = [0.0] * game.turns
    for tree, values in zip(group, advantages, strict=True):
        depths: list[int] = []
        for turn, weight in zip(tree.turns, turn_weights(tree.turns), strict=True):
            depths.append(0 if turn.after is None else depths[turn.after] + 1)
            found[depths[-1]] += weight * values[turn.id] * (turn.sampled_ids[0] - game.right) / len(group)
    return found


@dataclass(frozen=True)
class Figures:
    game: str
    solved: float
    shape: str
    tokens: float
    """Sampled in a group."""
    silent: float
    """Share of the groups without a gradient."""
    bias: float
    """Distance of the mean estimate from the exact gradient, in standard errors of its length."""
    tokens_to_signal: float
    """Sampled tokens at which the noise is as large as the gradient."""


def measure(game: Game, shape: Shape) -> Figures:
    true, branching, advantage = game.gradient(), shape.branching(game), shape.advantage()
    if shape.knows and isinstance(advantage, Remembering):
        advantage.restore({"T": [game.value, 1.0]})
    sums, noise, tokens, silent = [0.0] * game.turns, 0.0, 0, 0
    for number in range(GROUPS):
        dice = Random(f"{game.name} {shape.name} {number}")
        group = [play(game, branching, f"{number}-{member}", dice) for member in range(shape.members)]
        [values] = advantage([group])
        found = estimate(game, group, values)
        silent += not any(any(own) for own in values)
        tokens += sum(len(tree.turns) for tree in group)
        noise += sum((a - b) ** 2 for a, b in zip(found, true, strict=True))
        sums = [total + each for total, each in zip(sums, found, strict=True)]
    noise /= GROUPS
    off = sum((total / GROUPS - each) ** 2 for total, each in zip(sums, true, strict=True))
    signal = sum(each * each for each in true)
    return Figures(
        game=game.name,
        solved=game.value,
        shape=shape.name,
        tokens=tokens / GROUPS,
        silent=silent / GROUPS,
        bias=math.sqrt(off / (noise / GROUPS)),
        tokens_to_signal=noise / signal * tokens / GROUPS,
    )


def main() -> None:
    screen = console()
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("game")
    table.add_column("shape", no_wrap=True)
    for title in ("tokens", "silent", "gain"):
        table.add_column(title, justify="right", no_wrap=True)
    rows: list[dict[str, Any]] = []
    for game in GAMES:
        found = [measure(game, shape) for shape in SHAPES]
        for each in found:
            gain = found[0].tokens_to_signal / each.tokens_to_signal
            rows.append({**asdict(each), "gain": gain})
            table.add_row(
                f"{game.name}, {game.value:.1%} solved" if each is found[0] else "",
                each.shape,
                f"{each.tokens:.0f}",
                f"{each.silent:.0%}",
                f"{gain:.2f}",
            )
    screen.print(table)
    write_results("tree_signal", {"groups": GROUPS, "kappa": KAPPA, "arms": rows})


if __name__ == "__main__":
    main()
