"""What engines say, read strictly: a whole completion or an error, never a wrong turn."""

import json
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollwright.engines.base import Sampling
from rollwright.engines.dialect import EngineDialect
from rollwright.engines.llama_cpp import LlamaCppDialect
from rollwright.engines.partial import PartialCompletion
from rollwright.engines.sglang import SglangDialect
from rollwright.engines.vllm import VllmDialect
from rollwright.errors import FormatError
from rollwright.trajectory import FinishReason, token_ids

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=4, stop=("END",))
ASKED = PartialCompletion(token_ids([5, 6, 7]), SAMPLING, (2,), 11, 100)

VLLM = {
    "choices": [
        {
            "text": "x",
            "finish_reason": "stop",
            "token_ids": [8, 9, 2],
            "prompt_token_ids": [5, 6, 7],
            "logprobs": {"token_logprobs": [-0.5, -1.0, 0.0], "tokens": ["a", "b", ""], "top_logprobs": None},
        }
    ]
}
SGLANG = {
    "text": "x",
    "output_ids": [8, 9, 2],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 8, None], [-1.0, 9, None], [0.0, 2, None]],
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "weight_version": "4",
    },
}
LLAMA = {
    "content": "x",
    "tokens": [8, 9, 2],
    "stop_type": "eos",
    "tokens_predicted": 3,
    "completion_probabilities": [{"id": 8, "prob": 0.6}, {"id": 9, "prob": 0.36}, {"id": 2, "prob": 1.0}],
}
ENGINES: list[tuple[EngineDialect, dict[str, Any]]] = [
    (VllmDialect("m"), VLLM),
    (SglangDialect(), SGLANG),
    (LlamaCppDialect(), LLAMA),
]


@pytest.mark.parametrize(("dialect", "answer"), ENGINES)
def test_a_whole_answer_gives_its_ids_and_logprobs(dialect: EngineDialect, answer: dict[str, Any]) -> None:
    piece = dialect.response(json.dumps(answer).encode(), ASKED)
    assert piece.ids.tolist() == [8, 9, 2]
    assert piece.logprobs.tolist() == pytest.approx([-0.5, -1.0, 0.0], abs=0.03)
    assert (piece.finish, piece.text) == (FinishReason.STOP, None)


LIKELIEST = [[(8, -0.5), (3, -1.2)], [(9, -1.0)], [(2, 0.0), (1, -9.0)]]
"""By place, as the engines below tell them in words of their own."""

WITH_OTHERS: list[tuple[EngineDialect, str, Any, tuple[str, Any]]] = [
    (
        VllmDialect("m"),
        "choices.0.logprobs.top_logprobs",
        [{f"token_id:{id}": value for id, value in reversed(each)} for each in LIKELIEST],
        ("logprobs", 2),
    ),
    (
        SglangDialect(),
        "meta_info.output_top_logprobs",
        [[[value, id, None] for id, value in each] for each in LIKELIEST],
        ("top_logprobs_num", 2),
    ),
    (
        LlamaCppDialect(),
        "completion_probabilities",
        [
            {
                "id": each[0][0],
                "prob": exp(each[0][1]),
                "top_probs": [{"id": i, "prob": exp(v)} for i, v in each],
            }
            for each in LIKELIEST
        ],
        ("n_probs", 2),
    ),
]


@pytest.mark.parametrize("place", range(3))
def test_the_likeliest_tokens_are_told_if_they_are_asked_for(place: int) -> None:
    dialect, path, told, (field, value) = WITH_OTHERS[place]
    answer = json.dumps(changed(ENGINES[place][1], path, told)).encode()
    asked = structs.replace(ASKED, sampling=structs.replace(SAMPLING, top_logprobs=2))
    assert json.loads(dialect.request(asked))[field] == value
    piece = dialect.response(answer, asked)
    assert [[one.id for one in each] for each in piece.alternatives] == [[8, 3], [9], [2, 1]]
    values = [one.logprob for each in piece.alternatives for one in each]
    assert values == pytest.approx([value for each in LIKELIEST for _, value in each])
    assert dialect.response(answer, ASKED).alternatives == ()


def test_names_of_tokens_that_are_no_ids_are_not_taken_for_such() -> None:
    answer = changed(VLLM, "choices.0.logprobs.top_logprobs", [{"a": -0.5}, {"b": -1.0}, {"": 0.0}])
    asked = structs.replace(ASKED, sampling=structs.replace(SAMPLING, top_logprobs=2))
    assert VllmDialect("m").response(json.dumps(answer).encode(), asked).alternatives == ()


