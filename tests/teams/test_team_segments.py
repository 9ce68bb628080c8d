"""The segment cache gives the ids that the tokenizer gives, and makes fewer of them."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.base import Renderer
from rollwright.engines.rendering import make_renderer
from rollwright.models.tiny import tiny_tokenizer
from rollwright.teams import Performance, SegmentTokenizer, TeamPolicies, math_team, with_segment_cache
from rollwright.teams.segments import Cut, find_exact_cut
from rollwright.trajectory import Message

CORPUS = ["user assistant system You are a helpful assistant.\nWhat is 1 + 2?\n\n  So: 3.\n"] * 4
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's and Llama 3's tokenizers cut text into words."""
QWEN_MARKS = [
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


@cache
def tokenizer(split: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    made = tiny_tokenizer(CORPUS, 400)
    made.add_tokens(QWEN_MARKS, special_tokens=True)
    if split == "gpt4":
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GPT4_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return made


@cache
def remembering(split: str) -> SegmentTokenizer:
    """Made once, because making one tries the tokenizer out; small, so that it forgets all the time."""
    return SegmentTokenizer(tokenizer(split), cached_ids=50)


WORDS = [
    "a",
    "Z",
    "12",
    ".",
    "...",
    "'s",
    "`",
    "```",
    "{",
    "<think>",
    "é",
    "好",
    "\u0301",
    "🙂",
    "You are good.",
]
MARKS = ["<|im_end|>", "<|im_start|>"]
SPACES = [" ", "  ", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "\u00a0", "1 + 2\n= 3\n"]
PIECES = st.sampled_from([*WORDS, *MARKS, *SPACES])
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=20).map("".join)


@pytest.mark.parametrize("split", ["gpt2", "gpt4"])
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_ids_are_those_of_the_tokenizer_itself(split: str, texts: list[str]) -> None:
    plain = tokenizer(split)
    cached = remembering(split)
    assert cached.cut is {"gpt2": Cut.BEFORE, "gpt4": Cut.BEHIND}[split]
    for text in [*texts, *texts, "\n".join(texts)]:
        assert cached.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)


@cache
def renderers(name: str) -> tuple[Renderer, Any]:
    plain = make_renderer(tokenizer("gpt2"), name)
    return plain, plain.with_tokenizer(SegmentTokenizer)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["template", "qwen3"])
@given(system=TEXTS, asked=st.lists(TEXTS, min_size=1, max_size=3))
def test_whole_prompts_and_their_continuations_are_the_same_with_the_cache_off(
    name: str, system: str, asked: list[str]
) -> None:
    plain, cached = renderers(name)
    for text in asked:
        messages = [Message("system", system), Message("user", text)]
        prompt = plain.open(messages)
        assert cached.open(messages) == prompt
        sampled = prompt[:3]
        follow = [Message("user", system + text)]
        assert cached.extend(prompt, sampled, "stop", follow) == plain.extend(prompt, sampled, "stop", follow)  # type: ignore[arg-type]


def test_what_was_tokenised_before_is_not_tokenised_again() -> None:
    cached = SegmentTokenizer(tokenizer("gpt4"))
    system = "You are a helpful assistant.\nYou never lie.\n"
    cached.encode(system + "What is 1 + 2?", add_special_tokens=False)
    before = cached.figures.encoded_ids
    asked = len(cached.encode(system + "So?", add_special_tokens=False))
    assert cached.figures.encoded_ids - before == len(tokenizer("gpt4").encode("So?"))
    assert cached.figures.asked_ids >= before + asked


def test_the_cache_forgets_the_oldest_and_stays_small() -> None:
    cached = SegmentTokenizer(tokenizer("gpt4"), cached_ids=100)
    for number in range(200):
        cached.encode(f"line {number}\nline again", add_special_tokens=False)
    assert sum(len(ids) for ids in cached._pieces.values()) == cached._cached <= 100


def test_a_tokenizer_that_a_cut_would_change_is_never_cut() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "▁a": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()  # writes a mark before the first word of every text
    made: Any = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    assert find_exact_cut(made) is Cut.NOWHERE
    whole = SegmentTokenizer(made)
    assert whole.encode("a\nb", add_special_tokens=False) == made.encode("a\nb", add_special_tokens=False)
    greedy = tiny_tokenizer(CORPUS, 400)
    greedy.add_tokens([_swallows()], special_tokens=True)
    assert find_exact_cut(greedy) is Cut.NOWHERE  # type: ignore[arg-type]


def _swallows() -> Any:
    from tokenizers import AddedToken

    return AddedToken("<|x|>", lstrip=True)


def test_a_team_with_the_cache_on_trains_the_same_and_encodes_less(stage: Any) -> None:
    """Ids come from a real tokenizer here: it is the one thing that the switch touches."""
    found = {}
    for cache_on in (False, True):
        counting = CountingTokenizer(tokenizer("gpt4"))
        policy = stage.Script(
            {"math/solver": [r"so\n\boxed{1}"], "math/verifier": ["<verify>reject</verify>"]}
        )
        policy.renderer = make_renderer(counting, "template")  # type: ignore[arg-type]
        counting.ids = 0
        policies = TeamPolicies(policy, segment_cache=cache_on)
        assert (policies.of_agent("math/solver") is policy) != cache_on
        counting.ids = 0  # making the cache tried the tokenizer out
        team = math_team(performance=Performance(enable_preprocessing_cache=cache_on), max_loops=4)
        found[cache_on] = stage.trained(stage.play(team, policies)), counting.ids
    assert found[True][0] == found[False][0]
    assert found[True][1] < 0.5 * found[False][1]


class CountingTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ids = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self.ids += len(ids)
        return ids


def test_a_policy_without_a_tokenizer_is_left_as_it_is(stage: Any) -> None:
    policy = stage.Script({})
    assert with_segment_cache(policy) is policy
    policy.renderer = None
    assert with_segment_cache(policy) is policy
