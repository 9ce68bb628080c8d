"""The team's context: in order, joined once, cut by whole fragments, and never the question."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.teams import ContextLog, Performance, TeamAgent, math_team
from rollwright.trajectory import Message

FIXED = [Message("system", "Be good."), Message("user", "What?")]
PLAIN = TeamAgent(system="SYSTEM", prompt="{question}|{context}")


def log_of(texts: list[str]) -> ContextLog:
    log = ContextLog()
    for number, text in enumerate(texts):
        log.add(f"a{number}", text)
    return log


@given(st.lists(st.text(max_size=60), max_size=8), st.integers(0, 600), st.booleans())
def test_what_does_not_fit_is_cut_by_whole_fragments_from_the_oldest(
    texts: list[str], limit: int, with_renderer: bool
) -> None:
    log = log_of(texts)
    renderer = BytesRenderer() if with_renderer else None
    fitted = log.fit(FIXED, limit, renderer)
    shown = [fragment.shown for fragment in log.fragments]
    assert fitted.text == "".join(shown[fitted.cut :])
    if renderer is not None:
        sizes = [len(each.encode()) for each in shown]
        fixed = len(renderer.open(FIXED))
        assert fitted.cut == len(sizes) or fixed + sum(sizes[fitted.cut :]) <= limit
        assert fitted.cut == 0 or fixed + sum(sizes[fitted.cut - 1 :]) > limit
        assert fitted.cut_tokens == sum(sizes[: fitted.cut])


class CountingRenderer(BytesRenderer):
    """Notes what was tokenised."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, messages: Any, tools: Any = ()) -> Any:
        self.opened.append("|".join(message.content for message in messages))
        return super().open(messages, tools)


def test_nothing_is_counted_while_a_prompt_is_far_from_the_limit_and_each_fragment_once_near_it() -> None:
    renderer = CountingRenderer()
    log = log_of(["x" * 50, "y" * 50])
    assert log.fit(FIXED, 8192, renderer).cut == 0
    assert renderer.opened == []
    log.fit(FIXED, 100, renderer)
    log.fit(FIXED, 100, renderer)
    assert sum("x" * 50 in each for each in renderer.opened) == 1


def test_the_context_starts_anew_at_every_step(stage: Any) -> None:
    policy = stage.Script({"math/solver": ["FIRST", "SECOND"], "math/verifier": ["<verify>approve</verify>"]})
    stage.play(math_team(), policy, stage.Env(steps=2))
    assert policy.asked == ["math/solver", "math/verifier"] * 2
    assert "FIRST" in policy.prompts[1]
    assert "The output of" not in policy.prompts[2]
    assert "SECOND" in policy.prompts[3]
    assert "FIRST" not in policy.prompts[3]


def test_a_prompt_shows_the_fragments_in_order(stage: Any) -> None:
    policy = stage.Script(
        {
            "math/solver": ["ONE", "TWO"],
            "math/verifier": ["V1 <verify>reject</verify>", "V2 <verify>approve</verify>"],
        }
    )
    stage.play(math_team(), policy)
    last = policy.prompts[-1]
    places = [last.index(each) for each in ('"solver": ONE', '"verifier": V1', '"solver": TWO')]
    assert places == sorted(places)


def test_what_was_cut_is_counted_and_the_system_prompt_and_the_question_stay(stage: Any) -> None:
    team = math_team(performance=Performance(max_context_length=10), max_loops=2)
    team = replace(
        team,
        agents={
            name: replace(PLAIN, reading=each.reading, verdict=each.verdict)
            for name, each in team.agents.items()
        },
    )
    policy = stage.Script({"math/solver": ["SOLUTION"], "math/verifier": ["<verify>reject</verify>"]})
    trajectory = stage.play(team, policy)
    assert all("SYSTEM" in prompt and "QUESTION|" in prompt for prompt in policy.prompts)
    assert not any("output of" in prompt for prompt in policy.prompts)
    assert trajectory.metrics["context_fragments_cut"] == 1 + 2
    assert trajectory.metrics["context_tokens_cut"] > 0


def test_an_agent_that_keeps_to_itself_is_not_in_the_context(stage: Any) -> None:
    team = math_team(max_loops=2)
    silent = replace(team, agents={**team.agents, "verifier": replace(team.agents["verifier"], shares=False)})
    policy = stage.Script({"math/solver": ["ONE"], "math/verifier": ["WHY <verify>reject</verify>"]})
    stage.play(silent, policy)
    assert "ONE" in policy.prompts[2]
    assert "WHY" not in policy.prompts[2]
