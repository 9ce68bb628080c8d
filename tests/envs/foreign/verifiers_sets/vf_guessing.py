"""An environment of verifiers that speaks as the user, turn by turn: guess a number; an endless task set."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessingData(vf.TaskData):
    number: int


class GuessingTask(vf.Task[GuessingData]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return any("give up" in (each.content or "") for each in trace.messages if each.role == "assistant")

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        reward = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for left in range(5, 0, -1):
                if segment.terminated:
                    break
                found = re.search(r"\d+", segment.last_reply)
                guess = int(found[0]) if found else -1
                if guess == task.data.number:
                    reward = left / 5
                    break
                hint = "higher" if guess < task.data.number else "lower"
                segment = await interaction.turn(f"{hint} than {guess}")
        interaction.trace.record_reward("guessed", reward, 1.0)


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessingTask]:
        for index in itertools.count():
            number = (index * 37) % 16
            data = GuessingData(prompt=f"Game {index}: guess a number from 0 to 15.", number=number)
            yield GuessingTask(data, self.config.task)
