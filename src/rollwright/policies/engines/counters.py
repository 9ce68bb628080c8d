"""What an engine client counts, beside retries and failures by cause."""

from dataclasses import dataclass

from rollwright.policies.http_calls import CallCounters


@dataclass
class EngineCounters(CallCounters):
    """What happened so far."""

    updates: int = 0
    resumed_calls: int = 0
    """Calls that an update cut short and that went on behind the tokens they had."""
    restarted_calls: int = 0
    """Calls that an update made begin anew."""
    discarded_tokens: int = 0
    """Sampled, then thrown away by `restart_turn`."""
    not_exact: int = 0
    """Completions without ids, or with log-probabilities of another distribution."""
    outages: int = 0
    """Times that an engine went out of service and did not answer, or had the wrong weights, when asked after."""
