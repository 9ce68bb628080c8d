"""Tools: functions that a model can call, pools of leased resources, and built-in tools."""

from rollwright.tools.context import ToolContext
from rollwright.tools.pool import Lease, Pool
from rollwright.tools.result import EndEpisode, Problem, ToolError, ToolFailure, ToolResult
from rollwright.tools.schema import BadArguments
from rollwright.tools.tool import FunctionTool, Tool, tool
from rollwright.tools.toolbox import Toolbox

__all__ = [
    "BadArguments",
    "EndEpisode",
    "FunctionTool",
    "Lease",
    "Pool",
    "Problem",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolFailure",
    "ToolResult",
    "Toolbox",
    "tool",
]
