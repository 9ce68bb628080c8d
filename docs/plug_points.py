"""Generates the page `plugging_in.md`: a table of all plug points from their registries, and examples."""

import inspect

from markdown_tables import table
from rollwright.registry import Registry, import_object

REGISTRIES = (
    "rollwright.envs.registry:ENVIRONMENTS",
    "rollwright.agents.settings:AGENTS",
    "rollwright.rollout.settings.agents:CLI_AGENTS",
    "rollwright.tools.settings:TOOLS",
    "rollwright.engines.settings:POLICIES",
    "rollwright.engines.settings:DIALECTS",
    "rollwright.engines.settings:ROUTING",
    "rollwright.rewards.settings:REWARDS",
    "rollwright.training.settings:ADVANTAGES",
    "rollwright.training.settings:LOSSES",
    "rollwright.training.settings:METRIC_WRITERS",
    "rollwright.rollout.filters.settings:FILTERS",
    "rollwright.rollout.settings.strategies:BRANCH_POLICIES",
    "rollwright.rollout.settings:CURRICULA",
    "rollwright.rollout.settings:TASK_SAMPLERS",
    "rollwright.store.opening:STORES",
    "rollwright.swarm.settings:TRANSPORTS",
    "rollwright.sandbox.settings:SANDBOXES",
)
"""Every registry of the package; a test keeps this list whole."""

HEAD = """# Plugging in

The configuration names each replaceable part by a built-in kind, by an entry point of an installed package, or as
`module:name`, any importable object. Nothing is imported before it is needed. An unknown name is refused with the nearest
one; an exception in your own object becomes one line that names it.

A package offers an implementation by an entry point of the group in the table, in its `pyproject.toml`:

```toml
[project.entry-points."rollwright.advantages"]
ranked = "my_package.advantages:Ranked"
```

"""

