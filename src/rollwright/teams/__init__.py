"""Teams of agents (orchestras in the configuration): several agents choose one action, led by async code over a session."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.teams.agent import PLACEHOLDERS, TeamAgent
    from rollwright.teams.context import ContextLog, FittedContext, Fragment
    from rollwright.teams.flows import CriticLoop, Flow, Route, When, sort_into_stages
    from rollwright.teams.parsing import BOXED, Judgement, ParsedAnswer, ReadingRule, Verdict, VerdictRule
    from rollwright.teams.policies import TeamPolicies
    from rollwright.teams.segments import SegmentTokenizer, with_segment_cache
    from rollwright.teams.session import FROZEN, Memory, Reply, Round, Situation, TeamSession
    from rollwright.teams.settings import Performance, SamplingChanges
    from rollwright.teams.shipped import critic_team, math_team, search_team
    from rollwright.teams.simulated import SimulatedTeam
    from rollwright.teams.team import Team, TeamAction, only_agents

__all__ = [
    "BOXED",
    "FROZEN",
    "PLACEHOLDERS",
    "ContextLog",
    "CriticLoop",
    "FittedContext",
    "Flow",
    "Fragment",
    "Judgement",
    "Memory",
    "ParsedAnswer",
    "Performance",
    "ReadingRule",
    "Reply",
    "Round",
    "Route",
    "SamplingChanges",
    "SegmentTokenizer",
    "SimulatedTeam",
    "Situation",
    "Team",
    "TeamAction",
    "TeamAgent",
    "TeamPolicies",
    "TeamSession",
    "Verdict",
    "VerdictRule",
    "When",
    "critic_team",
    "math_team",
    "only_agents",
    "search_team",
    "sort_into_stages",
    "with_segment_cache",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BOXED": "parsing",
        "ContextLog": "context",
        "CriticLoop": "flows",
        "FROZEN": "session",
        "FittedContext": "context",
        "Flow": "flows",
        "Fragment": "context",
        "Judgement": "parsing",
        "Memory": "session",
        "PLACEHOLDERS": "agent",
        "ParsedAnswer": "parsing",
        "Performance": "settings",
        "ReadingRule": "parsing",
        "Reply": "session",
        "Round": "session",
        "Route": "flows",
        "SamplingChanges": "settings",
        "SegmentTokenizer": "segments",
        "SimulatedTeam": "simulated",
        "Situation": "session",
        "Team": "team",
        "TeamAction": "team",
        "TeamAgent": "agent",
        "TeamPolicies": "policies",
        "TeamSession": "session",
        "Verdict": "parsing",
        "VerdictRule": "parsing",
        "When": "flows",
        "critic_team": "shipped",
        "math_team": "shipped",
        "only_agents": "team",
        "search_team": "shipped",
        "sort_into_stages": "flows",
        "with_segment_cache": "segments",
    },
)
