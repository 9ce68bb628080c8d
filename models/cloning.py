"""A small Llama that has copied a player of a board game: one token for each cell and each move, and eyes.

The model is trained on the player's moves and, with a second loss, on questions about the board whose answers a move may
need. The head that answers them is thrown away: what stays is a model that sees these things, and has a use for them
only as far as the player had one. The same machine gives the same bytes.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two busy cores wait for each other

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

BATCH = 256
LEARNING_RATE, WARMUP = 3e-3, 50
REPORT_EVERY = 200

BOARD, MOVE, END, UNKNOWN = "<board>", "<move>", "<end>", "<unknown>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'user' %}}{{{{ '{BOARD}' + message['content'] }}}}"
    f"{{% elif message['role'] == 'assistant' %}}{{{{ '{MOVE}' + message['content'] + '{END}' }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{MOVE}' }}}}{{% endif %}}"
)
"""A board and a mark behind it; the system prompt is left out, because there is nothing in it that it could read."""


class Example(NamedTuple):
    """A board, what the player does there, and what there is to see."""

    board: str
    chances: Sequence[float]
    """Of each move."""
    sights: Sequence[int]
    """The answer to each question, as a number below `kinds`."""


class Size(NamedTuple):
    """Of the model."""

    layers: int
    hidden: int


def tokenizer(moves: Sequence[str], cells: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each cell and each move; line ends have none."""
    words = [UNKNOWN, BOARD, MOVE, END, *moves, *cells]
    model = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=UNKNOWN))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex("|".join([*moves, "."])), "isolated"),
        ]
    )
    model.decoder = decoders.Fuse()
    made: Any = PreTrainedTokenizerFast  # its constructor has no types
    wrapped: PreTrainedTokenizerFast = made(
        tokenizer_object=model, unk_token=UNKNOWN, eos_token=END, extra_special_tokens=[BOARD, MOVE]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def new_model(vocabulary_size: int, size: Size) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
        },  # distances of one cell to a board's length
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM  # its constructor has no types
    model: LlamaForCausalLM = made(config)
    return model


def clone(
    examples: Sequence[Example],
    *,
    moves: Sequence[str],
    cells: Sequence[str],
    kinds: int,
    steps: int,
    size: Size,
    folder: Path,
) -> None:
    """Trains on the examples and writes weights, tokenizer and chat template, as transformers saves them."""
    torch.set_num_threads(1)
    words = tokenizer(moves, cells)
    model = new_model(len(words), size)
    eyes = torch.nn.Linear(size.hidden, len(examples[0].sights) * kinds)
    prompts = torch.tensor([words.encode(f"{BOARD}{each.board}{MOVE}") for each in examples])
    chances = torch.tensor([each.chances for each in examples])
    sights = torch.tensor([each.sights for each in examples])
    first_move = words.convert_tokens_to_ids(moves[0])
    optimiser = torch.optim.AdamW(
        [*model.parameters(), *eyes.parameters()], lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    began = time.process_time()
    for step in range(steps):
        chosen = torch.randint(len(examples), (BATCH,))
        made = torch.multinomial(chances[chosen], 1)[:, 0] + first_move
        hidden = model.model(input_ids=prompts[chosen], use_cache=False).last_hidden_state[:, -1]
        copying = cross_entropy(model.lm_head(hidden), made)
        seeing = cross_entropy(eyes(hidden).view(-1, kinds), sights[chosen].view(-1), reduction="sum") / BATCH
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP, max(0.05, 1 - step / steps))
        optimiser.zero_grad()
        (copying + seeing).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % REPORT_EVERY == 0:
            spent = time.process_time() - began
            print(f"step {step + 1}: moves {copying:.3f}, eyes {seeing:.4f}, {spent:.0f} CPU s", flush=True)
    disable_progress_bar()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters in {folder}")
