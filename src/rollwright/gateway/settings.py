"""Settings of the gateway."""

from typing import Literal

from rollwright.settings import Settings

ClientSampling = Literal["pinned", "honoured"]
"""Treatment of a client's sampling parameters."""


class CaptureRules(Settings):
    """Rules for agents whose calls are recorded by the gateway."""

    client_sampling: ClientSampling = "pinned"
    """Treatment of a client's temperature, top_p and other sampling parameters. `pinned`: every call uses `sampling`;
    deviating requests are counted. `honoured`: a call's temperature and top_p apply; tokens sampled at temperature 0 or
    with a top_p below 1 are then masked out of the loss."""
    allow_no_calls: bool = False
    """Whether a rollout whose agent made no call may end with a reward; else it is a failure."""
