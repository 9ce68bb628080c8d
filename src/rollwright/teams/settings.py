"""Settings of teams of agents, the section `orchestras`; `kind` chooses the control flow."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from rollwright.settings import Settings
from rollwright.teams.parsing import ReadingRule, VerdictRule
from rollwright.tools.settings import AnyToolConfig, tools_by_name


class Performance(Settings):
    """Switches that change the cost of a team. All but `max_context_length` leave the recorded turns unchanged."""

    enable_early_termination: bool = True
    """Off: a loop runs all its rounds even after an approval; the additional calls are discarded."""
    enable_agent_skip: bool = True
    """Off: agents that a rollout does not need are called too; these calls are discarded."""
    enable_preprocessing_cache: bool = False
    """On: text segments that were tokenised before are not tokenised again."""
    enable_parallel_agents: bool = False
    """On: agents that do not depend on each other are called concurrently."""
    max_context_length: PositiveInt = 8192
    """Token limit of a prompt, kept by leaving out the oldest fragments of the team's context; never the system prompt
    or the question."""


class SamplingChanges(Settings):
    """Sampling parameters of an agent that differ from the run's."""

    temperature: NonNegativeFloat | None = None
    """Unset: the run's. Validation always uses 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Unset: the run's."""
    max_tokens: PositiveInt | None = None
    """Limit of tokens of one completion. Unset: the environment's limit."""
    stop: tuple[str, ...] | None = None
    """Stop strings of a completion. Unset: the run's."""


class TeamAgentConfig(Settings):
    """One agent. In a built-in team, unset fields keep that team's values."""

    system: str | None = None
    """Template of the system prompt."""
    prompt: str | None = None
    """Template of the user message; required in user-defined teams. Known placeholders: `{instruction}`,
    `{question}`, `{observation}`, `{history}`, `{context}`, `{step}`, `{max_steps}`, `{steps_left}`."""
    again: str | None = None
    """Template of the user message when the agent is called again: its prompt then continues its previous turn. Unset:
    every call starts a new conversation."""
    reading: ReadingRule | None = None
    verdict: VerdictRule | None = None
    shares: bool | None = None
    """Whether agents that are called later see its answer. Unset: yes."""
    trainable: bool | None = None
    """False: its tokens are masked out of the loss. Unset: true."""
    invalid_penalty: Annotated[float, Field(le=0)] | None = None
    """Penalty on a call whose completion does not have the required format; separate from the reward. Unset: 0."""
    sampling: SamplingChanges = SamplingChanges()
    tools: list[AnyToolConfig] | None = None
    """Tools that it may call before it answers: `calculator`, `python`, `module:name`, or a tool with settings. Unset: none."""
    max_tool_turns: PositiveInt | None = None
    """Limit of completions in one call, including the answer. Unset: 8."""
    policy: str | None = None
    """Policy of this agent: a name of `policies`. Unset: the run's `policy`."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine serves."""
    after: list[str] = Field(default_factory=list)
    """In a loop: the agents whose answers it needs; agents without a dependency between them form one stage."""
    from_step: PositiveInt = 1
    """In a loop: the first step of the environment in which it takes part."""
    first_round: bool = False
    """In a loop: whether it takes part in the first round only."""

    @field_validator("tools", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return tools_by_name(value)


class TeamConfig(Settings):
    """Settings of every kind of team."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Prefix of the agents' names in trajectories. Unset: the kind. Two teams of one run need different names."""
    agents: dict[str, TeamAgentConfig] = Field(default_factory=dict)
    """Settings of agents, by name."""


class MathTeamConfig(TeamConfig):
    """A solver and a verifier, in a loop until the verifier approves."""

    kind: Literal["math"]
    """Chooses this team."""
    max_loops: PositiveInt = 3
    """Limit of solutions; the last one is not verified."""


class SearchTeamConfig(TeamConfig):
    """A verifier decides whether to search or to answer."""

    kind: Literal["search"]
    """Chooses this team."""


class CriticTeamConfig(TeamConfig):
    """An agent that reflects, one that searches or answers, and a critic that approves."""

    kind: Literal["critic"]
    """Chooses this team."""
    max_loops: PositiveInt = 2
    """Limit of attempts in one step; the last one is not judged."""


class LoopTeamConfig(TeamConfig):
    """User-defined agents in a loop, ordered by their dependencies, with or without a critic."""

    kind: Literal["loop"]
    """Chooses this shape."""
    acts: str
    """Name of the agent whose latest answer is the action."""
    critic: str | None = None
    """Name of the agent whose approval ends the loop; needs a `verdict`. Unset: none."""
    max_loops: PositiveInt = 1
    """Limit of rounds; the critic is not called in the last one."""

    @model_validator(mode="after")
    def _fits(self) -> "LoopTeamConfig":
        if self.critic is None and self.max_loops > 1:
            raise ValueError(f"max_loops: {self.max_loops} rounds need a critic that can end them")
        return self


class RouteTeamConfig(TeamConfig):
    """The verdict of one agent decides which of two others acts."""

    kind: Literal["route"]
    """Chooses this shape."""
    router: str
    """Name of the agent that judges; needs a `verdict`."""
    approved: str
    """Agent that acts on an approval."""
    rejected: str
    """Agent that acts on a rejection, except in the last step, where the action is empty."""


class OwnTeamConfig(TeamConfig):
    """User-defined agents with a user-defined flow."""

    kind: Literal["own"]
    """Chooses this shape."""
    function: str
    """As `module:function`: an async function of a team session that returns the reply to act on."""


OrchestraConfig = Annotated[
    MathTeamConfig | SearchTeamConfig | CriticTeamConfig | LoopTeamConfig | RouteTeamConfig | OwnTeamConfig,
    Field(discriminator="kind"),
]
