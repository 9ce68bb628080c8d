"""Commands in a model's answers, and their results as observations: the text format of terminals in boxes.

It needs nothing of a chat template, so that any model can use it. An answer holds one block of bash; the rest of it is
thinking. The answer `done` in a block ends the episode.
"""

import re
from typing import NamedTuple

from rollwright.sandbox.box import CommandResult

SYSTEM = """You solve tasks in a Linux terminal. Think briefly, then write exactly one command block:
```bash
COMMAND
```
You then see its output. Files and background programs stay from one command to the next; variables and the current folder do
not. When the task is done, write:
```bash
done
```"""

DONE = "done"
NO_COMMAND = "Write one command between ```bash and ```, or `done` there when the task is done."

_BLOCK = re.compile(r"```(?:bash|sh|shell)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)


class TerminalAction(NamedTuple):
    """What an answer asks for."""

    command: str | None = None
    """`None`: the answer has no block, or it is done."""
    is_done: bool = False


def read_action(answer: str) -> TerminalAction:
    """The first command block of an answer."""
    found = _BLOCK.search(answer)
    command = found.group(1).strip() if found is not None else ""
    if command == DONE:
        return TerminalAction(is_done=True)
    return TerminalAction(command or None)


def describe_result(result: CommandResult, limit: int) -> str:
    """Output and exit code of a command, at most `limit` characters of output: the begin and the end of it."""
    output = "\n".join(each.rstrip("\n") for each in (result.stdout, result.stderr) if each.strip())
    if len(output) > limit:
        half = limit // 2
        output = f"{output[:half]}\n[{len(output) - 2 * half} characters left out]\n{output[-half:]}"
    notes = []
    if result.is_late:
        notes.append(f"[stopped after {result.seconds:.0f} s]")
    elif result.exit_code != 0:
        notes.append(f"[exit code {result.exit_code}]")
    return "\n".join([*([output] if output else []), *notes]) or "[no output]"
