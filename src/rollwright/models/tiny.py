"""Small random models for tests, examples and demos."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, which most small chat models are trained with."""


def tiny_llama(
    vocabulary_size: int,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    max_length: int = 1024,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> "LlamaForCausalLM":
    """A Llama with random weights that depend on the arguments alone; the defaults make 0.15M parameters with 261 ids.

    A larger `initializer_range` makes its distribution peaked: at 0.02 all ids are about equally likely.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=max_length,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # leaves the global random state unchanged
        torch.manual_seed(seed)
        make: Any = LlamaForCausalLM  # its constructor has no types
        model: LlamaForCausalLM = make(config).eval()
    return model


def tiny_tokenizer(texts: Iterable[str], vocabulary_size: int = 512) -> "PreTrainedTokenizerFast":
    """A lossless byte-level tokenizer trained on `texts`, with a ChatML template. Encodes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=TURN_END
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
