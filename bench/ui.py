"""The page over long runs: first paint, any turn, search and live lag in a real browser, and what it costs a run beside it.

python bench/ui.py            100,000 turns, then a million
python bench/ui.py --turns 100000 --no-million

Times of a browser are wall times, because that is what a user waits; the slowdown of a run is counted in CPU time of its
process and in its own throughput, with the page and without it in turn.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from results_file import write_results
from rollwright.run.live_snapshot import pause_after

ROOT = Path(__file__).parents[1]
SAMPLES = 15
"""Turns and searches that are timed."""

ROUNDS = 4
"""Runs with the page and without it, in turn."""


BESIDE = """
name: beside
max_steps: 12
rollout_batch_size: 256
policy: {kind: simulated, slots: 256, tokens_per_second: 1000000, skill: 0.6}
train_env_manager: {num_env_groups: 32, group_size: 8, tags: [FrozenLake]}
"""


def tests_module(name: str) -> ModuleType:
    """A module of tests/ui, whose browser and long runs this uses."""
    spec = importlib.util.spec_from_file_location(f"ui_{name}", ROOT / "tests" / "ui" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Page:
    """`rollwright ui` in a process of its own."""

    def __init__(self, runs: Path) -> None:
        words = [sys.executable, "-m", "rollwright", "ui", str(runs), "--port", "0", "--tied", "--no-browser"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().removeprefix("page: ")

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    @property
    def megabytes(self) -> float:
        return round(psutil.Process(self.process.pid).memory_info().rss / 2**20, 1)


def timed(browser: Any, act: str, done: str) -> float:
    """Seconds from an action in the page to a condition, by the page's own clock."""
    script = (
        "const done = arguments[arguments.length - 1]; const from = performance.now(); "
        f"{act}; const look = () => ({done}) ? requestAnimationFrame(() => done(performance.now() - from)) "
        ": setTimeout(look, 1); look();"
    )
    return float(browser.run_async(script)) / 1000


def long_run(browser: Any, folder: Path, turns: int) -> dict[str, Any]:
    with Page(folder) as page:
        browser.open("about:blank")
        browser.open(f"{page.url}#/run/long/trajectories")
        browser.wait("return performance.getEntriesByName('first-contentful-paint').length > 0")
        paint = (
            browser.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        )
        browser.wait("return document.querySelectorAll('.episode-list tbody tr').length > 0", seconds=120)
        listed = browser.run("return performance.now()") / 1000
        began = time.monotonic()
        browser.wait_for(f"{turns // 10:,} episodes", seconds=300)
        browser.wait("return !document.body.innerText.includes('reading the log')", seconds=300)
        indexed = time.monotonic() - began + listed
        episodes = turns // 10
        opened, searched, common = [], [], []
        for number in range(SAMPLES):
            at = number * 7919 % episodes
            place = f"#/run/long/trajectory/long.train-g{at // 4}-m{at % 4}?turn={at % 10}"
            here = f"document.querySelector('.turn.chosen')?.id === 'turn-{at % 10}' && document.title.includes('g{at // 4}-m{at % 4}')"
            opened.append(timed(browser, f"location.hash = '{place}'", here))
            wanted = f"needle{at}"
            browser.run("location.hash = '#/run/long/trajectories'")
            browser.wait("return !!document.querySelector('.episode-list tbody tr')")
            searched.append(
                timed(
                    browser,
                    f"location.hash = '#/run/long/trajectories?text={wanted}'",
                    f"document.querySelector('.hit mark')?.innerText === '{wanted}'",
                )
            )
        for word in ("hole", "goal", "think", "answer"):
            common.append(
                timed(
                    browser,
                    f"location.hash = '#/run/long/trajectories?text={word}'",
                    f"document.querySelector('.hit mark')?.innerText === '{word}'",
                )
            )
        return {
            "turns": turns,
            "episodes": episodes,
            "log_megabytes": round((folder / "long" / "trajectories.rwlog").stat().st_size / 2**20, 1),
            "first_paint_s": round(paint, 3),
            "first_rows_s": round(listed, 3),
            "all_indexed_s": round(indexed, 2),
            "turn_median_s": round(statistics.median(opened), 3),
            "turn_worst_s": round(max(opened), 3),
            "search_median_s": round(statistics.median(searched), 3),
            "search_worst_s": round(max(searched), 3),
            "search_of_a_word_in_every_turn_worst_s": round(max(common), 3),
            "server_megabytes": page.megabytes,
        }


