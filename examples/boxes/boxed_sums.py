"""An agent that asks the model once and writes its answer in the attempt's box, and a reward that reads it there."""

from typing import Any

import rollwright as rw


async def solve(task: dict[str, Any], session: Any) -> str:
    turn = await session.generate([rw.Message("user", task["question"])])
    box = await session.box()
    await box.put(turn.text.encode(), "/tmp/said")
    shown = await box.run("grep -oE '[0-9]+' /tmp/said | tail -1 > /tmp/answer; cat /tmp/answer")
    return str(shown.stdout.strip())


async def written(task: dict[str, Any], box: Any) -> float:
    return float((await box.get("/tmp/answer")).decode().strip() == task["answer"])
