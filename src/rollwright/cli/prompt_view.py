"""The prompts of a recorded episode as text: what each turn's agent was asked, as its model saw it.

A prompt is recorded as token ids, so its text is the text of those ids, marks of the chat format included. An engine that
speaks only text is given no ids; of it only the environment's opening messages are recorded.
"""

from collections.abc import Callable
from pathlib import Path

from rollwright.config import PolicyConfig, RunConfig, SimulatedPolicyConfig
from rollwright.errors import RollwrightError
from rollwright.policies.bytes_renderer import ASSISTANT, END, SYSTEM, TOOL, USER
from rollwright.policies.settings import EnginePolicyConfig, TorchPolicyConfig
from rollwright.trajectory import TokenIds, Turn

NOT_RECORDED = "not recorded: its engine takes text and no token ids"

_MARKS = {SYSTEM: "[system] ", USER: "[user] ", ASSISTANT: "[assistant] ", TOOL: "[tool] ", END: "\n"}

Decode = Callable[[TokenIds], str]


class Prompts:
    """Reads prompts of one run's turns; a tokenizer is loaded when the first one needs it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._decoders: dict[str, Decode | str] = {}
        """By policy; a text says why there is none."""

    def text(self, turn: Turn) -> str:
        """What was added for this turn to what it continues; for one that continues nothing, its whole prompt."""
        if not turn.prompt_ids:
            return NOT_RECORDED
        policy = self._policy_of(turn.agent)
        key = policy.model_dump_json()
        if key not in self._decoders:
            self._decoders[key] = _decoder(policy)
        decode = self._decoders[key]
        return decode if isinstance(decode, str) else decode(turn.prompt_ids).strip()

    def _policy_of(self, agent_id: str) -> PolicyConfig:
        """Of an agent by its id, `team/agent`."""
        team, _, agent = agent_id.rpartition("/")
        for each in self._config.orchestras.values():
            if team == (each.name or each.kind) and agent in each.agents:
                named = each.agents[agent].policy
                return self._config.policies.get(named or "", self._config.policy)
        return self._config.policy


def _decoder(policy: PolicyConfig) -> Decode | str:
    match policy:
        case TorchPolicyConfig():
            name = policy.model
        case EnginePolicyConfig():
            name = policy.renderer.tokenizer
        case SimulatedPolicyConfig():
            return _of_bytes
        case _:
            return _of_bytes
    try:
        from rollwright.models.loading import resolve
        from rollwright.policies.rendering.tokenizer import decode, load_tokenizer

        tokenizer = load_tokenizer(Path(resolve(name)))
    except RollwrightError as error:
        return f"cannot be read without its tokenizer: {error}"
    return lambda ids: decode(tokenizer, list(ids))


def _of_bytes(ids: TokenIds) -> str:
    """Of the byte-level renderer, whose marks are shown by their names."""
    parts: list[bytes] = []
    for each in ids:
        parts.append(_MARKS[each].encode() if each in _MARKS else bytes([each]))
    return b"".join(parts).decode(errors="replace")
