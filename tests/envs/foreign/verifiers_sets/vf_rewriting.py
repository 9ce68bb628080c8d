"""A task set of verifiers that rewrites answers, which only its interception server can do."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["RewritingTaskset"]


class RewritingTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def shout(self, response: vf.Response) -> vf.Response:
        message = response.message.model_copy(update={"content": (response.message.content or "").upper()})
        return response.model_copy(update={"message": message})

    @vf.reward
    async def loud(self, trace: vf.Trace) -> float:
        return float((trace.messages[-1].content or "").isupper())


class RewritingTaskset(vf.Taskset[RewritingTask, vf.TasksetConfig]):
    def load(self) -> Iterable[RewritingTask]:
        yield RewritingTask(vf.TaskData(prompt="1 + 1 = ?"), self.config.task)
