"""Text of token ids: whole prompts, and the piece of text of each single token.

Ids are decoded with the tokenizer of the policy that answered. A tokenizer that is missing is a line of text and no error,
because everything else about a turn can be shown without it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from rollwright.config import PolicyConfig, RunConfig
from rollwright.engines.rendering.bytes import ASSISTANT, END, SYSTEM, TOOL, USER
from rollwright.engines.settings import EnginePolicyConfig, TorchPolicyConfig
from rollwright.errors import RollwrightError
from rollwright.trajectory import Turn

NOT_RECORDED = "not recorded: its engine takes text and no token ids"

_MARKS = {SYSTEM: "[system] ", USER: "[user] ", ASSISTANT: "[assistant] ", TOOL: "[tool] ", END: "\n"}

BROKEN = "\ufffd"
"""Stands for bytes that are no whole character."""

MOST_TOKENS_OF_CHARACTER = 4
"""A character has at most four bytes, and a token at least one."""

Decode = Callable[[Sequence[int]], str]


class PromptReader:
    """Decodes the tokens of a run's turns; loads a tokenizer on first use."""

    def __init__(self, config: RunConfig, *, download: bool = True) -> None:
        """`download`: whether a tokenizer that is not on this machine may be downloaded."""
        self._config = config
        self._download = download
        self._decoders: dict[str, Decode | str] = {}
        """Decoders by policy; a string is the reason why there is none."""

    def text(self, turn: Turn) -> str:
        """Prompt of a turn: the part added to the turn that it extends, or the whole prompt."""
        if not turn.prompt_ids:
            return NOT_RECORDED
        decode = self.decoder(turn.agent)
        return decode if isinstance(decode, str) else decode(turn.prompt_ids).strip()

    def pieces(self, agent: str, ids: Sequence[int]) -> list[str]:
        """Text of each token by itself; a character that takes several tokens stands at the last of them. Empty if the ids
        cannot be decoded, see `decoder`."""
        decode = self.decoder(agent)
        if isinstance(decode, str):
            return []
        known: dict[int, str] = {}
        found: list[str] = []
        for place, each in enumerate(ids):
            if each not in known:
                known[each] = decode([each])
            found.append(known[each])
            if BROKEN in known[each]:
                _join_character(found, ids[: place + 1], decode)
        return found

    def decoder(self, agent: str) -> Decode | str:
        """Decoder of an agent's tokens, or the reason why there is none."""
        policy = self._policy_of(agent)
        key = policy.model_dump_json()
        if key not in self._decoders:
            self._decoders[key] = _decoder(policy, self._download)
        return self._decoders[key]

    def _policy_of(self, agent_id: str) -> PolicyConfig:
        """Policy of an agent, by its id `team/agent`."""
        team, _, agent = agent_id.rpartition("/")
        for each in self._config.orchestras.values():
            if team == (each.name or each.kind) and agent in each.agents:
                named = each.agents[agent].policy
                return self._config.policies.get(named or "", self._config.policy)
        return self._config.policy


def _join_character(found: list[str], ids: Sequence[int], decode: Decode) -> None:
    """Write a character at its last token, if the last tokens are its bytes; the tokens before it become empty."""
    for count in range(2, min(MOST_TOKENS_OF_CHARACTER, len(ids)) + 1):
        text = decode(list(ids[-count:]))
        if BROKEN not in text and all(BROKEN in each for each in found[-count:]):
            found[-count:] = [*[""] * (count - 1), text]
            return


def _decoder(policy: PolicyConfig, download: bool) -> Decode | str:
    match policy:
        case TorchPolicyConfig():
            name = policy.model
        case EnginePolicyConfig():
            name = policy.renderer.tokenizer
        case _:  # players and the simulated engine
            return _decode_bytes
    try:
        from rollwright.engines.rendering.tokenizer import decode, load_tokenizer

        tokenizer = load_tokenizer(Path(_folder_of(name, download)))
    except RollwrightError as error:
        return f"cannot be read without its tokenizer: {error}"
    return lambda ids: decode(tokenizer, list(ids))


def _folder_of(model: str, download: bool) -> str:
    from rollwright.models.loading import find, resolve

    if download:
        return resolve(model)
    found = find(model)
    if found is None:
        from rollwright.models.hub import local_copy

        found = str(copy) if (copy := local_copy(model)) is not None else None
    if found is None:
        raise RollwrightError(f"{model} is not on this machine")
    return found


def _decode_bytes(ids: Sequence[int]) -> str:
    """Decode ids of the byte-level renderer; control tokens are shown by name."""
    parts: list[bytes] = []
    for each in ids:
        known = _MARKS.get(each)
        parts.append(known.encode() if known is not None else bytes([each]) if 0 <= each < 256 else b"?")
    return b"".join(parts).decode(errors="replace")
