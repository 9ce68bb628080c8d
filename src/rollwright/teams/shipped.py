"""Built-in teams: `math`, `search` and `critic`. Each is agents and a flow; change either with `dataclasses.replace`."""

from collections.abc import Mapping
from types import MappingProxyType

from rollwright.teams.agent import TeamAgent
from rollwright.teams.flows import CriticLoop, Route, When
from rollwright.teams.parsing import BOXED, ReadingRule, Verdict, VerdictRule
from rollwright.teams.settings import Performance
from rollwright.teams.team import Team

MATH_AGENTS: Mapping[str, TeamAgent] = MappingProxyType(
    {
        "solver": TeamAgent(
            system="You solve mathematical problems, step by step.",
            prompt="{instruction}\n{question}\n{context}\n"
            "If a verifier has rejected a solution above, find what is wrong with it and do better. "
            "Put the final answer in \\boxed{{}}.",
            reading=ReadingRule(pattern=BOXED),
            invalid_penalty=-0.1,
        ),
        "verifier": TeamAgent(
            system="You check solutions of mathematical problems.",
            prompt="{instruction}\n{question}\n{context}\n"
            "Check the last solution, step by step. End with <verify>approve</verify> if it is right, and with "
            "<verify>reject</verify> if it is not.",
            verdict=VerdictRule(malformed=Verdict.APPROVE),
            invalid_penalty=-0.1,
        ),
    }
)

SEARCH_AGENTS: Mapping[str, TeamAgent] = MappingProxyType(
    {
        "verifier": TeamAgent(
            system="You judge whether enough is known to answer a question.",
            prompt="{instruction}\n{question}\n{history}\n{observation}\nStep {step} of {max_steps}. "
            "End with <verify>yes</verify> if this is enough to answer, and with <verify>no</verify> if it is not.",
            verdict=VerdictRule(malformed=Verdict.APPROVE, approve="yes", reject="no"),
            invalid_penalty=-0.01,
        ),
        "search": TeamAgent(
            system="You write search queries.",
            prompt="{instruction}\n{question}\n{history}\n{observation}\nStep {step} of {max_steps}.\n{context}\n"
            "Think in <think></think>, then write one query in <search></search>.",
            reading=ReadingRule(tags=("search",), think=True),
            invalid_penalty=-0.01,
        ),
        "answer": TeamAgent(
            system="You answer questions from what was found.",
            prompt="{instruction}\n{question}\n{history}\n{observation}\n"
            "Think in <think></think>, then give the answer in <answer></answer>.",
            reading=ReadingRule(tags=("answer",), think=True),
            invalid_penalty=-0.01,
        ),
    }
)

CRITIC_AGENTS: Mapping[str, TeamAgent] = MappingProxyType(
    {
        "reflect": TeamAgent(
            system="You look back at what was tried, and say what to do better.",
            prompt="{instruction}\n{question}\n{history}\nIn two sentences: what was learnt, and what is missing?",
        ),
        "search": TeamAgent(
            system="You find answers by searching.",
            prompt="{instruction}\n{question}\n{history}\n{observation}\nStep {step} of {max_steps}.\n{context}\n"
            "Think in <think></think>, then write one query in <search></search> or the answer in <answer></answer>.",
            reading=ReadingRule(tags=("search", "answer"), think=True),
            invalid_penalty=-0.01,
        ),
        "critic": TeamAgent(
            system="You judge what a colleague is about to do.",
            prompt="{instruction}\n{question}\n{history}\n{observation}\n{context}\n"
            "End with <critic>approve</critic> if this is a good next step, and with <critic>reject</critic> and a "
            "reason before it if it is not.",
            verdict=VerdictRule(malformed=Verdict.APPROVE, tag="critic"),
            invalid_penalty=-0.01,
        ),
    }
)


def math_team(
    agents: Mapping[str, TeamAgent] = MATH_AGENTS,
    *,
    name: str = "math",
    max_loops: int = 3,
    performance: Performance | None = None,
) -> Team:
    """The solver writes a solution; after a rejection by the verifier it tries again."""
    flow = CriticLoop((("solver",),), acts="solver", critic="verifier", max_loops=max_loops)
    return Team(name, agents, flow, performance or Performance())


def search_team(
    agents: Mapping[str, TeamAgent] = SEARCH_AGENTS,
    *,
    name: str = "search",
    performance: Performance | None = None,
) -> Team:
    """The verifier decides whether to search once more or to answer."""
    return Team(
        name, agents, Route("verifier", approved="answer", rejected="search"), performance or Performance()
    )


def critic_team(
    agents: Mapping[str, TeamAgent] = CRITIC_AGENTS,
    *,
    name: str = "critic",
    max_loops: int = 2,
    performance: Performance | None = None,
) -> Team:
    """From the second step on, `reflect` is called first; then `search` searches or answers until the critic approves."""
    flow = CriticLoop(
        (("reflect",), ("search",)),
        acts="search",
        critic="critic",
        max_loops=max_loops,
        when={"reflect": When(from_step=2, first_round=True)},
    )
    return Team(name, agents, flow, performance or Performance())
