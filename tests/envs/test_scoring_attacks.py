"""Code in an answer is never run, for any dataset and in any disguise."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.envs import registry
from rollwright.envs.scoring import Score, ScoringService, shared
from rollwright.envs.scoring.protocol import JudgeReply
from rollwright.sandbox.protocol import frame

EVALUATING = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Datasets whose own scorer evaluates the answer."""

REPLIES = b"".join(frame(JudgeReply(number, Score(1.0))) for number in range(40))
"""Forged message of a judge for a right answer."""

EXPLOITS = {
    "a forged reply": f"__import__('os').write(3, {REPLIES!r}) and __import__('os')._exit(0)",
    "a forged reply to every file": f"[__import__('os').write(n, {REPLIES[:200]!r}) for n in range(64)]",
    "the variable of the scorer": "oracle_answer",
    "the variable, by a detour": "oracle_answer if 1 + 1 == 2 else []",
    "the entry, by frames": "__import__('sys')._getframe(1).f_locals['entry']['answer']",
    "the entry, by the collector": "[o['answer'] for o in __import__('gc').get_objects() if isinstance(o, dict) and 'answer' in o][0]",
    "another judgement": "setattr(__import__('builtins'), 'float', lambda *a: 1.0) or 1",
    "another scorer": "setattr(type(self), 'score_answer', lambda *a: 1.0)",
    "classes, from a tuple": "().__class__.__base__.__subclasses__()",
    "classes, from a symbol": "x.__class__.__mro__[-1].__subclasses__()",
    "sympy's own door": "sympify('__import__(\"os\").getpid()')",
    "a formula that is code": "x + eval('__import__(\"os\")._exit(0)')",
    "a lambda": "(lambda: __import__('os')._exit(0))()",
    "Lambda of sympy": "Lambda(x, __import__('os'))(1)",
    "memory": "__import__('ctypes').memset(id(0), 1, 100)",
    "memory, by its file": "open('/proc/self/mem', 'r+b').read(1)",
    "the environment": "__import__('os').environ['HOME']",
    "a handler of signals": "__import__('signal').signal(14, lambda *a: None)",
    "something for the end": "__import__('atexit').register(print)",
    "a thread for later": "__import__('threading').Timer(0.01, print).start()",
    "a process": "__import__('os').fork()",
    "a command": "__import__('os').system('true')",
    "a pickle": "__import__('pickle').loads(b\"cos\\nsystem\\n(S'true'\\ntR.\")",
    "a class that reduces itself": "type('A', (), {'__reduce__': lambda s: (print, ())})()",
    "a walrus": "(y := __import__('os')) and y._exit(0)",
    "a format": "f'{__import__(\"os\")._exit(0)}'",
    "an exit": "exit()",
    "an interruption": "(_ for _ in ()).throw(KeyboardInterrupt)",
    "a comprehension": "[__import__('os')._exit(0) for _ in [1]]",
    "a statement": "import os; os._exit(0)",
    "letters that Python takes for others": "__ﬁmport__('os')".replace("ﬁ", "i") + " + ｅｘｉｔ()",
    "a call over lines": "(__import__\n('os')\n._exit\n(0))",
    "a nested tag": "<answer>exit()</answer>",
    "a comment": "1 # exit()",
}


@pytest.fixture
def service() -> ScoringService:
    return shared()


@pytest.mark.parametrize("dataset", EVALUATING)
async def test_code_in_an_answer_is_never_run_where_the_own_scorer_would(service, dataset: str) -> None:
    entry = await service.entry(dataset, {}, 3)
    found = await asyncio.gather(*(service.score(dataset, {}, 3, each) for each in EXPLOITS.values()))
    for name, score in zip(EXPLOITS, found, strict=True):
        assert score.value <= 0.01, f"{name}: {score}"
        assert not score.killed, name
    assert sum(score.refused for score in found) >= len(EXPLOITS) - 4
    assert not [score for score in found if score.refused and score.value]
    if entry.answer is not None:
        assert await service.score(dataset, {}, 3, entry.answer) == Score(1.0)


def every_dataset() -> list[str]:
    listing = "import json; from reasoning_gym.factory import DATASETS; print(json.dumps([*DATASETS]))"
    printed = subprocess.run([sys.executable, "-c", listing], capture_output=True, check=True).stdout
    return list(json.loads(printed))


async def test_no_dataset_gives_code_full_marks(service) -> None:
    names = every_dataset()
    assert len(names) > 100
    for name in names:
        if name == "composite":
            continue
        service.check(name, {})  # also fails if its scorer evaluates answers
        scores = await asyncio.gather(*(service.score(name, {}, 5, each) for each in EXPLOITS.values()))
        assert not any(each.killed for each in scores), name
        assert max(each.value for each in scores) < 0.6, name


