"""Makes the base model of the demo: a small Llama that has copied a player who ignores holes.

    python models/make_base_model.py

The player says what lies to its left, below, to its right and above, and then walks towards the goal over whatever lies
there; now and then it strays a step. It never walks against the edge. No move in the data depends on where the holes
are, so that what the trained model knows about staying out of them and finding a way around, it learned afterwards.

Every lake is drawn from the part to train on (see `rollwright.envs.frozen_lake`). Writes `models/frozen_lake`: weights,
tokenizer and chat template, as transformers saves them. The same machine gives the same bytes.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two busy cores wait for each other

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rollwright import draws
from rollwright.envs.frozen_lake import FrozenLake, Lake, Part

FOLDER = Path(__file__).parent / "frozen_lake"

SIZE = 4
ICE_SHARE = 0.8
"""As in the configuration that trains it."""
LAKES = 60_000
"""Drawn once; each is seen about ten times, with a new move each time."""
STRAY = 0.25
"""Share of moves that go anywhere: without it nothing but the straight way would ever be tried."""
STEPS, BATCH = 2400, 256
LEARNING_RATE, WARMUP = 3e-3, 50
REPORT_EVERY = 200

BOARD, LOOK, END, UNKNOWN = "<board>", "<look>", "<end>", "<unknown>"
CELLS = tuple(FrozenLake.symbols)
EDGE = "#"
"""What the player says lies beyond the edge."""
MOVES = FrozenLake.action_names
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'user' %}}{{{{ '{BOARD}' + message['content'] }}}}"
    f"{{% elif message['role'] == 'assistant' %}}{{{{ '{LOOK}' + message['content'] + '{END}' }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{LOOK}' }}}}{{% endif %}}"
)
"""A board and a mark behind it; the system prompt is left out, because there is nothing in it that it could read."""

AROUND = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Rows and columns from the player to the cells it names, in the order of the moves."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each cell and each move; line ends have none."""
    words = [UNKNOWN, BOARD, LOOK, END, *MOVES, *CELLS, EDGE]
    model = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=UNKNOWN))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex("|".join([*MOVES, "."])), "isolated"),
        ]
    )
    model.decoder = decoders.Fuse()
    made: Any = PreTrainedTokenizerFast  # its constructor has no types
    wrapped: PreTrainedTokenizerFast = made(
        tokenizer_object=model, unk_token=UNKNOWN, eos_token=END, extra_special_tokens=[BOARD, LOOK]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def base_model(vocabulary_size: int) -> LlamaForCausalLM:
    """Three layers: where am I, what lies around me, what do I do."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
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


def lakes() -> Iterator[Lake]:
    """Lakes to train on, with the player on any cell that is no hole; whether a way exists does not matter."""
    rng = draws.generator("base model")
    while True:
        holes = frozenset(cell for cell in range(SIZE**2) if rng.random() >= ICE_SHARE)
        ice = [cell for cell in range(SIZE**2) if cell not in holes]
        if len(ice) < 2:
            continue
        start, goal = rng.sample(ice, 2)
        lake = Lake(start, goal, holes)
        if lake.part(SIZE) is Part.TRAIN:
            yield lake


def board(lake: Lake) -> str:
    cells = ["O" if cell in lake.holes else "_" for cell in range(SIZE**2)]
    cells[lake.goal], cells[lake.start] = "G", "P"
    return "".join(cells)


def around(drawn: str, start: int) -> str:
    """What the player says before it moves."""
    row, column = divmod(start, SIZE)
    named = ""
    for rows, columns in AROUND:
        at = row + rows, column + columns
        named += drawn[at[0] * SIZE + at[1]] if all(0 <= each < SIZE for each in at) else EDGE
    return named


def ways(lake: Lake) -> tuple[list[float], list[float]]:
    """How likely each move is when it walks to the goal, and when it strays."""
    (row, column), (to_row, to_column) = divmod(lake.start, SIZE), divmod(lake.goal, SIZE)
    nearer = [to_column < column, to_row > row, to_column > column, to_row < row]
    inside = [column > 0, row < SIZE - 1, column < SIZE - 1, row > 0]
    return [each / sum(nearer) for each in nearer], [each / sum(inside) for each in inside]


def main() -> None:
    torch.set_num_threads(1)
    words = tokenizer()
    model = base_model(len(words))
    source = lakes()
    drawn = [(lake, board(lake)) for lake in (next(source) for _ in range(LAKES))]
    seen = [f"{BOARD}{cells}{LOOK}{around(cells, lake.start)}" for lake, cells in drawn]
    before_move = torch.tensor([words.encode(each) for each in seen])
    odds = torch.tensor([ways(lake) for lake, _ in drawn])
    chances = (1 - STRAY) * odds[:, 0] + STRAY * odds[:, 1]
    first_move = words.convert_tokens_to_ids(MOVES[0])
    said = len(AROUND) + 1
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.process_time()
    for step in range(STEPS):
        chosen = torch.randint(LAKES, (BATCH,))
        moves = torch.multinomial(chances[chosen], 1) + first_move
        ids = torch.cat([before_move[chosen], moves], dim=1)
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -said:]
        losses = cross_entropy(model.lm_head(hidden).transpose(1, 2), ids[:, -said:], reduction="none").mean(
            0
        )
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP, max(0.05, 1 - step / STEPS))
        optimiser.zero_grad()
        losses.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % REPORT_EVERY == 0:
            spent = time.process_time() - began
            print(
                f"step {step + 1}: cells {losses[:-1].mean():.4f}, move {losses[-1]:.3f}, {spent:.0f} CPU s"
            )
    disable_progress_bar()
    model.save_pretrained(FOLDER)
    words.save_pretrained(FOLDER)
    parameters = sum(each.numel() for each in model.parameters())
    print(f"{parameters:,} parameters in {FOLDER}")


if __name__ == "__main__":
    main()
