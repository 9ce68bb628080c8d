"""Pictures of every view for `ui.md`, from runs that are played for them: `python docs/ui_screenshots.py`.

Two trainings of a small model, a run of trees, a team with tools, two nodes of a swarm, and a run that is still playing
while its picture is taken. Needs Chromium and a few minutes.
"""

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"

TRAIN = str(ROOT / "configs" / "frozen_lake_train.yaml")
SMALL = ["max_steps=24", "eval_steps=8", "rollout_batch_size=128", "train_env_manager.num_env_groups=16"]
SMALL += [
    "val_env_manager.num_env_groups=48",
    "training.checkpoint_steps=24",
    "policy.model=models/frozen_lake",
]

TREE = """
name: tree
rollout_batch_size: 4
policy: {kind: simulated, slots: 16, tokens_per_second: 20000, skill: 0.55}
strategy: {kind: tree, width: 2, depth: 4}
train_env_manager: {num_env_groups: 2, group_size: 2, tags: [FrozenLake]}
"""

LIVE = """
name: playing
max_steps: 400
eval_steps: 40
async_generation_ratio: 1
rollout_batch_size: 64
policy: {kind: simulated, slots: 48, tokens_per_second: 500, skill: 0.6}
train_env_manager:
  num_env_groups: 16
  group_size: 8
  tags: [FrozenLake, SimpleSokoban]
  filters: [void_turn, zero_variance]
"""

SWARM = ["max_steps=5", "eval_steps=2"]


def load(name: str) -> ModuleType:
    """A module of tests/ui: its browser."""
    spec = importlib.util.spec_from_file_location(f"ui_{name}", ROOT / "tests" / "ui" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rollwright", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def play(folder: Path) -> None:
    """Everything that is finished when the pictures are taken."""
    (folder / "models").symlink_to(ROOT / "models")
    (folder / "tree.yaml").write_text(TREE)
    (folder / "playing.yaml").write_text(LIVE)
    team = str(ROOT / "configs" / "team_with_tools.yaml")
    for words in (
        ["train", TRAIN, *SMALL, "name=lake_grpo", "--no-live"],
        [
            "train",
            TRAIN,
            *SMALL,
            "name=lake_rloo",
            "training.advantage=rloo",
            "training.learning_rate=6e-4",
            "--no-live",
        ],
        ["run", "tree.yaml", "--no-live"],
        ["run", team, "--no-live"],
    ):
        if start(folder, *words).wait():
            sys.exit(f"rollwright {' '.join(words)}: failed")
    swarm(folder)


def swarm(folder: Path) -> None:
    """Two nodes that share rollouts on this machine."""
    config = str(ROOT / "configs" / "swarm_frozen_lake.yaml")
    words = ["swarm", "join", config, *SWARM, "policy.model=models/frozen_lake"]
    nodes = [start(folder, *words, "--home", f"runs/{name}") for name in ("ann", "bob")]
    for node in nodes:
        node.wait()


def pictures(browser: Any, url: str, taken: dict[str, tuple[str, str]]) -> None:
    for name, (place, text) in taken.items():
        browser.open(f"{url}{place}")
        browser.wait_for(text, seconds=60)
        time.sleep(1.2)  # for films and tokens that come into view
        browser.picture(IMAGES / f"ui_{name}.png")
        print(name, flush=True)


def episode(browser: Any, url: str, run: str, **query: str) -> str:
    """The first rollout of a list."""
    asked = "&".join(f"{key}={value}" for key, value in query.items())
    script = "const done = arguments[1]; fetch(arguments[0]).then(one => one.json()).then(one => done(one.rows[0]?.rollout_id ?? ''))"
    while not (found := browser.run_async(script, f"{url}api/episodes?run={run}&{asked}")):
        time.sleep(0.2)
    return str(found)


def main() -> None:
    browsers = load("browser")
    if (why := browsers.why_not()) is not None:
        sys.exit(why)
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(prefix="rollwright-ui-") as temporary:
        folder = kept or Path(temporary)
        if not (folder / "runs").is_dir():
            play(folder)
        command = [sys.executable, "-m", "rollwright", "ui", "--port", "0", "--tied", "--no-browser"]
        page = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert page.stdout is not None
        url = page.stdout.readline().strip().removeprefix("page: ")
        playing = start(folder, "run", "playing.yaml", "--no-live")
        try:
            with browsers.Browser(width=1280, height=900) as browser:
                take(browser, url)
        finally:
            playing.terminate()
            playing.wait()
            assert page.stdin is not None
            page.stdin.close()
            page.wait()


def take(browser: Any, url: str) -> None:
    browser.open(url)
    solved = episode(browser, url, "lake_grpo", mode="train", sort="-turns", success="yes")
    tree = episode(browser, url, "tree", sort="-turns")
    team = episode(browser, url, "team_with_tools", sort="-turns")
    browser.open(f"{url}#/run/playing/live")
    browser.wait_for("about", ".tile", seconds=90)
    pictures(
        browser,
        url,
        {
            "runs": ("#/", "running"),
            "live": ("#/run/playing/live", "rollouts at once"),
            "overview": ("#/run/lake_grpo", "Results"),
            "curves": ("#/run/lake_grpo/training", "Entropy"),
            "trajectories": ("#/run/lake_grpo/trajectories?text=Down&mode=train", "match"),
            "trajectory": (f"#/run/lake_grpo/trajectory/{solved}", "turn 2"),
            "tokens": (
                f"#/run/team_with_tools/trajectory/{team}?show=tokens&colour=logprob",
                "sampled tokens",
            ),
            "group": (f"#/run/lake_grpo/trajectory/{solved}?show=group", "members on"),
            "forest": (f"#/run/tree/trajectory/{tree}?show=forest", "the decision before it"),
            "team": (f"#/run/team_with_tools/trajectory/{team}", "turn 2"),
            "team_forest": (f"#/run/team_with_tools/trajectory/{team}?show=forest", "the decision before it"),
            "swarm": ("#/run/bob/swarm", "Peers"),
            "compare": ("#/compare/lake_grpo/lake_rloo", "Last validation"),
            "settings": ("#/run/lake_grpo/settings", "training.advantage.name"),
        },
    )
    browser.open(f"{url}#/run/lake_grpo/training")
    browser.wait_for("Before and after")
    browser.run(
        "[...document.querySelectorAll('h2')].find(each => each.innerText.startsWith('Validation')).scrollIntoView()"
    )
    time.sleep(1)
    browser.picture(IMAGES / "ui_before_after.png")
    browser.shape(1280, 900, dark=True)
    pictures(browser, url, {"dark": ("#/run/playing/live", "rollouts at once")})
    browser.shape(390, 844)
    pictures(
        browser,
        url,
        {
            "phone_runs": ("#/", "running"),
            "phone_trajectory": (f"#/run/lake_grpo/trajectory/{solved}", "turn 2"),
        },
    )


if __name__ == "__main__":
    main()
