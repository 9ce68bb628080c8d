"""Players answer in the environment's format, by keyed draws, with honest log-probabilities."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from math import exp, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines import EngineError, Prompt, Sampling
from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.errors import ConfigError
from rollwright.simulation.players import OraclePlayer, RandomPlayer, SkilledPlayer
from rollwright.trajectory import FinishReason, Message, VersionRun, token_ids

ACTIONS = ("Left", "Down", "Right", "Up")


@dataclass(frozen=True)
class Board:
    listed: tuple[str, ...] = ACTIONS
    best: str | None = "Down"

    def actions(self) -> tuple[str, ...]:
        return self.listed

    def best_action(self) -> str | None:
        return self.best

    def answer(self, action: str) -> str:
        return f"<answer>{action}</answer>"


def prompt(*key: str | int, board: Board | None = Board(), **fields: object) -> Prompt:
    return Prompt(episode="e", key=key, messages=[Message("user", "go")], env=board, **fields)  # type: ignore[arg-type]


def texts(player: SkilledPlayer, count: int = 400, board: Board = Board()) -> Counter[str]:
    return Counter(player.choose(prompt("run", i, board=board), Sampling()).text for i in range(count))


def test_the_random_player_names_every_action_about_equally_often() -> None:
    found = texts(RandomPlayer(), 4000)
    assert set(found) == {f"<answer>{action}</answer>" for action in ACTIONS}
    assert all(880 < count < 1120 for count in found.values())


def test_the_oracle_always_names_the_best_action() -> None:
    assert set(texts(OraclePlayer())) == {"<answer>Down</answer>"}


@pytest.mark.parametrize("skill", [0.25, 0.7])
def test_skill_is_the_share_of_best_actions_beyond_chance(skill: float) -> None:
    share = texts(SkilledPlayer(skill), 4000)["<answer>Down</answer>"] / 4000
    assert isclose(share, skill + (1 - skill) / 4, abs_tol=0.03)


@given(st.floats(0, 1), st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=6), st.integers())
def test_an_answers_probability_is_exactly_how_likely_it_was(
    skill: float, listed: list[str], key: int
) -> None:
    board = Board(tuple(listed), "Down")
    choice = SkilledPlayer(skill).choose(prompt(key, board=board), Sampling())
    of_random = sum(board.answer(action) == choice.text for action in listed) / len(listed)
    of_best = float(choice.text == board.answer("Down"))
    assert isclose(exp(choice.logprob), (1 - skill) * of_random + skill * of_best)


async def test_the_probability_of_the_whole_answer_stands_on_its_first_token() -> None:
    made = await RandomPlayer().generate(prompt("k"), Sampling())
    assert isclose(exp(sum(made.logprobs)), 1 / 4, rel_tol=1e-6)
    assert not any(made.logprobs[1:])
    assert (await OraclePlayer().generate(prompt("k"), Sampling())).logprobs[0] == 0


async def test_a_generation_has_the_ids_and_stamps_of_its_text() -> None:
    player = OraclePlayer()
    made = await player.generate(prompt("k", ids=token_ids([1, 2, 3])), Sampling())
    assert made.sampled_ids == player.renderer.encode("<answer>Down</answer>")
    assert made.versions == (VersionRun(0, len(made.sampled_ids)),)
    assert (made.exact, made.finish, made.prompt_tokens) == (True, FinishReason.STOP, 3)
    assert made.completion_tokens == len(made.sampled_ids) == len(made.logprobs)


async def test_a_token_limit_cuts_the_answer() -> None:
    made = await OraclePlayer().generate(prompt("k"), Sampling(max_tokens=9))
    assert (made.text, made.finish, len(made.sampled_ids)) == ("<answer>D", FinishReason.LENGTH, 9)


async def test_luck_depends_on_the_key_alone() -> None:
    player = RandomPlayer()
    asked = [prompt("run", i) for i in range(60)]
    one_by_one = [await player.generate(each, Sampling()) for each in asked]
    together = await asyncio.gather(*(player.generate(each, Sampling()) for each in reversed(asked)))
    assert one_by_one == together[::-1]


@pytest.mark.parametrize("ids", [None, token_ids([5, 6])])
def test_at_temperature_0_equal_prompts_get_equal_answers_for_sure(ids: object) -> None:
    greedy = Sampling(temperature=0.0)
    choices = {RandomPlayer().choose(prompt("run", i, ids=ids), greedy) for i in range(20)}
    assert len(choices) == 1
    assert choices.pop().logprob == 0


def test_at_temperature_0_other_prompts_get_other_answers() -> None:
    greedy = Sampling(temperature=0.0)
    choices = {RandomPlayer().choose(prompt("run", ids=token_ids([i])), greedy).text for i in range(40)}
    assert len(choices) == 4


def test_an_oracle_without_a_solution_plays_at_random() -> None:
    assert len(texts(OraclePlayer(), board=Board(best=None))) == 4


def test_without_any_action_the_answer_is_empty_in_the_right_format() -> None:
    blind = Board(listed=(), best=None)
    for player in (RandomPlayer(), OraclePlayer(), SkilledPlayer(0.5)):
        assert player.choose(prompt("k", board=blind), Sampling())[:2] == ("<answer></answer>", 0.0)


def test_without_a_list_the_best_answer_is_still_given_as_often_as_skill_says() -> None:
    found = texts(SkilledPlayer(0.7), 1000, Board(listed=(), best="42"))
    assert set(found) == {"<answer></answer>", "<answer>42</answer>"}
    assert isclose(found["<answer>42</answer>"] / 1000, 0.7, abs_tol=0.05)


@pytest.mark.parametrize("player", [RandomPlayer(), OraclePlayer(), SkilledPlayer(0.5)])
async def test_without_a_board_the_error_says_what_is_missing(player: SkilledPlayer) -> None:
    with pytest.raises(EngineError, match=f"the {player.name} needs an environment that lists its actions"):
        await player.generate(prompt("k", board=None), Sampling())


def test_a_skill_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"skill: 1\.5 is not a probability; accepted: 0 to 1"):
        SkilledPlayer(1.5)


async def test_the_oracle_solves_a_real_environment() -> None:
    env = FrozenLake()
    await env.reset(seed=3)
    for turn in range(20):
        made = await OraclePlayer().generate(Prompt("e", ("k", turn), [], env=env), Sampling())
        step = await env.step(made.text)
        if step.terminated:
            break
    assert step.info["success"]
