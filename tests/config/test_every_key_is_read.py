"""A key that nothing reads is a promise that nobody keeps.

Short real runs are played while every read of a settings attribute is recorded, with the model that declares the key.
Reads by the configuration box itself (validation, comparing, dumping) do not count, so a key counts only where a component
asks for it.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import RunConfig, build, dump
from rollwright.engines.base import Generation
from rollwright.engines.factory import build_policy
from rollwright.engines.settings import SimulatedPolicyConfig
from rollwright.errors import ConfigError, RollwrightError
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.rollout.cli_agents.recipe import CliRecipe
from rollwright.run.build_swarm import open_transport, swarm_of
from rollwright.run.evaluating import evaluate_run, settle_evaluation
from rollwright.run.folder import RunFolder
from rollwright.run.model_choice import cache_room, download_rules, settle_model
from rollwright.run.run import Run
from rollwright.run.swarm_node import SwarmNode
from rollwright.run.training import TrainingRun
from rollwright.settings import Settings
from rollwright.swarm.identity import Identity
from rollwright.trajectory import Message

Key = tuple[str, str]
"""The model that declares a key, and the key."""

_PEER = "needs a second node that shares a group; tests/swarm/test_poison.py and test_silent_peers.py set it"
_GATEWAY = "needs an agent that calls the gateway; tests/gateway/test_gateway_sampling.py sets it"
_RULES = "needs an agent that calls the gateway; tests/gateway/test_gateway_rules.py and _formats.py set it"

_REMOTE = "needs a remote program; tests/run/test_remote_agents.py sets it"

_GROUP_JUDGE = "needs a judge that ranks; tests/run/test_ranked_groups.py has one"

_RANKS = "needs several ranks; tests/training/test_ranks.py starts them"
_TRAINER = "needs a trainer elsewhere; tests/training/test_batch_service.py has one"
NOT_READ_HERE: dict[Key, str] = {
    **{("ServeSettings", key): _TRAINER for key in ("host", "lease_seconds", "port", "token_env")},
    ("CommunicationConfig", "fetch_timeout"): _PEER,
    ("CommunicationConfig", "verify_timeout"): _PEER,
    ("SwarmConfig", "max_group_kb"): _PEER,
    ("SwarmConfig", "max_round_lag"): _PEER,
    ("SwarmConfig", "min_mean_logprob"): _PEER,
    ("CaptureRules", "client_sampling"): _GATEWAY,
    ("TrainerSettings", "rank_restarts"): _RANKS,
    ("TrainerSettings", "rank_timeout"): _RANKS,
    ("TrainerSettings", "shard_ranks"): _RANKS,
    ("RemoteAgentConfig", "lease_seconds"): _REMOTE,
    ("RunConfig", "remote"): _REMOTE,
    ("RemoteConfig", "host"): _REMOTE,
    ("RemoteConfig", "port"): _REMOTE,
    ("RemoteConfig", "public_url"): _REMOTE,
    ("CaptureRules", "client_formats"): _RULES,
    **{("CallRule", key): _RULES for key in ("model", "agent", "system", "train", "policy")},
    (
        "TrainerSettings",
        "max_skips_in_a_row",
    ): "needs a loss that is not finite; tests/training/test_trainer.py sets it",
    ("GroupJudgeReward", "rounds"): _GROUP_JUDGE,
    ("GroupJudgeReward", "seed"): _GROUP_JUDGE,
    (
        "VerdictRule",
        "malformed",
    ): "needs a judge without a verdict; tests/teams/test_team_verdicts.py sets it",
}
"""Keys that these runs cannot read, each with the reason."""

HAS_MATH_VERIFY = find_spec("math_verify") is not None
if not HAS_MATH_VERIFY:
    NOT_READ_HERE |= {
        ("MathVerifyReward", key): "needs the package math-verify"
        for key in ("allow_unconfined", "concurrency", "cpu_seconds", "field", "memory_mb")
    }

TEAM_AGENT = {"prompt": "{question} {context}"}
JUDGE = {"prompt": "{context}", "verdict": {"malformed": "approve"}}


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def models(root: type[BaseModel]) -> set[type[BaseModel]]:
    found = {root}
    for field in root.model_fields.values():
        for model in models_in(field.annotation):
            found |= models(model)
    return found


def declared(model: type[BaseModel], key: str) -> Key:
    """The key under the model that first declares it."""
    owner = [each for each in model.__mro__ if key in getattr(each, "__annotations__", {})][-1]
    return owner.__name__, key


def keys(root: type[BaseModel]) -> set[Key]:
    """All keys but `kind`, which pydantic reads to choose the model."""
    return {declared(model, key) for model in models(root) for key in model.model_fields if key != "kind"}


@contextmanager
def recorded() -> Iterator[set[Key]]:
    """The keys that are read meanwhile by components."""
    found: set[Key] = set()
    plain, iterate = Settings.__getattribute__, Settings.__iter__

    def read(self: Settings, name: str) -> Any:
        kind = type(self)
        if name in kind.__pydantic_fields__ and _acts(sys._getframe(1)):
            found.add(declared(kind, name))
        return plain(self, name)

    def every(self: Settings) -> Any:
        found.update(declared(type(self), key) for key in type(self).model_fields)
        return iterate(self)

    Settings.__getattribute__, Settings.__iter__ = read, every  # type: ignore[assignment,method-assign]
    try:
        yield found
    finally:
        del Settings.__getattribute__, Settings.__iter__


def _acts(frame: Any) -> bool:
    """Whether the code that reads is a component of the package, and no validator."""
    place, name = frame.f_code.co_filename, frame.f_code.co_name
    if "/rollwright/" not in place or "/rollwright/config/" in place:
        return False
    return not (place.endswith("settings.py") and name.startswith("_"))


async def lead(session: Any) -> Any:
    """A flow of one's own."""
    return await session.call("a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(["0123456789", "left right up down"], vocabulary_size=270)
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def games(**more: Any) -> dict[str, Any]:
    manager = {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"], **more.pop("manager", {})}
    policy = {"tokens_per_second": 1e5, "mean_tokens": 5}
    return {"name": "games", "policy": policy, "train_env_manager": manager, **more}


FILTERS = [
    "void_turn",
    "format_error",
    {"kind": "repetition", "shortest": 1},
    {"kind": "overlong", "limit": 50, "action": "penalise"},
    "no_trainable_token",
    "duplicate",
    "zero_variance",
    "accuracy_band",
    {"kind": "own", "test": "rollwright.rollout.filters.filters:VoidTurn"},
]

TREES = [
    {"kind": "tree"},
    {"kind": "tree", "branch": "random"},
    {"kind": "tree", "branch": "split"},
    {"kind": "tree", "branch": "keep_alive"},
    {"kind": "tree", "branch": "uncertainty"},
    {"kind": "tree", "branch": {"kind": "own", "function": "builtins:hash"}},
]

SEVERAL = {"a": {**TEAM_AGENT, "reading": {}}, "b": {**TEAM_AGENT, "after": ["a"]}, "c": JUDGE}
SEARCH = {"kind": "search", "passages": "nowhere.jsonl"}
TEAMS = [
    {
        "kind": "math",
        "agents": {"solver": {"tools": ["bash", "calculator", "python"], "sampling": {"top_p": 1.0}}},
    },
    {"kind": "search", "agents": {"search": {"policy": "other"}}},
    {"kind": "critic", "agents": {"search": {"tools": ["rollwright.tools.calculator:calculator"]}}},
    {"kind": "loop", "acts": "b", "critic": "c", "max_loops": 2, "agents": SEVERAL},
    {"kind": "route", "router": "c", "approved": "a", "rejected": "b", "agents": SEVERAL},
    {"kind": "own", "function": "every_key_flows:lead", "agents": {"a": TEAM_AGENT}},
]


async def play(content: dict[str, Any], batches: int = 1) -> None:
    config = build(content)
    async with Run(config) as run:
        for _ in range(batches if config.train_env_manager else 0):
            async with asyncio.timeout(120):
                await run.get_batch()
        if config.val_env_manager is not None:
            await run.evaluate()


async def play_games() -> None:
    val = {"num_env_groups": 2, "tags": ["FrozenLake"]}
    custom = {"FrozenLake": {"env_config": {"size": 4}, "max_steps": 4, "step_timeout": 5.0}}
    await play(
        games(manager={"filters": FILTERS, "min_group_size": 1}, val_env_manager=val, custom_envs=custom)
    )
    levels = {"tags": ["reasoning_gym:leg_counting"], "curriculum": {"levels": 2, "window": 1}}
    await play(games(manager=levels))
    # Random play solves some lakes now and then: those are played again.
    sampler = {"group_size": 8, "task_sampler": {"explore": 0.0, "low": 0.02, "largest_group": 16}}
    await play(games(manager=sampler) | {"policy": {"kind": "random"}}, batches=6)
    await play(games(agent={"history": {"mode": "window", "length": 1}}))
    for tree in TREES:
        await play(games(strategy=tree))


async def play_teams() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        await play(games(orchestras={"FrozenLake": {**TEAMS[0], "agents": {"solver": {"tools": [SEARCH]}}}}))
    for team in TEAMS:
        await play(games(orchestras={"FrozenLake": team}, policies={"other": {"kind": "random"}}))


REWARDS = [
    "exact_match",
    {"kind": "regex", "pattern": "."},
    {"kind": "contains", "texts": ["1"]},
    {"kind": "length", "limit": 10},
    {"kind": "json_schema", "json_schema": {}},
    {"kind": "returned", "key": "n"},
    {"kind": "unit_tests", "allow_unconfined": True, "partial": True},
    *([{"kind": "math_verify", "allow_unconfined": True}] if HAS_MATH_VERIFY else []),
    {"kind": "function", "function": "every_key_flows:one"},
    {
        "kind": "judge",
        "rubric": "r",
        "retries": 0,
        "policy": {"kind": "own", "policy": "every_key_flows:Grader"},
    },
]


def one(answer: str) -> float:
    return 1.0


async def asks(task: Any, session: Any) -> dict[str, int]:
    await session.generate([Message("user", task["question"])])
    return {"n": 1}


RECIPE = CliRecipe("silent", None, ("true",))


class Grader:
    """A judge's policy."""

    renderer, version, pressure = None, 0, 0

    async def generate(self, prompt: Any, sampling: Any) -> Generation:
        return Generation("score: 1", exact=False)

    async def close(self) -> None:
        pass


async def play_tasks(folder: Path) -> None:
    row = '{"question": "%d?", "answer": "1", "tests": ["assert True"]}\n'
    (folder / "tasks.jsonl").write_text("".join(row % number for number in range(20)))
    tasks = {"tasks": "tasks.jsonl", "held_out": 0.3, "template": "{question}"}
    command = [sys.executable, "-c", "import openai; openai.OpenAI().models.list()"]
    shown = {"folder": str(folder), "manager": {"tags": ["T"]}}
    await play(
        games(custom_envs={"T": {**tasks, "agent": "every_key_flows:asks", "rewards": REWARDS}}, **shown)
    )
    agents = {"T": {**tasks, "agent": {"command": command}, "rewards": REWARDS[:1]}}
    limits = {"max_attempts": 1, "max_refills": 1}
    with suppress(RollwrightError):  # it asks nothing, which is a failure
        await play(games(custom_envs=agents, limits=limits, **shown))
    terminal = {
        "T": {**tasks, "agent": {"kind": "terminal", "max_turns": 1}, "box": {}, "rewards": REWARDS[:1]}
    }
    with suppress(RollwrightError):  # where no backend of boxes runs, its attempts fail
        await play(games(custom_envs=terminal, limits=limits, **shown))

    cli = {"cli": "every_key_flows:RECIPE", "timeout": 20}
    in_box = {"T": {**tasks, "agent": cli, "box": {}, "rewards": REWARDS[:1]}}
    with suppress(RollwrightError):  # it asks nothing, which is a failure; without boxes, its attempts fail
        await play(games(custom_envs=in_box, limits=limits, **shown))


async def make_policies(folder: Path) -> None:
    engine = {"base_urls": ["http://127.0.0.1:1"], "renderer": {"tokenizer": str(folder), "name": "template"}}
    for policy in (
        {"kind": "random"},
        {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"},
        {"kind": "vllm", "model": "m", **engine},
        {"kind": "sglang", **engine},
        {"kind": "engine", "dialect": "sglang", **engine},
        {"kind": "own", "policy": "rollwright.simulation.players:RandomPlayer"},
    ):
        await build_policy(build({"policy": policy}).policy).close()


async def train(folder: Path, runs: Path) -> None:
    settings = {"lora": {"rank": 2}, "loss": {"ratio": "proximal", "kl_coefficient": 0.1}, "device": "cpu"}
    constant = {"aggregation": "constant", "entropy_coefficient": 0.1, "correction": "mask"}
    lake = {"FrozenLake": {"max_steps": 1, "max_tokens_per_step": 4}}
    own = {
        "loss": "rollwright.training.losses:clipped_loss",
        "device": "cpu",
        "critic": {},
        "advantage": "gae",
    }
    two = {"loss": constant, "device": "cpu"}
    for name, training in (("one", settings), ("two", two), ("three", own)):
        content = games(name=name, max_steps=2, custom_envs=lake, training=training, eval_steps=1)
        content["policy"] = {"kind": "torch", "model": str(folder), "renderer": "template", "device": "cpu"}
        content["val_env_manager"] = {"num_env_groups": 1, "tags": ["FrozenLake"]}
        config = build(content)
        place, config = RunFolder.create(runs, config)
        run = TrainingRun(config, place, store=place.store_address(None))
        try:
            await run.run()
        finally:
            place.finish(run.summary())


async def join(folder: Path, runs: Path) -> None:
    content = games(name="node", max_steps=1, training={"device": "cpu"}, swarm={"local_groups": 1})
    content["policy"] = {"kind": "torch", "model": str(folder), "renderer": "template", "device": "cpu"}
    content["custom_envs"] = {"FrozenLake": {"max_steps": 1, "max_tokens_per_step": 4}}
    content["swarm"]["communication"] = {"transport": "directory", "folder": str(runs)}
    await SwarmNode(build(content), runs / "home").run()


async def evaluate(runs: Path) -> None:
    settings = {
        "evaluation": {"tags": ["FrozenLake"], "tasks": 2, "samples": 2},
        "prices": {"simulated": {"prompt": 1.0, "completion": 2.0}},
        "budget": {"usd": 100.0},
        "policy": {"tokens_per_second": 1e5, "mean_tokens": 5},
    }
    config = settle_evaluation(build(settings))
    await evaluate_run(config, RunFolder.begin(runs / "run", config))


@pytest.fixture(scope="module")
def read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> set[Key]:
    # Tests are imported under names that no path in a configuration could have.
    sys.modules["every_key_flows"] = sys.modules[__name__]

    async def everything() -> None:
        await play_games()
        await play_teams()
        await play_tasks(tmp_path_factory.mktemp("tasks"))
        await make_policies(folder)
        await evaluate(tmp_path_factory.mktemp("evaluations"))
        await train(folder, tmp_path_factory.mktemp("runs"))
        await join(folder, tmp_path_factory.mktemp("swarm"))
        for announce in ("all", "views"):
            alone = {
                "communication": {"announce": announce, "multicast": False, "listen": ["tcp/127.0.0.1:0"]}
            }
            await (await open_transport(swarm_of(build({"swarm": alone})), Identity.generate())).close()

    played = tmp_path_factory.mktemp("played")
    (played / "games.yaml").write_text(dump(build(games(keep_steps=1, max_steps=2, gateway={}))))
    with recorded() as found:
        told = CliRunner().invoke(app, ["run", str(played / "games.yaml"), "--runs", str(played)])
        assert told.exit_code == 0, told.output
        asyncio.run(everything())
        config = build({"policy": {"kind": "torch", "model": str(folder)}, "training": {}})
        cache_room(config), download_rules(config), settle_model(config)
        with suppress(RollwrightError):
            settle_model(
                build({"policy": {"kind": "torch", "model": "auto"}, "downloads": {"offline": True}})
            )
    return found


def test_every_key_is_read_by_a_component(read: set[Key]) -> None:
    unread = sorted(keys(RunConfig) - read - set(NOT_READ_HERE))
    assert not unread, f"nothing reads {unread}"


def test_only_keys_that_are_not_read_are_excused(read: set[Key]) -> None:
    assert sorted(set(NOT_READ_HERE) & read) == []
    assert sorted(set(NOT_READ_HERE) - keys(RunConfig)) == []


class WithDeadKey(SimulatedPolicyConfig):
    """A policy that somebody added a key to."""

    dead: int = 3
    """Nothing reads it."""


def test_a_key_that_nothing_reads_is_found() -> None:
    settings = WithDeadKey(kind="simulated")
    with recorded() as found:
        build_policy(settings)
    assert ("SimulatedPolicyConfig", "slots") in found
    assert keys(WithDeadKey) - found == {("WithDeadKey", "dead")}
