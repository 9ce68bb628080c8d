"""Property tests check promises, not the speed of a busy machine; in CI they draw the same examples every time.

Models compute with one thread here: tests run side by side, and each would take the whole machine.
"""

import os

from hypothesis import settings

settings.register_profile("rollwright", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rollwright")

os.environ.setdefault("OMP_NUM_THREADS", "1")
