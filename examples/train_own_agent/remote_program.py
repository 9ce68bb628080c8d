"""A program on any machine that plays the tasks of a run: it asks the run for the next one until the run has ended.

rollwright run examples/train_own_agent/config.yaml custom_envs.Larger.agent=remote
python examples/train_own_agent/remote_program.py http://127.0.0.1:8810
"""

import sys

from my_agent import solve

from rollwright import RemoteRun

if __name__ == "__main__":
    played = RemoteRun(sys.argv[1]).play(solve, concurrency=8)
    print(f"{played} rollouts played")
