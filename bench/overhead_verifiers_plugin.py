"""What `verifiers` loads by this module's name: a task set of one task, and a harness.

The harness is the lightest that its contract allows: it plays in the caller's process instead of starting
a program for each rollout, over one shared connection pool; its model calls go through the interception
server, as every harness's must.
"""

import json
from collections.abc import Iterable
from typing import Any, ClassVar

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

from overhead_episode import OBSERVATION, OPENING, SYSTEM, TURNS

__all__ = ["InProcessHarness", "LakeTaskset"]


class LakeTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def always(self) -> float:
        return 1.0


class LakeTaskset(vf.Taskset[LakeTask]):
    def load(self) -> Iterable[LakeTask]:
        yield LakeTask(vf.TaskData(prompt=OPENING, system_prompt=SYSTEM), self.config.task)


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    pool: ClassVar[aiohttp.ClientSession]
    """Of the class, because every episode gets a harness object of its own; set before the first one."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, opening = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": opening}]
        headers = {"Authorization": f"Bearer {secret}"}
        url = f"{endpoint}/chat/completions"
        for _ in range(TURNS):
            body = {"model": ctx.model, "messages": messages}
            async with self.pool.post(url, json=body, headers=headers) as response:
                answer = json.loads(await response.read())
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": OBSERVATION})
        return ProgramResult(exit_code=0, stdout="", stderr="")
