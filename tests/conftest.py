"""Property tests check promises, not the speed of a busy machine; in CI they draw the same examples every time.

Models compute with one thread here: tests run side by side, and each would take the whole machine. Processes that tests
interrupt hear Ctrl-C, also where a shell that put the tests in the background had it ignored.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("rollwright", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rollwright")

os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)
