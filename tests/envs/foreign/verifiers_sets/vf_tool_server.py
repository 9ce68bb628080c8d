"""The tool server of `vf_tools`, which verifiers starts as a program."""

import verifiers.v1 as vf


class CalculatorToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calc"

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


if __name__ == "__main__":
    CalculatorToolset.run()
