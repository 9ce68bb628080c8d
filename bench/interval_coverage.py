"""How often intervals of evaluations cover: `python bench/interval_coverage.py [TASKS …]` prints tables in Markdown.

- Each cell of the first two tables is 2,000 simulated evaluations with a known skill: tasks of different difficulty (a beta
  distribution around the skill, with the correlation ρ of two samples of a task; or two kinds of tasks, easy and hard), a number
  of samples of each, and the interval at 95 %: the closed form, and the bootstrap. The Monte Carlo error is 0.5 points.
- With one sample of each task the coverage follows exactly from the binomial distribution. It jumps with the skill, because only
  a few results are possible. The third table has, over skills from 0.05 to 0.95, the mean coverage, the mean distance from 95 %
  and the share of skills that cover 94 to 96 %, beside three intervals of the textbooks.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollwright.evaluation.share_test import ShareTest, bootstrap_level

EVALUATIONS = 2000
LEVEL = 0.05
SKILLS = (0.05, 0.1, 0.3, 0.5, 0.8, 0.95)
TASKS = (20, 50, 100, 200, 500)
BOOTSTRAP_SKILLS = (0.05, 0.3, 0.9)
BOOTSTRAP_TASKS = (20, 50)
BOOTSTRAP_DRAWS = 400
"""Of each evaluation; a report draws 2,000."""


@dataclass(frozen=True)
class Case:
    name: str
    correlation: float
    samples: tuple[int, ...]
    """Each is as likely as the others."""
    kinds: bool = False
    """Two kinds of tasks instead of a beta distribution."""


ANY = tuple(range(1, 17))
CASES = (
    Case("1 to 16, ρ 0.1", 0.1, ANY),
    Case("1 to 16, ρ 0.3", 0.3, ANY),
    Case("1 to 16, ρ 0.6", 0.6, ANY),
    Case("1 to 16, two kinds, ρ 0.25", 0.25, ANY, kinds=True),
    Case("1 or 16, ρ 0.2", 0.2, (1, 16)),
    Case("8, ρ 0.2", 0.2, (8,)),
    Case("8, ρ 0", 0.0, (8,)),
)

BOOTSTRAP_CASES = (CASES[1], CASES[3])

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def simulate(case: Case, tasks: int, skill: float) -> tuple[Ints, Ints]:
    """Solved samples and samples of each task, a row for each evaluation."""
    random = np.random.default_rng([tasks, round(1000 * skill), *map(ord, case.name)])
    shape = EVALUATIONS, tasks
    rho = case.correlation
    chances = np.full(shape, skill)
    if case.kinds:  # with the variance ρ·skill·(1 - skill), as the beta distribution has
        apart = math.sqrt(rho)
        low, high = skill * (1 - apart), skill + (1 - skill) * apart
        chances = np.where(random.random(shape) < skill, high, low)
    elif rho:
        chances = random.beta(skill * (1 - rho) / rho, (1 - skill) * (1 - rho) / rho, shape)
    samples = random.choice(np.array(case.samples), shape)
    return random.binomial(samples, chances), samples


def closed_form(solved: Ints, samples: Ints, skill: float) -> float:
    return float((ShareTest.of_counts(solved, samples).p_values(skill) >= LEVEL).mean())


def bootstrap(solved: Ints, samples: Ints, skill: float) -> float:
    levels = [
        bootstrap_level(ours / all_, np.stack([ours, all_], 1), LEVEL, number, BOOTSTRAP_DRAWS)
        for number, (ours, all_) in enumerate(zip(solved, samples, strict=True))
    ]
    return float((ShareTest.of_counts(solved, samples).p_values(skill) >= np.array(levels)).mean())


def table(
    tasks: tuple[int, ...],
    skills: tuple[float, ...],
    cases: tuple[Case, ...],
    covered: Callable[[Ints, Ints, float], float],
) -> None:
    print("| tasks | skill |", " | ".join(case.name for case in cases), "|")
    print("|---|---|", "---|" * len(cases), sep="")
    for count in tasks:
        for skill in skills:
            shares = [covered(*simulate(case, count, skill), skill) for case in cases]
            print(
                f"| {count} | {skill} |", " | ".join(f"{100 * each:.1f}" for each in shares), "|", flush=True
            )


def binomial(tasks: int, chance: float) -> Floats:
    ways = [
        math.lgamma(tasks + 1) - math.lgamma(k + 1) - math.lgamma(tasks - k + 1) for k in range(tasks + 1)
    ]
    solved = np.arange(tasks + 1)
    found: Floats = np.exp(
        np.array(ways) + solved * math.log(chance) + (tasks - solved) * math.log1p(-chance)
    )
    return found


def one_sample(tasks: int) -> dict[str, dict[str, float]]:
    solved = np.arange(tasks + 1)
    counts = (solved[:, None] > np.arange(tasks)[None]).astype(np.int64)
    test = ShareTest.of_counts(counts, np.ones_like(counts))
    covered: dict[str, list[float]] = {"ours": [], "Wilson": [], "mid-p": [], "Clopper–Pearson": []}
    for skill in np.linspace(0.05, 0.95, 181):
        chances = binomial(tasks, skill)
        below = chances.cumsum()
        distance = np.abs(solved / tasks - skill) / math.sqrt(skill * (1 - skill) / tasks)
        middle = below - chances / 2
        accepted = {
            "ours": test.p_values(skill) >= LEVEL,
            "Wilson": distance <= 1.959963984540054,
            "mid-p": np.minimum(middle, 1 - middle) >= LEVEL / 2,
            "Clopper–Pearson": np.minimum(below, 1 - below + chances) >= LEVEL / 2,
        }
        for name, each in accepted.items():
            covered[name].append(float(chances[each].sum()))
    return {
        name: {
            "mean": float(np.mean(each)),
            "distance": float(np.abs(np.array(each) - 0.95).mean()),
            "within": float(np.mean([0.94 <= one <= 0.96 for one in each])),
        }
        for name, each in covered.items()
    }


def main() -> None:
    chosen = tuple(int(each) for each in sys.argv[1:])
    print("Closed form\n")
    table(chosen or TASKS, SKILLS, CASES, closed_form)
    print("\nBootstrap\n")
    table(chosen or BOOTSTRAP_TASKS, BOOTSTRAP_SKILLS, BOOTSTRAP_CASES, bootstrap)
    print("\nOne sample of each task\n")
    single = {count: one_sample(count) for count in chosen or TASKS}
    names = list(next(iter(single.values())))
    print("| tasks |", " | ".join(names), "|")
    print("|---|", "---|" * len(names), sep="")
    for count, row in single.items():
        told = [
            f"{100 * each['mean']:.1f}, ± {100 * each['distance']:.1f}, {100 * each['within']:.0f} %"
            for each in row.values()
        ]
        print(f"| {count} |", " | ".join(told), "|")


if __name__ == "__main__":
    main()
