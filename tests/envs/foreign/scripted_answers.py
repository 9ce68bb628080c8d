"""Answers by rule to the environments that are compared with their native runners; used on both sides, so it imports nothing."""

import re
import zlib

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def answer(messages: list[dict[str, str]]) -> str:
    """What a model would say here; depends on the conversation alone."""
    first = next(each["content"] for each in messages if each["role"] == "user")
    last = messages[-1]["content"]
    said = [each["content"] for each in messages if each["role"] == "assistant"]
    draw = zlib.crc32(f"{first}|{len(said)}".encode())
    if found := re.match(r"(\d+) \+ (\d+) = \?", first):
        total = int(found[1]) + int(found[2]) + (draw % 3 == 0)
        return f"{'well ' * (draw % 4)}it is {total}"
    if "guess a number" in first:
        return _guess(messages, said, draw)
    if "Hangman" in first or "hangman" in first:
        return f"I try [{LETTERS[(len(said) + draw % 3) % len(LETTERS)]}]"
    if "action_schema" in last:
        return '{"message": "' + "a" * (draw % 9 + 1) + '"}'
    return f"I have no rule for {first[:40]!r}"


def _guess(messages: list[dict[str, str]], said: list[str], draw: int) -> str:
    if said and draw % 11 == 0:
        return "I give up"
    low, high = 0, 15
    for each in messages:
        if found := re.match(r"(higher|lower) than (-?\d+)", each["content"]):
            if found[1] == "higher":
                low = max(low, int(found[2]) + 1)
            else:
                high = min(high, int(found[2]) - 1)
    return f"maybe {low + draw % max(1, high - low + 1)}"
