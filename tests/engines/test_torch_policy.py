"""The model in this process: exact ids and log-probabilities, keyed luck, and calls that come and go."""

import asyncio
import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rollwright.config import build
from rollwright.engines.base import EngineError, Generation, Probed, Prompt, Sampling, Updatable, UpdateMode
from rollwright.engines.rendering.bytes import END, VOCABULARY_SIZE, BytesRenderer
from rollwright.engines.settings import TorchServingConfig
from rollwright.engines.torch import TorchPolicy
from rollwright.engines.torch.batcher import nucleus
from rollwright.engines.torch.kv_cache import KVCache, cache_bytes, cache_shape
from rollwright.engines.torch.policy import divergence
from rollwright.errors import ConfigError, RollwrightError
from rollwright.models.loading import set_threads
from rollwright.models.tiny import tiny_llama
from rollwright.rng import digest
from rollwright.run.run import Run
from rollwright.trajectory import FinishReason, TokenIds, VersionRun, full_prompt, token_ids

SHARPNESS = 0.3
"""Spread of the random weights: some ids are likely and many are not, as in a trained model."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    set_threads()


def model(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    return tiny_llama(VOCABULARY_SIZE, hidden_size=32, initializer_range=SHARPNESS, seed=seed, **more)


def policy(of: LlamaForCausalLM | None = None, **more: Any) -> TorchPolicy:
    own = {name: more.pop(name) for name in ("tokens_per_step", "cache_bytes", "version") if name in more}
    return TorchPolicy(of or model(), BytesRenderer(), TorchServingConfig(**more), **own)


def ids(number: int, length: int, shared: int = 0) -> TokenIds:
    """A prompt of its own; its first `shared` ids are everybody's."""
    return token_ids(
        digest("prompt", 0 if place < shared else number + 1, place) % 256 for place in range(length)
    )


def prompt(number: int, length: int = 40, shared: int = 0) -> Prompt:
    return Prompt(episode=f"e{number}", key=("test", number), messages=(), ids=ids(number, length, shared))


def mixed(count: int) -> list[tuple[Prompt, Sampling]]:
    """Calls of all lengths and settings, some with a common beginning."""
    return [
        (
            prompt(number, 5 + number * 37 % 120, shared=(number % 3) * 24),
            Sampling(
                temperature=(1.0, 0.7, 0.0, 1.3)[number % 4],
                top_p=(1.0, 0.9, 0.5)[number % 3],
                max_tokens=1 + number % 9,
            ),
        )
        for number in range(count)
    ]


async def play(it: TorchPolicy, calls: list[tuple[Prompt, Sampling]]) -> list[Generation]:
    return list(await asyncio.gather(*(it.generate(*call) for call in calls)))


def forced(of: LlamaForCausalLM, asked: Prompt, sampling: Sampling, sampled: TokenIds) -> list[float]:
    """Log-probabilities by one plain forward pass over prompt and sample."""
    assert asked.ids is not None
    whole = torch.tensor([[*asked.ids, *sampled]])
    with torch.no_grad():
        logits = of(input_ids=whole).logits[0, len(asked.ids) - 1 : -1].float()
    if sampling.temperature == 0:
        assert logits.argmax(-1).tolist() == sampled.tolist()
        return [0.0] * len(sampled)
    logprobs = torch.log_softmax(logits / sampling.temperature, -1)
    if sampling.top_p < 1:
        logprobs = nucleus(logprobs, torch.full((len(sampled),), sampling.top_p))
    return logprobs.gather(1, torch.tensor(sampled.tolist())[:, None])[:, 0].tolist()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_logprobs_agree_with_a_teacher_forced_pass(batch_invariant: bool, kv_heads: int) -> None:
    weights = model(kv_heads=kv_heads)
    it = policy(weights, batch_invariant=batch_invariant, max_batch=16, tokens_per_step=100)
    calls = mixed(60)
    made = await play(it, calls)
    await it.close()
    reference = model(kv_heads=kv_heads)
    for (asked, sampling), generation in zip(calls, made, strict=True):
        expected = forced(reference, asked, sampling, generation.sampled_ids)
        assert list(generation.logprobs) == pytest.approx(expected, abs=1e-4)
        assert generation.versions == (VersionRun(0, len(generation.sampled_ids)),)
        assert 1 <= generation.completion_tokens <= sampling.max_tokens
        assert generation.prompt_tokens == len(asked.ids or ())


