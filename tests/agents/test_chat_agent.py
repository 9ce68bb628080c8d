"""What the model sees, turn by turn, and what is recorded of it."""

from collections.abc import Sequence

import pytest

from rollwright.agents import ChatAgent, EpisodeFailure, History, HistoryMode, Session
from rollwright.engines.base import EngineError, Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.errors import ConfigError
from rollwright.rollout.episode import EpisodeSettings, play_episode
from rollwright.rollout.settings import LimitsConfig
from rollwright.trajectory import (
    Boundary,
    FinishReason,
    StopReason,
    Trajectory,
    VersionRun,
    floats,
    full_prompt,
    samples,
)

WHOLE = History()
PROMPTS = PromptTemplates(
    system="rules of the house",
    opening="{instruction}|{observation}|turn {turn_idx}|{actions_left} left|{max_response_length} tokens",
    turn="{observation}|turn {turn_idx}|{actions_left} left",
)


class Corridor:
    """Walk right until the end; the answer's last word is the action."""

    instruction = "walk"
    prompts = PROMPTS

    def __init__(self, length: int = 4) -> None:
        self.length = length
        self.place = 0

    async def reset(self, seed: int) -> Reset:
        self.place = 0
        return Reset("at 0", {})

    async def step(self, answer: str) -> Step:
        action = answer.split()[-1]
        self.place += action == "right"
        done = self.place == self.length
        return Step(
            f"at {self.place}", float(done), done, False, {"action": action, "success": done, "penalty": -0.5}
        )

    async def close(self) -> None: ...

    def actions(self) -> Sequence[str]:
        return ["left", "right"]

    def best_action(self) -> str | None:
        return "right"

    def answer(self, action: str) -> str:
        return f"do {action}"


class Recorder:
    """A policy that says the same thing and keeps what it was asked."""

    def __init__(
        self, text: str = "hmm, right", *, ids: bool = True, finish: FinishReason = FinishReason.STOP
    ) -> None:
        self.renderer = BytesRenderer() if ids else None
        self.version = 3
        self.pressure = 0
        self.text = text
        self.finish = finish
        self.asked: list[Prompt] = []
        self.limits: list[int] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.asked.append(prompt)
        self.limits.append(sampling.max_tokens)
        if self.renderer is None:
            return Generation(self.text, exact=False, prompt_tokens=50, completion_tokens=9)
        ids = self.renderer.encode(self.text)
        if self.finish is not FinishReason.STOP:
            ids = ids[:-1]
        return Generation(
            self.text,
            ids,
            floats([-0.5] * len(ids)),
            (VersionRun(3, len(ids)),),
            self.finish,
            completion_tokens=len(ids),
        )

    async def close(self) -> None: ...


async def played(
    policy: Recorder,
    history: History = WHOLE,
    *,
    sequence_length: int = 10_000,
    env: Corridor | None = None,
) -> Trajectory:
    agent = ChatAgent(PROMPTS, history, max_steps=6, max_response_length=32)
    sampling = Sampling(max_tokens=32)
    settings = EpisodeSettings(
        "Corridor",
        {},
        agent,
        sampling,
        6,
        sequence_length,
        LimitsConfig(step_timeout=1.0, generate_timeout=1.0, episode_timeout=5.0),
    )
    env = env or Corridor()
    session = Session(
        Trajectory("r", "a", "g", "Corridor", 0),
        policy,
        sampling,
        ("key",),
        sequence_length=sequence_length,
        generate_timeout=1.0,
        env=env,
    )
    return await play_episode(session, env, settings, policy, Corridor)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
async def test_with_a_whole_history_every_prompt_extends_the_one_before_by_what_is_new(
    finish: FinishReason,
) -> None:
    policy = Recorder(finish=finish)
    trajectory = await played(policy)
    assert trajectory.stop is StopReason.TERMINATED
    assert len(samples(trajectory)) == 1
    for turn, asked in zip(trajectory.turns, policy.asked, strict=True):
        assert full_prompt(trajectory.turns, turn.id) == asked.ids
    for earlier, later in zip(policy.asked, policy.asked[1:], strict=False):
        assert later.ids is not None
        assert earlier.ids is not None
        sampled = trajectory.turns[policy.asked.index(earlier)].sampled_ids
        assert later.ids[: len(earlier.ids) + len(sampled)] == earlier.ids + sampled


async def test_the_ids_sent_are_the_ids_of_the_conversation() -> None:
    policy = Recorder()
    await played(policy)
    renderer = BytesRenderer()
    text = renderer.decode(policy.asked[1].ids)
    assert text == (
        "rules of the housewalk|at 0|turn 1|6 left|32 tokens" + "hmm, right" + "at 1|turn 2|5 left"
    )