EXAMPLES = '''
The protocol defines the members of an implementation. A class is instantiated with `options` as keyword arguments, checked
against its signature; a plain function (possible for advantages, losses, branch policies and group filters) is called with
its usual arguments and the options.

## Advantages, losses, writers

```python
import sys
from pathlib import Path

from rollwright import make_advantage
from rollwright.training.metrics import Metrics


class Ranked:
    """Every turn of a group's best member gets 1, every other turn 0."""

    def __init__(self, best: float = 1.0) -> None:
        self.best = best

    def __call__(self, groups):
        found = []
        for group in groups:
            most = max(each.reward for each in group)
            found.append([[self.best * (each.reward == most)] * len(each.turns) for each in group])
        return found


class Printed:
    """Prints the metrics of each step."""

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        self.folder = folder

    def write(self, step, figures):
        print(step, dict(figures))

    def forget(self, step): ...

    def close(self): ...


sys.modules["my_package"] = sys.modules["__main__"]
assert make_advantage("my_package:Ranked", best=2.0)([[]] * 0) == []
Metrics(Path("."), ["my_package:Printed"]).write(1, {"loss": 0.5})
```

```yaml
training:
  advantage: {name: "my_package:Ranked", options: {best: 2.0}}
  loss: {name: "my_package.losses:plain", options: {}}
  writers: [jsonl, "my_package:Printed"]
```

A loss is a function like `rollwright.training.losses.Loss`; it returns one number for each token:

```python
from rollwright.training.losses import token_losses
from rollwright.training.settings import LossSettings
import sys
import torch


def plain(new, engine, advantages, settings, *, proximal=None, reference=None, entropy=None):
    """REINFORCE without any clip."""
    return -torch.exp(new - engine) * advantages


sys.modules["my_package"] = sys.modules["__main__"]
new = torch.zeros(3, requires_grad=True)
found = token_losses(new, torch.zeros(3), torch.ones(3), LossSettings(name="my_package:plain"))
assert found.losses.tolist() == [-1.0, -1.0, -1.0]
```

## Rewards

```python
import asyncio
import sys

from rollwright import Rewards, Trajectory, Turn


class Mentions:
    """1 where the answer contains a word; has the methods of `rollwright.rewards.composition.RewardComponent`."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def evaluate(self, attempt):
        return self.word in attempt.answer

    async def close(self): ...


def brevity(answer, *, limit=10):
    return len(answer) <= limit


sys.modules["my_package"] = sys.modules["__main__"]
rewards = Rewards.build(
    [
        {"kind": "my_package:Mentions", "options": {"word": "four"}, "name": "right"},
        {"kind": "my_package:brevity", "options": {"limit": 20}, "weight": 0.5},
    ]
)
trajectory = Trajectory(
    "r1", "a1", "g1", "Sums", 0, turns=[Turn(0, None, None, text="It is four.", exact=False)]
)
assert asyncio.run(rewards.evaluate({}, trajectory)).components == {"right": 1.0, "brevity": 1.0}
```

## Policies and engines

```python
import sys

from rollwright import RandomPlayer, load_config
from rollwright.engines.factory import build_policy


class MyPolicy(RandomPlayer):
    """Has the members of `rollwright.engines.base.Policy`."""

    def __init__(self, luck: float = 0.5) -> None:
        super().__init__()
        self.luck = luck


sys.modules["my_package"] = sys.modules["__main__"]
config = load_config({"policy": {"kind": "my_package:MyPolicy", "options": {"luck": 0.9}}})
assert build_policy(config.policy).luck == 0.9
```

An engine over HTTP needs only a dialect: the format of requests and responses. Connections, retries, routing and weight
updates are those of every engine:

```yaml
policy:
  kind: engine
  dialect: my_package.engines:MyDialect
  base_urls: ["http://127.0.0.1:8000"]
  renderer: {tokenizer: smollm2}
```

## Filters, branch policies, curricula

```python
import sys

from rollwright import load_config
from rollwright.rollout.filters import build_filters


class Short:
    """Catches turns of few characters."""

    name = "short"

    def __init__(self, least: int = 3) -> None:
        self.least = least

    def catches_turn(self, turn) -> bool:
        return len(turn.text) < self.least


sys.modules["my_package"] = sys.modules["__main__"]
short = {"kind": "my_package:Short", "action": "mask"}
manager = {"num_env_groups": 1, "tags": ["FrozenLake"], "filters": [short]}
(found,) = build_filters(load_config({"train_env_manager": manager}).train_env_manager)
assert found.name == "short"
```

```yaml
strategy: {kind: tree, width: 3, branch: "my_package:answers_for"}
```

The function gets a `rollwright.rollout.branching.Node` and returns the number of answers. A curriculum is a class like
`rollwright.rollout.curriculum.LevelSampler`, named by `train_env_manager.curriculum.name`.

## Transports, stores, sandboxes

```yaml
swarm:
  communication: {transport: "my_package:MyTransport", options: {room: 7}}
```

A transport is created as `MyTransport(swarm_settings, peer, clock=…, **options)`, by a class or by an async function. Stores are
chosen by the scheme of their address: a package that offers `redis` in the group of stores opens `redis://…`.
'''


def plugging_in() -> str:
    rows = []
    for path in REGISTRIES:
        registry: Registry[object] = import_object(path)
        protocol = registry.protocol.replace(":", ".")
        kinds = ", ".join(f"`{kind}`" for kind in registry.kinds) or "none"
        what = (
            " ".join((inspect.getdoc(import_object(registry.protocol)) or "").split())
            .partition(". ")[0]
            .rstrip(".")
        )
        is_class = inspect.isclass(import_object(registry.protocol))
        rows.append(
            (
                registry.group,
                f"`{registry.key}`",
                f"`{protocol}`" + (f": {what}" if is_class else ""),
                kinds,
            )
        )
    return HEAD + table(("entry-point group", "key", "protocol", "built in"), rows) + "\n" + EXAMPLES
