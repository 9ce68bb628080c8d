"""Offers one batch after the other to trainers, and takes their weights back.

Always true: at most one batch is offered at a time, because the next one is played with the weights of this one. What a
trainer is told is on the disk first (`ledger`), and what it decides about its batch is decided by `leases`.
"""

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from rollwright.errors import FormatError
from rollwright.models.loading import weights_checksum, weights_files
from rollwright.training.service.leases import BatchLease, BatchLeases, LeaseLost
from rollwright.training.service.ledger import Finish, HandOut, ServedLedger
from rollwright.training.service.wire import (
    BatchReply,
    BatchRow,
    FinishBatch,
    FinishReply,
    GetBatch,
    HandedBatch,
    LeaseReply,
    Refusal,
    ReleaseBatch,
    RenewLease,
    StatusReply,
    WeightsFile,
    WeightsReply,
)

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Names of uploaded files; a folder of a model has no folders inside."""

INCOMING = ".incoming"


class BatchService:
    """The trainers' side of a run. Belongs to one event loop."""

    def __init__(
        self,
        ledger: ServedLedger,
        weights: Path,
        base: Path,
        *,
        lease_seconds: float,
        temperature: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`weights`: folder of the run for uploaded weights, by version. `base`: folder of the base model."""
        self.version = 0
        self.folder = base
        """Current weights."""
        self._ledger, self._weights, self._base = ledger, weights, base
        self._leases = BatchLeases(lease_seconds)
        self._temperature, self._clock = temperature, clock
        self._rows: Sequence[BatchRow] = ()
        self._done: asyncio.Future[Finish] | None = None
        self._news = asyncio.Condition()
        self._finishing = asyncio.Lock()
        self._closed = False
        self._earlier = dict(ledger.handed)
        """Hand-outs of earlier processes, which their trainers may still be at work on."""
        if ledger.finished:
            last = ledger.finished[max(ledger.finished)]
            self._leases.remember(BatchLease(last.lease, last.step, "", 0.0))

    # -- the run's side ---------------------------------------------------------------------------------

    async def train(self, step: int, rows: Sequence[BatchRow]) -> Finish:
        """Offers a batch until a trainer has acknowledged it."""
        held = self._earlier.pop(step, None)
        until = self._clock() + self._leases.seconds
        self._leases.offer(step, None if held is None else BatchLease(held.lease, step, held.trainer, until))
        self._rows = rows
        self._done = asyncio.get_running_loop().create_future()
        try:
            await self._tell()
            return await self._done
        finally:
            self._rows, self._done = (), None

    async def close(self) -> None:
        """Tells waiting trainers that there will be no more batches."""
        self._closed = True
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    # -- the trainers' side -----------------------------------------------------------------------------

    async def get_batch(self, request: GetBatch) -> BatchReply:
        loop = asyncio.get_running_loop()
        ends = loop.time() + request.wait_seconds
        self._leases.take_back(request.trainer)
        while True:
            if self._closed:
                return BatchReply("done")
            lease = self._leases.take(uuid4().hex, request.trainer, self._clock())
            if lease is not None:
                return BatchReply("batch", await self._hand_out(lease))
            held = self._leases.held
            left = ends - loop.time()
            if left <= 0:
                return BatchReply("wait")
            if held is not None:  # looks again when that lease has run out
                left = min(left, max(held.expires - self._clock(), 0.01))
            await self._wait_for_news(left)

    async def _wait_for_news(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait()
        except TimeoutError:
            return

    async def _hand_out(self, lease: BatchLease) -> HandedBatch:
        rows = self._rows
        await asyncio.to_thread(self._ledger.append, HandOut(lease.step, lease.id, lease.trainer))
        return HandedBatch(
            step=lease.step,
            lease=lease.id,
            lease_seconds=self._leases.seconds,
            version=self.version,
            folder=str(self.folder),
            temperature=self._temperature,
            rows=rows,
        )

    async def renew_lease(self, request: RenewLease) -> LeaseReply:
        with _refusing():
            self._leases.renew(request.lease, self._clock())
        return LeaseReply(self._leases.seconds)

    async def release_batch(self, request: ReleaseBatch) -> LeaseReply:
        with _refusing():
            self._leases.release(request.lease, self._clock())
        await asyncio.to_thread(shutil.rmtree, self._incoming(request.lease), True)
        await self._tell()
        return LeaseReply(0.0)

    async def finish_batch(self, request: FinishBatch) -> FinishReply:
        async with self._finishing:
            if (step := self._leases.finished_step(request.lease)) is not None:
                return FinishReply(self._ledger.finished[step].version)
            if sum(each is not None for each in (request.folder, request.uploaded, request.skipped)) != 1:
                raise Refusal(422, "invalid", "give one of `folder`, `uploaded` and `skipped`")
            with _refusing():
                lease = self._leases.pin(request.lease, self._clock())
            try:
                finish = await asyncio.to_thread(self._accept, lease, request)
                await asyncio.to_thread(self._ledger.append, finish)
            except BaseException:
                self._leases.renew(lease.id, self._clock())
                raise
            self._leases.finish(lease.id, self._clock())
            self.take_weights(finish)
            if self._done is not None:
                self._done.set_result(finish)
            return FinishReply(self.version)

    def take_weights(self, finish: Finish) -> None:
        """Makes the weights of an acknowledged batch the current ones."""
        self.version = finish.version
        if finish.folder is not None:
            self.folder = Path(finish.folder)

    def _accept(self, lease: BatchLease, request: FinishBatch) -> Finish:
        """Checks the weights of an acknowledgement; of uploaded ones, puts them into their place."""
        if request.skipped is not None:
            return Finish(
                lease.step, lease.id, self.version, skipped=request.skipped, metrics=request.metrics
            )
        version, incoming = self.version + 1, self._incoming(lease.id)
        if request.folder is not None:
            # Copied, not linked: a trainer may write its next weights into the same files.
            copy_weights(Path(request.folder), incoming)
        else:
            self._check_upload(incoming, request.uploaded or {})
        checksum = check_weights(incoming, self._base)
        place = self._weights / f"{version:06d}"
        shutil.rmtree(place, ignore_errors=True)
        incoming.rename(place)
        shutil.rmtree(incoming.parent, ignore_errors=True)  # also what trainers left that lost their leases
        return Finish(lease.step, lease.id, version, str(place), checksum, metrics=request.metrics)

    def _check_upload(self, incoming: Path, sums: dict[str, str]) -> None:
        for name, expected in sums.items():
            file = incoming / name
            if not FILE_NAME.fullmatch(name) or not file.is_file():
                raise Refusal(422, "invalid", f"uploaded: no file {name[:80]!r} came under this lease")
            with file.open("rb") as opened:
                found = _sha256(opened.read)
            if found != expected:
                raise Refusal(
                    422, "damaged", f"uploaded: {name} has SHA-256 {found[:12]}…, not {expected[:12]}…"
                )
        if not incoming.is_dir():
            raise Refusal(422, "invalid", "uploaded: is empty")
        if not (incoming / "config.json").exists():
            shutil.copy(self._base / "config.json", incoming)

    async def upload(self, lease: str, name: str, parts: AsyncIterator[bytes]) -> LeaseReply:
        """Writes one file of new weights; a file of the same name is replaced."""
        if not FILE_NAME.fullmatch(name):
            raise Refusal(422, "invalid", "a file's name has letters, digits, `.`, `_` and `-`")
        with _refusing():
            self._leases.renew(lease, self._clock())
        incoming = self._incoming(lease)
        incoming.mkdir(parents=True, exist_ok=True)
        with (incoming / name).open("wb") as file:
            async for part in parts:
                await asyncio.to_thread(file.write, part)
        with _refusing():
            self._leases.renew(lease, self._clock())
        return LeaseReply(self._leases.seconds)

    def _incoming(self, lease: str) -> Path:
        if not FILE_NAME.fullmatch(lease):
            raise Refusal(409, "lease_lost", "this lease does not hold the offered batch")
        return self._weights / INCOMING / lease

    async def weights(self) -> WeightsReply:
        files = [each for each in sorted(self.folder.iterdir()) if each.is_file()]
        return WeightsReply(self.version, [WeightsFile(each.name, each.stat().st_size) for each in files])

    def weights_file(self, name: str) -> Path:
        """The path of one file of the current weights."""
        path = self.folder / name
        if not FILE_NAME.fullmatch(name) or not path.is_file():
            raise Refusal(404, "not_found", f"no file {name[:80]!r} of the current weights")
        return path

    async def status(self) -> StatusReply:
        self._leases.expire(self._clock())
        held = self._leases.held
        return StatusReply(
            step=self._leases.step,
            trainer=None if held is None else held.trainer,
            version=self.version,
            finished=len(self._ledger.finished),
            lost_leases=self._leases.lost,
        )


@contextmanager
def _refusing() -> Iterator[None]:
    """Turns a lost lease into a response."""
    try:
        yield
    except LeaseLost as error:
        raise Refusal(409, "lease_lost", str(error)) from None


def copy_weights(folder: Path, place: Path) -> None:
    """Copies the files of a folder of weights; raises a `Refusal` if there is none."""
    if not folder.is_dir():
        raise Refusal(422, "invalid", f"folder: {folder} is no folder that the run can read")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        shutil.copyfile(file, place / file.name)


def check_weights(folder: Path, base: Path) -> str:
    """The checksum of returned weights; raises a `Refusal` for a folder without weights, or with those of another model."""
    try:
        expected, found = tensor_shapes(base), tensor_shapes(folder)
    except FormatError as error:
        raise Refusal(422, "invalid", str(error)) from None
    for name, shape in found.items():
        if expected.get(name, shape) != shape:
            raise Refusal(
                422, "another_model", f"{name}: has shape {shape}, and {expected[name]} in the base model"
            )
    if missing := sorted(expected.keys() - found.keys() - TIED):
        raise Refusal(422, "another_model", f"{missing[0]}: is missing, as are {len(missing) - 1} others")
    return weights_checksum(folder)


TIED = frozenset({"lm_head.weight"})
"""Tensors that a saved model leaves out where they equal another one."""


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a folder's safetensors files, by name."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in weights_files(folder):
        try:
            with safe_open(file, framework="numpy") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise FormatError(f"{file}: is not readable: {error}") from error
    return found


def _sha256(read: Callable[[int], bytes]) -> str:
    total = sha256()
    while chunk := read(1 << 20):
        total.update(chunk)
    return total.hexdigest()
