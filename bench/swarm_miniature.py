"""A swarm in miniature for `bench/swarm.py`: small enough for a CPU, made of the parts that a node is made of.

Eight nodes, each with a Llama of some 60,000 parameters, learn five operations on four digits from 0 to 5; an answer is
two digits, so chance is one in 36. All begin with the same model, which was shown a few examples, many of them wrong.
Episodes, sharing, checking, advantages and the trainer are rollwright's own; only the scheduler and the engine are
replaced, by a loop that plays the nodes in turn and a sampler that serves a node's whole round at once.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollwright import rng
from rollwright.agents import ChatAgent
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import ASSISTANT, END, SYSTEM, USER, VOCABULARY_SIZE, BytesRenderer
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.models.tiny import tiny_llama
from rollwright.rollout.episode import Episode, EpisodeSettings, new_session, play_episode
from rollwright.swarm.content import SharedGroup
from rollwright.swarm.exchange import Exchange, Verifier
from rollwright.swarm.identity import Identity
from rollwright.swarm.recipes import TaskBook, task_level, task_seed
from rollwright.swarm.settings import CommunicationConfig, SwarmConfig
from rollwright.swarm.transports.memory import MemorySwarm
from rollwright.swarm.verification import Scorer, Verified, verify
from rollwright.training.advantages import make_advantage
from rollwright.training.rows import build_rows
from rollwright.training.settings import LossSettings, TrainerSettings
from rollwright.training.trainer import Trainer
from rollwright.trajectory import FinishReason, Floats, TokenIds, Trajectory, VersionRun, floats, token_ids

NODES, GROUP_SIZE = 8, 8
DIGITS, OPERATIONS, ANSWER = 6, "abcde", 2
TAG, SWARM, TOKENIZER = "digits", "miniature", "bytes"
LEARNING_RATE = 1.5e-3
SHOWN, SHOWN_BATCH, RIGHT = 300, 64, 0.6
"""Batches of examples that the base model has seen, their size, and the share of them that is right: after so many, one
greedy answer in seven is right, so there is something to learn from and much to learn."""
FORGED = 8
"""Groups that the poisoner announces in a round; it need not play them."""


def solution(question: str) -> str:
    """What is right."""
    a, b, c, d = map(int, question[1:])
    match question[0]:
        case "a":
            return f"{(a + b + c) // DIGITS}{(a + b + c) % DIGITS}"
        case "b":
            return f"{a * d // DIGITS}{a * d % DIGITS}"
        case "c":
            return f"{max(a, b, c, d)}{min(a, b, c, d)}"
        case "d":
            return f"{abs(a - b)}{abs(c - d)}"
        case _:
            return f"{d}{b}"


def question(seed: int) -> str:
    generator = rng.generator("question", seed)
    return generator.choice(OPERATIONS) + "".join(str(generator.randrange(DIGITS)) for _ in range(4))


def prompt(asked: str) -> list[int]:
    """A question as an episode renders it: a chat begins with a system message, though this one is empty."""
    return [SYSTEM, END, USER, *asked.encode(), END, ASSISTANT]


class Digits:
    """One question, one answer."""

    instruction = ""
    prompts = PromptTemplates(system="", opening="{observation}", turn="{observation}")

    def __init__(self) -> None:
        self._question = ""

    async def reset(self, seed: int) -> Reset:
        self._question = question(seed)
        return Reset(self._question, {"success": False})

    async def step(self, answer: str) -> Step:
        right = answer == solution(self._question)
        return Step("", float(right), True, False, {"success": right, "valid": True})

    async def close(self) -> None:
        """Holds nothing."""


SETTINGS = EpisodeSettings(
    env_type="swarm_miniature:Digits",
    env_config={},
    agent=ChatAgent(Digits.prompts, max_response_length=ANSWER + 1),
    sampling=Sampling(max_tokens=ANSWER + 1),
    max_steps=1,
    sequence_length=64,
)


def base_model(seed: int) -> Any:
    """What all nodes of a run begin with."""
    model = tiny_llama(VOCABULARY_SIZE, hidden_size=40, layers=2, heads=4, max_length=32, seed=seed).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = rng.generator("base", seed)
    for _ in range(SHOWN):
        rows = []
        for _ in range(SHOWN_BATCH):
            asked = question(generator.getrandbits(60))
            said = solution(asked)
            if generator.random() >= RIGHT:
                said = "".join(str(generator.randrange(DIGITS)) for _ in range(ANSWER))
            rows.append([*prompt(asked), *said.encode(), END])
        ids = torch.tensor(rows)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -(ANSWER + 1) :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -(ANSWER + 1) :].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


class Sampler:
    """An engine that waits until a node's whole round has asked, and then answers all of it."""

    pressure = 0

    def __init__(self, model: Any, seed: int) -> None:
        self.renderer = BytesRenderer()
        self.version = 0
        self._model = model
        self._random = torch.Generator().manual_seed(seed)
        self._waiting: list[tuple[TokenIds, asyncio.Future[Generation]]] = []
        self.expected = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        assert prompt.ids is not None
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt.ids, done))
        if len(self._waiting) == self.expected:
            self._answer()
        return await done

    @torch.no_grad()
    def _answer(self) -> None:
        calls, self._waiting = self._waiting, []
        ids = torch.tensor([list(prompt) for prompt, _ in calls])  # of equal length, all of them
        logprobs = []
        for _ in range(ANSWER + 1):
            odds = torch.log_softmax(self._model(input_ids=ids, use_cache=False).logits[:, -1], dim=-1)
            chosen = torch.multinomial(odds.exp(), 1, generator=self._random)
            logprobs.append(odds.gather(1, chosen))
            ids = torch.cat([ids, chosen], dim=1)
        said, likely = ids[:, -(ANSWER + 1) :].tolist(), torch.cat(logprobs, dim=1).tolist()
        for (prompt, done), tokens, own in zip(calls, said, likely, strict=True):
            length = tokens.index(END) + 1 if END in tokens else len(tokens)
            sampled = token_ids(tokens[:length])
            done.set_result(
                Generation(
                    text=self.renderer.decode(sampled),
                    sampled_ids=sampled,
                    logprobs=floats(own[:length]),
                    versions=(VersionRun(self.version, length),),
                    finish=FinishReason.STOP if END in tokens else FinishReason.LENGTH,
                    prompt_tokens=len(prompt),
                    completion_tokens=length,
                )
            )

    async def close(self) -> None:
        """Nothing is its own."""


