"""Rows E7 and E8 with real processes: nodes that crash, hang, are suspended, run out of memory, leave orphans."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwright.swarm.supervisor.record import SupervisorState, is_supervised

from .conftest import NO_MEMORY_KILLS, PATIENCE, QUICK, Watched, runs

Supervise = Callable[..., Watched]


def test_a_node_that_crashes_goes_on_where_it_was(supervise: Supervise) -> None:
    watched = supervise(
        """
        finish_a_round()
        if life < 3:
            raise RuntimeError(f"boom {life}")
        """
    )
    assert watched.wait() == 0
    assert watched.lives == 3
    assert watched.record.endings == {"crashed": 2, "done": 1}
    assert 'RuntimeError: boom 1"' in watched.record.last[0].reason
    assert watched.record.state is SupervisorState.ENDED


def test_a_crash_loop_is_left_with_the_reason(supervise: Supervise) -> None:
    watched = supervise("sys.exit('the disk is full')")
    assert watched.wait() == 1
    assert watched.lives == 3
    assert "3 times in a row no round was finished" in watched.record.reason
    assert "the disk is full" in watched.record.reason
    assert watched.log.count("next start in") == 2
    assert watched.log.count("the disk is full") == 2 * 3, "once by the node, once by the supervisor"
    assert "the supervisor ends with code 1: giving up: 3 times in a row no round was finished" in watched.log


def test_each_death_is_one_line_with_what_follows(supervise: Supervise) -> None:
    watched = supervise(
        """
        finish_a_round()
        if life == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if life == 2:
            sys.exit(137)
        """,
        f'{QUICK}, {NO_MEMORY_KILLS}, oom_fallbacks=[["batch=4"]]',
    )
    assert watched.wait() == 0
    said = [line.partition("| ")[2] for line in watched.log.splitlines() if " supervisor | " in line]
    deaths = [line for line in said if " after " in line]
    assert [line.partition(" after ")[0].split(maxsplit=2)[2] for line in deaths] == [
        "was killed by SIGKILL",
        "was killed for want of memory",
        "ended with code 0",
    ]
    assert all(" and 1 round" in line for line in deaths)
    assert deaths[0].endswith(" s")
    assert deaths[1].endswith(" s with batch=4")
    assert [line for line in said if line.startswith("started process")][1].count("(restart 1)") == 1
    assert said[-1] == "the supervisor ends with code 0: the node ended by itself"
    assert len(said) == 3 + 3 + 1, "three starts, three ends, and its own"


def test_settings_that_are_refused_are_not_tried_again(supervise: Supervise) -> None:
    watched = supervise("print('error: seed: got nonsense', flush=True); sys.exit(2)")
    assert watched.wait() == 2
    assert watched.lives == 1
    assert "seed: got nonsense" in watched.record.reason


def test_want_of_memory_makes_the_batch_smaller(supervise: Supervise) -> None:
    oom_fallbacks = 'oom_fallbacks=[["batch=4"], ["batch=2"]]'
    watched = supervise("sys.exit(137 if life < 3 else 0)", f"{QUICK}, {oom_fallbacks}")
    assert watched.wait() == 0
    assert (watched.home / "arguments").read_text().splitlines() == ["", "batch=4", "batch=2"]
    assert watched.record.endings == {"out_of_memory": 2, "done": 1}
    assert watched.record.oom_fallbacks == ["batch=2"]


def test_a_killed_node_is_started_again_as_it_was(supervise: Supervise) -> None:
    """`kill -9` by a person is no want of memory: the kernel's counter tells them apart."""
    watched = supervise(
        "finish_a_round(); time.sleep(600 if life == 1 else 0)",
        f'{QUICK}, {NO_MEMORY_KILLS}, oom_fallbacks=[["batch=4"]]',
    )
    os.kill(watched.until_beating(), signal.SIGKILL)
    assert watched.wait() == 0
    assert (watched.home / "arguments").read_text().splitlines() == ["", ""]
    assert watched.record.endings == {"crashed": 1, "done": 1}


def test_a_node_that_lives_but_does_nothing_is_started_again(supervise: Supervise) -> None:
    watched = supervise(
        "finish_a_round(); time.sleep(600 if life == 1 else 0)",
        f"{QUICK}, watching=WatchRules(hang_seconds=1)",
    )
    assert watched.wait() == 0
    assert watched.record.endings == {"hung": 1, "done": 1}


