"""Base of environments whose package plays whole episodes itself, with the run's model as its client.

Always true: an episode is played by the package's own loop; every call of the model is recorded; what the package reports as
an error is a failure of the attempt, never a reward. Such an environment takes no steps and cannot be forked.

The program of the package (see `programs/concurrent_program.py`) has two operations:

    reset(seed)                            returns {"observation": text, "task": {…}}: what is asked, and what rewards may see
    play(seed, base_url, api_key, ask)     returns {"reward": …, "success": …, "components": {…}, "metrics": {…}}

`base_url` and `api_key` lead to the run's model for this episode alone, by HTTP; they are empty where `needs_gateway` is false.
`ask` does the same without HTTP: `await ask({"body": …, "agent": …})` with the body of a chat completion as text gives
`{"status": …, "body": …}`.
"""

from collections.abc import Mapping
from typing import Any

from rollwright.envs.base import EnvironmentFailure, EpisodeResult, ModelAccess, PromptTemplates, Reset, Step
from rollwright.envs.foreign.package import ForeignPackage
from rollwright.envs.foreign.shared import EpisodeLease, SharedUse

_PROMPTS = PromptTemplates(system="", opening="{observation}", turn="{observation}")

DEFAULT_STALL_SECONDS = 60.0
"""Seconds without an answer after which a process counts as blocked. Loading and scoring may take long, but they should not
stop everything else in their process for a minute."""


class ForeignEpisodeEnv:
    """A place in the shared process of a package."""

    stateless = False
    """It cannot be copied; see `rollwright.envs.base.can_fork`."""
    needs_gateway = True
    """Whether its program calls the model by HTTP."""
    episodes_per_process = 10_000
    """Most episodes at once in one process, for packages that allow only a few."""

    def __init__(
        self,
        package: ForeignPackage,
        options: dict[str, Any],
        *,
        success_at: float = 1.0,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
    ) -> None:
        """`success_at`: reward from which on an episode counts as solved, where the package does not say."""
        self._package = package
        self._options = options
        self._success_at = success_at
        self._stall_seconds = stall_seconds
        self._use: SharedUse | None = None
        self._lease: EpisodeLease | None = None
        self._seed = 0
        self.task: Mapping[str, Any] = {}

    @property
    def instruction(self) -> str:
        return ""

    @property
    def prompts(self) -> PromptTemplates:
        return _PROMPTS

    async def reset(self, seed: int) -> Reset:
        await self._release()
        if self._use is None:
            self._use = SharedUse(
                self._package, self._options, self._stall_seconds, self.episodes_per_process
            )
        self._seed = seed
        self._lease = await self._use.lease(seed)
        said = await self._lease.ask("reset", seed=seed)
        self.task = said.get("task") or {}
        return Reset(said["observation"], {"success": False})

    async def play_episode(self, model: ModelAccess) -> EpisodeResult:
        if self._lease is None:
            raise EnvironmentFailure(f"{self._package.name}: no episode is running; call reset first")

        async def answer(asked: Any) -> dict[str, Any]:
            status, body = await model.complete(asked["body"].encode(), asked.get("agent") or "agent")
            return {"status": status, "body": body.decode()}

        address = (model.base_url, model.api_key) if self.needs_gateway else ("", "")
        said = await self._lease.ask("play", answer, seed=self._seed, base_url=address[0], api_key=address[1])
        self._lease.note_success()
        reward, success = said["reward"], said.get("success")
        return EpisodeResult(
            reward,
            reward >= self._success_at if success is None else success,
            said.get("components") or {},
            said.get("metrics") or {},
        )

    async def step(self, answer: str) -> Step:
        raise EnvironmentFailure(
            f"{self._package.name}: it plays whole episodes by itself and takes no steps"
        )

    async def close(self) -> None:
        await self._release()
        use, self._use = self._use, None
        if use is not None:
            await use.end()

    async def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release()