@dataclass
class LaterScorer:
    """Log-probabilities are filled in for the whole round at once, see `Node.train`: a pass for each answer would take
    most of the time of so small a model."""

    version: int = 0
    tokenizer: str = TOKENIZER
    renderer: BytesRenderer = field(default_factory=BytesRenderer)

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        return floats([0.0]) * len(sampled)

    def encode(self, text: str) -> TokenIds:
        return self.renderer.encode(text)


async def trusting(
    group: SharedGroup, digest: str, book: TaskBook, scorer: Scorer, seconds: float
) -> Verified:
    """What happens without a check: the rewards are those that the peer claims."""
    found = await verify(group, digest, book, scorer, seconds, check=lambda replayed: None)
    for trajectory, member in zip(found.trajectories, group.members, strict=True):
        trajectory.episode_reward += member.reward - trajectory.reward
    return found


class Node:
    def __init__(
        self, number: int, seed: int, base: Any, network: MemorySwarm, home: Path, verifier: Verifier
    ) -> None:
        key = Ed25519PrivateKey.from_private_bytes(sha256(f"{seed} {number}".encode()).digest())
        self.identity = Identity(key)
        self.seed = task_seed(SWARM, self.identity.peer)
        self.book = TaskBook({TAG: SETTINGS}, lambda settings: Digits())
        self.exchange = Exchange(
            self.identity,
            SWARM,
            network.join(self.identity.peer),
            self.book,
            home / f"{number}",
            settings=SwarmConfig(communication=CommunicationConfig(beam_size=NODES)),
            verifier=verifier,
        )
        settings = TrainerSettings(
            learning_rate=LEARNING_RATE,
            tokens_per_micro_batch=8192,
            loss=LossSettings(clip_high=0.28),
            device="cpu",
        )
        self.trainer = Trainer(copy.deepcopy(base), settings)
        self.sampler = Sampler(self.trainer._model.module, rng.seed("samples", seed, number) % 2**63)
        self.scorer = LaterScorer()
        self._advantage = make_advantage("grpo")
        self._next = 0
        """The next task of this node's stream."""

    async def play(self, groups: int) -> list[tuple[int, list[Trajectory]]]:
        """The next groups of this node, with their indices."""
        self.sampler.expected = groups * GROUP_SIZE
        first, self._next = self._next, self._next + groups
        places = [(index, member) for index in range(first, self._next) for member in range(GROUP_SIZE)]
        played = await asyncio.gather(*(self._episode(index, member) for index, member in places))
        asked = played[0].observation
        assert list(played[0].turns[0].prompt_ids) == prompt(asked), "the base model was shown other prompts"
        return [
            (first + each, list(played[each * GROUP_SIZE : (each + 1) * GROUP_SIZE]))
            for each in range(groups)
        ]

    async def _episode(self, index: int, member: int) -> Trajectory:
        env, name = Digits(), f"g{index}-m{member}"
        episode = Episode(TAG, task_level(self.seed, index), "train", f"g{index}", index, member, self.seed)
        session = new_session(episode, self.sampler, SETTINGS, env, rollout_id=name, attempt_id=name)
        return await play_episode(session, env, SETTINGS, self.sampler, Digits)

    async def share(self, round: int, groups: Sequence[tuple[int, list[Trajectory]]]) -> None:
        for index, group in groups:
            await self.exchange.share(round, index, TAG, group, TOKENIZER)

    async def forge(self, round: int, honest: list[Trajectory]) -> None:
        """A poisoner's round: of each task half the answers are right, and said to be worth nothing; the other half is
        one wrong answer, said to be right. All of it is of its own stream and well signed."""
        for _ in range(FORGED):
            index, self._next = self._next, self._next + 1
            asked = question(task_level(self.seed, index))
            right = solution(asked)
            wrong = right[::-1] if right != right[::-1] else f"{(int(right[0]) + 1) % DIGITS}{right[1]}"
            forged = []
            for place, model in enumerate(honest):
                said, claim = (right, 0.0) if place % 2 else (wrong, 1.0)
                ids = BytesRenderer().encode(said)
                turn = msgspec.structs.replace(
                    model.turns[0],
                    text=said,
                    sampled_ids=ids,
                    finish=FinishReason.STOP,
                    outcome=msgspec.structs.replace(model.turns[0].outcome, reward=claim),
                )
                forged.append(msgspec.structs.replace(model, observation=asked, turns=[turn]))
            await self.exchange.share(round, index, TAG, forged, TOKENIZER)

    async def gather(self, round: int, count: int) -> list[list[Trajectory]]:
        found = await self.exchange.gather(round, count, self.scorer)
        return [each.trajectories for each in found]

    def train(self, own: Sequence[list[Trajectory]], foreign: Sequence[list[Trajectory]]) -> None:
        turns = [each.turns[0] for group in foreign for each in group]
        likely = iter(
            self.trainer.logprobs([(each.prompt_ids, each.sampled_ids) for each in turns]) if turns else ()
        )
        for group in foreign:
            for each in group:
                each.turns[0] = msgspec.structs.replace(each.turns[0], logprobs=next(likely))
        self.trainer.step(build_rows([*own, *foreign], self._advantage))
        self.sampler.version = self.scorer.version = self.trainer.version


