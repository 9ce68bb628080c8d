"""Judges score answers correctly, bound the resources of each answer, and are replaced when they end."""

import asyncio
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.scoring import Score, ScoringService, shared
from rollwright.envs.scoring import pool as pool_module
from rollwright.envs.scoring.service import MAX_ANSWER
from rollwright.errors import ConfigError
from rollwright.sandbox.client import ForkServer
from rollwright.sandbox.protocol import Ready, SandboxLimits

KILLED = Score(0.0, killed=True)
ENDLESS = "1e999999999"
"""An answer of coin_flip: a fraction of a billion digits."""


@pytest.fixture
def service() -> ScoringService:
    return shared()


@pytest.fixture
def own_service():
    made = ScoringService()
    yield made
    made.close()


def fork_server_pid(service: ScoringService) -> int:
    """Process id of the fork server."""
    process = service.pool.fork_server.process
    assert process is not None
    return process.pid


def judges(pid: int) -> list[int]:
    """Process ids of the judges, which are grandchildren of the fork server: the spawner is between them."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parent = {int(each): int(above) for each, above in (line.split() for line in found.splitlines())}
    return [each for each, above in parent.items() if parent.get(above) == pid]


async def test_right_and_wrong_answers_and_lists_get_what_the_dataset_says(service) -> None:
    entry = await service.entry("string_insertion", {}, 1)
    assert entry.answer is not None

    async def ask(answer: str) -> Score:
        return await service.score("string_insertion", {}, 1, answer)

    assert await ask(entry.answer) == Score(1.0)
    assert await ask("nothing like it") == Score(0.0)
    assert await ask(repr(list(entry.answer))) == Score(0.1)
    assert await ask(repr(tuple(entry.answer))) == Score(0.1)
    assert await ask(repr(entry.answer)) == Score(0.1)
    assert await ask(f"list({entry.answer!r})") == Score(0.0, refused=True)
    assert await ask("\udcff broken text") == Score(0.0)


async def test_an_endless_answer_is_killed_and_others_are_not_disturbed(own_service) -> None:
    entry = await own_service.entry("string_insertion", {}, 1)
    endless = asyncio.gather(*(own_service.score("coin_flip", {}, 1, ENDLESS, seconds=0.5) for _ in range(3)))
    right = [own_service.score("string_insertion", {}, 1, entry.answer, seconds=60) for _ in range(20)]
    assert await asyncio.gather(*right) == [Score(1.0)] * 20
    assert await endless == [KILLED] * 3
    assert await own_service.score("string_insertion", {}, 1, entry.answer) == Score(1.0)


def room_for_more(pid: int) -> int:
    """Bytes that a process can still allocate."""
    (limit,) = [
        int(line.split()[3])
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
        if line.startswith("Max address space")
    ]
    return limit - int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


async def test_memory_is_limited_and_a_judge_that_ran_out_of_it_spoils_nothing() -> None:
    small = ScoringService(memory=64 << 20)
    entry = await small.entry("basic_arithmetic", {}, 1)
    (judge,) = judges(fork_server_pid(small))
    assert room_for_more(judge) <= 64 << 20
    # The text of a number with a billion digits takes a gigabyte; this scorer catches the `MemoryError` itself.
    assert (await small.score("power_function", {}, 1, "1e999999999", seconds=60)).value <= 0.01
    assert await small.score("basic_arithmetic", {}, 1, entry.answer) == Score(1.0)
    small.close()


async def test_an_answer_over_which_a_judge_dies_is_tried_once_more_and_then_worth_nothing(
    own_service,
) -> None:
    await own_service.entry("coin_flip", {}, 1)
    pid = fork_server_pid(own_service)
    asked = asyncio.create_task(own_service.score("coin_flip", {}, 1, ENDLESS, seconds=60))
    seen: set[int] = set()
    while not asked.done():
        fresh = set(await asyncio.to_thread(judges, pid)) - seen
        busy = [each for each in fresh if is_computing(each)]
        for each in busy:
            seen.add(each)
            os.kill(each, signal.SIGKILL)
        await asyncio.sleep(0.01)
    assert asked.result() == KILLED
    assert len(seen) == 2
    assert fork_server_pid(own_service) == pid


def is_computing(pid: int) -> bool:
    """Whether a judge has used some processor time for its answer."""
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
    except OSError:
        return False
    return int(used) > 10


async def test_what_an_answer_is_worth_does_not_depend_on_what_was_judged_before(service) -> None:
    cases = [
        (name, seed)
        for name in ("decimal_arithmetic", "chain_sum", "simple_integration", "knight_swap", "pool_matrix")
        for seed in range(3)
    ]
    answers = {case: (await service.entry(case[0], {}, case[1])).answer for case in cases}

    async def score(name: str, seed: int, answer: str) -> Score:
        return await service.score(name, {}, seed, answer)

    given = [(name, seed, answer) for name, seed in cases for answer in {*answers.values()} if answer]
    forwards = [await score(*each) for each in given]
    backwards = [await score(*each) for each in reversed(given)]
    assert forwards == backwards[::-1]
    assert forwards.count(Score(1.0)) >= len(cases)


async def test_an_answer_too_long_to_be_one_is_not_even_tried(service) -> None:
    entry = await service.entry("basic_arithmetic", {}, 1)
    padded = entry.answer.ljust(MAX_ANSWER)
    assert not (await service.score("basic_arithmetic", {}, 1, padded)).failed
    assert await service.score("basic_arithmetic", {}, 1, padded + " ") == Score(0.0, failed=True)


def test_it_serves_one_event_loop_after_another(service, recwarn) -> None:
    questions = {asyncio.run(service.entry("string_insertion", {}, 1)).question for _ in range(5)}
    assert len(questions) == 1
    assert not recwarn.list


async def test_a_request_that_nobody_waits_for_any_more_disturbs_nothing(own_service) -> None:
    entry = await own_service.entry("basic_arithmetic", {}, 1)
    asked = [
        asyncio.create_task(own_service.score("basic_arithmetic", {}, 1, entry.answer)) for _ in range(200)
    ]
    await asyncio.sleep(0)
    for each in asked[::2]:
        each.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert found[1::2] == [Score(1.0)] * 100
    assert await own_service.score("basic_arithmetic", {}, 1, entry.answer) == Score(1.0)


async def test_requests_survive_the_death_of_all_judges_and_questions_are_the_same_in_the_next(
    own_service,
) -> None:
    hash_dependent = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
    before = [await own_service.entry(name, {}, seed) for name in hash_dependent for seed in range(3)]
    pid = fork_server_pid(own_service)
    slow = asyncio.create_task(own_service.score("coin_flip", {}, 1, ENDLESS, seconds=1.5))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    assert await slow == KILLED
    assert fork_server_pid(own_service) != pid
    assert [await own_service.entry(name, {}, seed) for name in hash_dependent for seed in range(3)] == before


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


async def test_judges_that_cannot_start_are_a_failure_and_no_score(monkeypatch) -> None:
    service = ScoringService()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EnvironmentFailure, match="cannot be started"):
        await service.score("countdown", {}, 1, "1 + 1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentFailure, match=r"ended before it was ready|cannot be started"):
        await service.score("countdown", {}, 1, "1 + 1")
    service.close()


async def test_idle_judges_end_by_themselves_and_come_back(monkeypatch, own_service) -> None:
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.2)
    entry = await own_service.entry("basic_arithmetic", {}, 1)
    process = own_service.pool.fork_server.process
    assert await asyncio.to_thread(process.wait, 60) is not None
    assert await own_service.entry("basic_arithmetic", {}, 1) == entry
    assert own_service.pool.fork_server.process is not process


def test_judges_end_when_their_owner_is_killed() -> None:
    script = (
        "import asyncio, time\n"
        "from rollwright.envs import scoring\n"
        "asyncio.run(scoring.shared().entry('basic_arithmetic', {}, 1))\n"
        "print(scoring.shared().pool.fork_server.process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    below = [pid, *judges(pid)]
    assert len(below) > 1
    owner.kill()
    owner.wait()
    owner.stdout.close()
    for _ in range(1000):
        if not any(Path(f"/proc/{each}").exists() for each in below):
            return
        subprocess.run(["sleep", "0.02"], check=True)
    pytest.fail("a judge is left over")


def test_a_script_that_forgets_to_close_it_ends_cleanly() -> None:
    script = (
        "import asyncio\n"
        "from rollwright.envs import scoring\n"
        "print(asyncio.run(scoring.shared().entry('string_insertion', {}, 1)).answer)\n"
        "print(scoring.shared().pool.fork_server.process.pid)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    pid = int(ended.stdout.split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_forked_copy_of_a_process_has_judges_of_its_own() -> None:
    script = (
        "import asyncio, os\n"
        "from rollwright.envs import scoring\n"
        "def ask(): return asyncio.run(scoring.shared().entry('string_insertion', {}, 1)).question\n"
        "before = ask()\n"
        "pid = os.fork()\n"
        "assert ask() == before\n"
        "scoring.shared().close()\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


REFUSING = """
import platform, struct, sys
from rollwright.envs import registry
from rollwright.errors import RollwrightError
from rollwright.sandbox import isolation
unshare = {"x86_64": 272, "aarch64": 97}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
isolation.install_seccomp_filter(b"".join(struct.pack("HBBI", *each) for each in steps))
try:
    registry.make("reasoning_gym:countdown")
