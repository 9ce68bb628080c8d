"""Why a request has no answer. Each message is one line."""

from rollwright.errors import RollwrightError


class HttpFault(RollwrightError):
    """A request ended without a whole answer."""


class Unreachable(HttpFault):
    """No connection, or it ended before the answer began; so does one that the server closed as we asked."""


class TimedOut(HttpFault):
    """The answer was not there in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds
        """The limit that was reached: the request's, or that of connecting."""


class BrokenAnswer(HttpFault):
    """What came is not HTTP, is larger than allowed, or ended in the middle."""
