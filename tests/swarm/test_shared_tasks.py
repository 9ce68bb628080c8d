"""Task files in a swarm: a peer's group is verified against this node's own copy of the file, and by its own rewards."""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # as in `test_node`
from tiny_swarm import configuration, save_model

from rollwright import RemoteRollout, RemoteRun
from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.run.build_swarm import node_config, task_book
from rollwright.run.folder import RunReader
from rollwright.run.swarm_node import SwarmNode
from rollwright.swarm.identity import IDENTITY_FILE, load_identity
from rollwright.swarm.transports.memory import MemorySwarm

REWARD = """
def right(task, answer):
    return float(answer.split()[-1:] == [str(task["answer"])])
"""


AGENT = """
from rollwright import Message

async def solve(task, session):
    return (await session.generate([Message("user", task["question"])])).text
"""


def files(folder: Path, *, shift: int = 1, reward: str = REWARD) -> Path:
    """A node's own copy of the rows and of the module with the reward."""
    folder.mkdir()
    rows = [{"question": f"{n} + 1 = ?", "answer": n + shift} for n in range(16)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "swarm_rewards.py").write_text(reward, encoding="utf-8")
    return folder


def content(folder: Path, **custom: Any) -> dict[str, Any]:
    tag = {"tasks": "sums.jsonl", "max_tokens_per_step": 64, "rewards": [LAST_WORD], **custom}
    return {"folder": str(folder), "custom_envs": {"Sums": tag}, "swarm": {}}


LAST_WORD = {"kind": "exact_match", "extract": r"(\S+)\s*$"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))


async def test_a_peers_rows_are_found_in_ones_own_copy_and_judged_by_ones_own_rewards(
    node, tmp_path: Path
) -> None:
    there = node("Sums", settings=content(files(tmp_path / "there")))
    here = node("Sums", settings=content(files(tmp_path / "here")))
    assert there.book.version("Sums") == here.book.version("Sums")
    assert await there.share(1, 0) is not None
    (got,) = await here.gather(1, 1)
    _, played = await there.useful(0)
    assert [each.seed for each in got.trajectories] == [each.seed for each in played]
    assert [each.reward for each in got.trajectories] == [each.reward for each in played]
    assert {each.reward for each in got.trajectories} == {0.0, 1.0}
    assert got.trajectories[0].components == {"exact_match": played[0].reward}


@pytest.mark.parametrize(
    ("other", "custom"),
    [
        ({"shift": 2}, {}),
        ({}, {"held_out": 0.3}),
        ({}, {"template": "What is {question}"}),
        ({}, {"rewards": [{**LAST_WORD, "weight": 2.0}]}),
    ],
)
async def test_other_rows_or_rewards_are_another_version_and_nobody_is_blamed(
    node, tmp_path: Path, other: dict[str, Any], custom: dict[str, Any]
) -> None:
    there = node("Sums", settings=content(files(tmp_path / "there", **other), **custom))
    here = node("Sums", settings=content(files(tmp_path / "here")))
    assert there.book.version("Sums") != here.book.version("Sums")
    await there.share(1, 0)
    assert await here.gather(1, 1) == []


def test_the_code_of_a_reward_is_part_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = []
    for number, text in enumerate((REWARD, REWARD, REWARD.replace("[-1:]", "[:1]"))):
        folder = files(tmp_path / str(number), reward=text)
        name = "swarm_rewards"
        monkeypatch.delitem(sys.modules, name, raising=False)  # each node is a process of its own
        monkeypatch.syspath_prepend(str(folder))
        settings = content(
            folder, rewards=[{"kind": "function", "function": f"{name}:right", "name": "right"}]
        )
        settings["train_env_manager"] = {"num_env_groups": 1, "group_size": 2, "tags": ["Sums"]}
        rewards = task_book(build(settings)).settings("Sums").rewards
        assert rewards is not None
        versions.append(rewards.version)
    assert versions[0] == versions[1] != versions[2]


async def test_a_wrong_claim_about_a_row_is_found(node, tmp_path: Path) -> None:
    there = node("Sums", settings=content(files(tmp_path / "there")))
    here = node("Sums", settings=content(files(tmp_path / "here")))
    index, played = await there.useful(0)
    for each in played:
        each.episode_reward = 1.0 - each.episode_reward
    await there.exchange.share(1, index, "Sums", played, there.scorer.tokenizer)
    assert await here.gather(1, 1) == []
    assert here.exchange.counts["wrong_reward"] == 1


