"""The tokenizer interface of renderers, and loading a tokenizer from a folder."""

from pathlib import Path
from typing import Any, Protocol, cast

from rollwright.engines.base import LONGEST_TOKEN
from rollwright.errors import ConfigError


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that renderers use."""

    name_or_path: str
    chat_template: Any
    eos_token_id: int | None
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, Any]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder; download nothing and run no code from the folder."""
    if not folder.is_dir():
        raise ConfigError(f"tokenizer: {folder} is not a folder; give one with tokenizer.json in it")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            "a tokenizer needs transformers: install rollwright with the extra `engines`"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"tokenizer: {folder} cannot be read: {reason}") from error
    return cast(Tokenizer, tokenizer)


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids, special tokens such as `<tool_call>` included."""
    return tokenizer.decode(ids, skip_special_tokens=False)


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token; at least `LONGEST_TOKEN`, because templates trim white space and some tokenizers merge
    unknown characters."""
    return max(LONGEST_TOKEN, *map(len, tokenizer.get_vocab()))
