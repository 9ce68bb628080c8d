"""Playing a task folder in boxes: its services, what a step brings, and its solution.

Always true: tests and solution are not in the box while the agent works. Everything that cannot be done is an
`EnvironmentFailure` that names the task. A step's network is the agent's while the agent works, and the verifier's while the
tests run.
"""

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.harbor.compose import Healthcheck, Service
from rollwright.envs.harbor.tasks import (
    MAIN,
    HarborTask,
    NetworkMode,
    TaskEnvironment,
    TaskPhase,
    TaskStep,
    substitute,
)
from rollwright.sandbox.attempts import AttemptBoxes
from rollwright.sandbox.box import Box, BoxError, BoxSpec, CommandResult, Feature, Network, SwitchableBox
from rollwright.sandbox.building import image_for
from rollwright.sandbox.images import find_image

_LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs /logs/agent /logs/verifier /logs/artifacts"
_DEFAULT_SECONDS = 3600.0
_SHOWN = 300
"""Characters of a program's last words in an error."""

_NETWORKS: Mapping[NetworkMode, Network] = {
    "public": Network.PUBLIC,
    "no-network": Network.NONE,
    "allowlist": Network.ALLOWLIST,
}


class TaskBoxes:
    """The boxes of one task while it is played."""

    def __init__(self, task: HarborTask, boxes: AttemptBoxes, state: Path) -> None:
        self.task = task
        self.boxes = boxes
        self._state = state
        self._main: Box | None = None
        self._others: dict[str, Box] = {}

    @property
    def main(self) -> Box:
        if self._main is None:
            raise EnvironmentFailure(f"task {self.task.name}: is not started")
        return self._main

    def service(self, name: str) -> Box:
        """The box of a service."""
        if name == MAIN:
            return self.main
        if name not in self._others:
            raise EnvironmentFailure(f"task {self.task.name}: has no service {name!r}")
        return self._others[name]

    async def start(self) -> Box:
        """Starts all services, waits until they are healthy, and returns the agent's."""
        main, *others = self.task.services
        agent = self.task.agent
        spec = await self.spec(main, self.task.environment, agent)
        self._main = await self.boxes.start(self.boxes.needs.apply(spec))
        await make_log_folders(self._main)
        for service in others:
            self._others[service.name] = await self._start_service(service)
        if self.task.upload:
            await self.main.put(Path(self.task.upload), await self._workdir(agent))
        await self._wait_until_healthy(self.task.environment.healthcheck, self.main, agent)
        await self.begin_step(self.task.steps[0])
        return self._main

    async def begin_step(self, step: TaskStep) -> None:
        """Makes the box ready for a step: its network, its files, its `setup.sh` and its healthcheck."""
        self.boxes.adopt(self.main, user=user_of(step.agent), seconds=step.agent.timeout_sec)
        await self.use_network(step.agent, self.task.environment, is_agent=True)
        if step.workdir:
            folder = await self._workdir(step.agent)
            await self.main.put(Path(step.workdir), folder)
            if await asyncio.to_thread(Path(step.workdir, "setup.sh").is_file):
                script = f"{folder.rstrip('/')}/setup.sh"
                set_up = await self.main.run(f"bash {shlex.quote(script)}", user=user_of(step.agent))
                must_succeed(set_up, f"task {self.task.name}: step {step.name}: setup.sh")
        await self._wait_until_healthy(step.healthcheck, self.main, step.agent)

    def forked(self, main: Box, boxes: AttemptBoxes) -> "TaskBoxes":
        """The same task in a copy of its main box."""
        other = TaskBoxes(self.task, boxes, self._state)
        other._main, other._others = main, self._others
        return other

    async def solve(self, step: TaskStep) -> CommandResult:
        """Runs the solution, as Harbor's oracle does."""
        source = Path(step.solution)
        is_older = self.task.is_terminal_bench
        path = "/solution/solution.sh" if is_older else "/solution/solve.sh"
        script = source if is_older else source / "solve.sh"
        if not await asyncio.to_thread(script.is_file):
            raise EnvironmentFailure(f"task {self.task.name}: has no solution at {script}")
        await self.main.put(source, path if source == script else "/solution")
        await self.main.run(["chmod", "+x", path], user="root")
        given = substitute(self.task.solution_env, f"task {self.task.name}: solution.env")
        return await self.main.run(
            f"{'bash ' if is_older else ''}{path} > /logs/agent/oracle.txt 2>&1",
            environment={"DEBIAN_FRONTEND": "noninteractive", **given},
            seconds=step.agent.timeout_sec or self.main.spec.seconds,
            user=user_of(step.agent),
        )

    async def spec(self, service: Service, given: TaskEnvironment, phase: TaskPhase) -> BoxSpec:
        """The box of a service of this environment."""
        where = f"task {self.task.name}"
        variables = service.environment
        if service.name == MAIN:
            variables = {**substitute(given.env, f"{where}: environment.env"), **variables}
        return BoxSpec(
            image=await self._image(service, given),
            user=service.user,
            workdir=(given.workdir if service.name == MAIN else "") or service.workdir,
            environment=variables,
            memory_mb=given.memory_limit,
            cpus=given.cpus or 0.0,
            disk_mb=given.storage_limit,
            seconds=phase.timeout_sec or _DEFAULT_SECONDS,
            hostname=service.name,
            hosts=tuple(each.name for each in self.task.services),
            **network_of(phase, given),
        )

    async def use_network(self, phase: TaskPhase, given: TaskEnvironment, *, is_agent: bool = False) -> None:
        """Gives the main box the network of a phase; that of an agent has what the agent needs."""
        wanted = network_of(phase, given)
        if is_agent:
            applied = self.boxes.needs.apply(BoxSpec(**wanted))
            wanted = {"network": applied.network, "allowed_hosts": applied.allowed_hosts}
        spec = self.main.spec
        if (spec.network, spec.allowed_hosts) == (wanted["network"], wanted["allowed_hosts"]):
            return
        if not isinstance(self.main, SwitchableBox):
            if (spec.network, wanted["network"]) == (Network.GATEWAY, Network.NONE):
                return  # the agent has left the gateway, which answers nobody any more
            raise EnvironmentFailure(
                f"task {self.task.name}: its phases have different networks, which this backend cannot change"
            )
        try:
            await self.main.change_network(**wanted)
        except BoxError as error:
            raise EnvironmentFailure(f"task {self.task.name}: network: {error}") from error

    async def _image(self, service: Service, given: TaskEnvironment) -> str:
        where = f"task {self.task.name}: service {service.name}"
        try:
            if Feature.REMOTE in (await self.boxes.backend()).features:
                if service.build:
                    raise EnvironmentFailure(
                        f"{where}: this backend builds no images; set environment.docker_image to one of its registry"
                    )
                return service.image
            return await asyncio.to_thread(
                image_for,
                self._state,
                service.image,
                service.build,
                service.dockerfile,
                given.build_timeout_sec,
            )
        except BoxError as error:
            raise EnvironmentFailure(f"{where}: {error}") from error

    async def _start_service(self, service: Service) -> Box:
        spec = (await self.spec(service, self.task.environment, TaskPhase())).replace(
            network=Network.NONE, allowed_hosts=(), network_of=self.main.id
        )
        box = await self.boxes.start(spec)
        image = await asyncio.to_thread(find_image, self._state, spec.image)
        own = ((), ()) if image is None else (image.entrypoint, image.command)
        if words := service.words(*own):
            command = shlex.join(words)
            must_succeed(
                await box.run(f"mkdir -p /var/log; nohup {command} > /var/log/service.log 2>&1 &"),
                f"service {service.name}",
            )
        await self._wait_until_healthy(service.healthcheck, box, TaskPhase())
        return box

    async def _workdir(self, phase: TaskPhase) -> str:
        return (await self.main.run("pwd", user=user_of(phase))).stdout.strip() or "/"

    async def _wait_until_healthy(self, check: Healthcheck | None, box: Box, phase: TaskPhase) -> None:
        """Failures in the start period do not count; after it, so many in a row are one too many."""
        if check is None:
            return
        loop = asyncio.get_running_loop()
        grace, failures = loop.time() + check.start_period_sec, 0
        while True:
            counts = loop.time() >= grace
            result = await box.run(check.command, seconds=check.timeout_sec, user=user_of(phase))
            if result.ok:
                return
            failures += counts
            if failures >= check.retries:
                raise EnvironmentFailure(f"task {self.task.name}: healthcheck: {last_words(result)}")
            await asyncio.sleep(check.interval_sec if counts else check.start_interval_sec)


def network_of(phase: TaskPhase, given: TaskEnvironment) -> dict[str, Any]:
    """The network of a phase: its own, else the environment's."""
    mode, hosts = (
        (phase.network_mode, phase.allowed_hosts)
        if phase.network_mode is not None
        else (given.network, given.allowed_hosts)
    )
    network = _NETWORKS[mode]
    return {"network": network, "allowed_hosts": tuple(hosts) if network is Network.ALLOWLIST else ()}


async def make_log_folders(box: Box) -> None:
    must_succeed(await box.run(_LOGS, user="root"), "making /logs")


def user_of(phase: TaskPhase) -> str | None:
    return None if phase.user is None else str(phase.user)


def must_succeed(result: CommandResult, what: str) -> None:
    if not result.ok:
        raise EnvironmentFailure(f"{what}: exit code {result.exit_code}: {last_words(result)}")


def last_words(result: CommandResult) -> str:
    return (result.stderr.strip() or result.stdout.strip() or "no output")[-_SHOWN:]