@pytest.mark.parametrize("seed", range(6))
async def test_a_halting_question_is_answered_by_what_is_true_and_by_nothing_else(service, seed: int) -> None:
    entry = await service.entry("game_of_life_halting", {}, seed)
    said = [
        (await service.score("game_of_life_halting", {}, seed, each)).value for each in ("True", "False", "x")
    ]
    assert entry.answer in ("True", "False")
    assert said == [float(entry.answer == "True"), float(entry.answer == "False"), 0.0]


@pytest.mark.parametrize("dataset", ["simple_integration", "intermediate_integration"])
async def test_an_integral_said_again_is_no_answer(service, dataset: str) -> None:
    """Exception: the dataset's own answer contains one."""
    solved = 0
    for seed in range(12):
        entry = await service.entry(dataset, {}, seed)
        if "Integral(" in str(entry.answer):
            continue
        solved += 1
        asked = re.search(r"∫ (.*?) dx", entry.question)
        assert asked is not None
        over = "X" if "X" in asked[1] else "x"
        score = await service.score(dataset, {}, seed, f"Integral({asked[1]}, {over}) + C")
        assert score.value < 0.1, (seed, entry.question, score)
    assert solved


@pytest.mark.parametrize(
    "wrapper", ["<answer>{}</answer>", "<answer>\n{}\n</answer>", "<answer>```python\n{}\n```</answer>"]
)
async def test_an_environment_counts_what_was_refused(play, wrapper: str) -> None:
    env = registry.make("reasoning_gym:spiral_matrix")
    attack = EXPLOITS["a forged reply"]
    (step,) = await play(env, 1, [wrapper.format(attack)])
    assert step.reward == 0
    assert not step.info["success"]
    assert step.info["metrics"] == {"scorer_killed": 0.0, "scorer_failed": 0.0, "scorer_refused": 1.0}


GAMED = {
    "countdown": "({sum}) * 0 + 0x{target:x}",
    "countdown, with a decimal": "({sum}) * 0 + {target}e0",
}


@pytest.mark.parametrize("trick", GAMED.values(), ids=list(GAMED))
async def test_numbers_that_hide_from_the_count_are_not_read(service, trick: str) -> None:
    question = (await service.entry("countdown", {}, 3)).question
    *numbers, target = re.findall(r"\d+", question.split("Final answer")[0])
    answer = trick.format(sum=" + ".join(numbers), target=int(target))
    assert (await service.score("countdown", {}, 3, answer)).value <= 0.05


HOSTILE_SCORERS = """
import json, sys
from reasoning_gym import factory
from rollwright.envs.scoring import datasets, guard, judge

judge.prepare()
guard.install()

ways = {
    "eval": lambda answer: eval(answer),
    "exec": lambda answer: exec(answer),
    "compile": lambda answer: compile(answer, "a", "eval"),
    "literal": lambda answer: __import__("ast").literal_eval(answer),
    "import": lambda answer: __import__("this"),
    "open": lambda answer: open("/dev/null"),
    "command": lambda answer: __import__("os").system("true"),
    "process": lambda answer: __import__("subprocess").run(["true"]),
    "sympify": lambda answer: __import__("sympy").sympify(answer),
    "parse_expr": lambda answer: __import__("sympy").parse_expr(answer),
    "pickle": lambda answer: __import__("pickle").loads(b"cos\\ngetpid\\n."),
    "socket": lambda answer: __import__("socket").socket(),
    "ctypes": lambda answer: __import__("ctypes").string_at(1),
    "hidden": lambda answer: float("1") if not isinstance(eval(answer), type) else 1.0,
}
kind, config = factory.DATASETS["basic_arithmetic"]
found = {}
for name, way in ways.items():
    class Evaluating(kind):
        def score_answer(self, answer, entry, way=way):
            try:
                way(answer)
            except Exception:
                pass
            return 1.0
    factory.DATASETS["evaluating"] = (Evaluating, config)
    question = datasets.make("evaluating", {}, 1)
    verdict = datasets.judge(question, "1 + 1")
    refusal = datasets.check("evaluating", {})
    found[name] = [verdict.score.value, verdict.was_stopped, refusal and refusal.message]
del factory.DATASETS["evaluating"]
print(json.dumps(found))
"""


def test_a_scorer_that_evaluates_by_any_way_is_stopped_and_its_dataset_refused_at_the_start() -> None:
    """Also for datasets of later releases."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE_SCORERS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for name, (value, was_stopped, refusal) in json.loads(done.stdout.splitlines()[-1]).items():
        assert (value, was_stopped) == (0.0, True), name
        assert "cannot be judged: its scorer evaluates answers as code" in refusal
        assert "\n" not in refusal


def test_the_page_lists_the_datasets_whose_scorer_evaluates() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    section = page.split("## Answers that are code")[1].split("\n## ")[0]
    assert not [each for each in (*EVALUATING, "bitwise_arithmetic", "number_sorting") if each not in section]
