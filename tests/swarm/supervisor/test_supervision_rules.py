"""Rows E7 and E8: when a node is started again, given up, made smaller or judged to hang, decided without a process."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.swarm.supervisor.logs import KEPT, NodeLogs
from rollwright.swarm.supervisor.rules import (
    HOUR,
    ExitCause,
    ProcessExit,
    Restart,
    RestartHistory,
    RestartRules,
    Seen,
    Stop,
    Watch,
    WatchRules,
    classify_exit,
    decide,
)

RULES = RestartRules(first_delay=1, factor=2, max_delay=10, max_fruitless=6, max_per_hour=20)


def crash(rounds: int = 0, ending: ExitCause = ExitCause.CRASHED) -> ProcessExit:
    return ProcessExit(ending, 1, 5.0, rounds, "boom")


def delays(lives: list[ProcessExit], rules: RestartRules = RULES) -> list[float | str]:
    """The waits, and at the end why it was given up."""
    history, found, now = RestartHistory(), [], 0.0
    for life in lives:
        history, decision = decide(history, life, now, rules, oom_fallbacks=0)
        now += 100
        if isinstance(decision, Stop):
            return [*found, decision.reason]
        found.append(decision.delay)
    return found


def test_waits_grow_to_a_limit_and_begin_anew_after_a_finished_round() -> None:
    assert delays([crash()] * 5) == [1, 2, 4, 8, 10]
    assert delays([crash(), crash(), crash(rounds=1), crash(), crash()]) == [1, 2, 1, 1, 2]


def test_a_crash_loop_stops_and_says_what_was_last_heard() -> None:
    assert delays([crash()] * 9)[-1] == (
        '6 times in a row no round was finished; the last time the node ended with code 1 after 5 s and 0 rounds: "boom"'
    )


def test_even_a_node_that_gets_rounds_done_has_a_limit_in_each_hour() -> None:
    busy = delays([crash(rounds=1)] * 40)
    assert len(busy) == 21
    assert "more than 20 restarts in an hour" in str(busy[-1])
    calm = RestartRules(max_per_hour=int(HOUR // 100))
    assert all(isinstance(each, float) for each in delays([crash(rounds=1)] * 200, calm))


@given(st.lists(st.sampled_from(list(ExitCause)), min_size=9), st.integers(0, 3))
def test_without_a_finished_round_it_ends_after_a_bounded_number_of_lives(
    endings: list[ExitCause], oom_fallbacks: int
) -> None:
    """However it dies: at most `max_fruitless` lives for the size it began with and for each smaller one."""
    history, lives = RestartHistory(), 0
    for ending in endings * 4:
        history, decision = decide(
            history, crash(0, ending), lives * HOUR, RULES, oom_fallbacks=oom_fallbacks
        )
        lives += 1
        if isinstance(decision, Stop):
            break
        assert RULES.first_delay <= decision.delay <= RULES.max_delay
    assert isinstance(decision, Stop)
    assert lives <= RULES.max_fruitless * (oom_fallbacks + 1)


def test_want_of_memory_asks_for_less_until_there_is_no_less() -> None:
    history, found = RestartHistory(), []
    for number in range(9):
        history, decision = decide(
            history, crash(ending=ExitCause.OUT_OF_MEMORY), float(number), RULES, oom_fallbacks=3
        )
        found.append((history.oom_fallbacks, type(decision)))
    assert found == [(1, Restart), (2, Restart), (3, Restart), *[(3, Restart)] * 5, (3, Stop)]


@pytest.mark.parametrize(
    ("code", "rounds", "by_kernel", "expected"),
    [
        (0, 0, False, ExitCause.DONE),
        (1, 0, False, ExitCause.CRASHED),
        (2, 0, False, ExitCause.REFUSED),
        (2, 3, False, ExitCause.CRASHED),
        (137, 0, False, ExitCause.OUT_OF_MEMORY),
        (-9, 0, True, ExitCause.OUT_OF_MEMORY),
        (-9, 0, False, ExitCause.CRASHED),
        (-11, 0, True, ExitCause.CRASHED),
    ],
)
def test_how_a_life_ended(code: int, rounds: int, by_kernel: bool, expected: ExitCause) -> None:
    assert classify_exit(code, rounds, killed_for_memory=by_kernel) is expected


WATCH = WatchRules(hang_seconds=10, start_seconds=100, stopped_seconds=5, blind_seconds=4)


def judge(looks: list[Seen]) -> list[ExitCause | None]:
    watch = Watch(WATCH, 0.0)
    return [watch.look(each) for each in looks]


def test_a_beat_that_moves_is_life_and_one_that_does_not_is_none() -> None:
    moving = [Seen(float(at), at // 9, False) for at in range(0, 60, 3)]
    assert set(judge(moving)) == {None}
    still = [Seen(float(at), 1, False) for at in range(0, 16, 3)]
    assert judge(still) == [None, None, None, None, ExitCause.HUNG, ExitCause.HUNG]


def test_starting_may_take_longer() -> None:
    assert set(judge([Seen(float(at), None, False) for at in range(0, 99, 3)])) == {None}
    assert set(judge([Seen(float(at), 1, False, starting=True) for at in range(0, 99, 3)])) == {None}
    assert judge([Seen(float(at), None, False) for at in range(0, 103, 3)])[-1] is ExitCause.HUNG


def test_a_suspended_process_is_given_a_moment() -> None:
    briefly = [Seen(float(at), at, 2 <= at < 6) for at in range(20)]
    assert set(judge(briefly)) == {None}
    assert judge([Seen(float(at), 1, True) for at in range(6)])[-1] is ExitCause.STOPPED


def test_a_watcher_that_slept_itself_judges_nobody_by_it() -> None:
    assert judge([Seen(0.0, 1, False), Seen(5000.0, 1, False), Seen(5003.0, 1, True)]) == [None, None, None]


def test_logs_are_bounded_and_a_reader_of_the_open_file_goes_on(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path, most_bytes=2_000)
    logs.write_output("first")
    with logs.readable.open() as follower:
        for number in range(400):
            logs.write_output(f"line {number:04} " + "x" * 50)
        follower.seek(0)
        assert "line 0399" in follower.read()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 * (KEPT + 1)
    assert all(file.stat().st_size <= 2_000 for file in files)
    kept = [
        json.loads(line)["text"]
        for number in (*range(KEPT, 0, -1), 0)
        for line in (tmp_path / f"events.jsonl{f'.{number}' if number else ''}").read_text().splitlines()
    ]
    numbers = [int(text.split()[1]) for text in kept]
    assert numbers == list(range(400 - len(numbers), 400))
