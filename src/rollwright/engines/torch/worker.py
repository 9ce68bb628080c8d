"""The thread that owns the model: it runs the steps and applies weight updates.

Always true: between two steps the thread admits new calls, removes cancelled ones and applies weight updates. A step that
fails ends the calls in it and no others. Every submitted call is answered, also at `close`. New weights are read and checked
against the model before they are applied, so a bad update changes nothing. The event loop never waits: it submits under a
lock that is not held during a step.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rollwright.engines.base import EngineError, UpdateMode, Weights
from rollwright.engines.torch.batcher import Batcher
from rollwright.engines.torch.call import Counters, GenerationCall
from rollwright.errors import ConfigError, FormatError
from rollwright.models.loading import weights_checksum, weights_files

Tensors = Mapping[str, torch.Tensor]


def read_weights(model: PreTrainedModel, weights: Weights) -> Tensors:
    """Read the new tensors by name; raise one line if they do not fit the model or the announced checksum."""
    where = f"weights of version {weights.version}"
    if weights.tensors is not None:
        tensors: Tensors = weights.tensors
    elif weights.folder is not None:
        tensors = _read_folder(weights.folder, weights.checksum, where)
    else:
        raise ConfigError(f"{where}: hold neither a folder nor tensors; accepted: one of them")
    _check(model, tensors, where)
    return tensors


def apply_weights(model: PreTrainedModel, tensors: Tensors) -> None:
    """Copy the tensors into the model, in place."""
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


def _read_folder(folder: Path, checksum: str | None, where: str) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if checksum is not None and (found := weights_checksum(folder)) != checksum:
        raise FormatError(
            f"{where}: {folder} has checksum {found[:12]}…, not the announced {checksum[:12]}…;"
            " the old weights stay"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in weights_files(folder):
        try:
            tensors.update(load_file(path))
        except SafetensorError as error:
            raise FormatError(f"{where}: {path} is not a whole safetensors file: {error}") from error
    return tensors


def _check(model: PreTrainedModel, tensors: Tensors, where: str) -> None:
    state = model.state_dict()
    if unknown := sorted(set(tensors) - set(state)):
        raise FormatError(f"{where}: {_some(unknown)} not in the model; accepted: its own names")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise FormatError(
                f"{where}: {name} has shape {tuple(tensor.shape)}; accepted: {tuple(state[name].shape)}"
            )
    # One of several names for the same tensor is enough: input and output embeddings are often tied.
    given = {state[name].data_ptr() for name in tensors}
    if missing := sorted(name for name, tensor in state.items() if tensor.data_ptr() not in given):
        raise FormatError(f"{where}: {_some(missing)} missing; accepted: all tensors of the model")


def _some(names: list[str]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {more} more are" if more else f"{names[0]} is"


@dataclass(eq=False)
class Update:
    """A pending weight update."""

    tensors: Tensors
    version: int
    mode: UpdateMode
    done: asyncio.Future[None]
    error: EngineError | None = None


class Worker:
    """Starts its thread with the first call or update, and again for one after `close`."""

    def __init__(self, model: PreTrainedModel, batcher: Batcher, counters: Counters, version: int) -> None:
        self.version = version
        """Changed only by the thread, between steps."""
        self._model = model
        self._batcher = batcher
        self._counters = counters
        self._condition = threading.Condition()
        """Guards everything below."""
        self._new: list[GenerationCall] = []
        self._updates: list[Update] = []
        """Updates that can still be withdrawn, in order of arrival."""
        self._cancelled = False
        """Whether calls were cancelled since the last step."""
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, call: GenerationCall) -> None:
        with self._condition:
            self._wake()
            self._new.append(call)
            self._counters.calls += 1

    def cancel(self, call: GenerationCall) -> None:
        with self._condition:
            call.cancelled = self._cancelled = True
            self._condition.notify()

    def update(self, update: Update) -> None:
        with self._condition:
            self._wake()
            self._updates.append(update)

    def withdraw(self, update: Update) -> bool:
        """Withdraw an update; false: it is being applied or was applied already."""
        with self._condition:
            early = update in self._updates
            if early:
                self._updates.remove(update)
                self._condition.notify()
            return early

    def close(self) -> None:
        """Block until the current step is over and every call and update is answered."""
        with self._condition:
            thread, self._closing = self._thread, True
            self._condition.notify()
        if thread is not None:
            thread.join()
        with self._condition:
            if self._thread is thread:
                self._thread, self._closing = None, False

    def _wake(self) -> None:
        """Start or notify the thread. The caller holds the lock, so the thread sees the new call or update."""
        if self._closing:
            raise EngineError("the torch policy is being closed; it takes no more calls")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torch-policy", daemon=True)
            self._thread.start()
        self._condition.notify()

    def _run(self) -> None:
        while self._collect_work():
            update = self._due_update()
            if update is not None:
                self._apply(update)
            elif self._batcher.running or self._batcher.waiting:
                self._step()
        self._end()

    def _collect_work(self) -> bool:
        """Wait for work and take in new and cancelled calls; false: the worker is closing."""
        busy = self._batcher.running or self._batcher.waiting
        with self._condition:
            while not (busy or self._new or self._updates or self._cancelled or self._closing):
                self._condition.wait()
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, False
            closing = self._closing
        for call in new:
            self._batcher.add(call)
        if cancelled:
            self._counters.cancelled += self._batcher.drop_cancelled()
        return not closing

    def _due_update(self) -> Update | None:
        """The next update, unless running calls have to end before it."""
        with self._condition:
            if not self._updates:
                return None
            if self._updates[0].mode is UpdateMode.DRAIN and self._batcher.running:
                return None
            return self._updates.pop(0)

    def _step(self) -> None:
        with self._condition:
            draining = bool(self._updates)
        try:
            ended = self._batcher.step(self.version, admit=not draining)
        except Exception as error:  # noqa: BLE001 - an error of the model ends the calls in the step, not the thread
            self._fail(self._batcher.remove_all(waiting=False), f"the model failed: {_one_line(error)}")
        else:
            self._answer(ended)

    def _apply(self, update: Update) -> None:
        self._batcher.interrupt(restart=update.mode is UpdateMode.RESTART_TURN)
        try:
            apply_weights(self._model, update.tensors)
        except RuntimeError as error:  # the tensors were checked before, so only the device can fail
            update.error = EngineError(f"weights of version {update.version}: {_one_line(error)}")
        else:
            self.version = update.version
            self._counters.updates += 1
        _settle_in_loop([update])

    def _end(self) -> None:
        with self._condition:
            updates, self._updates = self._updates, []
        for update in updates:
            update.error = EngineError(f"weights of version {update.version}: the torch policy was closed")
        _settle_in_loop(updates)
        self._fail(self._batcher.remove_all(waiting=True), "the torch policy was closed")

    def _fail(self, calls: Sequence[GenerationCall], reason: str) -> None:
        for call in calls:
            call.error = EngineError(reason)
        self._answer(calls)

    def _answer(self, calls: Sequence[GenerationCall]) -> None:
        failed = sum(call.error is not None for call in calls)
        self._counters.failed += failed
        self._counters.completed += len(calls) - failed
        _settle_in_loop(calls)


def _settle_in_loop(things: Sequence[GenerationCall | Update]) -> None:
    """Resolve the futures in their own event loops, with one callback for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[GenerationCall | Update]] = defaultdict(list)
    for each in things:
        by_loop[each.done.get_loop()].append(each)
    for loop, theirs in by_loop.items():
        if not loop.is_closed():  # otherwise no task waits for them
            loop.call_soon_threadsafe(_settle, theirs)


def _settle(things: Sequence[GenerationCall | Update]) -> None:
    for each in things:
        if each.done.done():
            continue  # cancelled in the meantime
        if each.error is not None:
            each.done.set_exception(each.error)
        else:
            each.done.set_result(None)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
