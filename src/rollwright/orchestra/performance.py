"""The switches that change what a team costs and never what is trained (`max_context_length` aside)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Performance:
    """The keys and defaults of `agent.performance`."""

    enable_early_termination: bool = True
    """Off: a loop goes on after the approval until its last round, and what it samples is thrown away."""
    enable_agent_skip: bool = True
    """Off: agents that this sample does not need are asked too, and what they say is thrown away."""
    enable_preprocessing_cache: bool = False
    """On: pieces of prompts that were tokenised before are taken from a cache."""
    enable_parallel_agents: bool = False
    """On: agents that do not depend on each other are asked at the same time."""
    max_context_length: int = 8192
    """Tokens that a prompt may have before the oldest fragments of the context are cut."""