@dataclass(frozen=True)
class Arm:
    """One way to run the swarm."""

    name: str
    own: int
    foreign: int
    poisoned: bool = False
    verified: bool = True
    silent: bool = False
    """Whether the last node shares nothing."""


@dataclass(frozen=True)
class Outcome:
    """What one run came to; the last node, which is the poisoner where there is one, is left out of the figures."""

    rewards: list[float]
    """Of each round: the mean over the groups that the nodes played themselves."""
    accuracy: float
    """Share of fresh questions that the final models answer right at temperature 0, mean over the nodes."""
    foreign: int
    """Groups of peers that were trained on."""
    refused: dict[str, int]
    quarantined: int
    """Nodes that put the last one into quarantine."""


async def run(arm: Arm, seed: int, base: Any, rounds: int, home: Path) -> Outcome:
    network = MemorySwarm()
    verifier: Verifier = verify if arm.verified else trusting
    nodes = [Node(number, seed, base, network, home, verifier) for number in range(NODES)]
    counted, last = nodes[:-1], nodes[-1]
    rewards, taken = [], 0
    for round in range(rounds):
        played = [await node.play(arm.own) for node in nodes]
        rewards.append(_mean([each.reward for own in played[:-1] for _, group in own for each in group]))
        if arm.foreign:
            for node, own in zip(nodes, played, strict=True):
                if node is last and arm.poisoned:
                    await node.forge(round, own[0][1])
                elif node is not last or not arm.silent:
                    await node.share(round, own)
        for node, own in zip(nodes, played, strict=True):
            foreign = await node.gather(round, arm.foreign) if arm.foreign else []
            node.train([group for _, group in own], foreign)
            taken += len(foreign) if node is not last else 0
    refused: Counter[str] = Counter()
    for node in counted:
        refused.update(node.exchange.counts)
    for name in ("accepted", "shared"):
        refused.pop(name, None)
    caught = sum(last.identity.peer in node.exchange.quarantine for node in counted)
    accuracy = _mean([_accuracy(node.trainer._model.module, seed) for node in counted])
    for node in nodes:
        await node.exchange.close()
    return Outcome(rewards, accuracy, taken, dict(refused), caught)


@torch.no_grad()
def _accuracy(model: Any, seed: int, questions: int = 256) -> float:
    asked = [question(rng.seed("held out", seed, each)) for each in range(questions)]
    ids = torch.tensor([prompt(each) for each in asked])
    for _ in range(ANSWER):
        ids = torch.cat(
            [ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1
        )
    said = [BytesRenderer().decode(token_ids(each)) for each in ids[:, -ANSWER:].tolist()]
    return _mean([float(answer == solution(each)) for answer, each in zip(said, asked, strict=True)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
