"""How often intervals of evaluations cover: `python bench/interval_coverage.py [TASKS …]` prints a table in Markdown.

Each cell is 2,000 simulated evaluations with a known skill: tasks of different difficulty (a beta distribution around the skill;
ρ is the correlation of two samples of a task), a number of samples of each, and the closed-form interval at 95 %. The Monte
Carlo error of a cell is 0.5 points. With one sample of each task, and few tasks, only a few results are possible, and no
interval can cover exactly 95 %.
"""

import sys
from random import Random

from rollwright.evaluation.intervals import ShareTest

EVALUATIONS = 2000
SKILLS = (0.03, 0.1, 0.3, 0.5, 0.97)
TASKS = (8, 20, 50, 100, 200)
CASES = (
    ("1 sample", 0.0, (1, 1)),
    ("8, ρ 0", 0.0, (8, 8)),
    ("1 to 16, ρ 0.1", 0.1, (1, 16)),
    ("1 to 16, ρ 0.3", 0.3, (1, 16)),
    ("1 to 16, ρ 0.6", 0.6, (1, 16)),
)


def covered(tasks: int, skill: float, correlation: float, samples: tuple[int, int]) -> float:
    random = Random(f"{tasks} {skill} {correlation} {samples}")
    found = 0
    for _ in range(EVALUATIONS):
        counts = []
        for _ in range(tasks):
            chance = skill
            if correlation:
                strength = (1 - correlation) / correlation
                chance = random.betavariate(skill * strength, (1 - skill) * strength)
            drawn = random.randint(*samples)
            counts.append((sum(random.random() < chance for _ in range(drawn)), drawn))
        found += 0.025 <= ShareTest(counts).below(skill) <= 0.975
    return found / EVALUATIONS


def main() -> None:
    print("| tasks | skill |", " | ".join(name for name, _, _ in CASES), "|")
    print("|---|---|", "---|" * len(CASES), sep="")
    for tasks in [int(each) for each in sys.argv[1:]] or TASKS:
        for skill in SKILLS:
            shares = [covered(tasks, skill, rho, samples) for _, rho, samples in CASES]
            print(
                f"| {tasks} | {skill} |", " | ".join(f"{100 * each:.1f}" for each in shares), "|", flush=True
            )


if __name__ == "__main__":
    main()
