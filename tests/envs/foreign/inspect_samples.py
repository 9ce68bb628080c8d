"""Tasks of Inspect: sums, one whose solver breaks, one with several scores."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Target, accuracy, includes, match, scorer
from inspect_ai.solver import TaskState, generate, solver, system_message


@task
def sums(count: int = 10) -> Task:
    rows = [Sample(input=f"{n} + 1 = ?", target=str(n + 1)) for n in range(count)]
    return Task(
        dataset=MemoryDataset(rows),
        solver=[system_message("Answer with a number."), generate()],
        scorer=[match(), includes()],
    )


@solver
def breaks_off() -> Any:
    async def solve(state: TaskState, generate: Any) -> TaskState:
        await generate(state)
        raise ValueError("the solver broke off")

    return solve


@task
def broken() -> Task:
    return Task(dataset=MemoryDataset([Sample(input="x", target="y")]), solver=breaks_off(), scorer=match())


@scorer(metrics={"*": [accuracy()]})
def parts() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"length": float(len(state.output.completion)), "right": "P"})

    return score


@task
def graded() -> Task:
    return Task(dataset=MemoryDataset([Sample(input="x", target="y")]), solver=generate(), scorer=parts())
