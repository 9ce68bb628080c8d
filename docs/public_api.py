"""The page of public names: what each is for, from its docstring."""

import inspect

import rollwright
from markdown_tables import table

INTRODUCTION = """# The public API

`import rollwright` gives everything that a program needs. Each name is loaded when it is first used, so the import itself
takes a few milliseconds and needs no extra. The names on this page are stable; the modules behind them are not.

```python
import rollwright as rw

found = rw.evaluate(tags=["FrozenLake"], episodes=32, policy={"kind": "random"})
print(found)  # reward with its interval, share of solved levels, failures
print(found.scores["FrozenLake"].interval)
print(found.trajectories[0].turns[0].text)  # what was said, turn by turn
```

`rw.evaluate` and `rw.train` block until they are done, also beside a running event loop, as in a notebook. `rw.Run` is for
programs that want the batches themselves:

```python
import asyncio

import rollwright as rw

config = rw.load_config(
    {
        "rollout_batch_size": 8,
        "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["FrozenLake"]},
    }
)


async def main() -> None:
    async with rw.Run(config, policy=rw.RandomPlayer()) as run:
        batch = await run.get_batch()
        print(len(batch.trajectories), "trajectories in", len(batch.groups), "groups")


asyncio.run(main())
```

A training takes a configuration, or a model and environments, and leaves a folder that can be resumed; from the project's
folder:

```pycon
>>> import rollwright as rw
>>> trained = rw.train("configs/frozen_lake_train.yaml", steps=3)
>>> trained.model  # a folder that `policy.model` takes
PosixPath('runs/frozen_lake_train/model')
>>> rw.train(resume=trained.folder, steps=4).summary["training"]["steps"]
4
```

## Names
"""


def purpose(name: str) -> str:
    """The first line of a name's docstring."""
    text = inspect.getdoc(getattr(rollwright, name)) or ""
    return text.partition("\n")[0] if not text.startswith(("dict(", "The central part")) else ""


SAID = {
    "Agent": "A function `(task, session)` that plays an episode, async or plain.",
    "Task": "A row of a task file: a plain mapping.",
}
"""Names that are types without a docstring of their own."""


def page() -> str:
    rows = [
        (f"`{name}`", SAID.get(name) or purpose(name)) for name in rollwright.__all__ if name != "__version__"
    ]
    return f"{INTRODUCTION}\n{table(('name', 'purpose'), rows)}\n"
