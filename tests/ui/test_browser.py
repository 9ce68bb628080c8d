"""Every view in a real browser: finished runs, trees, teams, a swarm node, damage, attacks, a run that is being written."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VIEWS = {
    "": "Runs",
    "#/run/lake": "Results",
    "#/run/lake/live": "From opened to trained",
    "#/run/lake/trajectories": "episodes",
    "#/run/lake/training": "Before and after",
    "#/run/lake/settings": "train_env_manager.group_size",
    "#/run/lake/trajectory/lake.train-g0-m0": "turn 1",
    "#/run/lake/trajectory/lake.train-g0-m0?show=tokens": "sampled tokens",
    "#/run/lake/trajectory/lake.train-g0-m0?show=group": "4 members on the same level",
    "#/run/lake/trajectory/lake.train-g0-m0?show=forest": "the decision before it",
    "#/run/node/swarm": "amber-fox",
    "#/run/exam/evaluation": "pass@4",
    "#/compare/lake/tree": "Settings",
    "#/compare/lake/exam": "Evaluations",
}
"""Views by their address, and a text of each."""


def test_every_view_shows_its_run_without_an_error(browser: Any, page: str) -> None:
    for place, text in VIEWS.items():
        browser.open(page + place)
        browser.wait_for(text)
        assert not browser.texts(".failure"), place
    assert browser.messages() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_view_fits_a_narrow_and_a_wide_screen(browser: Any, page: str, width: int, dark: bool) -> None:
    browser.shape(width, 850, dark=dark)
    try:
        for place, text in VIEWS.items():
            browser.open(page + place)
            browser.wait_for(text)
            assert browser.run("return document.documentElement.scrollWidth") <= width, place
            ground = browser.run("return getComputedStyle(document.body).backgroundColor")
            lightness = sum(int(each) for each in re.findall(r"\d+", ground)[:3]) / 3
            assert (lightness < 100) is dark
    finally:
        browser.shape(1280, 900)


def test_everything_that_can_be_used_has_a_name(browser: Any, page: str) -> None:
    for place, text in VIEWS.items():
        browser.open(page + place)
        browser.wait_for(text)
        nameless = browser.run(
            "return [...document.querySelectorAll('a[href],button,input,select,[role=img],[role=progressbar]')]"
            ".filter(each => !(each.getAttribute('aria-label') || each.innerText || each.title || each.textContent))"
            ".map(each => each.outerHTML.slice(0, 200))"
        )
        assert nameless == [], place
        assert browser.run("return document.querySelectorAll('main h1, main h2').length") > 0, place


def test_the_keyboard_reaches_search_turns_and_views(browser: Any, page: str) -> None:
    browser.open(f"{page}#/run/lake/trajectory/lake.train-g0-m0")
    browser.wait_for("turn 1")
    browser.press("j")
    browser.wait("return location.hash.includes('turn=0')")
    browser.press("t")
    browser.wait_for("sampled tokens")
    browser.press("g")
    browser.wait_for("members on the same level")
    browser.press("f")
    browser.wait_for("the decision before it")
    browser.press("3")
    browser.wait("return location.hash.endsWith('/trajectories')")
    browser.wait("return !!document.getElementById('search')")
    browser.press("/")
    browser.wait("return document.activeElement.id === 'search'")


def test_a_search_finds_the_turn_and_its_link_opens_it(browser: Any, page: str) -> None:
    browser.open(f"{page}#/run/lake/trajectories?text=answer&mode=train")
    browser.wait_for("turn 1", ".hit")
    assert browser.text(".hit mark").lower() == "answer"
    browser.click(".hit a", "turn 1")
    browser.wait("return !!document.querySelector('.turn.chosen')")
    assert "turn=0" in browser.run("return location.hash")


def test_filters_narrow_the_list(browser: Any, page: str) -> None:
    browser.open(f"{page}#/run/lake/trajectories?tag=SimpleSokoban&stop=terminated")
    browser.wait_for("match")
    assert set(browser.texts(".episode-list td[data-name='ended by']")) == {"terminated"}
    assert all("SimpleSokoban" in each for each in browser.texts(".episode-list td[data-name='environment']"))


def test_a_tree_is_drawn_with_all_its_turns_and_links(browser: Any, page: str, serving: ModuleType) -> None:
    row = serving.ask(page, "episodes", run="tree", sort="-turns")["rows"][0]
    browser.open(f"{page}#/run/tree/trajectory/{row['rollout_id']}?show=forest")
    browser.wait_for("the decision before it")
    nodes = serving.ask(page, "forest", run="tree", rollout=row["rollout_id"])["nodes"]
    assert row["leaves"] > 1
    assert browser.run("return document.querySelectorAll('.forest .node').length") == row["turns"]
    links = sum(each["after"] is not None for each in nodes)
    assert browser.run("return document.querySelectorAll('.forest .after').length") == links
    assert all("V " in each and "A " in each for each in browser.texts(".node-value"))


def test_a_team_shows_who_spoke_and_both_links(browser: Any, page: str, serving: ModuleType) -> None:
    row = serving.ask(page, "episodes", run="team", sort="-turns")["rows"][0]
    assert len(row["agents"]) > 1
    browser.open(f"{page}#/run/team/trajectory/{row['rollout_id']}?show=forest")
    browser.wait_for("the decision before it")
    nodes = serving.ask(page, "forest", run="team", rollout=row["rollout_id"])["nodes"]
    continued = sum(each["extends"] is not None for each in nodes)
    assert 0 < continued < len(nodes) - 1, "the agents have sequences of their own"
    assert browser.run("return document.querySelectorAll('.forest svg .extends').length") == continued
    assert browser.run("return document.querySelectorAll('.forest svg .after').length") == len(nodes) - 1
    browser.open(f"{page}#/run/team/trajectory/{row['rollout_id']}")
    browser.wait_for(row["agents"][1])


def test_grid_games_are_drawn_as_boards(browser: Any, page: str) -> None:
    browser.open(f"{page}#/run/lake/trajectory/lake.train-g0-m0")
    browser.wait("return document.querySelectorAll('.turn .board .cell').length > 9")
    assert browser.run("return document.querySelectorAll('.board .player').length") > 0


def test_a_damaged_run_is_shown_with_what_is_wrong(browser: Any, page: str) -> None:
    browser.open(f"{page}#/run/damaged")
    browser.wait_for("things are wrong with this run")
    browser.wait_for("config.yaml: is damaged")
    browser.open(f"{page}#/run/damaged/trajectories")
    browser.wait("return document.querySelectorAll('.episode-list tbody tr').length > 0")
    browser.open(f"{page}#/run/there-is-none")
    browser.wait_for("there is no such run")


HOSTILE = (
    "",
    "#/run/hostile",
    "#/run/hostile/live",
    "#/run/hostile/trajectories?text=pwned",
    "#/run/hostile/settings",
    "#/run/hostile/trajectory/hostile.train-g0-m0",
    "#/run/hostile/trajectory/hostile.train-g0-m0?show=tokens",
    "#/run/hostile/trajectory/hostile.train-g0-m0?show=group",
    "#/run/hostile/trajectory/hostile.train-g0-m0?show=forest",
    "#/run/hostile/trajectory/hostile.train-g0-m%3Cscript%3Ewindow.pwned%3D29%3C%2Fscript%3E",
    "#/run/%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D40%3E",
    "#/run/exam/evaluation",
    "#/compare/hostile/lake",
)


def test_nothing_in_a_trajectory_runs_in_the_page(browser: Any, page: str) -> None:
    for place in HOSTILE:
        browser.open(page + place)
        browser.wait("return !document.querySelector('.loading') && document.querySelector('main')")
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert browser.run("return window.pwned ?? null") is None, place
        strange = browser.run(
            "return [...document.querySelectorAll('main *')].filter(each => ['SCRIPT', 'IFRAME', 'STYLE', 'OBJECT', 'EMBED',"
            " 'FORM'].includes(each.tagName) || [...each.attributes].some(one => one.name.startsWith('on'))"
            " || (each.tagName === 'IMG' && !/^data:image\\/(png|jpeg|gif|webp);/.test(each.src))"
            " || /^javascript:/i.test(each.getAttribute('href') ?? '')).map(each => each.outerHTML.slice(0, 200))"
        )
        assert strange == [], place
    browser.open(f"{page}#/run/hostile/trajectory/hostile.train-g0-m0")
    browser.wait_for("<script>window.pwned=1</script>")
    told = [each for each in browser.messages() if "404 (Not Found)" not in each]
    assert told == [], "the content security policy had nothing to stop"


SLOW = """
name: slow
max_steps: 40
rollout_batch_size: 8
policy: {kind: simulated, slots: 4, tokens_per_second: 200, skill: 0.6}
train_env_manager: {num_env_groups: 2, group_size: 4, tags: [FrozenLake]}
"""


def test_a_run_that_is_being_written_is_followed_until_it_ends(
    browser: Any, tmp_path: Path, serving: ModuleType
) -> None:
    (tmp_path / "slow.yaml").write_text(SLOW, encoding="utf-8")
    words = [sys.executable, "-m", "rollwright", "run", "slow.yaml", "--no-live"]
    with (
        serving.serving([str(tmp_path / "runs")]) as url,
        subprocess.Popen(
            words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as command,
    ):
        browser.open(url)
        browser.wait_for("slow", ".runs", seconds=60)
        browser.wait_for("running", ".runs", seconds=60)
        browser.open(f"{url}#/run/slow/live")
        browser.wait_for("engine", ".episodes .phase")
        assert re.search(r"\d+ (ms|s)", browser.text(".episodes tbody"))
        browser.wait_for("coroutine-0", ".section")
        played = browser.run(
            "return [...document.querySelectorAll('.tile')].find(each => each.innerText.startsWith('played')).innerText"
        )
        browser.wait(
            "return [...document.querySelectorAll('.tile')].find(each => each.innerText.startsWith('played')).innerText"
            " !== arguments[0]",
            played,
        )
        browser.wait_for("of the last", ".section")
        browser.open(f"{url}#/run/slow/trajectories")
        browser.wait("return document.querySelectorAll('.episode-list tbody tr').length > 0")
        command.terminate()
        command.wait()
        browser.open(f"{url}#/run/slow/live")
        browser.wait_for("interrupted", ".tile")
    assert [each for each in browser.messages() if "Failed to fetch" not in each] == []


def test_a_long_run_opens_lists_and_is_searched(
    browser: Any, tmp_path: Path, make: ModuleType, serving: ModuleType
) -> None:
    make.long_run(tmp_path / "runs" / "long", 100_000)
    with serving.serving([str(tmp_path / "runs")]) as url:
        browser.open(f"{url}#/run/long/trajectories?text=needle9876")
        browser.wait_for("1 of 10,000 episodes match")
        browser.click(".hit a", "turn 10")
        browser.wait_for("needle9876", ".turn.chosen")
        browser.open(f"{url}#/run/long/trajectories?offset=9950")
        browser.wait_for("9,951–10,000 of 10,000")
