"""Scores of the unmodified reasoning-gym, which evaluates answers: run as a program, with honest answers only.

Reads seeds and dataset names from its arguments and prints one JSON line for each: the question, its own answer, and for
that answer and several wrong ones what `score_answer` says. `null`: it raises.
"""

import json
import random
import re
import sys
from typing import Any

import numpy.random
from reasoning_gym.factory import DATASETS, create_dataset


def wrong_answers(answer: str, seed: int) -> list[str]:
    """Right, nearly right and wrong answers."""
    chance = random.Random(seed)
    words = answer.split()
    lines = answer.split("\n")
    rows = [line.split() for line in lines]
    shuffled = chance.sample(words, len(words))
    found = [
        " ".join(shuffled),
        answer[::-1],
        answer[: len(answer) // 2],
        f" {answer} ",
        f"The answer is {answer}.",
        "I do not know",
        "",
        "42",
        re.sub(r"\d+", lambda number: str(int(number[0]) + 1), answer, count=1),
        answer.upper(),
        repr(list(answer)) if len(answer) < 200 else "[]",
        repr(words),
        repr([[int(each) if each.isdecimal() else each for each in row] for row in rows]),
        answer.replace("+", "-", 1),
        f"({answer}) + sin(x)**2 + cos(x)**2",
        f"({answer}) + x*y/(x*y*z + sin(x)*cos(x)) + exp(x)*log(y)",
    ]
    return [each for each in dict.fromkeys(found) if len(each) < 3000]


def honest(name: str, seed: int) -> dict[str, Any]:
    random.seed(seed)
    numpy.random.seed(seed)
    dataset = create_dataset(name, seed=seed, size=1)
    entry = dataset[0]
    answer = entry.get("answer")
    if not isinstance(answer, str):
        answer = entry["metadata"].get("example_answer")
    answers = [answer] if isinstance(answer, str) else []
    answers += wrong_answers(answers[0] if answers else "[1, 2]", seed)
    scores = []
    for each in answers:
        try:
            scores.append(float(dataset.score_answer(each, entry)))
        except Exception:  # noqa: BLE001 - foreign code may raise anything
            scores.append(None)
    return {"question": str(entry["question"]), "answers": answers, "scores": scores}


def main() -> None:
    seeds, names = range(int(sys.argv[1]), int(sys.argv[2])), sys.argv[3:] or [*DATASETS]
    for name in names:
        for seed in seeds if name != "composite" else ():
            print(json.dumps({"dataset": name, "seed": seed, **honest(name, seed)}))


if __name__ == "__main__":
    main()
