"""Playing a task folder in boxes: its services, its solution, and its verifier.

Always true: the reward is what the verifier has written, `reward.json` before `reward.txt`; its exit code means nothing. A
verifier that writes no reward, or no finite number, is a failure of the environment and never a reward of 0. Tests and
solution are not in the box while the agent works.
"""

import asyncio
import math
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.harbor.tasks import HarborTask, NetworkMode, Service, TaskPhase, TaskStep, substitute
from rollwright.sandbox.attempts import AttemptBoxes
from rollwright.sandbox.box import Box, BoxError, BoxSpec, CommandResult, Network
from rollwright.sandbox.building import image_for

_LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs /logs/agent /logs/verifier /logs/artifacts"
_DEFAULT_VERIFIER_SECONDS = 600.0
_SHOWN = 300
"""Characters of a program's last words in an error."""

_NETWORKS: Mapping[NetworkMode, Network] = {
    "public": Network.PUBLIC,
    "no-network": Network.NONE,
    "allowlist": Network.ALLOWLIST,
}
_PYTEST_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors)\b")


class TaskBoxes:
    """The boxes of one task while it is played."""

    def __init__(self, task: HarborTask, boxes: AttemptBoxes, state: Path) -> None:
        self.task = task
        self._boxes = boxes
        self._state = state
        self._main: Box | None = None

    @property
    def main(self) -> Box:
        if self._main is None:
            raise EnvironmentFailure(f"task {self.task.name}: is not started")
        return self._main

    async def start(self) -> Box:
        """Starts all services, waits until they are healthy, and returns the agent's."""
        main, *others = self.task.services
        self._main = await self._boxes.start(self._boxes.needs.apply(await self._spec(main)))
        agent = self.task.agent
        self._boxes.adopt(self._main, user=_user(agent), seconds=agent.timeout_sec)
        _must_succeed(await self._main.run(_LOGS, user="root"), "making /logs")
        for service in others:
            await self._start_service(service)
        await self._wait_until_healthy()
        return self._main

    def forked(self, main: Box, boxes: AttemptBoxes) -> "TaskBoxes":
        """The same task in a copy of its main box."""
        other = TaskBoxes(self.task, boxes, self._state)
        other._main = main
        return other

    async def solve(self, step: TaskStep) -> CommandResult:
        """Runs the solution, as Harbor's oracle does."""
        if self.task.is_terminal_bench:
            source, path = Path(step.folder) / "solution.sh", "/solution/solution.sh"
        else:
            source, path = Path(step.folder) / "solution", "/solution/solve.sh"
        if not source.exists():
            raise EnvironmentFailure(f"task {self.task.name}: has no solution at {source}")
        await self.main.put(source, "/solution" if source.is_dir() else path)
        given = substitute(self.task.solution_env, f"task {self.task.name}: solution.env")
        seconds = self.task.agent.timeout_sec or self.main.spec.seconds
        return await self.main.run(
            f"chmod +x {path}; bash {path}", environment=given, seconds=seconds, user=_user(self.task.agent)
        )

    async def verify(self, step: TaskStep) -> dict[str, float]:
        """Runs the tests of a step and returns the rewards that they have written."""
        task, where = self.task, f"task {self.task.name}: verifier"
        box = await self._verifier_box() if task.verifier.environment_mode == "separate" else self.main
        command = "bash /tests/run-tests.sh" if task.is_terminal_bench else "/tests/test.sh"
        tests = Path(step.folder) / "tests"
        if not tests.is_dir():
            raise EnvironmentFailure(f"{where}: {tests} does not exist")
        try:
            _must_succeed(await box.run("rm -rf /tests /logs/verifier/*", user="root"), where)
            await box.put(tests, "/tests")
            if task.is_terminal_bench:
                await box.put(Path(step.folder) / "run-tests.sh", "/tests/run-tests.sh")
            await box.run("chmod -R a+rX /tests; chmod +x /tests/*.sh", user="root")
            result = await box.run(
                f"{command} > /logs/verifier/test-stdout.txt 2>&1",
                seconds=task.verifier.timeout_sec or _DEFAULT_VERIFIER_SECONDS,
                environment={"TEST_DIR": "/tests", **substitute(task.verifier.env, f"{where}.env")},
                user=_user(task.verifier),
            )
            if result.is_late:
                raise EnvironmentFailure(f"{where}: took longer than {result.seconds:.0f} s")
            if task.is_terminal_bench:
                return await self._read_pytest(box, where)
            return await _read_rewards(box, where)
        except BoxError as error:
            raise EnvironmentFailure(f"{where}: {error}") from error
        finally:
            if box is not self.main:
                self._boxes.end(box)

    async def _verifier_box(self) -> Box:
        """A new box of the same image with the artifacts of the agent's box in it."""
        main = self.task.services[0]
        box = await self._boxes.start((await self._spec(main)).replace(**self._network(self.task.verifier)))
        _must_succeed(await box.run(_LOGS, user="root"), "making /logs")
        for path in ("/logs/artifacts", *self.task.artifacts):
            packed = await self.main.run(
                ["sh", "-c", 'tar -C / -cf /tmp/.artifact.tar "${0#/}"', path], user="root"
            )
            if packed.ok:
                await box.put(await self.main.get("/tmp/.artifact.tar"), "/tmp/.artifact.tar")
                _must_succeed(
                    await box.run("tar -C / -xf /tmp/.artifact.tar", user="root"), f"artifact {path}"
                )
        return box

    async def _spec(self, service: Service) -> BoxSpec:
        task, given = self.task, self.task.environment
        try:
            image = await asyncio.to_thread(
                image_for,
                self._state,
                service.image,
                service.build,
                service.dockerfile,
                given.build_timeout_sec,
            )
        except BoxError as error:
            raise EnvironmentFailure(f"task {task.name}: service {service.name}: {error}") from error
        variables = (
            {**given.env, **service.environment} if service is task.services[0] else service.environment
        )
        return BoxSpec(
            image=image,
            user=service.user,
            workdir=given.workdir or service.workdir,
            environment=substitute(variables, f"task {task.name}: environment.env"),
            memory_mb=task.memory_mb,
            cpus=given.cpus or 0.0,
            disk_mb=task.storage_mb,
            seconds=task.agent.timeout_sec or 3600.0,
            hostname=service.name,
            hosts=tuple(each.name for each in task.services),
            **self._network(task.agent),
        )

    def _network(self, phase: TaskPhase) -> dict[str, Any]:
        mode = phase.network_mode or self.task.environment.network
        network = _NETWORKS[mode]
        hosts = tuple(phase.allowed_hosts or self.task.environment.allowed_hosts)
        return {"network": network, "allowed_hosts": hosts if network is Network.ALLOWLIST else ()}

    async def _start_service(self, service: Service) -> None:
        spec = (await self._spec(service)).replace(
            network=Network.NONE, allowed_hosts=(), network_of=self.main.id
        )
        box = await self._boxes.start(spec)
        command = service.command if isinstance(service.command, str) else shlex.join(service.command)
        if command:
            _must_succeed(
                await box.run(f"nohup sh -c {shlex.quote(command)} > /var/log/service.log 2>&1 &"),
                f"service {service.name}",
            )

    async def _wait_until_healthy(self) -> None:
        check = self.task.environment.healthcheck
        if check is None:
            return
        await asyncio.sleep(check.start_period_sec)
        for attempt in range(max(1, check.retries)):
            if attempt:
                await asyncio.sleep(check.interval_sec)
            result = await self.main.run(check.command, seconds=check.timeout_sec)
            if result.ok:
                return
        raise EnvironmentFailure(f"task {self.task.name}: healthcheck: {_last_words(result)}")

    async def _read_pytest(self, box: Box, where: str) -> dict[str, float]:
        """Terminal-Bench counts a task as solved if all of its tests pass."""
        output = (await box.get("/logs/verifier/test-stdout.txt")).decode(errors="replace")
        counts = dict.fromkeys(("passed", "failed", "error", "errors"), 0)
        for number, word in _PYTEST_COUNTS.findall(output.rpartition("=====\n")[0][-2000:] or output[-2000:]):
            counts[word] = int(number)
        if not any(counts.values()):
            raise EnvironmentFailure(
                f"{where}: its output has no result of pytest: {output.strip()[-_SHOWN:]}"
            )
        solved = (
            counts["passed"] > 0 and not counts["failed"] and not counts["error"] and not counts["errors"]
        )
        return {"reward": float(solved)}


