"""The environment that both sides of `foreign.py` play: four turns, in which verifiers' own `Env.run` speaks as the user.

The interpreter that has verifiers imports it.
"""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

OPENING = (
    "You walk on a frozen lake from the start to the goal without falling into a hole. "
    "P is you, _ is ice, O is a hole, G is the goal. Actions: Left, Down, Right, Up.\n"
    "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G\nAnswer like this: <answer>Right</answer>"
)
OBSERVATION = "The map is now:\n_ P _ _\n_ O _ O\n_ _ _ O\nO _ _ G\nAnswer like this: <answer>Right</answer>"
TURNS = 4
TASKS = 64

__all__ = ["LakeEnv", "LakeTaskset"]


class LakeTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        answers = [each.content or "" for each in trace.messages if each.role == "assistant"]
        return sum("Right" in each for each in answers) / TURNS


class LakeTaskset(vf.Taskset[LakeTask, vf.TasksetConfig]):
    def load(self) -> Iterable[LakeTask]:
        for number in range(TASKS):
            yield LakeTask(vf.TaskData(prompt=f"Lake {number}. {OPENING}"), self.config.task)


class LakeEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class LakeEnv(vf.Env[LakeEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for _ in range(TURNS - 1):
                await interaction.turn(OBSERVATION)
