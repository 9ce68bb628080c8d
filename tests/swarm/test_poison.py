"""One bad peer: no crash, nothing of it run, nothing of it taken, and everybody else as without it."""

import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from rollwright.swarm.content import decode, encode
from rollwright.swarm.gathering import GroupCheck
from rollwright.swarm.quarantine import Quarantine
from rollwright.swarm.refusals import BLAMED, SUSPECT, PeerRefusal, PeerRefused
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.signed import open_signed, sign_manifest
from rollwright.swarm.transports.base import digest_of

BINARY_MATRIX = "reasoning_gym:binary_matrix"
"""reasoning-gym's own scorer would evaluate an answer that is not the right one as code."""


def lied(group):
    """The same group, its rewards turned round."""
    members = tuple(msgspec.structs.replace(member, reward=1.0 - member.reward) for member in group.members)
    return msgspec.structs.replace(group, members=members)


@pytest.fixture
def swarm(node):
    """A receiver, an honest peer and a bad one."""
    return node(), node(), node()


async def test_honest_groups_are_taken_and_counted(swarm) -> None:
    receiver, honest, _ = swarm
    digests = {await honest.share(1, index) for index in range(4)} - {None}
    taken = await receiver.gather(1, 4)
    assert {each.digest for each in taken} == digests
    assert all(each.peer == honest.peer for each in taken)
    assert receiver.exchange.counts["accepted"] == len(digests) >= 2
    assert await receiver.gather(1, 4) == []


async def test_wrong_rewards_lead_to_quarantine_with_the_evidence(swarm) -> None:
    receiver, honest, bad = swarm
    await honest.share(1, 0)
    lie = lied(await bad.shared_group(0))
    sealed = await bad.send(lie, 1)
    taken = await receiver.gather(1, 8)
    assert {each.peer for each in taken} == {honest.peer}
    assert receiver.exchange.counts[PeerRefusal.WRONG_REWARD] == 1
    (verdict,) = receiver.exchange.quarantine.verdicts
    assert verdict.peer == bad.peer
    assert verdict.reason is PeerRefusal.WRONG_REWARD
    evidence = receiver.folder / "quarantine" / bad.peer
    assert (evidence / "manifest.bin").read_bytes() == sealed
    assert (evidence / "content.bin").read_bytes() == encode(lie)
    assert open_signed(sealed).peer == bad.peer, "anybody can check who signed it"


async def test_a_caught_peer_stays_out_over_a_restart_until_it_is_released(swarm, node) -> None:
    receiver, _, bad = swarm
    await bad.send(lied(await bad.shared_group(0)), 1)
    await receiver.gather(1, 4)
    await receiver.exchange.close()
    again = node(identity=receiver.identity)
    await bad.share(2, 1)
    assert await again.gather(2, 4) == []
    assert again.exchange.counts[PeerRefusal.QUARANTINED] >= 1
    assert again.exchange.quarantine.release(bad.peer)
    await bad.share(3, 2)
    assert [each.peer for each in await again.gather(3, 4)] == [bad.peer]


async def test_another_s_group_under_an_own_name_is_refused(swarm) -> None:
    receiver, honest, bad = swarm
    group = await honest.shared_group(0)
    await bad.send(group, 1)
    assert await receiver.gather(1, 4) == []
    assert receiver.exchange.counts[PeerRefusal.CONTENT_DIFFERS] == 1
    assert bad.peer in receiver.exchange.quarantine
    assert honest.peer not in receiver.exchange.quarantine
    await honest.share(1, 0)
    assert [each.peer for each in await receiver.gather(1, 4)] == [honest.peer]


@pytest.mark.parametrize("seed", ["theirs", "own"])
async def test_another_s_answers_with_the_own_name_written_in_are_refused(swarm, seed: str) -> None:
    receiver, honest, bad = swarm
    group, own = await honest.shared_group(0), await bad.shared_group(0)
    recipe = own.recipe if seed == "own" else group.recipe
    stolen = msgspec.structs.replace(group, peer=bad.peer, recipe=recipe)
    await bad.send(stolen, 1)
    assert await receiver.gather(1, 4) == []
    refused = set(receiver.exchange.counts) & set(BLAMED)
    assert refused
    assert bad.peer in receiver.exchange.quarantine


async def test_a_copy_of_a_taken_group_is_refused(swarm) -> None:
    receiver, honest, _ = swarm
    await honest.share(1, 0)
    assert len(await receiver.gather(1, 4)) == 1
    await honest.share(2, 0)
    assert await receiver.gather(2, 4) == []
    assert receiver.exchange.counts[PeerRefusal.DUPLICATE] == 1


