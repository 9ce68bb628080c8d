"""The verifier of a task: its tests, in the agent's box or in one of their own, and the rewards that they write.

Always true: the reward is what the tests have written, `reward.json` before `reward.txt`; their exit code means nothing. Tests
that write no reward, or no finite number, are a failure of the environment and never a reward of 0.
"""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.harbor.play import TaskBoxes, last_words, make_log_folders, must_succeed, user_of
from rollwright.envs.harbor.tasks import MAIN, Artifact, TaskStep, VerifierBox, substitute
from rollwright.sandbox.box import Box, BoxError

_DEFAULT_SECONDS = 600.0
_SHOWN = 300
"""Characters of the tests' output in an error."""

_PUBLISHED = Artifact("/logs/artifacts")
_PYTEST_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors)\b")
_CLEAN = "rm -rf /tests /logs/verifier/* /logs/verifier/.[!.]*"

Rewards = dict[str, float]


async def verify(playing: TaskBoxes, step: TaskStep) -> Rewards:
    """Runs the tests of a step and returns the rewards that they have written."""
    where = f"task {playing.task.name}: verifier"
    try:
        if step.verifier_box is None:
            return await _verify_in(playing, step, playing.main, where)
        box = await _start_separate(playing, step, step.verifier_box)
        try:
            return await _verify_in(playing, step, box, where)
        finally:
            playing.boxes.end(box)
    except BoxError as error:
        raise EnvironmentFailure(f"{where}: {error}") from error


async def _verify_in(playing: TaskBoxes, step: TaskStep, box: Box, where: str) -> Rewards:
    task, is_shared = playing.task, box is playing.main
    if is_shared:
        await _collect(playing, step)
        await playing.use_network(step.verifier, task.environment)
    if step.name and is_shared:
        must_succeed(await box.run(_CLEAN, user="root"), where)
    if not (step.verifier_box and step.verifier_box.has_tests):
        await _copy_tests(playing, step, box, where)
    command = "bash /tests/run-tests.sh" if task.is_terminal_bench else "/tests/test.sh"
    result = await box.run(
        f"{command} > /logs/verifier/test-stdout.txt 2>&1",
        seconds=step.verifier.timeout_sec or _DEFAULT_SECONDS,
        environment={"TEST_DIR": "/tests", **substitute(step.verifier.env, f"{where}.env")},
        user=user_of(step.verifier),
    )
    if result.is_late:
        raise EnvironmentFailure(f"{where}: took longer than {result.seconds:.0f} s")
    rewards = await (_read_pytest(box, where) if task.is_terminal_bench else _read_rewards(box, where))
    if step.name and is_shared:  # the next step's agent must not see the tests, nor what they wrote
        must_succeed(await box.run(_CLEAN, user="root"), where)
    return rewards


async def _copy_tests(playing: TaskBoxes, step: TaskStep, box: Box, where: str) -> None:
    script = Path(playing.task.folder, "run-tests.sh") if playing.task.is_terminal_bench else None
    candidates = [script] if script is not None else [Path(each, "test.sh") for each in step.tests]
    if not await asyncio.to_thread(lambda: any(each.is_file() for each in candidates)):
        raise EnvironmentFailure(
            f"{where}: {' or '.join(map(str, candidates)) or 'tests/test.sh'} does not exist"
        )
    for folder in step.tests:
        await box.put(Path(folder), "/tests")
    if script is not None:
        await box.put(script, "/tests/run-tests.sh")
    await box.run("chmod -R a+rX /tests; chmod +x /tests/*.sh", user="root")


async def _start_separate(playing: TaskBoxes, step: TaskStep, wanted: VerifierBox) -> Box:
    """A box of its own for the verifier, with the artifacts of the agent's boxes in it."""
    spec = await playing.spec(wanted.services[0], wanted.environment, step.verifier)
    await _collect(playing, step)
    box = await playing.boxes.start(spec)
    try:
        await make_log_folders(box)
        for artifact in (_PUBLISHED, *step.artifacts):
            await _copy_artifact(playing.service(artifact.service or MAIN), box, artifact)
    except BaseException:
        playing.boxes.end(box)
        raise
    return box


async def _collect(playing: TaskBoxes, step: TaskStep) -> None:
    """Hooks that fail are left to the tests, which miss what they would have written."""
    for hook in step.verifier.collect:
        user = None if hook.user is None else str(hook.user)
        await playing.service(hook.service).run(hook.command, seconds=hook.timeout_sec, user=user)


async def _copy_artifact(source: Box, target: Box, artifact: Artifact) -> None:
    """Copies a file or folder to the same path; one that does not exist is left out."""
    packed = "/tmp/.artifact.tar"
    excluded = [f"--exclude={each}" for each in artifact.exclude]
    made = await source.run(
        ["tar", "-C", "/", *excluded, "-cf", packed, artifact.source.lstrip("/") or "."], user="root"
    )
    if not made.ok:
        return
    await target.put(await source.get(packed), packed)
    unpacked = await target.run(["tar", "-C", "/", "-xf", packed], user="root")
    if not unpacked.ok:
        raise EnvironmentFailure(f"artifact {artifact.source}: {last_words(unpacked)}")
    for box in (source, target):
        await box.run(["rm", "-f", packed], user="root")


async def _read_pytest(box: Box, where: str) -> Rewards:
    """Terminal-Bench counts a task as solved if all of its tests pass."""
    output = (await box.get("/logs/verifier/test-stdout.txt")).decode(errors="replace")
    counts = dict.fromkeys(("passed", "failed", "error", "errors"), 0)
    for number, word in _PYTEST_COUNTS.findall(output.rpartition("=====\n")[0][-2000:] or output[-2000:]):
        counts[word] = int(number)
    if not any(counts.values()):
        raise EnvironmentFailure(f"{where}: its output has no result of pytest: {output.strip()[-_SHOWN:]}")
    solved = counts["passed"] > 0 and not counts["failed"] and not counts["error"] and not counts["errors"]
    return {"reward": float(solved)}


async def _read_rewards(box: Box, where: str) -> Rewards:
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


def _from_json(content: bytes) -> Rewards | None:
    try:
        found = msgspec.json.decode(content, type=dict[str, float | bool])
    except (msgspec.MsgspecError, ValueError):
        return None
    rewards = {name: float(value) for name, value in found.items()}
    return rewards if rewards and all(map(math.isfinite, rewards.values())) else None


def _from_text(content: bytes) -> Rewards | None:
    try:
        value = float(content.decode().strip())
    except ValueError:
        return None
    return {"reward": value} if math.isfinite(value) else None


def misses(rewards: Mapping[str, float], least: Mapping[str, float]) -> bool:
    """Whether a reward is below the one that a step asks for, or missing."""
    return any(rewards.get(name, -math.inf) < value for name, value in least.items())


def combine(steps: Sequence[Rewards], strategy: str) -> Rewards:
    """Rewards of a task from those of its steps: the last one's, or the mean of each name, where a missing one counts as 0."""
    if strategy == "final":
        return steps[-1]
    names = {name for each in steps for name in each}
    return {name: sum(each.get(name, 0.0) for each in steps) / len(steps) for name in sorted(names)}


def total_of(rewards: Mapping[str, float]) -> float:
    """One number: `reward` if there is one of that name, else the mean."""
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)
