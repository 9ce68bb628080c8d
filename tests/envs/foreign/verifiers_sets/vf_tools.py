"""A task set of verifiers whose tasks bring a tool server."""

from collections.abc import Iterable

import verifiers.v1 as vf
from vf_tool_server import CalculatorToolset

__all__ = ["ToolsTaskset"]


class ToolsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ToolsTask(vf.Task[vf.TaskData, vf.State, ToolsTaskConfig]):
    @classmethod
    def toolsets(cls, config: ToolsTaskConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)]

    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(any(each.role == "tool" and each.content == "12" for each in trace.messages))


class ToolsConfig(vf.TasksetConfig):
    task: ToolsTaskConfig = ToolsTaskConfig()


class ToolsTaskset(vf.Taskset[ToolsTask, ToolsConfig]):
    def load(self) -> Iterable[ToolsTask]:
        yield ToolsTask(vf.TaskData(prompt="Add 5 and 7 with the tool."), self.config.task)
