"""The environment of `harbor:PATH`: a task folder played by commands in text, or by an agent in its box.

The seed chooses the task. An episode with the chat agent is one command per turn until the answer is `done`; then the tests
of the step run, and the next step's instruction follows if there is one. The oracle player runs the task's solution, and a
player at random does nothing: Harbor's oracle and nop.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rollwright.envs.base import EnvironmentFailure, Info, PromptTemplates, Reset, Step
from rollwright.envs.harbor.play import TaskBoxes, user_of
from rollwright.envs.harbor.tasks import HarborTask, find_tasks, load_task
from rollwright.envs.harbor.verifier import combine, misses, total_of, verify
from rollwright.envs.terminal import DONE, NO_COMMAND, SYSTEM, describe_result, read_action
from rollwright.sandbox.attempts import AttemptBoxes, current_boxes
from rollwright.sandbox.box import BoxError
from rollwright.sandbox.leases import state_folder

_ORACLE = "solution"
_DONE = "```bash\ndone\n```"
_PROMPTS = PromptTemplates(system=SYSTEM, opening="{observation}", turn="{observation}")


class HarborEnv:
    """Plays the tasks of a folder."""

    def __init__(
        self, path: str, *, seconds: float = 120.0, output_limit: int = 8000, solved_at: float = 1.0
    ) -> None:
        """`seconds`: time limit of one command. `output_limit`: characters of its output that the model sees. `solved_at`:
        reward from which on a task counts as solved."""
        self._tasks = tuple(load_task(each) for each in find_tasks(Path(path).expanduser()))
        self._seconds = seconds
        self._output_limit = output_limit
        self._solved_at = solved_at
        self._playing: TaskBoxes | None = None
        self._boxes: AttemptBoxes | None = None
        self._step = 0
        self._rewards: list[dict[str, float]] = []
        self._oracle_asked = False
        self.task: Mapping[str, Any] = {}

    @property
    def tasks(self) -> tuple[HarborTask, ...]:
        return self._tasks

    @property
    def instruction(self) -> str:
        return ""

    @property
    def prompts(self) -> PromptTemplates:
        return _PROMPTS

    async def reset(self, seed: int) -> Reset:
        await self.close()
        task = self._tasks[seed % len(self._tasks)]
        self._boxes = current_boxes()
        self._playing = TaskBoxes(task, self._boxes, state_folder())
        self._step, self._rewards, self._oracle_asked = 0, [], False
        first = task.steps[0].instruction
        self.task = {"name": task.name, "folder": task.folder, "instruction": first}
        try:
            await self._playing.start()
        except BoxError as error:
            raise EnvironmentFailure(f"task {task.name}: {error}") from error
        return Reset(first, {"success": False})

    async def step(self, answer: str) -> Step:
        playing = self._open()
        if self._oracle_asked and answer == self.answer(_ORACLE):
            await self.solve()
            return await self._finish_step("solution")
        action = read_action(answer)
        if action.is_done:
            return await self._finish_step(DONE)
        if action.command is None:
            return Step(NO_COMMAND, 0.0, False, False, {"action": None, "valid": False})
        try:
            result = await playing.main.run(
                action.command,
                seconds=self._seconds,
                user=user_of(playing.task.steps[self._step].agent),
            )
        except BoxError as error:
            raise EnvironmentFailure(f"task {playing.task.name}: {error}") from error
        shown = describe_result(result, self._output_limit)
        return Step(shown, 0.0, False, False, {"action": action.command, "valid": True})

    async def conclude(self) -> Step:
        """Runs the tests of the present step on what an agent has done."""
        return await self._finish_step(DONE)

    async def solve(self) -> None:
        """Runs the task's own solution."""
        playing = self._open()
        await playing.solve(playing.task.steps[self._step])

    async def fork(self) -> Self:
        """A copy in the same state: its main box is copied, with files and without processes."""
        playing, boxes = self._open(), self._boxes
        assert boxes is not None
        copied = await playing.main.fork()
        boxes.keep(copied)
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._playing = playing.forked(copied, boxes)
        other._rewards = list(self._rewards)
        return other

    async def close(self) -> None:
        """Ends the main box; services end with the attempt."""
        playing, boxes, self._playing = self._playing, self._boxes, None
        if playing is not None and boxes is not None and playing._main is not None:
            boxes.end(playing._main)

    def actions(self) -> list[str]:
        return ["done"]

    def best_action(self) -> str | None:
        self._oracle_asked = True
        return _ORACLE

    def answer(self, action: str) -> str:
        return _DONE if action != _ORACLE else "```bash\n# the task's own solution\n```"

    async def _finish_step(self, action: str) -> Step:
        playing = self._open()
        steps = playing.task.steps
        done = steps[self._step]
        self._rewards.append(await verify(playing, done))
        self._step += 1
        if self._step < len(steps) and not misses(self._rewards[-1], done.min_reward):
            try:
                await playing.begin_step(steps[self._step])
            except BoxError as error:
                raise EnvironmentFailure(f"task {playing.task.name}: {error}") from error
            self.task = {**self.task, "instruction": steps[self._step].instruction}
            return Step(steps[self._step].instruction, 0.0, False, False, {"action": action, "valid": True})
        rewards = combine(self._rewards, playing.task.strategy)
        reward = total_of(rewards)
        metrics = {f"verifier.{name}": value for name, value in rewards.items()}
        info: Info = {
            "action": action,
            "valid": True,
            "success": reward >= self._solved_at,
            "metrics": metrics,
        }
        return Step("", reward, True, False, info)

    def _open(self) -> TaskBoxes:
        if self._playing is None:
            raise EnvironmentFailure("harbor: no task is open; call reset first")
        return self._playing
