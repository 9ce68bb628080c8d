"""Orchestras: several agents that act as one, led by ordinary async code over a team session."""

from rollwright.orchestra.agent import PLACEHOLDERS, TeamAgent
from rollwright.orchestra.context import ContextLog, Fitted, Fragment
from rollwright.orchestra.credit import only_agents
from rollwright.orchestra.flows import CriticLoop, Flow, Route, When, stages
from rollwright.orchestra.policies import TeamPolicies
from rollwright.orchestra.reading import BOXED, Answer, ReadingRule
from rollwright.orchestra.rehearsal import Rehearsal
from rollwright.orchestra.segments import SegmentTokenizer, with_segment_cache
from rollwright.orchestra.session import FROZEN, Memory, Reply, Round, Situation, TeamSession
from rollwright.orchestra.settings import Performance, SamplingChanges
from rollwright.orchestra.shipped import critic_team, math_team, search_team
from rollwright.orchestra.team import Action, Team
from rollwright.orchestra.verdict import Judgement, Verdict, VerdictRule

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
