"""A peer whose answers write their own score: an honest node finds the right one, refuses the group and the peer."""

import msgspec
import pytest

from rollwright.envs.scoring import Score
from rollwright.sandbox.protocol import LENGTH
from rollwright.swarm import signed
from rollwright.swarm.content import Recipe, SharedAction, SharedGroup, SharedMember
from rollwright.swarm.recipes import task_digest, task_level, task_seed
from rollwright.swarm.refusals import PeerRefusal
from rollwright.trajectory import FinishReason

SWARM = "test-swarm"

OF_THE_SWARM = (
    *("arc_1d", "basic_arithmetic", "base_conversion", "bf", "binary_matrix", "calendar_arithmetic"),
    *("decimal_arithmetic", "fraction_simplification", "propositional_logic"),
)
"""The kinds of puzzles that a swarm of reasoners plays."""

EVALUATED = (
    *("countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
)
"""Others, whose own scorer evaluates the answer."""

FULL_MARKS = msgspec.msgpack.encode(Score(1.0))
JUDGED = msgspec.msgpack.encode({"type": "judged", "id": 0, "result": {"type": "score", "value": 1.0}})
WRITE = "__import__('os').write(3, {!r}) and __import__('os')._exit(0)"
FORGERIES = {
    "a score on the line": WRITE.format(FULL_MARKS),
    "a reply on the line": WRITE.format(LENGTH.pack(len(JUDGED)) + JUDGED),
    "by classes": "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
    f".__init__.__globals__['write'](3, {FULL_MARKS!r})",
    "the scorer's own variable": "oracle_answer if 1 else []",
}


async def forged(node, tag: str, text: str) -> SharedGroup:
    """A group of three, of which the first claims full marks for its forgery; the others are what they are."""
    settings = node.book.settings(tag)
    env = node.book.make_env(settings)
    seed = task_seed(SWARM, node.peer)
    shown = (await env.reset(task_level(seed, 0))).observation
    honest = (await env.step("<answer>no idea</answer>")).reward
    await env.close()
    recipe = Recipe(tag, node.book.version(tag), seed, 0, task_digest(shown))
    members = tuple(
        SharedMember((SharedAction(f"<answer>{answer}</answer>", b"", FinishReason.STOP),), reward)
        for answer, reward in ((text, 1.0), ("no idea", honest), ("no idea", honest))
    )
    return SharedGroup(signed.PROTOCOL, node.peer, recipe, "bytes", members)


@pytest.mark.parametrize("dataset", OF_THE_SWARM + EVALUATED)
async def test_a_forged_answer_is_refused_and_its_sender_put_into_quarantine(node, dataset: str) -> None:
    tag = f"reasoning_gym:{dataset}"
    receiver = node(tag)
    for number, (name, text) in enumerate(FORGERIES.items(), 1):
        bad = node(tag)
        await bad.send(await forged(bad, tag, text), number)
        assert await receiver.gather(number, 8) == [], name
        assert receiver.exchange.counts[PeerRefusal.WRONG_REWARD] == number, name
        verdict = receiver.exchange.quarantine.verdicts[-1]
        assert (verdict.peer, verdict.reason) == (bad.peer, PeerRefusal.WRONG_REWARD), name
        assert "claims 1, earns 0" in verdict.detail
    assert receiver.exchange.counts["accepted"] == 0


async def test_an_honest_group_is_taken_beside_a_forged_one(node) -> None:
    tag = "reasoning_gym:binary_matrix"
    receiver, honest, bad = node(tag), node(tag), node(tag)
    await bad.send(await forged(bad, tag, FORGERIES["a score on the line"]), 1)
    await honest.share(1, 0)
    assert {each.peer for each in await receiver.gather(1, 8)} == {honest.peer}
    assert [each.peer for each in receiver.exchange.quarantine.verdicts] == [bad.peer]
