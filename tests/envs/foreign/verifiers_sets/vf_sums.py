"""A task set of verifiers: sums, with a weighted reward, a second one, and a metric."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.messages[-1].content.split()[-1:] == [str(self.data.answer)])

    @vf.reward(weight=-0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / len(trace.messages[-1].content.split())

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.messages[-1].content.split()))


class SumsConfig(vf.TasksetConfig):
    largest: int = 50


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterable[SumsTask]:
        for first in range(self.config.largest):
            second = (first * 7) % 11
            data = SumsData(prompt=f"{first} + {second} = ?", system_prompt="Add.", answer=first + second)
            yield SumsTask(data, self.config.task)
