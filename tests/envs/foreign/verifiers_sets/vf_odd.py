"""A task set of verifiers for the smallest model: two answers, each worth its share of odd characters. Chance gives a half."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["OddEnv", "OddTaskset"]


class OddTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def odd(self, trace: vf.Trace) -> float:
        said = "".join(each.content or "" for each in trace.messages if each.role == "assistant")
        return sum(ord(each) % 2 for each in said) / max(len(said), 1)


class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self) -> Iterable[OddTask]:
        for number in range(10):
            yield OddTask(vf.TaskData(prompt=str(number)), self.config.task)


class OddEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("1")
