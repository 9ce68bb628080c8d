"""A task set of verifiers whose tasks do what they should not, each by its index."""

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["TroubleTaskset"]

GOOD, RAISES, CRASHES, BLOCKS, HANGS, NEEDS_NETWORK, TOO_LATE = range(7)


class TroubleTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def paid(self, trace: vf.Trace) -> float:
        print("{ garbage on standard output")
        match self.data.idx:
            case 1:
                raise LookupError("no such\nthing")
            case 2:
                print("last words", file=sys.stderr, flush=True)
                os.abort()
            case 3:
                time.sleep(3600)  # noqa: ASYNC251
            case 4:
                await asyncio.Event().wait()
            case 5:
                await asyncio.to_thread(urllib.request.urlopen, "http://127.0.0.1:9/", None, 5)
            case 6:
                await asyncio.sleep(5)
        return 1.0


class TroubleTaskset(vf.Taskset[TroubleTask, vf.TasksetConfig]):
    def load(self) -> Iterable[TroubleTask]:
        for index in range(7):
            late = vf.TaskTimeout(scoring=0.1) if index == TOO_LATE else vf.TaskTimeout()
            yield TroubleTask(vf.TaskData(prompt=f"{index} + 1 = ?", timeout=late), self.config.task)
