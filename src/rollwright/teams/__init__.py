"""Orchestras: several agents that act as one, led by ordinary async code over a team session."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.teams.agent import PLACEHOLDERS, TeamAgent
    from rollwright.teams.context import ContextLog, Fitted, Fragment
    from rollwright.teams.flows import CriticLoop, Flow, Route, When, stages
    from rollwright.teams.parsing import BOXED, Answer, Judgement, ReadingRule, Verdict, VerdictRule
    from rollwright.teams.policies import TeamPolicies
    from rollwright.teams.segments import SegmentTokenizer, with_segment_cache
    from rollwright.teams.session import FROZEN, Memory, Reply, Round, Situation, TeamSession
    from rollwright.teams.settings import Performance, SamplingChanges
    from rollwright.teams.shipped import critic_team, math_team, search_team
    from rollwright.teams.simulated import Rehearsal
    from rollwright.teams.team import Action, Team, only_agents

__all__ = [
    "BOXED",
    "FROZEN",
    "PLACEHOLDERS",
    "Action",
    "Answer",
    "ContextLog",
    "CriticLoop",
    "Fitted",
    "Flow",
    "Fragment",
    "Judgement",
    "Memory",
    "Performance",
    "ReadingRule",
    "Rehearsal",
    "Reply",
    "Round",
    "Route",
    "SamplingChanges",
    "SegmentTokenizer",
    "Situation",
    "Team",
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
    "stages",
    "with_segment_cache",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Action": "team",
        "Answer": "parsing",
        "BOXED": "parsing",
        "ContextLog": "context",
        "CriticLoop": "flows",
        "FROZEN": "session",
        "Fitted": "context",
        "Flow": "flows",
        "Fragment": "context",
        "Judgement": "parsing",
        "Memory": "session",
        "PLACEHOLDERS": "agent",
        "Performance": "settings",
        "ReadingRule": "parsing",
        "Rehearsal": "simulated",
        "Reply": "session",
        "Round": "session",
        "Route": "flows",
        "SamplingChanges": "settings",
        "SegmentTokenizer": "segments",
        "Situation": "session",
        "Team": "team",
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
        "stages": "flows",
        "with_segment_cache": "segments",
    },
)