async def test_own_groups_do_not_come_back(swarm) -> None:
    receiver, _, bad = swarm
    digest = await receiver.share(1, 0)
    group = await receiver.shared_group(0)
    assert digest == digest_of(encode(group))
    await bad.send(group, 1)
    assert await receiver.gather(1, 4) == []


async def test_a_replayed_envelope_does_not_count_twice_and_blames_nobody(swarm) -> None:
    receiver, honest, bad = swarm
    sealed = await honest.send(await honest.shared_group(0), 1)
    assert len(await receiver.gather(1, 4)) == 1
    assert await receiver.gather(1, 4) == []
    await bad.transport.announce(sealed)
    assert await receiver.gather(1, 4) == []
    assert receiver.exchange.counts[PeerRefusal.REPLAY] == 1
    assert receiver.exchange.quarantine.verdicts == []


async def test_two_manifests_with_one_number_lead_to_quarantine(swarm) -> None:
    receiver, _, bad = swarm
    await bad.send(await bad.shared_group(0), 1, sequence=50)
    await bad.send(await bad.shared_group(1), 1, sequence=50)
    await receiver.gather(1, 4)
    assert receiver.exchange.counts[PeerRefusal.EQUIVOCATION] == 1
    assert bad.peer in receiver.exchange.quarantine


async def test_old_rounds_and_wrong_clocks_are_refused_without_blame(node) -> None:
    receiver = node(sharing=SwarmConfig(max_round_lag=2))
    behind, skewed = node(), node(clock=lambda: 4_000_000_000.0)
    await behind.share(1, 0)
    await skewed.share(11, 0)
    assert await receiver.gather(11, 4) == []
    assert receiver.exchange.counts[PeerRefusal.OLD_ROUND] == 1
    assert receiver.exchange.counts[PeerRefusal.CLOCK_SKEW] == 1
    assert receiver.exchange.quarantine.verdicts == []
    await behind.share(10, 1)
    assert [each.round for each in await receiver.gather(11, 4)] == [10]


async def test_a_group_that_grows_old_while_it_waits_is_not_taken(swarm) -> None:
    receiver, honest, _ = swarm
    await honest.share(1, 0)
    assert await receiver.gather(1, 0) == []
    assert await receiver.gather(20, 4) == []


async def test_an_environment_that_is_not_played_here_is_never_made(node) -> None:
    receiver, bad = node(), node()
    group = await bad.shared_group(0)
    for tag in ("os:system", "gymnasium:CartPole-v1", "SimpleSokoban"):
        recipe = msgspec.structs.replace(group.recipe, env=tag)
        await bad.send(msgspec.structs.replace(group, recipe=recipe), 1)
    assert await receiver.gather(1, 4) == []
    assert receiver.exchange.counts[PeerRefusal.UNKNOWN_ENV] == 3


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path({file!r}).write_text('x')",
        "__import__('os').system('touch {file}')",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os')._exit(0)",
        "[0] * 10**11",
    ],
)
async def test_code_in_an_answer_does_nothing_here(node, tmp_path: Path, attack: str) -> None:
    receiver, bad = node(BINARY_MATRIX), node(BINARY_MATRIX)
    made = tmp_path / "made"
    group = await bad.shared_group(0)
    text = f"<answer>{attack.format(file=str(made))}</answer>"
    action = msgspec.structs.replace(group.members[0].actions[0], text=text, ids=b"")
    attacking = msgspec.structs.replace(group.members[0], actions=(action,), reward=1.0)
    await bad.send(msgspec.structs.replace(group, members=(attacking, *group.members[1:])), 1)
    assert await receiver.gather(1, 8) == []
    assert not made.exists()
    assert receiver.exchange.counts["accepted"] == 0
    refused = receiver.exchange.counts
    assert refused[PeerRefusal.WRONG_REWARD] + refused[PeerRefusal.UNVERIFIABLE] == 1


HOSTILE = {
    "1 GiB array": b"\xdd\x40\x00\x00\x00",
    "1 GiB text": b"\x95\x01\xdb\x40\x00\x00\x00",
    "4 GiB map": b"\xdf\xff\xff\xff\xff",
    "deep nesting": b"\x91" * 500_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "many items": b"\xdd\x00\x0f\x00\x00" + b"\x01" * 0xF0000,
    "empty": b"",
    "text": b"not a group",
    "code": b"import os; os.system('true')",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=list(HOSTILE))
