"""A foreign group is trained on exactly if it holds up when it is played again."""

import asyncio
import inspect
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from rollwright.engines.rendering import make_renderer
from rollwright.envs import registry
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_tokenizer
from rollwright.swarm.content import encode
from rollwright.swarm.recipes import task_digest, task_level, task_seed
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.signed import Manifest
from rollwright.swarm.transports.base import digest_of
from rollwright.swarm.verification import FOREIGN, OFF_POLICY, check_claims, tokenizer_digest, verify
from rollwright.training.advantages import RLOO
from rollwright.training.rows import build_rows
from rollwright.trajectory import check, floats, token_ids
from rollwright.trajectory.arrays import pack


def replaced(group, member: int = 0, turn: int | None = None, **changes):
    """The group with one member, or one of its actions, changed."""
    members = list(group.members)
    if turn is None:
        members[member] = msgspec.structs.replace(members[member], **changes)
    else:
        actions = list(members[member].actions)
        actions[turn] = msgspec.structs.replace(actions[turn], **changes)
        members[member] = msgspec.structs.replace(members[member], actions=tuple(actions))
    return msgspec.structs.replace(group, members=tuple(members))


async def verified(receiver, group):
    return await verify(group, digest_of(encode(group)), receiver.book, receiver.scorer)


@pytest.fixture
def pair(node):
    return node("FrozenLake", "SimpleSokoban"), node("FrozenLake", "SimpleSokoban")


async def test_an_honest_group_becomes_own_trajectories_with_own_logprobs(pair) -> None:
    sender, receiver = pair
    played = await sender.group(3)
    group = await sender.shared_group(3)
    found = await verified(receiver, group)
    assert not found.off_policy
    assert [each.reward for each in found.trajectories] == [each.reward for each in played]
    for own, foreign in zip(played, found.trajectories, strict=True):
        check(foreign)
        assert foreign.observation == own.observation
        assert [turn.prompt_ids for turn in foreign.turns] == [turn.prompt_ids for turn in own.turns]
        assert [turn.sampled_ids for turn in foreign.turns] == [turn.sampled_ids for turn in own.turns]
        assert [turn.outcome for turn in foreign.turns] == [turn.outcome for turn in own.turns]
        assert {each for turn in foreign.turns for each in turn.logprobs} == {-2.0}
        assert foreign.oldest_version == receiver.scorer.version
        assert foreign.metrics[FOREIGN] == 1.0
        assert foreign.metrics[OFF_POLICY] == 0.0


async def test_a_foreign_group_trains_like_any_other(pair) -> None:
    sender, receiver = pair
    found = await verified(receiver, await sender.shared_group(1))
    rows = build_rows([found.trajectories], RLOO())
    assert len(rows) == len(found.trajectories)
    assert any(any(row.advantages) for row in rows)


async def test_many_turns_are_played_again(pair) -> None:
    sender, receiver = pair
    group = await sender.shared_group(2, "SimpleSokoban")
    assert max(len(member.actions) for member in group.members) > 3
    found = await verified(receiver, group)
    assert tuple(each.reward for each in found.trajectories) == group.rewards


async def test_a_wrong_reward_is_found(pair) -> None:
    sender, receiver = pair
    group = await sender.shared_group(1)
    lie = replaced(group, 3, reward=group.members[3].reward + 0.01)
    with pytest.raises(PeerRefused) as refused:
        await verified(receiver, lie)
    assert refused.value.reason is PeerRefusal.WRONG_REWARD


async def test_actions_behind_the_end_of_an_episode_are_found(pair) -> None:
    sender, receiver = pair
    group = await sender.shared_group(1)
    actions = group.members[0].actions
    with pytest.raises(PeerRefused) as refused:
        await verified(receiver, replaced(group, 0, actions=(*actions, actions[-1])))
    assert refused.value.reason is PeerRefusal.WRONG_ACTIONS


async def test_an_episode_cut_short_earns_what_it_earned_until_then(pair) -> None:
    sender, receiver = pair
    group = await sender.shared_group(1)
    actions = group.members[0].actions
    cut = replaced(group, 0, actions=actions[:-1], reward=0.0)
    assert (await verified(receiver, cut)).trajectories[0].reward == 0.0
    with pytest.raises(PeerRefused) as refused:
        await verified(receiver, replaced(group, 0, actions=actions[:-1]))
    assert refused.value.reason is PeerRefusal.WRONG_REWARD