async def test_the_next_turn_of_an_episode_computes_only_what_is_new_and_its_logprobs_stay_exact() -> None:
    weights, sampling = model(), Sampling(max_tokens=5)
    it = policy(weights)
    asked = prompt(1, 100)
    for turn in range(6):
        fed = it.counters.fed_tokens
        made = await it.generate(asked, sampling)
        assert list(made.logprobs) == pytest.approx(
            forced(weights, asked, sampling, made.sampled_ids), abs=1e-4
        )
        if turn:
            assert it.counters.fed_tokens - fed <= 20 + len(made.sampled_ids) + 1
        assert asked.ids is not None
        asked = Prompt("e1", ("test", 1, turn), (), ids=asked.ids + made.sampled_ids + ids(turn, 20))
    await it.close()


async def test_members_of_a_group_share_the_reading_of_their_prompt() -> None:
    it = policy()
    same = [Prompt(f"e{number}", (number,), (), ids=ids(0, 200)) for number in range(8)]
    await play(it, [(each, Sampling(max_tokens=1)) for each in same])
    await it.close()
    assert it.counters.fed_tokens <= 200 + 8 * 16
    assert it.counters.reused_tokens >= 7 * 180


async def test_the_same_key_gives_the_same_sample_and_another_key_another() -> None:
    sampling = Sampling(max_tokens=12)
    first, second = policy(), policy()
    one = await first.generate(prompt(1), sampling)
    await play(second, mixed(20))
    again = await second.generate(prompt(1), sampling)
    others = [await first.generate(Prompt("e", (n,), (), ids=ids(1, 40)), sampling) for n in range(5)]
    await first.close()
    await second.close()
    assert one.sampled_ids == again.sampled_ids
    assert len({each.sampled_ids.tobytes() for each in [one, *others]}) == 6


async def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    it, draws = policy(), 4000
    asked = ids(1, 20)
    calls = [(Prompt("e", (n,), (), ids=asked), Sampling(max_tokens=1)) for n in range(draws)]
    seen = Counter(each.sampled_ids[0] for each in await play(it, calls))
    await it.close()
    with torch.no_grad():
        shares = model()(input_ids=torch.tensor([asked.tolist()])).logits[0, -1].softmax(-1).tolist()
    likely = [token for token, share in enumerate(shares) if share * draws >= 5]
    rest = 1 - sum(shares[token] for token in likely)
    cells = [(seen[token], shares[token] * draws) for token in likely]
    cells.append((draws - sum(count for count, _ in cells), rest * draws))
    chi_square = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    assert freedom >= 10
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


