"""Settings of teams of agents that play an environment as one; `kind` chooses the shape."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from rollwright.settings import Settings
from rollwright.teams.parsing import ReadingRule, VerdictRule
from rollwright.tools.settings import AnyToolConfig, tools_by_name


class Performance(Settings):
    """What a team costs; what is trained is the same, `max_context_length` aside."""

    enable_early_termination: bool = True
    """Off: a loop goes on after the approval to its last round; those calls are thrown away."""
    enable_agent_skip: bool = True
    """Off: agents that a sample does not need are asked too; those calls are thrown away."""
    enable_preprocessing_cache: bool = False
    """On: what was tokenised before is not tokenised again."""
    enable_parallel_agents: bool = False
    """On: agents that do not depend on each other are asked at the same time."""
    max_context_length: PositiveInt = 8192
    """Tokens of a prompt from which on the oldest parts of the team's context are left out; never the system prompt
    or the question."""


class SamplingChanges(Settings):
    """What an agent samples differently from the run."""

    temperature: NonNegativeFloat | None = None
    """Unset: the run's. Validation is always at 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Unset: the run's."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one answer. Unset: the environment's limit."""
    stop: tuple[str, ...] | None = None
    """Texts that end a completion. Unset: the run's."""


class TeamAgentConfig(Settings):
    """One agent. In a team that comes with the package, what is unset stays as it is there."""

    system: str | None = None
    """Template of the system prompt."""
    prompt: str | None = None
    """Template of the message that asks it; needed in a team of one's own. Known placeholders: `{instruction}`,
    `{question}`, `{observation}`, `{history}`, `{context}`, `{step}`, `{max_steps}`, `{steps_left}`."""
    again: str | None = None
    """Template of the message when it is asked again: its prompt then continues its own earlier turn. Unset: every
    call starts anew."""
    reading: ReadingRule | None = None
    verdict: VerdictRule | None = None
    shares: bool | None = None
    """Whether the agents after it see its answer. Unset: yes."""
    trainable: bool | None = None
    """False: its tokens are never in the loss. Unset: true."""
    invalid_penalty: Annotated[float, Field(le=0)] | None = None
    """What a call without the asked-for form costs, on that call, apart from the reward. Unset: 0."""
    sampling: SamplingChanges = SamplingChanges()
    tools: list[AnyToolConfig] | None = None
    """What it may call before it answers: `calculator`, `python`, `module:name`, or a tool with settings. Unset: none."""
    max_tool_turns: PositiveInt | None = None
    """Completions of one call, those that call tools and the answer. Unset: 8."""
    policy: str | None = None
    """Who plays it: a name of `policies`. Unset: the run's `policy`."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine serves; the engine is asked for it by this name."""
    after: list[str] = Field(default_factory=list)
    """In a loop: the agents whose answers it needs; agents that need nobody's run together."""
    from_step: PositiveInt = 1
    """In a loop: the first step of the environment at which it takes part."""
    first_round: bool = False
    """In a loop: whether it speaks in the first round only."""

    @field_validator("tools", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return tools_by_name(value)


class TeamConfig(Settings):
    """What all teams share."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Stands before the agents' names in trajectories. Unset: the kind; two teams of one run need different names."""
    agents: dict[str, TeamAgentConfig] = Field(default_factory=dict)
    """By name."""


class MathTeamConfig(TeamConfig):
    """Solver and verifier, until it approves."""

    kind: Literal["math"]
    """Chooses this team."""
    max_loops: PositiveInt = 3
    """Most solutions; the last one is not verified."""


class SearchTeamConfig(TeamConfig):
    """A verifier decides whether to search or to answer."""

    kind: Literal["search"]
    """Chooses this team."""


class CriticTeamConfig(TeamConfig):
    """Reflect, search, and a critic that approves."""

    kind: Literal["critic"]
    """Chooses this team."""
    max_loops: PositiveInt = 2
    """Most tries at one step; the last one is not judged."""


class LoopTeamConfig(TeamConfig):
    """Agents of one's own in a loop, ordered by who needs whom, with or without a critic."""

    kind: Literal["loop"]
    """Chooses this shape."""
    acts: str
    """Whose last answer is the action."""
    critic: str | None = None
    """Who is asked after all others whether the loop may end; its `verdict` is needed. Unset: nobody."""
    max_loops: PositiveInt = 1
    """Most rounds; in the last one the critic is not asked."""

    @model_validator(mode="after")
    def _fits(self) -> "LoopTeamConfig":
        if self.critic is None and self.max_loops > 1:
            raise ValueError(f"max_loops: {self.max_loops} rounds need a critic that can end them")
        return self


class RouteTeamConfig(TeamConfig):
    """One agent's verdict decides which of two others acts."""

    kind: Literal["route"]
    """Chooses this shape."""
    router: str
    """Who judges; its `verdict` is needed."""
    approved: str
    """Who acts on an approval."""
    rejected: str
    """Who acts on a rejection; on the last step nobody does."""


class OwnTeamConfig(TeamConfig):
    """Agents of one's own, led by a function of one's own."""

    kind: Literal["own"]
    """Chooses this shape."""
    function: str
    """As `module:function`: an async function of a team session that gives the reply to act on."""


OrchestraConfig = Annotated[
    MathTeamConfig | SearchTeamConfig | CriticTeamConfig | LoopTeamConfig | RouteTeamConfig | OwnTeamConfig,
    Field(discriminator="kind"),
]
