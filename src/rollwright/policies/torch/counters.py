"""What a torch policy has done so far."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Only grows."""

    calls: int = 0
    """All that came; those neither in `completed`, `failed` nor `cancelled` are still here."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    """Times that every call which was being served got one more token, or one more part of its prompt read."""
    passes: int = 0
    """Passes through the model; a step takes several when prompts of different lengths come in."""
    sampled_tokens: int = 0
    fed_tokens: int = 0
    """Tokens of prompts and samples that went through the model."""
    reused_tokens: int = 0
    """Tokens that did not have to, because their keys and values were at hand."""
    updates: int = 0
    """Weight updates that took effect."""
    resumed_calls: int = 0
    """Calls that went on under new weights."""
    restarted_calls: int = 0
    """Calls that began anew under new weights."""
    discarded_tokens: int = 0
    """Tokens that restarted calls had sampled."""