async def test_hostile_content_costs_no_more_than_its_bytes_and_leads_to_quarantine(
    swarm, data: bytes
) -> None:
    receiver, honest, bad = swarm
    await honest.share(1, 0)
    await bad.send_raw(data, await bad.shared_group(0), 1)
    tracemalloc.start()
    taken = await receiver.gather(1, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [each.peer for each in taken] == [honest.peer]
    assert bad.peer in receiver.exchange.quarantine
    assert peak < 8 * len(data) + (16 << 20)


async def test_content_larger_than_said_is_not_taken(swarm) -> None:
    receiver, _, bad = swarm
    group = await bad.shared_group(0)
    await bad.send_raw(encode(group), group, 1, size=10)
    await bad.send_raw(encode(group) + b"\x00" * 2_000_000, group, 1)
    assert await receiver.gather(1, 8) == []
    assert receiver.exchange.counts[PeerRefusal.NOT_FETCHED] == 1
    assert receiver.exchange.counts[PeerRefusal.TOO_LARGE] == 1


def mutated(data: bytes, luck: random.Random) -> bytes:
    """One of the ways in which bytes go wrong."""
    changed = bytearray(data)
    way = luck.randrange(5)
    if way == 0:
        return luck.randbytes(luck.randrange(0, 600))
    if way == 1:
        for _ in range(luck.randrange(1, 8)):
            changed[luck.randrange(len(changed))] = luck.randrange(256)
    elif way == 2:
        del changed[luck.randrange(len(changed)) :]
    elif way == 3:
        place = luck.randrange(len(changed))
        changed[place:place] = luck.choice(list(HOSTILE.values()))[:200]
    else:
        place = luck.randrange(len(changed))
        del changed[place : place + luck.randrange(1, 50)]
    return bytes(changed)


def said(group) -> list:
    """What a group says was done and earned, as far as two machines agree about it."""
    return [(round(member.reward, 5), [each.text for each in member.actions]) for member in group.members]


async def test_ten_thousand_fuzzed_messages_crash_nothing_and_bring_nothing(swarm) -> None:
    receiver, honest, bad = swarm
    luck = random.Random(8)
    group = await bad.shared_group(0)
    data = encode(group)
    manifest = bad.exchange.publisher.manifest(1, group, data)
    sealed = sign_manifest(manifest, bad.identity)
    door = receiver.exchange.admission
    for _ in range(5000):
        changed = mutated(sealed, luck)
        if changed == sealed:
            continue
        with pytest.raises(PeerRefused):
            door.admit(changed, round=1, now=manifest.created)
    for _ in range(5000):
        changed = mutated(data, luck)
        try:
            found = decode(changed)
            claims = bad.exchange.publisher.manifest(1, found, changed)
            receiver.book.check(claims.env, claims.env_version)
            await receiver.exchange.checker(receiver.scorer).verify(GroupCheck(claims, changed))
        except PeerRefused:
            continue
        # Signed anew by a peer that changed only what has no meaning, such as the name of its tokenizer.
        assert said(found) == said(group)
    await honest.share(1, 0)
    assert [each.peer for each in await receiver.gather(1, 4)] == [honest.peer]


async def test_a_fuzzing_peer_on_the_wire_changes_nothing_for_the_others(swarm) -> None:
    receiver, honest, bad = swarm
    luck = random.Random(9)
    sealed = sign_manifest(
        bad.exchange.publisher.manifest(1, group := await bad.shared_group(0), encode(group)), bad.identity
    )
    for _ in range(300):
        await bad.transport.announce(mutated(sealed, luck)[:2000])
    digest = await honest.share(1, 0)
    assert [each.digest for each in await receiver.gather(1, 4)] == [digest]


async def test_one_of_eight_peers_changes_nothing_for_the_seven(node, network) -> None:
    receiver, honest, bad = node(), [node() for _ in range(7)], node()
    without_it = node()
    for index, peer in enumerate(honest):
        await peer.share(1, index)
    for index in range(8):
        await bad.send(lied(await bad.shared_group(index)), 1)
    with_it = await receiver.gather(1, 14)
    assert bad.peer in receiver.exchange.quarantine
    network.cut(bad.peer)
    without = await without_it.gather(1, 14)

    def rewards(groups) -> dict:
        return {each.digest: [member.reward for member in each.trajectories] for each in groups}

    assert rewards(with_it) == rewards(without)
    assert len(with_it) == 7


async def test_a_peer_whose_checks_keep_failing_is_put_away_and_one_that_recovers_is_not(
    tmp_path: Path,
) -> None:
    quarantine = Quarantine(tmp_path, strikes=3)
    slow = PeerRefused(PeerRefusal.UNVERIFIABLE, "took too long")
    assert not any(quarantine.judge("a" * 64, slow, now=1.0, manifest=b"m") for _ in range(2))
    quarantine.trust_again("a" * 64)
    assert not any(quarantine.judge("a" * 64, slow, now=1.0, manifest=b"m") for _ in range(2))
    assert quarantine.judge("a" * 64, slow, now=1.0, manifest=b"m")
    assert "a" * 64 in Quarantine(tmp_path)


def test_what_an_honest_node_can_do_is_never_enough_for_quarantine(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    for reason in set(PeerRefusal) - BLAMED - SUSPECT:
        for _ in range(20):
            assert not quarantine.judge("b" * 64, PeerRefused(reason), now=1.0, manifest=b"m")
    assert quarantine.verdicts == []


def test_evidence_does_not_fill_the_disk(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, max_evidence_bytes=10_000)
    for number in range(20):
        quarantine.judge(
            f"{number:064x}",
            PeerRefused(PeerRefusal.WRONG_REWARD),
            now=float(number),
            manifest=b"m",
            content=bytes(3000),
        )
    assert len(quarantine.verdicts) == 20
    assert sum(each.has_evidence for each in quarantine.verdicts) == 3
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*.bin")) <= 10_000
    assert [each.peer for each in Quarantine(tmp_path).verdicts] == [
        each.peer for each in quarantine.verdicts
    ]
    quarantine.release(f"{0:064x}")
    quarantine.judge(
        "f" * 64, PeerRefused(PeerRefusal.WRONG_REWARD), now=99.0, manifest=b"m", content=bytes(3000)
    )
    assert quarantine.verdicts[-1].has_evidence


async def test_without_peers_a_round_goes_on_alone(node, network) -> None:
    receiver, honest = node(), node()
    await honest.share(1, 0)
    network.cut(honest.peer)
    assert await receiver.gather(1, 4) == []
    assert receiver.exchange.counts[PeerRefusal.NOT_FETCHED] == 1
    assert await receiver.share(1, 0) is not None
    network.heal(honest.peer)
    await honest.share(2, 1)
    assert [each.peer for each in await receiver.gather(2, 4)] == [honest.peer]


async def test_a_scorer_that_was_stopped_is_not_shared_as_a_verdict(swarm) -> None:
    sender, _, _ = swarm
    played = await sender.group(0)
    played[0].metrics["scorer_killed"] = 1.0
    assert await sender.exchange.share(1, 0, "FrozenLake", played, "bytes") is None
    assert sender.exchange.counts["not_shared"] == 1


async def test_flat_groups_are_neither_shared_nor_taken(swarm) -> None:
    receiver, _, bad = swarm
    group = await bad.shared_group(0)
    flat = msgspec.structs.replace(group, members=(group.members[2], group.members[2]))
    await bad.send(flat, 1)
    assert await receiver.gather(1, 4) == []
    assert await bad.exchange.share(1, 5, "FrozenLake", [(await bad.group(0))[0]] * 2, "bytes") is None


async def test_groups_that_are_too_large_or_too_unlikely_are_refused_without_blame(node) -> None:
    honest = node()
    small = node(max_group_size=3)
    picky = node(sharing=SwarmConfig(min_mean_logprob=-1.0))
    easy = node(sharing=SwarmConfig(min_mean_logprob=-3.0))
    await honest.share(1, 0)
    assert await small.gather(1, 4) == []
    assert small.exchange.counts[PeerRefusal.TOO_LARGE] == 1
    assert await picky.gather(1, 4) == []
    assert picky.exchange.counts[PeerRefusal.UNLIKELY] == 1
    assert len(await easy.gather(1, 4)) == 1
    assert small.exchange.quarantine.verdicts == picky.exchange.quarantine.verdicts == []


async def test_the_seen_file_keeps_groups_from_being_taken_twice(swarm, node) -> None:
    receiver, honest, _ = swarm
    group = await honest.shared_group(0)
    await honest.send(group, 1)
    assert len(await receiver.gather(1, 4)) == 1
    await receiver.exchange.close()
    again = node(identity=receiver.identity)
    await honest.send(group, 2)
    assert await again.gather(2, 4) == []
    assert again.exchange.counts[PeerRefusal.REPLAY] == 1
    assert again.exchange.counts[PeerRefusal.DUPLICATE] == 1
