"""A harness for the native side of `foreign.py`: the lightest that verifiers' contract allows, in the caller's process and over
one pool of connections."""

import json
from typing import Any, ClassVar

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["PooledHarness"]


class PooledHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    pool: ClassVar[aiohttp.ClientSession]
    """Of the class, because every episode gets a harness object of its own; set before the first one."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(each) for each in prompt or ()]
        )
        body = {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        async with self.pool.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
            json.loads(await response.read())
            return ProgramResult(0 if response.status == 200 else 1, "", "")