async def _read_rewards(box: Box, where: str) -> dict[str, float]:
    for name, read in (("reward.json", _from_json), ("reward.txt", _from_text)):
        try:
            content = await box.get(f"/logs/verifier/{name}")
        except BoxError:
            continue
        found = read(content)
        if found is None:
            shown = content[:80].decode(errors="replace").strip()
            raise EnvironmentFailure(f"{where}: {name} holds {shown!r}; finite numbers are accepted")
        return found
    output = ""
    with suppress(BoxError):
        output = (await box.get("/logs/verifier/test-stdout.txt")).decode(errors="replace").strip()[-_SHOWN:]
    raise EnvironmentFailure(
        f"{where}: has written neither reward.json nor reward.txt{': ' + output if output else ''}"
    )


def _from_json(content: bytes) -> dict[str, float] | None:
    try:
        found = msgspec.json.decode(content, type=dict[str, float])
    except (msgspec.MsgspecError, ValueError):
        return None
    return found if found and all(map(math.isfinite, found.values())) else None


def _from_text(content: bytes) -> dict[str, float] | None:
    try:
        value = float(content.decode().strip())
    except ValueError:
        return None
    return {"reward": value} if math.isfinite(value) else None


def total_of(rewards: Mapping[str, float]) -> float:
    """One number: `reward` if there is one of that name, else the mean."""
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)


def _user(phase: TaskPhase) -> str | None:
    return None if phase.user is None else str(phase.user)


def _must_succeed(result: CommandResult, what: str) -> None:
    if not result.ok:
        raise EnvironmentFailure(f"{what}: exit code {result.exit_code}: {_last_words(result)}")


def _last_words(result: CommandResult) -> str:
    return (result.stderr.strip() or result.stdout.strip() or "no output")[-_SHOWN:]
