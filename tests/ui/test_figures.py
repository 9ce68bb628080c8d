"""Figures of the page, which are pure: states, estimates, intervals, thinned curves, the flow of the ledger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.ui.figures import (
    RunState,
    cost_of,
    flow_of,
    progress_of,
    state_of,
    thinned,
    trainer_curves,
    wilson,
)
from rollwright.ui.redaction import Redaction, without_secrets

ENDED = {"interrupted": False, "error": None}


def live(age: float) -> dict[str, object]:
    return {"time": 1000.0 - age, "pid": 1}


@pytest.mark.parametrize(
    ("summary", "snapshot", "alive", "state"),
    [
        (None, live(1), True, RunState.RUNNING),
        (None, live(1), None, RunState.RUNNING),
        (None, live(1), False, RunState.KILLED),
        (None, live(60), True, RunState.SILENT),
        (None, live(60), False, RunState.KILLED),
        (None, live(60), None, RunState.KILLED),
        (ENDED, live(1), True, RunState.RUNNING),  # resumed
        (ENDED, None, None, RunState.ENDED),
        ({"interrupted": True}, None, None, RunState.INTERRUPTED),
        ({"error": "no engine"}, None, None, RunState.FAILED),
        (None, None, None, RunState.UNKNOWN),
    ],
)
def test_the_state_of_a_run(
    summary: dict[str, object] | None, snapshot: dict[str, object] | None, alive: bool | None, state: RunState
) -> None:
    assert state_of(summary, snapshot, now=1000.0, alive=alive) is state


def test_the_end_is_estimated_from_the_steps_of_this_process() -> None:
    snapshot = {"time": 100.0, "began": 0.0, "steps": 30, "steps_at_start": 20}
    told = progress_of([], snapshot, 50, 100.0)
    assert told == {"steps": 30, "most_steps": 50, "share": 0.6, "seconds_left": 200.0}


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_an_interval_holds_its_share_and_stays_within_0_and_1(share: float, count: int) -> None:
    interval = wilson(share, count)
    assert interval is not None
    assert 0 <= interval[0] <= share + 1e-9
    assert share - 1e-9 <= interval[1] <= 1


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300), st.integers(1, 50))
def test_a_thinned_curve_keeps_its_mean_and_its_bounds(values: list[float | None], most: int) -> None:
    short = thinned({"y": values}, most)["y"]
    assert len(short) <= max(most, 0) or len(short) == len(values)
    known = [each for each in values if each is not None]
    assert all(min(known) - 1e-6 <= each <= max(known) + 1e-6 for each in short if each is not None)


def test_lines_of_one_step_are_one_point() -> None:
    rows = [
        {"step": 0, "reward": 1.0, "skipped": "x"},
        {"step": 1, "reward": 2.0},
        {"step": 1, "val/reward": 3.0},
    ]
    assert trainer_curves(rows) == {"step": [0, 1], "reward": [1.0, 2.0], "val/reward": [None, 3.0]}


def test_the_flow_sums_to_what_was_opened() -> None:
    ledger = {
        "opened": 10,
        "running": 1,
        "waiting": 2,
        "delivered": 3,
        "filtered": 1,
        "stale": 1,
        "cancelled": 1,
        "failed": 1,
    }
    flow = flow_of(ledger, {"failed: x": 1}, 2)
    parts = ("running", "waiting", "delivered", "filtered", "stale", "cancelled", "failed")
    assert sum(flow[name] for name in parts) == flow["opened"]


def test_costs_follow_the_given_prices() -> None:
    assert cost_of(2e6, 1e6, (0.5, 2.0)) == 3.0
    assert cost_of(2e6, 1e6, None) is None


def test_settings_that_are_secrets_are_hidden_and_others_are_not() -> None:
    shown = without_secrets(
        {
            "api_key": "abc",
            "api_key_env": "OPENAI_API_KEY",
            "tokenizer": "models/x",
            "max_tokens": 5,
            "nested": [{"password": "abc"}],
            "base_url": "http://u:p@host:1/v1",
        }
    )
    assert shown["api_key"] == shown["nested"][0]["password"] == "…"
    assert shown["api_key_env"] == "OPENAI_API_KEY"
    assert (shown["tokenizer"], shown["max_tokens"]) == ("models/x", 5)
    assert "p@" not in shown["base_url"]
    assert "host:1" in shown["base_url"]


@given(st.text(min_size=6).filter(lambda text: text.strip() == text), st.text(), st.text())
def test_a_known_secret_is_in_no_answer(secret: str, before: str, after: str) -> None:
    try:
        answer = f"{before}{secret}{after}".encode()
    except UnicodeEncodeError:
        return
    assert secret.encode() not in Redaction([secret], {}).clean(answer)