def test_a_suspended_node_is_started_again(supervise: Supervise) -> None:
    watched = supervise(
        """
        finish_a_round()
        while life == 1:
            pulse.progress()
            time.sleep(0.05)
        """,
        f"{QUICK}, watching=WatchRules(stopped_seconds=0.5)",
    )
    pid = watched.until_beating()
    os.kill(pid, signal.SIGSTOP)
    assert watched.wait() == 0
    assert watched.record.endings == {"stopped": 1, "done": 1}
    assert not runs(pid)


ORPHANS = """
quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
plain = subprocess.Popen(sleeping, **quiet)
away = subprocess.Popen(sleeping, start_new_session=True, **quiet)
nameless = subprocess.Popen(sleeping, start_new_session=True, env={}, **quiet)
(home / f"orphans-{life}").write_text(f"{plain.pid} {away.pid} {nameless.pid}")
finish_a_round()
"""


def orphans_of(home: Path, life: int) -> list[int]:
    return [int(each) for each in (home / f"orphans-{life}").read_text().split()]


def test_nothing_of_a_dead_node_is_left_behind(supervise: Supervise) -> None:
    """Neither what stayed in its group, nor what left it, nor what has an environment of its own."""
    watched = supervise(ORPHANS + "os._exit(3 if life == 1 else 0)")
    assert watched.wait() == 0
    for life in (1, 2):
        assert not [pid for pid in orphans_of(watched.home, life) if runs(pid)]
    assert "ended 3 processes that the node left behind" in watched.log


def test_being_told_to_stop_reaches_the_node_first(supervise: Supervise) -> None:
    watched = supervise(
        """
        def checkpoint(number, frame):
            print("checkpoint written", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, checkpoint)
        finish_a_round()
        time.sleep(600)
        """
    )
    pid = watched.until_beating()
    assert is_supervised(watched.home)
    watched.process.terminate()
    assert watched.wait() == 128 + signal.SIGTERM
    assert "checkpoint written" in watched.log
    assert not runs(pid)
    assert not is_supervised(watched.home)


def test_a_node_that_does_not_stop_in_time_is_killed(supervise: Supervise) -> None:
    watched = supervise(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); finish_a_round(); time.sleep(600)",
        f"{QUICK}, stop_seconds=0.5",
    )
    pid = watched.until_beating()
    watched.process.terminate()
    assert watched.wait() == 128 + signal.SIGTERM
    assert not runs(pid)


def test_a_supervisor_that_was_killed_leaves_nothing_that_the_next_one_trips_over(
    supervise: Supervise,
) -> None:
    first = supervise("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ORPHANS + "time.sleep(600)")
    pid = first.until_beating()
    first.until(lambda: (first.home / "orphans-1").exists())
    first.process.kill()
    first.wait()
    second = supervise("finish_a_round()")
    assert second.wait() == 0
    assert not runs(pid)
    assert not [each for each in orphans_of(first.home, 1)[:2] if runs(each)]
    os.kill(
        orphans_of(first.home, 1)[2], signal.SIGKILL
    )  # nameless, and its adopter is dead: nobody can know it


def test_one_folder_has_one_supervisor(supervise: Supervise) -> None:
    first = supervise("finish_a_round(); time.sleep(600)")
    first.until_beating()
    second = supervise("finish_a_round(); time.sleep(600)")
    assert second.wait() == 1
    assert second.process.stderr is not None
    assert f"is supervised already (process {first.process.pid})" in second.process.stderr.read()


def test_both_logs_tell_what_the_node_said_and_what_was_done(supervise: Supervise) -> None:
    watched = supervise("print('a word'); finish_a_round()")
    assert watched.wait() == 0
    rows = [json.loads(line) for line in (watched.home / "logs" / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["start", "output", "output", "end", "ended"]
    assert rows[2]["from"] == "node"
    assert rows[2]["text"] == "a word"
    assert "node       | a word" in watched.log


@pytest.fixture
def tight_group() -> Iterator[Path]:
    """A real group of version 1 with little memory, where this machine lets one make it."""
    place = Path("/sys/fs/cgroup/memory") / f"rollwright-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError:
        pytest.skip("groups cannot be made here")
    yield place
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:  # the kernel needs a moment to see that nobody is in it
        try:
            place.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def test_the_kernels_own_kill_for_want_of_memory_is_known(supervise: Supervise, tight_group: Path) -> None:
    watched = supervise(
        f"""
        Path({str(tight_group)!r}, "cgroup.procs").write_text(str(os.getpid()))
        held = bytearray((400 if len(sys.argv) == 2 else 10) << 20)
        finish_a_round()
        """,
        f'{QUICK}, oom_fallbacks=[["batch=4"]]',
    )
    assert watched.wait() == 0
    assert watched.record.endings == {"out_of_memory": 1, "done": 1}
    assert watched.record.oom_fallbacks == ["batch=4"]