@pytest.mark.parametrize("hidden", [[258], [300], [-5], [70, 71]])
async def test_ids_that_do_not_say_what_the_text_says_are_found(pair, hidden: list[int]) -> None:
    sender, receiver = pair
    group = await sender.shared_group(1)
    action = group.members[0].actions[0]
    forged = b"".join(each.to_bytes(4, "little", signed=True) for each in hidden) + action.ids
    with pytest.raises(PeerRefused) as refused:
        await verified(receiver, replaced(group, 0, 0, ids=forged))
    assert refused.value.reason is PeerRefusal.WRONG_TOKENS


class TokenizerScorer:
    """A policy with a tokenizer of transformers."""

    version = 1

    def __init__(self) -> None:
        self.own: Any = tiny_tokenizer(
            ["system user assistant left right up down <answer>Left</answer>"], 300
        )
        self.renderer = make_renderer(self.own)
        self.tokenizer = tokenizer_digest(self.own)

    async def logprobs(self, prompt, sampled):
        return floats([-1.5]) * len(sampled)

    def encode(self, text: str):
        return token_ids([*self.own.encode(text, add_special_tokens=False), self.own.eos_token_id])

    def tokens(self, group):
        """The group as a node with this tokenizer would have sampled it."""
        members = []
        for member in group.members:
            actions = tuple(
                msgspec.structs.replace(each, ids=pack(self.encode(each.text))) for each in member.actions
            )
            members.append(msgspec.structs.replace(member, actions=actions))
        return msgspec.structs.replace(group, members=tuple(members), tokenizer=self.tokenizer)


async def test_a_real_tokenizer_says_whether_ids_and_text_agree(node) -> None:
    scorer = TokenizerScorer()
    sender, receiver = node(), node(scorer=scorer)
    group = scorer.tokens(await sender.shared_group(0))
    assert not (await verified(receiver, group)).off_policy
    ids = group.members[0].actions[0].ids
    end = ids[-4:]
    for forged in (
        end + ids,
        ids[:4] + end + ids[4:],
        ids + end,
        ids[:-4] + pack(token_ids([10**6])),
        ids[4:],
    ):
        with pytest.raises(PeerRefused) as refused:
            await verified(receiver, replaced(group, 0, 0, ids=forged))
        assert refused.value.reason is PeerRefusal.WRONG_TOKENS


def test_the_digest_of_a_tokenizer_is_that_of_its_rules() -> None:
    one, same = TokenizerScorer(), TokenizerScorer()
    assert one.tokenizer == same.tokenizer
    same.own.padding_side = "left"
    same.own("pad", padding="max_length", max_length=8)
    assert tokenizer_digest(same.own) == one.tokenizer
    assert tokenizer_digest(tiny_tokenizer(["other words"], 300)) != one.tokenizer
    with pytest.raises(ConfigError, match="fast tokenizer"):
        tokenizer_digest(object())


async def test_another_tokenizer_means_own_encoding_of_the_text_marked_as_off_policy(pair) -> None:
    sender, receiver = pair
    group = msgspec.structs.replace(await sender.shared_group(1), tokenizer="another")
    group = replaced(group, 0, 0, ids=b"\x01\x00\x00\x00")
    found = await verified(receiver, group)
    assert found.off_policy
    turn = found.trajectories[0].turns[0]
    assert turn.sampled_ids == receiver.scorer.encode(turn.text)
    assert all(each.metrics[OFF_POLICY] == 1.0 for each in found.trajectories)
    assert all(each.not_trainable is None for each in found.trajectories)


async def test_what_does_not_fit_here_is_refused_without_blame(node) -> None:
    sender = node("FrozenLake")
    receiver = node("FrozenLake", settings={"sequence_length": 700})
    with pytest.raises(PeerRefused) as refused:
        await verified(receiver, await sender.shared_group(1))
    assert refused.value.reason is PeerRefusal.TOO_LONG


