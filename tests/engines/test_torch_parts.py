"""The parts of the torch policy that decide without a model."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.base import Generation
from rollwright.engines.torch.batcher import nucleus, sample
from rollwright.engines.torch.policy import divergence
from rollwright.engines.torch.prefixes import BLOCK, CachedSequence, Prefixes, block_digests
from rollwright.engines.torch.rows import pack
from rollwright.trajectory import TokenIds, floats, token_ids


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(0, 500))
def test_packing_covers_all_rows_in_order_with_little_padding(lengths: list[int], worth: int) -> None:
    runs = pack(lengths, worth)
    assert [place for run in runs for place in run] == list(range(len(lengths)))
    for run in runs:
        inside = [lengths[place] for place in run]
        assert max(inside) * len(inside) - sum(inside) <= worth
    for run, following in pairwise(runs):
        joined = [lengths[place] for place in run] + [lengths[following.start]]
        assert max(joined) * len(joined) - sum(joined) > worth


@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=30),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.1, 3),
)
def test_a_token_is_chosen_when_the_draw_falls_into_its_share(
    logits: list[float], draw: float, temperature: float
) -> None:
    (token,), (logprob,) = sample(torch.tensor([logits]), [temperature], [1.0], [draw])
    heated = [each / temperature for each in logits]
    total = sum(math.exp(each - max(heated)) for each in heated)
    shares = [math.exp(each - max(heated)) / total for each in heated]
    assert sum(shares[:token]) <= draw + 1e-5
    assert sum(shares[: token + 1]) >= draw - 1e-5
    assert abs(math.exp(logprob) - shares[token]) < 1e-5


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30, unique=True), st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_likeliest_tokens_that_hold_that_share(
    logits: list[float], top_p: float
) -> None:
    logprobs = torch.tensor([logits]).log_softmax(-1)
    kept = nucleus(logprobs, torch.tensor([top_p]))[0]
    shares = logprobs[0].double().exp()
    inside = kept > -math.inf
    assert abs(float(kept.exp().sum()) - 1) < 1e-5
    assert float(shares[inside].sum()) >= top_p - 1e-6
    assert float(shares[inside].sum() - shares[inside].min()) < top_p + 1e-6
    assert inside.all() or float(shares[inside].min()) >= float(shares[~inside].max())


def test_rows_of_a_batch_have_settings_of_their_own() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 4)
    tokens, logprobs = sample(logits, [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.1, 1.0], [0.0, 0.0, 0.0, 0.999])
    assert tokens == [0, 2, 2, 2]
    assert logprobs[1:3] == [0.0, 0.0]
    assert logprobs[0] < logprobs[3] < 0


def sequence(tokens: TokenIds, cached: int, numbers: int = 0) -> CachedSequence:
    kept = torch.zeros(1, 2, 1, cached, numbers) if numbers else None
    return CachedSequence(tokens, block_digests(tokens), cached, kept=kept)


@given(st.integers(0, 5 * BLOCK), st.integers(1, 3 * BLOCK), st.integers(1, 3 * BLOCK))
def test_a_prompt_finds_all_that_it_has_in_common_with_what_is_cached(
    same: int, rest: int, others: int
) -> None:
    stored = token_ids([*range(same), *[900] * others])
    asked = token_ids([*range(same), *[800] * rest])
    prefixes = Prefixes(max_bytes=10**6)
    prefixes.add(sequence(stored, len(stored)))
    found = prefixes.find(asked, block_digests(asked))
    expected = same if same >= BLOCK else 0
    assert (found.length, found.source is not None) == (expected, expected > 0)


def test_a_whole_prompt_that_is_cached_leaves_its_last_id_to_be_fed() -> None:
    tokens = token_ids(range(4 * BLOCK))
    prefixes = Prefixes(max_bytes=10**6)
    prefixes.add(sequence(tokens, len(tokens)))
    assert prefixes.find(tokens, block_digests(tokens)).length == 4 * BLOCK - 1


def test_what_is_being_computed_is_announced_and_not_used() -> None:
    tokens = token_ids(range(4 * BLOCK))
    prefixes = Prefixes(max_bytes=10**6)
    ready = sequence(tokens[: 2 * BLOCK], 2 * BLOCK)
    prefixes.add(ready)
    prefixes.add(sequence(tokens, 2 * BLOCK), known=2 * BLOCK)
    found = prefixes.find(tokens, block_digests(tokens))
    assert (found.source, found.length, found.coming) == (ready, 2 * BLOCK, 4 * BLOCK - 1)


def test_kept_sequences_stay_within_their_bytes_and_the_least_used_go_first() -> None:
    prefixes = Prefixes(max_bytes=3 * 2 * BLOCK * 4)
    stored = [sequence(token_ids([number] * BLOCK), BLOCK, numbers=1) for number in range(3)]
    for each in stored:
        prefixes.add(each)
        prefixes.keep(each)
    asked = token_ids([0] * (BLOCK + 1))
    assert prefixes.find(asked, block_digests(asked)).source is stored[0]
    newest = sequence(token_ids([9] * BLOCK), BLOCK, numbers=1)
    prefixes.add(newest)
    prefixes.keep(newest)
    assert prefixes.kept_bytes <= prefixes.max_bytes

    def has(number: int) -> bool:
        ids = token_ids([number] * (BLOCK + 1))
        return prefixes.find(ids, block_digests(ids)).source is not None

    assert [has(number) for number in (0, 1, 2, 9)] == [True, False, True, True]


def test_divergence_counts_calls_and_compares_what_they_have_in_common() -> None:
    def made(ids: list[int], logprobs: list[float]) -> Generation:
        return Generation("", token_ids(ids), floats(logprobs))

    found = divergence(
        [made([1, 2, 3], [-1, -2, -3]), made([4], [-1])], [made([1, 2, 9], [-1, -2.5, 0]), made([4], [-1])]
    )
    assert (found.calls, found.diverged, found.tokens, found.largest_gap) == (2, 1, 3, 0.5)
    assert found.share == 0.5
