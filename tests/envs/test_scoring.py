"""The scoring process: right about answers, and safe from them.

`string_insertion` serves as the target: its scorer evaluates an answer that is not the right one, and gives
0.1 if the value, joined, is. So `oracle_answer if <attack> else []` shows whether an attack worked.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.scoring import Score, ScoringService, shared
from rollwright.envs.scoring.service import MAX_ANSWER
from rollwright.errors import ConfigError

EVALUATED = Score(0.1)
"""The answer was run as code, and what it tried succeeded."""
REFUSED = Score(0.0)
"""It was run as code, and what it tried raised."""

Ask = Callable[..., Awaitable[Score]]


@pytest.fixture
def service() -> ScoringService:
    return shared()


@pytest.fixture
def ask(service: ScoringService) -> Ask:
    async def ask(answer: str, **limits: float) -> Score:
        return await service.score("string_insertion", {}, 1, answer, **limits)

    return ask


def _pid(service: ScoringService) -> int:
    assert service._running is not None
    return service._running.process.pid


async def test_right_wrong_and_evaluated_answers_get_what_the_dataset_says(service, ask: Ask) -> None:
    entry = await service.entry("string_insertion", {}, 1)
    assert entry.answer is not None
    assert await ask(entry.answer) == Score(1.0)
    assert await ask("nothing like it") == Score(0.0)
    assert await ask(repr(list(entry.answer))) == EVALUATED
    assert await ask("oracle_answer if 1 + 1 == 2 else []") == EVALUATED


@pytest.mark.parametrize(
    "attack",
    [
        "not __import__('os').system('touch {file}')",
        "open('{file}', 'w')",
        "open('{file}', 'a')",
        "__import__('os').open('{file}', 0o101)",
        "not __import__('os').mkdir('{file}')",
        "not __import__('os').symlink('/', '{file}')",
        "not __import__('subprocess').run(['touch', '{file}'])",
        "not __import__('os').rename('{beside}', '{file}')",
    ],
)
def test_an_answer_cannot_make_a_file(ask: Ask, tmp_path: Path, attack: str) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    beside = tmp_path / "beside"
    beside.touch()
    target = tmp_path / "made"
    answer = f"oracle_answer if {attack.format(file=target, beside=beside)} else []"
    assert asyncio.run(ask(answer)) == REFUSED
    assert sorted(tmp_path.iterdir()) == [beside]


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('socket').socket()",
        "__import__('os').fork() + 1",
        "not __import__('os').kill(__import__('os').getppid(), 9)",
        "not __import__('os').chdir('/tmp')",
        "not __import__('resource').setrlimit(0, (9, 9))",
        "not __import__('os').setuid(12345)",
        "'ROLLWRIGHT_SECRET' in __import__('os').environ",
        "len(__import__('os').listdir('/proc/self/fd')) > 5",
    ],
)
async def test_an_answer_cannot_reach_out(ask: Ask, attack: str) -> None:
    assert await ask(f"oracle_answer if {attack} else []") == REFUSED


async def test_modules_can_still_be_imported(ask: Ask) -> None:
    """Scorers load some of theirs late, and would otherwise call right answers wrong."""
    assert await ask("oracle_answer if __import__('xml.dom.minidom') else []") == EVALUATED


async def test_an_endless_answer_is_killed_and_others_are_not_disturbed(service, ask: Ask) -> None:
    entry = await service.entry("string_insertion", {}, 1)
    pid = _pid(service)
    endless = asyncio.gather(
        ask("list(iter(int, 1))", seconds=0.5), ask("__import__('time').sleep(99)", seconds=0.5)
    )
    assert await asyncio.gather(*(ask(entry.answer) for _ in range(5))) == [Score(1.0)] * 5
    assert await endless == [Score(0.0, killed=True)] * 2
    assert await ask(entry.answer) == Score(1.0)
    assert _pid(service) == pid


async def test_memory_is_limited(ask: Ask) -> None:
    bomb = "oracle_answer if bytes(2**28) else []"
    assert await ask(bomb, memory=2**30) == EVALUATED
    assert await ask(bomb, memory=2**27) == REFUSED


@pytest.mark.parametrize(
    ("attack", "score"),
    [
        ("exit()", Score(0.0, failed=True)),
        ("(_ for _ in ()).throw(KeyboardInterrupt)", Score(0.0, failed=True)),
        ("__import__('ctypes').string_at(0)", Score(0.0, killed=True)),
        ("__import__('os')._exit(0)", Score(0.0, killed=True)),
        ("__import__('os').write(3, b'x' * 100)", Score(0.0, killed=True)),
        ("[print('noise'), __import__('os').write(1, b'noise')]", REFUSED),
        ("\udcff broken text", REFUSED),
    ],
)
async def test_an_answer_that_breaks_its_scorer_is_worth_nothing_and_breaks_no_other(
    service, ask: Ask, attack: str, score: Score
) -> None:
    entry = await service.entry("string_insertion", {}, 1)
    pid = _pid(service)
    assert await ask(attack) == score
    assert await ask(entry.answer) == Score(1.0)
    assert _pid(service) == pid


async def test_what_an_answer_changes_in_its_process_is_gone_with_it(service, ask: Ask) -> None:
    patch = "setattr(__import__('builtins'), 'str', 5) or []"
    assert await ask(patch) in (REFUSED, Score(0.0, failed=True), Score(0.0, killed=True))
    entry = await service.entry("string_insertion", {}, 1)
    assert await ask(entry.answer) == Score(1.0)


async def test_an_answer_too_long_to_be_one_is_not_even_tried(ask: Ask) -> None:
    padded = "oracle_answer".ljust(MAX_ANSWER)
    assert await ask(padded) == EVALUATED
    assert await ask(padded + " ") == Score(0.0, failed=True)


def test_it_serves_one_event_loop_after_another(service, recwarn) -> None:
    questions = {asyncio.run(service.entry("string_insertion", {}, 1)).question for _ in range(5)}
    assert len(questions) == 1
    assert not recwarn.list


async def test_a_request_survives_the_death_of_the_process_and_questions_are_the_same_in_the_next(
    service, ask: Ask, monkeypatch
) -> None:
    hash_dependent = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
    before = [await service.entry(name, {}, seed) for name in hash_dependent for seed in range(3)]
    monkeypatch.setenv("ROLLWRIGHT_SECRET", "visible to this process only")
    slow = asyncio.create_task(ask("__import__('time').sleep(0.5) or oracle_answer"))
    await asyncio.sleep(0.1)
    pid = _pid(service)
    os.kill(pid, 9)
    assert await slow == EVALUATED
    assert _pid(service) != pid
    assert [await service.entry(name, {}, seed) for name in hash_dependent for seed in range(3)] == before
    assert await ask("oracle_answer if 'ROLLWRIGHT_SECRET' in __import__('os').environ else []") == REFUSED


async def test_a_dataset_or_option_that_does_not_exist_is_one_clear_line(service) -> None:
    for dataset, options, words in [
        ("sudokku", {}, "no dataset 'sudokku' .did you mean 'sudoku'"),
        ("countdown", {"min_numbrs": 3}, "unknown setting 'min_numbrs' .did you mean 'min_numbers'"),
        ("countdown", {"seed": 3}, "unknown setting 'seed'"),
        ("countdown", {"min_numbers": 1}, "countdown refuses .* must be greater than 1"),
        ("countdown", {"min_numbers": object()}, "must be plain data"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            service.check(dataset, options)
        assert "\n" not in str(caught.value)
    service.check("countdown", {"min_numbers": 3})


async def test_a_process_that_cannot_start_is_a_failure_and_no_score(monkeypatch) -> None:
    service = ScoringService()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EnvironmentFailure, match="cannot be started"):
        await service.score("countdown", {}, 1, "1 + 1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentFailure, match="ended before it was ready"):
        await service.score("countdown", {}, 1, "1 + 1")


def test_an_idle_process_ends_by_itself_and_so_does_one_whose_owner_died() -> None:
    serve = (
        "import sys\n"
        "from rollwright.envs.scoring import process\n"
        "process.IDLE_SECONDS = float(sys.argv[1])\n"
        "process._Server(0, sys.stdout.buffer, None).serve()\n"
    )
    for seconds, keeps_input_open in (("0.2", True), ("1000", False)):
        server = subprocess.Popen([sys.executable, "-c", serve, seconds], stdin=subprocess.PIPE)
        assert server.stdin is not None
        if not keeps_input_open:
            server.stdin.close()
        assert server.wait(timeout=30) == 0
        server.stdin.close()


def test_a_script_that_forgets_to_close_it_ends_cleanly() -> None:
    script = (
        "import asyncio\n"
        "from rollwright.envs import scoring\n"
        "print(asyncio.run(scoring.shared().entry('string_insertion', {}, 1)).answer)\n"
        "print(scoring.shared()._running.process.pid)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    pid = int(ended.stdout.split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_time_spent_on_the_question_is_not_taken_from_the_answer() -> None:
    script = (
        "import time\n"
        "from rollwright.envs.scoring.confinement import confine\n"
        "def work(seconds):\n"
        "    until = time.process_time() + seconds\n"
        "    while time.process_time() < until: pass\n"
        "work(2.2)\n"
        "confine(memory=1 << 26, cpu_seconds=0.5)\n"
        "work(0.5)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