def live_lag(browser: Any, folder: Path) -> dict[str, Any]:
    """How old the shown number of turns is: the page's figure against the snapshots that the run wrote before it."""
    (folder / "beside.yaml").write_text(
        BESIDE.replace("1000000", "300").replace("max_steps: 12", "max_steps: 500")
    )
    words = [sys.executable, "-m", "rollwright", "run", "beside.yaml", "--no-live", "--runs", "live"]
    run = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lags, costs, most = [], [], 0
    try:
        with Page(folder / "live") as page:
            browser.open(f"{page.url}#/run/beside/live")
            browser.wait_for("tokens/s ·", seconds=60)
            for _ in range(SAMPLES):
                time.sleep(0.37)
                shown = browser.run(
                    "return Number(document.querySelector('[data-snapshot]').dataset.snapshot)"
                )
                lags.append(time.time() - shown)
                snapshot = json.loads((folder / "live" / "beside" / "live.json").read_text())
                costs.append(snapshot["took"])
                most = max(most, len(snapshot["episodes"]))
    finally:
        run.terminate()
        run.wait()
    return {
        "median_s": round(statistics.median(lags), 2),
        "worst_s": round(max(lags), 2),
        "snapshot_median_ms": round(1000 * statistics.median(costs), 2),
        "snapshot_episodes": most,
        "snapshots_share_percent": round(
            100 * statistics.median(costs) / pause_after(statistics.median(costs)), 2
        ),
    }


def slowdown(browser: Any, folder: Path) -> dict[str, Any]:
    """CPU seconds of a run that plays as fast as it can, with the page open at its live view and without one."""
    (folder / "beside.yaml").write_text(BESIDE)
    spent: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * ROUNDS):
        arm = ("without", "with")[number % 2]
        runs = folder / f"slow{number}"
        words = [sys.executable, "-m", "rollwright", "run", "beside.yaml", "--no-live", "--runs", str(runs)]
        page = Page(runs) if arm == "with" else None
        if page is not None:
            browser.open(f"{page.url}#/run/beside/live")
        with psutil.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            cpu = 0.0
            while run.poll() is None:
                try:
                    times = run.cpu_times()
                    cpu = times.user + times.system
                except psutil.Error:
                    break
                time.sleep(0.01)
        spent[arm].append(cpu)
        if page is not None:
            page.__exit__()
            browser.open("about:blank")
    medians = {arm: statistics.median(each) for arm, each in spent.items()}
    return {
        "cpu_s_without": round(medians["without"], 2),
        "cpu_s_with": round(medians["with"], 2),
        "slower_percent": round(100 * (medians["with"] / medians["without"] - 1), 1),
        "all": {arm: [round(each, 2) for each in found] for arm, found in spent.items()},
    }


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--turns", type=int, default=100_000)
    given.add_argument("--million", action=argparse.BooleanOptionalAction, default=True)
    options = given.parse_args()
    browsers, runs = tests_module("browser"), tests_module("runs")
    if (why := browsers.why_not()) is not None:
        sys.exit(why)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rollwright-ui-bench-") as place, browsers.Browser() as browser:
        folder = Path(place)
        sizes = [options.turns, *([1_000_000] if options.million else [])]
        for turns in sizes:
            runs.long_run(folder / str(turns) / "long", turns)
            found[f"{turns:,} turns"] = long_run(browser, folder / str(turns), turns)
            print(json.dumps(found[f"{turns:,} turns"]), flush=True)
        found["live lag"] = live_lag(browser, folder)
        print(json.dumps(found["live lag"]), flush=True)
        found["run beside the page"] = slowdown(browser, folder)
        print(json.dumps(found["run beside the page"]), flush=True)
    write_results("ui", found)


if __name__ == "__main__":
    main()
