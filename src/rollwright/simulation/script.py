"""Scripts for the simulated engine: tool calls, JSON, reasoning and text that it answers with, so that an agent can be tried
without a model.

Always true: what is answered depends on the conversation in the prompt alone, never on earlier calls, so a repeated, replayed
or concurrent call gets the same answer. Under an output format the answer obeys it: the script's own call or JSON if it has
one that fits, else an instance of the schema.

A script is a list of scenes, or of replies, which are then one scene for every conversation. The first scene whose patterns
are all found answers. `when` looks at the user's last message, and the replies are numbered from there; `task` looks at the
first one, and they are numbered over the whole conversation, for agents whose tools answer as the user. Behind its last reply
a scene repeats it.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollwright.engines.base import EngineError, OutputFormat, Prompt, Sampling
from rollwright.engines.rendering.bytes import TOOLS_HEADING, BytesRenderer, thought, written_call
from rollwright.errors import ConfigError
from rollwright.simulation.instances import instance
from rollwright.simulation.players import Choice, draw_key
from rollwright.trajectory import Message

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

_SHOWN = 80
"""Characters of a question in an error message."""


class ScriptCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call."""

    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class ScriptReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer. `{question}`, `{task}`, `{result}` and the named groups of the patterns stand for texts of the
    conversation: the user's last and first message, and the last answer of a tool."""

    say: str = ""
    reasoning: str = ""
    call: ScriptCall | None = None
    calls: tuple[ScriptCall, ...] = ()
    json: Any = msgspec.UNSET
    """Written as JSON text in place of `say`."""

    @property
    def all_calls(self) -> tuple[ScriptCall, ...]:
        return self.calls if self.call is None else (self.call, *self.calls)


class ScriptScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replies to the conversations that its patterns match; without patterns, to all."""

    replies: tuple[ScriptReply, ...]
    when: str | None = None
    """Regular expression for the user's last message."""
    task: str | None = None
    """Regular expression for the user's first message."""
    system: str | None = None
    """Regular expression for the system message."""

    def __post_init__(self) -> None:
        if not self.replies:
            raise ValueError("replies: there is none; accepted: one or more")
        if self.when is not None and self.task is not None:
            raise ValueError(
                "when and task: accepted is one of them, because it says where replies are counted from"
            )
        for name in ("when", "task", "system"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(f"{name}: not a regular expression: {error}") from error


class _Seen(msgspec.Struct, frozen=True):
    """What a scene looks at in a conversation."""

    system: str
    first: str
    last: str
    result: str
    answers: int
    answers_since_last: int


class ScriptedPlayer:
    """Answers by a script."""

    renderer = BytesRenderer()

    def __init__(self, scenes: tuple[ScriptScene, ...], name: str = "script") -> None:
        self._scenes = scenes
        self._name = name

    def choose(self, prompt: Prompt, sampling: Sampling) -> Choice:
        messages = list(prompt.messages) if prompt.ids is None else self.renderer.read(prompt.ids)
        seen = _look(messages)
        found = self._find(seen)
        if found is None:
            raise EngineError(
                f"{self._name}: no scene matches {seen.last[:_SHOWN]!r}; accepted: one without patterns"
            )
        reply, values = found
        if sampling.output is not None:
            return Choice(_constrained(reply, values, sampling.output, prompt, sampling), 0.0, whole=True)
        return Choice(_write(reply, values), 0.0, whole=True)

    def _find(self, seen: _Seen) -> tuple[ScriptReply, dict[str, str]] | None:
        for scene in self._scenes:
            values = {"question": seen.last, "task": seen.first, "result": seen.result}
            for pattern, text in (
                (scene.system, seen.system),
                (scene.task, seen.first),
                (scene.when, seen.last),
            ):
                if pattern is None:
                    continue
                match = re.search(pattern, text)
                if match is None:
                    break
                values |= {name: each for name, each in match.groupdict().items() if each is not None}
            else:
                made = seen.answers_since_last if scene.task is None else seen.answers
                return scene.replies[min(made, len(scene.replies) - 1)], values
        return None


def read_script(script: str | list[Any]) -> ScriptedPlayer:
    """A player from a file (YAML, JSON or JSON lines) or from the entries themselves; raises a `ConfigError` that names the
    entry."""
    name = script if isinstance(script, str) else "script"
    entries = _load(script) if isinstance(script, str) else script
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{name}: holds no entries; accepted: a list of replies or of scenes")
    flat = not any(isinstance(each, dict) and "replies" in each for each in entries)
    kind: Any = ScriptReply if flat else ScriptScene
    read = []
    for number, entry in enumerate(entries, 1):
        try:
            read.append(msgspec.convert(entry, kind))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}: entry {number}: {error}") from error
    # `task` counts over the whole conversation, and an empty pattern is found in any.
    scenes = (ScriptScene(tuple(read), task=""),) if flat else tuple(read)
    return ScriptedPlayer(scenes, name)


def _load(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            return [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
        return yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"policy.script: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy.script: {path}: {' '.join(str(error).split())}") from error


def _look(messages: list[Message]) -> _Seen:
    users = [place for place, each in enumerate(messages) if each.role == "user"]
    last = users[-1] if users else -1
    results = [each.content for each in messages if each.role == "tool"]
    answers = [place for place, each in enumerate(messages) if each.role == "assistant"]
    return _Seen(
        system="\n".join(
            each.content
            for each in messages
            if each.role == "system" and not each.content.startswith(TOOLS_HEADING)
        ),
        first=messages[users[0]].content if users else "",
        last=messages[last].content if users else "",
        result=results[-1] if results else "",
        answers=len(answers),
        answers_since_last=sum(place > last for place in answers),
    )


def _write(reply: ScriptReply, values: dict[str, str]) -> str:
    said = _fill(reply.say, values) if reply.json is msgspec.UNSET else _json(_fill(reply.json, values))
    calls = [written_call(each.name, _fill(each.arguments, values)) for each in reply.all_calls]
    return thought(_fill(reply.reasoning, values)) + str(said) + "".join(calls)


def _constrained(
    reply: ScriptReply, values: dict[str, str], output: OutputFormat, prompt: Prompt, sampling: Sampling
) -> str:
    for call in reply.all_calls:
        if call.name in output.tools:
            return _json({"name": call.name, "arguments": _fill(call.arguments, values)})
    if output.kind != "tool_call" and reply.json is not msgspec.UNSET:
        return _json(_fill(reply.json, values))
    return _json(instance(output.answer or output.schema, *draw_key(prompt, sampling)))


def _fill(value: Any, values: dict[str, str]) -> Any:
    """The value with the texts of the conversation in place of their names. A name alone stands for a number if its text
    is one."""
    if isinstance(value, dict):
        return {name: _fill(each, values) for name, each in value.items()}
    if isinstance(value, list):
        return [_fill(each, values) for each in value]
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    if whole is not None and _NUMBER.fullmatch(values.get(whole[1], "")):
        return msgspec.json.decode(values[whole[1]])
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
