"""Settings of the gateway."""

from typing import Literal

from rollwright.settings import Settings

ClientSampling = Literal["pinned", "honoured"]
"""The treatment of a temperature or top_p that a client asks for."""


class CaptureRules(Settings):
    """What agents may do whose calls are recorded by the gateway."""

    client_sampling: ClientSampling = "pinned"
    """What becomes of a temperature, top_p or other sampling setting that a client asks for. `pinned`: every call is
    sampled as `sampling` says, and wishes are counted. `honoured`: a call's own temperature and top_p count; tokens
    drawn at temperature 0 or with a top_p below 1 are then out of the loss."""
    allow_no_calls: bool = False
    """Whether a rollout whose agent made no call may end with a reward; else it is a failure."""