def changed(answer: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The answer with one thing in it replaced; `...` removes it."""
    copy = json.loads(json.dumps(answer))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = copy
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copy


@pytest.mark.parametrize(
    ("place", "path", "value", "why"),
    [
        (0, "choices.0.token_ids", ..., "no token ids"),
        (0, "choices.0.logprobs", ..., "no log-probabilities"),
        (0, "choices.0.logprobs.token_logprobs", [-0.5, -1.0], "3 token ids but 2 log-probabilities"),
        (0, "choices.0.logprobs.token_logprobs.1", None, "None is not the log-probability of token 1"),
        (0, "choices.0.logprobs.token_logprobs.1", 0.5, "0.5 is not the log-probability"),
        (0, "choices.0.token_ids.1", 100, "token id 100 is not in the vocabulary, which ends at 99"),
        (0, "choices.0.token_ids.1", -1, "token id -1"),
        (0, "choices.0.prompt_token_ids", [5, 6, 8], "the engine saw another prompt"),
        (0, "choices.0.prompt_token_ids", ..., "ignores return_token_ids"),
        (0, "choices.0.finish_reason", None, "finish_reason None"),
        (0, "choices", [], "Expected `array` of length >= 1"),
        (1, "meta_info.output_token_logprobs", ..., "no token ids"),
        (1, "output_ids", [8, 9], "name different tokens"),
        (1, "meta_info.prompt_tokens", 4, "saw 4 prompt tokens instead of 3"),
        (1, "meta_info.finish_reason.type", "error", "finish_reason 'error'"),
        (1, "meta_info.output_token_logprobs.0.0", None, "None is not the log-probability"),
        (2, "completion_probabilities.0.id", 7, "the probabilities of 3 others"),
        (2, "completion_probabilities", [], "the probabilities of 0 others"),
        (2, "completion_probabilities.0.prob", 0.0, "None is not the log-probability"),
        (2, "stop_type", "none", "stop_type 'none'"),
        (2, "truncated", True, "cut the prompt"),
    ],
)
def test_a_broken_answer_is_told_in_one_line(place: int, path: str, value: Any, why: str) -> None:
    dialect, answer = ENGINES[place]
    with pytest.raises(FormatError) as error:
        dialect.response(json.dumps(changed(answer, path, value)).encode(), ASKED)
    assert why in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("dialect", "answer"), ENGINES)
def test_more_tokens_than_asked_for_and_cut_bodies_are_refused(
    dialect: EngineDialect, answer: dict[str, Any]
) -> None:
    body = json.dumps(answer).encode()
    short = PartialCompletion(ASKED.prompt_ids, Sampling(max_tokens=2), ASKED.stop_ids)
    with pytest.raises(FormatError, match="at most 2 were asked for"):
        dialect.response(body, short)
    for end in range(len(body)):
        with pytest.raises(FormatError):
            dialect.response(body[:end], ASKED)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda each: (
            st.lists(each, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "meta_info", "content", "tokens"]), each, max_size=3
            )
        ),
    ).map(lambda each: json.dumps(each).encode())
)
def test_no_bytes_at_all_make_a_reader_fail_in_another_way(body: bytes) -> None:
    for dialect, _ in ENGINES:
        with pytest.raises(FormatError):
            dialect.response(body, ASKED)


def test_requests_carry_the_ids_the_settings_and_nothing_that_changes_the_distribution() -> None:
    vllm, sglang, llama = (json.loads(dialect.request(ASKED)) for dialect, _ in ENGINES)
    assert vllm["prompt"] == sglang["input_ids"] == llama["prompt"] == [5, 6, 7]
    assert vllm["stop_token_ids"] == sglang["sampling_params"]["stop_token_ids"] == [2]
    assert (vllm["max_tokens"], sglang["sampling_params"]["max_new_tokens"], llama["n_predict"]) == (4, 4, 4)
    for fields in (vllm, sglang["sampling_params"], llama):
        assert (fields["temperature"], fields["top_p"], fields["stop"]) == (0.7, 0.9, ["END"])
    assert vllm["return_token_ids"] is True
    assert (vllm["repetition_penalty"], vllm["top_k"], vllm["min_p"], vllm["seed"]) == (1.0, -1, 0.0, 11)
    assert sglang["return_logprob"] is True
    assert sglang["sampling_params"]["no_stop_trim"] is True
    assert (llama["repeat_penalty"], llama["samplers"]) == (1.0, ["temperature", "top_p"])
    assert llama["post_sampling_probs"] is llama["return_tokens"] is True


def test_an_abort_may_have_no_token_yet_but_a_finished_completion_has_one() -> None:
    empty = changed(changed(VLLM, "choices.0.token_ids", []), "choices.0.logprobs", None)
    aborted = changed(empty, "choices.0.finish_reason", "abort")
    assert VllmDialect("m").response(json.dumps(aborted).encode(), ASKED).finish is FinishReason.ABORT
    with pytest.raises(FormatError, match="not a single token"):
        VllmDialect("m").response(json.dumps(empty).encode(), ASKED)


@pytest.mark.parametrize(
    "answer", [{**LLAMA, "tokens": []}, {**LLAMA, "stop_type": "word"}], ids=["no ids", "stop string"]
)
def test_llama_cpp_without_ids_gives_text_that_is_not_exact(answer: dict[str, Any]) -> None:
    piece = LlamaCppDialect().response(json.dumps(answer).encode(), ASKED)
    assert (piece.text, len(piece.ids)) == ("x", 0)


@pytest.mark.parametrize(
    ("sampling", "vllm_raw", "sglang"),
    [
        (Sampling(), True, True),
        (Sampling(temperature=0.5), False, False),
        (Sampling(top_p=0.5), False, False),
        (Sampling(temperature=0.0, top_p=0.5), True, True),
    ],
)
def test_logprobs_count_only_where_they_are_of_the_sampled_distribution(
    sampling: Sampling, vllm_raw: bool, sglang: bool
) -> None:
    assert VllmDialect("m").faithful(sampling.params(), processed=False) is vllm_raw
    assert VllmDialect("m").faithful(sampling.params(), processed=True)
    assert SglangDialect().faithful(sampling.params(), processed=False) is sglang
    assert SglangDialect().faithful(Sampling(temperature=0.5).params(), processed=True)
    assert LlamaCppDialect().faithful(sampling.params(), processed=False)
