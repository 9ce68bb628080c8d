"""TextArena by tag: its own rewards, exact copies, opponents, and one line for what cannot be played."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rollwright as rw
from rollwright.envs import registry
from rollwright.envs.adapters.textarena import PACKAGE, TextArena
from rollwright.envs.base import EnvironmentFailure
from rollwright.errors import ConfigError
from rollwright.rng import digest

pytestmark = pytest.mark.foreign

EPISODES = 200


def first_listed(seen: str) -> str:
    """The first of the moves that the game has listed last."""
    return re.findall(r"\[[^\[\]\n]{1,24}\]", re.findall(r"Available Moves:(.*)", seen)[-1])[0]


def make(game: str, **options: Any) -> TextArena:
    made = registry.make(f"textarena:{game}", options)
    assert isinstance(made, TextArena)
    return made


def script(game: str, seed: int) -> list[str]:
    def draw(step: int, below: int) -> int:
        return digest("script", game, seed, step) % below

    if game == "GuessTheNumber-v0":
        return [f"I say [{1 + draw(step, 20)}]" for step in range(12)]
    return [f"[{draw(step, 9)}]" for step in range(12)]


def native(
    game: str, seat: int, players: int, episodes: list[tuple[int, list[str]]]
) -> list[tuple[bool, float]]:
    done = subprocess.run(
        [str(PACKAGE.interpreter()), str(Path(__file__).with_name("native_textarena.py"))],
        input=json.dumps([f"{game}-raw", seat, players, episodes]),
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(each) for each in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("game", "seat", "players", "options"),
    [
        ("GuessTheNumber-v0", 0, 1, {}),
        ("TicTacToe-v0", 1, 2, {"seat": 1, "opponent": f"{__name__}:first_listed"}),
    ],
)
async def test_rewards_are_those_of_its_own_loop(
    game: str, seat: int, players: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "opponent" in options:
        monkeypatch.setattr("rollwright.envs.adapters.textarena.import_object", lambda _: first_listed)
    env = make(game, **options)
    episodes = [(seed, script(game, seed)) for seed in range(EPISODES)]
    ours = []
    for seed, moves in episodes:
        await env.reset(seed)
        result = (False, 0.0)
        for move in moves:
            step = await env.step(move)
            if step.terminated:
                result = (True, step.reward)
                break
        ours.append(result)
    await env.close()
    assert ours == native(game, seat, players, episodes)
    assert {reward for _, reward in ours} - {0.0}, "the script never earns anything"


async def test_a_game_is_the_same_for_the_same_level_and_its_copies_are_exact() -> None:
    one, other = make("GuessTheNumber-v0"), make("GuessTheNumber-v0")
    assert await one.reset(7) == await other.reset(7)
    assert await one.step("[10]") == await other.step("[10]")
    twin = one.fork()
    assert await one.step("[3]") == await twin.step("[3]") == await other.step("[3]")
    await one.step("[4]")
    assert (await twin.step("[20]")).info["action"] == "[20]"
    for each in (one, other, twin):
        await each.close()


async def test_a_random_opponent_plays_moves_that_the_game_lists() -> None:
    env = make("TicTacToe-v0", opponent="random", seat="alternate")
    for seed in range(6):
        state = await env.reset(seed)
        done, text = False, state.observation
        while not done:
            step = await env.step(first_listed(text))
            done, text = step.terminated, step.observation
            assert step.info["valid"]
    await env.close()


async def test_reasoning_before_a_move_is_not_searched_for_moves() -> None:
    env = make("GuessTheNumber-v0")
    await env.reset(1)
    assert (await env.step("<think>not [1]</think>I say [20]")).info["action"] == "I say [20]"
    await env.close()


@pytest.mark.parametrize(
    ("game", "options", "said"),
    [
        ("TicTac", {}, "no game 'TicTac'; there are TicTacToe-v0"),
        ("TicTacToe-v0", {}, "has 2 players; give opponent"),
        ("TicTacToe-v0", {"opponent": "random", "seat": 2}, "seat must be alternate or 0 to 1, got 2"),
        ("TicTacToe-v0", {"opponent": {"url": 1}}, "accepted: base_url, model, api_key_env, max_tokens"),
        ("GuessTheNumber-v0", {"colour": 1}, "refuses the settings {'colour': 1}"),
        ("Wordle-v0", {}, "needs data that is not on this machine"),
    ],
)
def test_what_cannot_be_played_is_one_line_before_anything_is_opened(
    game: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        make(game, **options)
    assert "\n" not in str(caught.value)


async def test_an_opponent_that_cannot_be_asked_is_a_failure_and_no_reward() -> None:
    env = make("TicTacToe-v0", seat=1, opponent={"base_url": "http://127.0.0.1:9/v1", "model": "m"})
    with pytest.raises(EnvironmentFailure, match="opponent http"):
        await env.reset(0)
    await env.close()


PLAYER = """
import re
from rollwright.engines.base import Generation


class Listed:
    \"\"\"Plays a move that the game lists: the trained one its first, an opponent its last.\"\"\"

    renderer = None
    version = 0
    pressure = 0

    async def generate(self, prompt, sampling):
        seen = "\\n".join(each.content for each in prompt.messages)
        moves = re.findall(r"\\[\\d+\\]", re.findall(r"Available Moves:(.*)", seen)[-1])
        is_opponent = any(str(part).startswith("opponent") for part in prompt.key)
        return Generation(moves[-1 if is_opponent else 0], exact=False, prompt_tokens=10, completion_tokens=1)

    async def close(self):
        pass
"""


@pytest.mark.parametrize("opponent", ["policy", {"policy": "frozen"}])
def test_a_policy_of_the_run_plays_the_other_seat_in_this_process(opponent: Any, tmp_path: Path) -> None:
    (tmp_path / "listed_player.py").write_text(PLAYER)
    config = {
        "folder": str(tmp_path),
        "policy": {"kind": "listed_player:Listed"},
        "policies": {"frozen": {"kind": "listed_player:Listed"}},
        "custom_envs": {
            "Duel": {
                "env_type": "textarena:TicTacToe-v0",
                "env_config": {"opponent": opponent, "seat": "alternate"},
            }
        },
    }
    found = rw.evaluate(config, tags=["Duel"], episodes=6, runs=tmp_path / "runs")
    assert found.report["episodes"] == {"finished": 6, "failed": 0, "not_played": 0}
    assert found.report == rw.evaluate(config, "evaluation.cache=false", tags=["Duel"], episodes=6).report
    by_agent = found.report["cost"]["by"]["agent"]
    assert set(by_agent) == {"agent", "opponent-0", "opponent-1"}
    assert by_agent["agent"]["calls"] == sum(len(each.turns) for each in found.trajectories)
    for each in found.trajectories:
        assert {turn.agent for turn in each.turns} == {"agent"}
        assert all(turn.outcome is not None and turn.outcome.valid for turn in each.turns)


def test_an_opponent_that_is_no_policy_of_the_configuration_is_one_line() -> None:
    config = {
        "policy": {"kind": "random"},
        "custom_envs": {
            "Duel": {"env_type": "textarena:TicTacToe-v0", "env_config": {"opponent": {"policy": "nobody"}}}
        },
    }
    with pytest.raises(ConfigError, match=r"opponent.policy: no 'nobody' in `policies`; there are: none"):
        rw.evaluate(config, tags=["Duel"], episodes=1)
