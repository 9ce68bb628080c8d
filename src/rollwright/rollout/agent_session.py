"""Sessions for agents that bring their own control flow: by calls, from a thread, and through the worker's gateway.

Always true: `base_url` and `api_key` belong to one episode alone and end with it; whatever way a call comes in, it is
recorded and journalled in the same trajectory.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rollwright.agents import Session
from rollwright.engines.base import Parsed, Sampling, ToolSpec
from rollwright.errors import RollwrightError
from rollwright.gateway import Access, CaptureRules, Gateway, RolloutRecorder
from rollwright.gateway.recorder import USUAL_RULES
from rollwright.sandbox.attempts import current_boxes
from rollwright.sandbox.box import Box, BoxError
from rollwright.trajectory import Message, Turn

Answer = TypeVar("Answer")


class AgentSession(Session):
    """A session that can also be reached through the worker's gateway."""

    gateway: Gateway | None = None
    rules: CaptureRules = USUAL_RULES
    """What an agent that is reached so may do."""
    recorder: RolloutRecorder | None = None
    """Records calls in a model API; `None`: nobody has asked for an address."""
    _access: Access | None = None

    @property
    def base_url(self) -> str:
        """Address for an SDK: OpenAI's chat completions and responses, Anthropic's messages."""
        return self.access().base_url

    @property
    def api_key(self) -> str:
        return self.access().api_key

    async def box(self) -> Box:
        """The attempt's box."""
        return await current_boxes().box()

    async def box_access(self) -> Access:
        """Address and key for an agent inside the attempt's box, whose network is `gateway`."""
        box, access = await self.box(), self.access()
        if not box.gateway_url:
            raise BoxError(
                f"box: its network is {box.spec.network}, and gateway is needed to reach the model"
            )
        return Access(box.gateway_url + urlsplit(access.base_url).path, access.api_key)

    def access(self) -> Access:
        if self._access is None:
            if self.gateway is None:
                raise RollwrightError("session.base_url: this run has no gateway")
            self._access = self.gateway.open(self.record())
        return self._access

    def rejoin_gateway(self) -> None:
        """After `leave_gateway`: the next caller that asks gets a new key, for the next part of the same episode."""
        self._access = self.recorder = None

    def record(self) -> RolloutRecorder:
        """The recorder of calls in a model API, whether they come in by HTTP or not."""
        if self.recorder is None:
            self.recorder = RolloutRecorder(self, self._sampling, rules=self.rules)
        return self.recorder

    async def leave_gateway(self) -> None:
        """Late calls are refused from now on."""
        if self.recorder is None:
            return
        if self.gateway is not None:
            await self.gateway.close_rollout(self.recorder)
        else:
            await self.recorder.seal()


class ThreadSession:
    """A session for code in a thread."""

    def __init__(self, session: AgentSession, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        self.ended = False
        """Whether the episode is over: a thread that was given up must not sample any more."""

    @property
    def base_url(self) -> str:
        return self._access().base_url

    @property
    def api_key(self) -> str:
        return self._access().api_key

    def generate(
        self,
        messages: Sequence[Message],
        *,
        continues: Turn | None = None,
        agent: str = "agent",
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
    ) -> Turn:
        return self._wait_for(
            self._session.generate(messages, continues=continues, agent=agent, tools=tools, sampling=sampling)
        )

    def parse(self, turn: Turn) -> Parsed:
        return self._session.parse(turn)

    def _access(self) -> Access:
        async def access() -> Access:
            return self._session.access()

        return self._wait_for(access())

    def _wait_for(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        if self.ended:
            call.close()
            raise RollwrightError("the episode is over: it was given up, or ended already")
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