async def test_an_environment_that_fails_here_is_not_put_down_to_the_peer(pair) -> None:
    sender, receiver = pair

    class Broken:
        prompts = property(lambda self: receiver.book.make_env(receiver.book.settings("FrozenLake")).prompts)
        instruction = ""

        async def reset(self, seed: int):
            raise OSError("no such disk")

        async def close(self) -> None: ...

    receiver.book.make_env = lambda settings: Broken()
    with pytest.raises(PeerRefused) as refused:
        await verified(receiver, await sender.shared_group(1))
    assert refused.value.reason is PeerRefusal.CANNOT_CHECK


async def test_time_is_limited(pair) -> None:
    sender, receiver = pair
    group = await sender.shared_group(1)
    with pytest.raises(PeerRefused) as refused:
        await verify(group, "0" * 64, receiver.book, receiver.scorer, seconds=0.0)
    assert refused.value.reason is PeerRefusal.UNVERIFIABLE


async def test_the_manifest_binds_its_content(pair) -> None:
    sender, other = pair
    group = await sender.shared_group(1)
    manifest = sender.exchange.publisher.manifest(1, group, encode(group))
    check_claims(group, manifest, "test-swarm")
    changes = [
        {"peer": other.peer},
        {"env": "SimpleSokoban"},
        {"env_version": "0"},
        {"index": 2},
        {"rewards": (9.0, *group.rewards[1:])},
    ]
    for change in changes:
        with pytest.raises(PeerRefused) as refused:
            check_claims(group, msgspec.structs.replace(manifest, **change), "test-swarm")
        assert refused.value.reason is PeerRefusal.CONTENT_DIFFERS
    chosen = msgspec.structs.replace(group, recipe=msgspec.structs.replace(group.recipe, seed=1))
    with pytest.raises(PeerRefused) as refused:
        check_claims(chosen, manifest, "test-swarm")
    assert refused.value.reason is PeerRefusal.FOREIGN_SEED


TASKS = ("FrozenLake", "SimpleSokoban", "reasoning_gym:binary_matrix")


async def tasks() -> list[str]:
    found = []
    for tag in TASKS:
        env = registry.make(tag, {})
        for index in range(3):
            level = task_level(task_seed("s", "ab" * 32), index)
            found.append(f"{tag} {level} {task_digest((await env.reset(level)).observation)}")
    return found


async def test_the_same_recipe_gives_the_same_task_in_another_process() -> None:
    program = f"""
import asyncio
from rollwright.envs import registry
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_tokenizer
from rollwright.engines.rendering import make_renderer
from rollwright.swarm.recipes import task_digest, task_level, task_seed
TASKS = {TASKS!r}
{inspect.getsource(tasks)}
print(*asyncio.run(tasks()), sep="\\n")
"""
    run = [sys.executable, "-c", program]
    said = await asyncio.to_thread(subprocess.run, run, capture_output=True, text=True, check=True)
    here = await tasks()
    assert said.stdout.splitlines() == here
    assert len(set(here)) == len(here)


def test_levels_follow_from_the_swarm_and_the_peer() -> None:
    seeds = {task_seed(swarm, peer) for swarm in ("a", "b") for peer in ("1" * 64, "2" * 64)}
    assert len(seeds) == 4
    assert task_level(5, 0) != task_level(5, 1)


async def test_other_settings_or_another_maker_are_another_version(node) -> None:
    plain = node("FrozenLake")
    other = node("FrozenLake", settings={"custom_envs": {"FrozenLake": {"max_steps": 3}}})
    assert plain.book.version("FrozenLake") == node("FrozenLake").book.version("FrozenLake")
    assert plain.book.version("FrozenLake") != other.book.version("FrozenLake")
    with pytest.raises(PeerRefused) as refused:
        plain.book.check("FrozenLake", other.book.version("FrozenLake"))
    assert refused.value.reason is PeerRefusal.OTHER_ENV_VERSION
    with pytest.raises(PeerRefused) as refused:
        plain.book.check("os:system", "1")
    assert refused.value.reason is PeerRefusal.UNKNOWN_ENV


def test_a_manifest_has_no_answer_test_or_scorer() -> None:
    assert set(Manifest.__struct_fields__) == {
        *("swarm", "peer", "round", "sequence", "created", "env", "env_version", "index", "digest", "size"),
        "rewards",
    }