@pytest.mark.parametrize(
    ("custom", "why"),
    [
        ({"agent": {"command": ["true"]}}, "a peer cannot play the calls of an agent's own program again"),
        (
            {"rewards": [{"kind": "judge", "rubric": "r", "policy": {"kind": "random"}}]},
            "another machine's judge may give another verdict",
        ),
    ],
)
async def test_what_no_peer_can_verify_stays_on_its_node(
    node, tmp_path: Path, custom: dict[str, Any], why: str
) -> None:
    settings = content(files(tmp_path / "there"), **custom)
    there = node("Sums", settings=settings)
    assert there.book.unverifiable == {"Sums": why}
    honest = node("Sums", settings=content(files(tmp_path / "here")))
    index, played = await honest.useful(0)
    assert await there.exchange.share(1, index, "Sums", played, "bytes") is None
    await honest.share(1, 0)
    assert await there.gather(1, 1) == []
    manager = {"num_env_groups": 1, "group_size": 2, "tags": ["Sums"]}
    policy = {"kind": "torch", "model": "m"}
    alone = {**settings, "training": {}, "train_env_manager": manager, "policy": policy}
    with pytest.raises(ConfigError, match=r"custom_envs\.Sums: nothing of this run can be shared"):
        node_config(build(alone), "ab" * 32)


def play_remotely(node: SwarmNode) -> None:
    """A remote program that takes the node's rollouts, in a thread, until the node has ended."""
    while (
        node.training.local is None or node.training.local.board is None or not node.training.local.board.url
    ):
        time.sleep(0.02)

    def solve(task: dict[str, Any], session: RemoteRollout) -> str:
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            question: Any = {"role": "user", "content": task["question"]}
            return (
                client.chat.completions.create(model="m", messages=[question]).choices[0].message.content
                or ""
            )

    RemoteRun(node.training.local.board.url, patience=1).play(solve, concurrency=2)


@pytest.mark.parametrize("agent", [{"function": "swarm_agent:solve"}, {"kind": "remote"}])
async def test_a_whole_node_trains_on_a_peers_groups_of_the_same_file(
    tmp_path: Path, agent: dict[str, Any]
) -> None:
    """One node has a second tag, which an agent plays and which it keeps for itself."""
    model, network = save_model(tmp_path / "model"), MemorySwarm()
    even = {"kind": "function", "function": "node_rewards:even", "name": "even"}
    text = "def even(answer):\n    return sum(ord(each) % 2 for each in answer) / max(len(answer), 1)\n"
    nodes = []
    for number, name in enumerate(("first", "second")):
        folder = files(tmp_path / name)
        (folder / "node_rewards.py").write_text(text, encoding="utf-8")
        (folder / "swarm_agent.py").write_text(AGENT, encoding="utf-8")
        tag = {"tasks": "sums.jsonl", "rewards": [even], "max_tokens_per_step": 6}
        own = {**tag, "agent": agent}
        tags = ["Sums"] if number == 0 else ["Sums", "Own"]
        config = configuration(
            model,
            {},
            folder=str(folder),
            max_steps=100_000 if number == 0 else 3,
            custom_envs={"Sums": tag, "Own": own},
            remote={"port": 0},
            train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": tags},
        )
        home = tmp_path / f"home-{name}"
        home.mkdir()
        key = home / IDENTITY_FILE
        key.write_text(f"{number + 7:02d}" * 32)
        key.chmod(0o600)
        nodes.append(SwarmNode(config, home, transport=network.join(load_identity(key).peer)))
    running = asyncio.create_task(nodes[0].run())
    while not nodes[0].training.pipeline.done:  # models are loaded one after the other
        await asyncio.sleep(0.05)
        assert not running.done()
    if "kind" in agent:
        threading.Thread(target=play_remotely, args=(nodes[1],), daemon=True).start()
    await nodes[1].run()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    status = nodes[1].status()
    assert status.accepted > 0
    assert set(status.refused) <= {"not_shared"}  # its own groups of the other tag
    played = {each.tag for each in RunReader(nodes[1].home).trajectories()}
    assert played == {"Sums", "Own"}
    foreign = [
        each for node in nodes for each in RunReader(node.home).trajectories() if each.metrics.get("foreign")
    ]
    assert {each.tag for each in foreign} == {"Sums"}
