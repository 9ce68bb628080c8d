"""Property tests check promises, not the speed of a busy machine; in CI they draw the same examples every time."""

import os

from hypothesis import settings

settings.register_profile("rollwright", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rollwright")
