"""A foreign package that does everything that one should not."""

import os
import random
import sys
import time
from typing import Any


class Refused(Exception):
    is_settings = True


class Counter:
    def __init__(self, start: int) -> None:
        if start < 0:
            raise Refused("start must be 0 or more")
        self._count = start

    def reset(self, seed: int) -> int:
        random.seed(seed)
        print("garbage on standard output")
        sys.stdout.write("{" * 1000 + "\n")
        sys.stdout.flush()
        return self._count

    def add(self, number: int) -> list[int]:
        self._count += number
        return [self._count, random.randrange(1000), os.getpid()]

    def hang(self) -> None:
        time.sleep(3600)

    def crash(self) -> None:
        print("last words", file=sys.stderr, flush=True)
        os.abort()

    def leave(self) -> None:
        sys.exit("I leave")

    def break_off(self) -> None:
        raise LookupError("no such\nthing")

    def unsayable(self) -> Any:
        return object()


def make(start: int) -> Counter:
    return Counter(start)


def describe(start: int) -> dict[str, int]:
    print("garbage before the description")
    return {"start": Counter(start)._count}
