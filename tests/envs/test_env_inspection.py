"""Environments that are opened for inspection are closed again."""

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from rollwright.config import build
from rollwright.envs.base import PromptTemplates, Reset, Step, open_for_inspection
from rollwright.errors import ConfigError
from rollwright.run.build import SettingsTable


class Counted:
    """Counts its open instances."""

    open = 0
    prompts = PromptTemplates(system="", opening="{observation}", turn="{observation}")
    instruction = ""

    def __init__(self, level: int = 0) -> None:
        if level > 2:
            raise ConfigError(f"level: {level} does not exist")
        type(self).open += 1

    async def reset(self, seed: int) -> Reset:
        return Reset("", {})

    async def step(self, answer: str) -> Step:
        return Step("", 0.0, True, False, {})

    async def close(self) -> None:
        await asyncio.sleep(0)
        type(self).open -= 1

    def fork(self) -> "Counted":
        return Counted()


class Blocking:
    """Synchronous variant."""

    open = 0
    prompts, instruction = Counted.prompts, ""

    def __init__(self) -> None:
        type(self).open += 1

    def reset(self, seed: int) -> Reset:
        return Reset("", {})

    def step(self, answer: str) -> Step:
        return Step("", 0.0, True, False, {})

    def close(self) -> None:
        type(self).open -= 1


@pytest.fixture
def module() -> Iterator[None]:
    made: Any = ModuleType("counted_envs")
    made.Counted, made.Blocking = Counted, Blocking
    sys.modules["counted_envs"] = made
    yield
    del sys.modules["counted_envs"]


def config(kind: str, **more: Any) -> Any:
    tag = f"counted_envs:{kind}"
    manager = {"num_env_groups": 1, "tags": [tag], **more.pop("manager", {})}
    return build({"policy": {"kind": "random"}, "train_env_manager": manager, **more})


@pytest.mark.parametrize("kind", ["Counted", "Blocking"])
def test_environments_made_for_their_prompts_are_closed(module: None, kind: str) -> None:
    SettingsTable(config(kind))
    assert Counted.open == Blocking.open == 0


async def test_also_where_an_event_loop_runs(module: None) -> None:
    SettingsTable(config("Counted", strategy={"kind": "tree", "fork": "fork"}))
    SettingsTable(config("Counted", manager={"curriculum": {"levels": 3}}))
    assert Counted.open == 0


def test_one_that_raises_when_it_is_looked_at_or_closed_is_closed_and_holds_up_nobody() -> None:
    closed: list[str] = []

    class Bad(Counted):
        async def close(self) -> None:
            closed.append("yes")
            raise SystemExit

    with pytest.raises(ZeroDivisionError), open_for_inspection(Bad):
        raise ZeroDivisionError
    assert closed == ["yes"]