except RollwrightError as error:
    print(error)
else:
    print("made")
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the call's number is not known")
def test_a_machine_without_namespaces_judges_nothing_unless_told_so() -> None:
    command = [sys.executable, "-c", REFUSING]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.stdout.count("\n") == 1
    assert "missing is namespaces: unshare: Operation not permitted" in refused.stdout
    assert "ROLLWRIGHT_UNCONFINED_SCORING" in refused.stdout
    told = {**os.environ, "ROLLWRIGHT_UNCONFINED_SCORING": "1"}
    allowed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=told)
    # Even then no judge runs as root: it is refused if `nobody` cannot read this Python.
    assert allowed.stdout == "made\n" or "an unprivileged user to read" in allowed.stdout


PROGRAM = """
import os
from pathlib import Path
def prepare(): pass
def reads(): return [Path(__file__)]
def serve(line, limits): os.write(line, str(os.geteuid()).encode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused for this")
@pytest.mark.parametrize(("mode", "is_readable"), [(0o755, True), (0o700, False)])
def test_root_never_judges_as_root_also_where_others_cannot_read(
    tmp_path: Path, monkeypatch, mode: int, is_readable: bool
) -> None:
    import msgspec

    (tmp_path / "private_program.py").write_text(PROGRAM)
    tmp_path.chmod(mode)
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server = ForkServer("private_program", [tmp_path])
    line = fork_server.start(SandboxLimits())
    line.settimeout(60)
    said = b""
    while more := line.recv(1 << 16):
        said += more
    line.close()
    fork_server.close()
    length = int.from_bytes(said[:4])
    ready = msgspec.msgpack.decode(said[4 : 4 + length], type=Ready)
    if is_readable:
        assert ready == Ready()
        assert said[4 + length :].startswith(b"65534")
    else:
        assert "an unprivileged user to read" in ready.missing
        assert "chmod -R o+rX" in ready.missing
        assert b"0" not in said[4 + length :]
