"""Each switch changes what a team costs, and never what is trained (`max_context_length` aside)."""

from typing import Any

import pytest

from rollwright.config import build
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.teams import Performance, SimulatedTeam, Team, critic_team, math_team, search_team
from rollwright.teams.toy_envs import Lookup, Sums

DEFAULTS = {
    "enable_early_termination": True,
    "enable_agent_skip": True,
    "enable_preprocessing_cache": False,
    "enable_parallel_agents": False,
    "max_context_length": 8192,
}

TEAMS = {"math": (math_team, Sums), "search": (search_team, Lookup), "critic": (critic_team, Lookup)}
MEMBERS = range(12)


def test_the_keys_and_defaults_are_the_documented_ones() -> None:
    assert build({}).agent.performance.model_dump() == DEFAULTS
    assert vars(Performance()) == DEFAULTS


def engine(team: Team) -> SimulatedEngine:
    lengths = {team.agent_id(name): LogNormalLength(60, 0.6) for name in team.agents}
    player = SimulatedTeam.of(team, skill=0.6, approval=0.5, lengths=lengths)
    return SimulatedEngine(slots=4, tokens_per_second=50, player=player)


def season(stage: Any, kind: str, **switches: Any) -> tuple[list[str], float, float, float]:
    """What is trained; and in sum the calls made, the calls thrown away, and the seconds."""
    make, env = TEAMS[kind]
    team = make(performance=Performance(**switches))
    trained, calls, thrown, seconds = [], 0.0, 0.0, 0.0
    for member in MEMBERS:
        trajectory, taken = stage.timed(team, engine(team), env(), max_steps=4, member=member)
        trained.append(stage.trained(trajectory))
        discarded = trajectory.metrics.get("discarded_calls", 0.0)
        assert (discarded > 0) == (trajectory.metrics.get("discarded_tokens", 0.0) > 0)
        calls, thrown, seconds = (
            calls + len(trajectory.turns) + discarded,
            thrown + discarded,
            seconds + taken,
        )
    return trained, calls, thrown, seconds


@pytest.mark.parametrize(
    ("kind", "switch"),
    [
        ("math", "enable_early_termination"),
        ("critic", "enable_early_termination"),
        ("search", "enable_agent_skip"),
        ("critic", "enable_agent_skip"),
    ],
)
def test_a_call_made_only_because_a_switch_is_off_is_thrown_away_untrained(
    stage: Any, kind: str, switch: str
) -> None:
    lean, calls, thrown, seconds = season(stage, kind)
    fat, more_calls, more_thrown, more_seconds = season(stage, kind, **{switch: False})
    assert fat == lean
    assert thrown == 0
    assert more_thrown > 0
    assert more_calls == calls + more_thrown
    assert more_seconds > seconds


def test_without_early_termination_every_sample_goes_to_the_last_round(stage: Any) -> None:
    lines = {"math/solver": [r"\boxed{1}"], "math/verifier": ["<verify>approve</verify>"]}
    policy = stage.Script(lines)
    trajectory = stage.play(math_team(performance=Performance(enable_early_termination=False)), policy)
    assert policy.asked == ["math/solver", "math/verifier"] * 2 + ["math/solver"]
    assert len(trajectory.turns) == 2
    assert trajectory.metrics["discarded_calls"] == 3


def test_a_call_that_is_thrown_away_and_has_no_room_ends_nothing(stage: Any) -> None:
    lines = {"math/solver": ["x" * 900], "math/verifier": ["<verify>approve</verify>"]}
    lean = stage.play(math_team(max_loops=4), stage.Script(lines))
    just_enough = max(turn.prompt_tokens for turn in lean.turns) + 1
    team = math_team(performance=Performance(enable_early_termination=False), max_loops=4)
    fat = stage.play(team, stage.Script(lines), sequence_length=just_enough)
    assert fat.stop == "terminated"
    assert stage.trained(fat) == stage.trained(lean)
    assert fat.metrics.get("discarded_calls", 0) < 5, "some of the five had no room"


def test_agents_in_parallel_take_the_time_of_the_slowest_and_the_same_is_trained(stage: Any) -> None:
    async def panel(s: Any) -> Any:
        await s.gather("info", "planning")
        return await s.call("action")

    agents = {name: math_team().agents["solver"] for name in ("info", "planning", "action")}
    lines = {f"panel/{name}": [name] for name in agents}
    seconds = {"panel/info": 5.0, "panel/planning": 3.0, "panel/action": 1.0}
    found = {}
    for parallel in (True, False):
        policy = stage.Script(lines, seconds)
        team = Team("panel", agents, panel, Performance(enable_parallel_agents=parallel))
        trajectory, taken = stage.timed(team, policy)
        found[parallel] = (stage.trained(trajectory), taken, policy.most_running)
    assert found[True] == (found[False][0], 6.0, 2)
    assert found[False][1:] == (9.0, 1)


def test_all_switches_off_and_all_on_train_the_same(stage: Any) -> None:
    for kind in TEAMS:
        off = dict.fromkeys([key for key in DEFAULTS if key.startswith("enable")], False)
        on = dict.fromkeys(off, True)
        assert season(stage, kind, **off)[0] == season(stage, kind, **on)[0]


def test_a_shorter_context_changes_what_the_model_sees(stage: Any) -> None:
    short, long = season(stage, "math", max_context_length=200)[0], season(stage, "math")[0]
    assert short != long