async def test_every_position_has_luck_of_its_own() -> None:
    it = policy(
        tiny_llama(VOCABULARY_SIZE, hidden_size=16, layers=1, initializer_range=0.0)
    )  # all alike likely
    calls = [(Prompt("e", (n,), (), ids=ids(1, 20)), Sampling(max_tokens=2)) for n in range(1600)]
    pairs = [tuple(each.sampled_ids) for each in await play(it, calls) if each.completion_tokens == 2]
    await it.close()
    cells = Counter((first * 4 // VOCABULARY_SIZE, second * 4 // VOCABULARY_SIZE) for first, second in pairs)
    expected = len(pairs) / 16
    chi_square = sum((cells[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4))
    assert chi_square < 15 + 4 * 30**0.5


async def test_batch_invariant_results_are_equal_to_the_bit_however_calls_are_batched() -> None:
    calls = mixed(40)
    together, narrow, alone = (policy(batch_invariant=True, max_batch=size) for size in (64, 3, 1))
    first = await play(together, calls)
    second = list(reversed(await play(narrow, calls[::-1])))
    third = [await alone.generate(*call) for call in calls]
    for it in (together, narrow, alone):
        await it.close()
    for one, two, three in zip(first, second, third, strict=True):
        assert one.sampled_ids == two.sampled_ids == three.sampled_ids
        assert one.logprobs.tobytes() == two.logprobs.tobytes() == three.logprobs.tobytes()


async def test_fast_mode_differs_from_batch_invariant_mode_by_rounding_alone() -> None:
    calls = [(asked, Sampling(max_tokens=16)) for asked, _ in mixed(150)]
    fast, exact = policy(), policy(batch_invariant=True)
    found = divergence(await play(fast, calls), await play(exact, calls))
    await fast.close()
    await exact.close()
    assert found.tokens > 1500
    assert found.share <= 0.02
    assert found.largest_gap <= 1e-4


async def test_a_stop_id_ends_the_sample_and_is_part_of_it() -> None:
    weights = model()
    with torch.no_grad():
        weights.get_input_embeddings().weight[END] *= 3  # input and output are tied: it becomes likely
    it = policy(weights)
    made = await play(it, [(prompt(number), Sampling(max_tokens=40)) for number in range(40)])
    await it.close()
    stopped = [each for each in made if each.finish is FinishReason.STOP]
    assert len(stopped) > 5
    for each in made:
        ends = [place for place, token in enumerate(each.sampled_ids) if token == END]
        assert ends == ([len(each.sampled_ids) - 1] if each.finish is FinishReason.STOP else [])
        assert each.finish is FinishReason.STOP or len(each.sampled_ids) == 40


async def test_a_stop_string_ends_the_sample_with_all_its_ids_and_is_cut_from_the_text() -> None:
    it = policy()
    free = await it.generate(prompt(1), Sampling(max_tokens=30))
    plain = bytes(token for token in free.sampled_ids if token < 128).decode()
    stop = plain[4:6]
    made = await it.generate(prompt(1), Sampling(max_tokens=30, stop=("never said by it", stop)))
    await it.close()
    assert made.finish is FinishReason.STOP
    assert made.sampled_ids == free.sampled_ids[: len(made.sampled_ids)]
    decoded = BytesRenderer().decode(made.sampled_ids)
    assert decoded.endswith(stop)
    assert made.text == decoded[: decoded.index(stop)]


async def test_greedy_tokens_are_certain() -> None:
    it = policy()
    one, two = await play(
        it, [(Prompt("e", (key,), (), ids=ids(1, 30)), Sampling(temperature=0, max_tokens=6)) for key in "ab"]
    )
    await it.close()
    assert one.sampled_ids == two.sampled_ids
    assert set(one.logprobs) == {0.0}


async def test_a_cancelled_call_gives_its_place_to_the_next() -> None:
    it = policy(max_batch=2)
    endless = [asyncio.create_task(it.generate(prompt(n), Sampling(max_tokens=900))) for n in range(2)]
    waiting = asyncio.create_task(it.generate(prompt(7), Sampling(max_tokens=900)))
    short = asyncio.create_task(it.generate(prompt(9), Sampling(max_tokens=2)))
    while it.counters.sampled_tokens < 10:
        await asyncio.sleep(0)
    for task in (endless[0], waiting):
        task.cancel()
    assert (await short).completion_tokens == 2
    assert not endless[1].done()
    endless[1].cancel()
    results = await asyncio.gather(*endless, waiting, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in results)
    assert (await it.generate(prompt(1), Sampling(max_tokens=1))).completion_tokens == 1
    assert (it.counters.cancelled, it.counters.completed, it.counters.failed) == (3, 2, 0)
    await it.close()


async def test_closing_answers_every_call_ends_the_thread_and_allows_a_new_start() -> None:
    it = policy(max_batch=2)
    tasks = [asyncio.create_task(it.generate(prompt(n), Sampling(max_tokens=900))) for n in range(4)]
    while not it.counters.sampled_tokens:
        await asyncio.sleep(0)
    await it.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, EngineError) and "closed" in str(each) for each in results)
    assert not [each for each in threading.enumerate() if each.name == "torch-policy"]
    assert (await it.generate(prompt(1), Sampling(max_tokens=3))).completion_tokens <= 3
    await it.close()


async def test_the_event_loop_goes_on_while_the_model_works() -> None:
    it = policy()
    call = asyncio.create_task(it.generate(prompt(1), Sampling(max_tokens=200)))
    rounds = 0
    while not call.done():
        await asyncio.sleep(0)
        rounds += 1
    await it.close()
    assert rounds > 200


async def test_a_model_that_fails_ends_the_calls_in_it_and_serves_the_next() -> None:
    weights = model()
    it = policy(weights)
    layers = weights.model.layers
    weights.model.layers = None
    results = await asyncio.gather(
        *(it.generate(prompt(n), Sampling(max_tokens=3)) for n in range(3)), return_exceptions=True
    )
    assert all(isinstance(each, EngineError) and "the model failed" in str(each) for each in results)
    weights.model.layers = layers
    assert (await it.generate(prompt(1), Sampling(max_tokens=3))).completion_tokens <= 3
    assert it.counters.failed == 3
    await it.close()


@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_calls_whose_keys_find_no_memory_are_answered(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: KVCache, rows: int, columns: int) -> None:
        raise MemoryError(f"{rows} rows of {columns}")

    it = policy(batch_invariant=batch_invariant)
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "reserve", refuse)
        calls = (it.generate(prompt(n), Sampling(max_tokens=3)) for n in range(3))
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, EngineError) and "MemoryError" in str(each) for each in results)
    assert (await it.generate(prompt(1), Sampling(max_tokens=3))).completion_tokens <= 3
    await it.close()