async def test_a_window_starts_a_new_sequence_each_turn_and_keeps_the_rules() -> None:
    policy = Recorder()
    trajectory = await played(policy, History(mode=HistoryMode.WINDOW, length=1))
    assert [turn.extends for turn in trajectory.turns] == [None] * 4
    assert [turn.after for turn in trajectory.turns] == [None, 0, 1, 2]
    assert len(samples(trajectory)) == 4
    last = BytesRenderer().decode(policy.asked[3].ids)
    assert last.startswith("rules of the housewalk|at 0|turn 1")
    assert last.count("hmm, right") == 1
    assert last.endswith("hmm, rightat 3|turn 4|3 left")
    assert "at 2|turn 3" in last
    assert "at 1" not in last


async def test_an_actions_history_leaves_earlier_reasoning_out_D4() -> None:
    policy = Recorder("a long thought about going right")
    trajectory = await played(policy, History(mode=HistoryMode.ACTIONS))
    last = BytesRenderer().decode(policy.asked[3].ids)
    assert "thought" not in last
    assert last.count("do right") == 3
    assert all(f"at {place}" in last for place in range(4))
    for turn, asked in zip(trajectory.turns, policy.asked, strict=True):
        assert full_prompt(trajectory.turns, turn.id) == asked.ids
        assert turn.text == "a long thought about going right"


async def test_a_policy_that_speaks_text_gets_the_whole_conversation_and_is_not_trainable() -> None:
    policy = Recorder(ids=False)
    trajectory = await played(policy)
    assert [message.role for message in policy.asked[2].messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert trajectory.not_trainable == "the engine returned no exact token ids and log-probabilities"
    assert trajectory.sampled_tokens == 36


async def test_rewards_and_format_penalties_are_kept_apart() -> None:
    trajectory = await played(Recorder())
    assert trajectory.reward == 1.0
    assert trajectory.penalty == -2.0
    assert trajectory.success is True


async def test_the_action_limit_ends_the_episode() -> None:
    trajectory = await played(Recorder("left"))
    assert trajectory.stop is StopReason.MAX_STEPS
    assert len(trajectory.turns) == 6


async def test_a_full_sequence_ends_the_episode_and_the_last_answer_gets_only_the_room_left() -> None:
    policy = Recorder()
    first = len((await played(Recorder())).turns[0].prompt_ids)
    trajectory = await played(policy, sequence_length=first + 20)
    assert trajectory.stop is StopReason.MAX_LENGTH
    assert policy.limits == [20]


async def test_a_first_prompt_that_does_not_fit_ends_the_episode_without_a_turn() -> None:
    trajectory = await played(Recorder(), sequence_length=5)
    assert trajectory.stop is StopReason.MAX_LENGTH
    assert trajectory.turns == []
    assert trajectory.not_trainable == "no token was sampled"


async def test_draws_are_keyed_by_place_and_differ_between_turns_but_not_between_attempts() -> None:
    first, again = Recorder(), Recorder()
    await played(first)
    await played(again)
    assert [asked.key for asked in first.asked] == [asked.key for asked in again.asked]
    assert len({asked.key for asked in first.asked}) == 4


class Broken(Recorder):
    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        raise EngineError("no engine at\nthis address")


class Silent(Recorder):
    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        import asyncio

        await asyncio.sleep(3600)
        raise AssertionError


class Cracked(Corridor):
    async def step(self, answer: str) -> Step:
        raise ValueError("the floor is gone")


@pytest.mark.parametrize(
    ("policy", "env", "boundary", "kind"),
    [
        (Broken(), Corridor(), Boundary.ENGINE, "EngineError"),
        (Silent(), Corridor(), Boundary.ENGINE, "timeout"),
        (Recorder(), Cracked(), Boundary.ENVIRONMENT, "ValueError"),
        (Recorder(""), Corridor(), Boundary.ENVIRONMENT, "IndexError"),
    ],
)
async def test_a_failure_is_put_down_to_the_boundary_it_came_from(
    policy: Recorder, env: Corridor, boundary: Boundary, kind: str
) -> None:
    with pytest.raises(EpisodeFailure) as caught:
        await played(policy, env=env)
    assert (caught.value.record.boundary, caught.value.record.kind) == (boundary, kind)
    assert "\n" not in str(caught.value)


async def test_an_agent_that_raises_is_the_agents_failure() -> None:
    class Nameless(Corridor):
        @property
        def instruction(self) -> str:  # type: ignore[override]
            raise RuntimeError("no rules today")

    with pytest.raises(EpisodeFailure) as caught:
        await played(Recorder(), env=Nameless())
    assert caught.value.record.boundary is Boundary.AGENT


def test_a_template_that_refers_to_something_unknown_is_refused_with_the_known_names() -> None:
    agent = ChatAgent(PromptTemplates("s", "{observation}", "{observatoin}"))
    with pytest.raises(
        ConfigError, match=r"custom_envs\.X\.agent_template: 'observatoin' cannot be filled in; known"
    ):
        agent.check_templates("custom_envs.X")