@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_keys_and_values_stay_within_their_memory_and_calls_wait_for_it(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = policy(batch_invariant=batch_invariant)
    expected = await play(free, mixed(60))
    await free.close()
    most = 6 * cache_bytes(cache_shape(model()), 1, 192)
    caches: dict[int, int] = {}
    reserve = KVCache.reserve

    def watched(cache: KVCache, rows: int, columns: int) -> None:
        reserve(cache, rows, columns)
        caches[id(cache)] = cache_bytes(cache.shape, cache.rows, cache.columns)
        if not batch_invariant:  # else each call has a cache of its own, and those of ended calls are gone
            assert sum(caches.values()) <= most

    monkeypatch.setattr(KVCache, "reserve", watched)
    it = policy(batch_invariant=batch_invariant, cache_bytes=most)
    # many short calls first, then few long ones: rows that are not in use any more make room for columns
    short = [(prompt(1000 + number, 8), Sampling(max_tokens=2)) for number in range(30)]
    assert len(await play(it, short)) == 30
    found = await play(it, mixed(60))
    assert [each.sampled_ids for each in found] == [each.sampled_ids for each in expected]
    one = await it.generate(prompt(1, 700), Sampling(max_tokens=2)) if batch_invariant else None
    assert one is None or one.completion_tokens, "one call is served however long it is"
    await it.close()


async def test_what_the_model_cannot_take_is_refused_in_one_line() -> None:
    it = policy(model(max_length=64))
    with pytest.raises(EngineError, match="64 ids, which leaves no room"):
        await it.generate(prompt(1, 64), Sampling())
    with pytest.raises(EngineError, match=r"ids from 5 to 300; the model knows 0 to 260"):
        await it.generate(Prompt("e", ("k",), (), ids=token_ids([5, 300])), Sampling())
    with pytest.raises(EngineError, match="no token ids"):
        await it.generate(Prompt("e", ("k",), ()), Sampling())
    for wrong in (Sampling(temperature=-1), Sampling(top_p=0), Sampling(max_tokens=0)):
        with pytest.raises(ConfigError, match="accepted:"):
            await it.generate(prompt(1, 10), wrong)
    made = await it.generate(prompt(1, 60), Sampling(max_tokens=50))
    assert made.completion_tokens <= 4
    with pytest.raises(ConfigError, match="tokens_per_step: 0 is too few"):
        policy(tokens_per_step=0)
    await it.close()


async def test_a_model_with_windowed_attention_is_refused() -> None:
    windowed = model()
    windowed.config.sliding_window = 16
    with pytest.raises(ConfigError, match="layers without full attention"):
        policy(windowed)


async def test_it_says_what_it_can_do() -> None:
    it = policy()
    assert isinstance(it, Probed)
    assert isinstance(it, Updatable)
    found = await it.probe()
    assert found.trainable
    assert set(found.update_modes) == set(UpdateMode)
    await it.close()


async def test_episodes_played_by_a_model_train_the_ids_it_was_given_and_sampled() -> None:
    config = build(
        {
            "name": "torch",
            "train_env_manager": {"num_env_groups": 3, "group_size": 4, "tags": ["FrozenLake"]},
            "custom_envs": {"FrozenLake": {"max_steps": 3, "max_tokens_per_step": 6}},
        }
    )
    weights = model(max_length=4096)
    async with Run(config, policy=policy(weights)) as run:
        batch = await run.get_batch(12)
    assert len(batch.trajectories) == 12
    for trajectory in batch.trajectories:
        assert trajectory.error is None
        for turn in trajectory.turns:
            asked = Prompt("e", (), (), ids=full_prompt(trajectory.turns, turn.id))
            expected = forced(weights, asked, Sampling(), turn.sampled_ids)
            assert list(turn.logprobs) == pytest.approx(expected, abs=1e-4)


async def test_a_policy_that_a_fork_inherits_refuses_to_generate() -> None:
    """Its thread is in no fork: the call would wait for ever."""
    inherited, (read, write) = policy(), os.pipe()

    def in_fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(inherited.generate(prompt(0), Sampling(max_tokens=1)))
            except RollwrightError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    await asyncio.to_thread(in_fork)
    os.close(write)
    assert os.read(read, 1000).startswith(b"this TorchPolicy was created by process")
    os.close(read)
    await inherited.close()
