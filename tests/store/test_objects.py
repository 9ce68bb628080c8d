"""Trajectories as objects beside their rows, in a folder and in a real S3-compatible server."""

import asyncio
import logging
import os
import socket
import sqlite3
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollwright import rng
from rollwright.errors import ConfigError, FormatError
from rollwright.store.errors import AttemptRefused, StoreUnavailable
from rollwright.store.http.client import HttpStore
from rollwright.store.http.server import StoreServer
from rollwright.store.invariants import complaints
from rollwright.store.objects.buckets import FolderBucket, open_bucket
from rollwright.store.objects.store import ObjectBackedStore, shard_of
from rollwright.store.opening import TRAJECTORIES_VARIABLE, open_store
from rollwright.store.records import RolloutConfig
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver
from rollwright.trajectory import Trajectory

PROGRAM = Path(__file__).with_name("store_worker.py")
SECRET = "a-secret-that-nobody-may-see"
LONG = b"turns " * 2000


class S3Server:
    """moto's server on loopback; may be stopped, and started again at the same port with what it had."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._new = lambda: ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = self._new()
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)


def new_s3_bucket() -> str:
    import boto3

    name = f"test-{time.time_ns()}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/runs/one"


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty place for objects."""
    if request.param == "folder":
        return (tmp_path / "objects").as_uri()
    request.getfixturevalue("credentials")
    return new_s3_bucket()


@pytest.fixture
async def store(place: str, tmp_path: Path) -> AsyncIterator[ObjectBackedStore]:
    opened = await open_store(str(tmp_path / "store.db"), trajectories=place)
    assert isinstance(opened, ObjectBackedStore)
    yield opened
    await opened.close()


async def finished(store: ObjectBackedStore, name: str, data: bytes = LONG) -> None:
    claimed = await store.start_rollout({"task": name}, rollout_id=name)
    await store.update_attempt(
        name, claimed.attempt.attempt_id, status="succeeded", trajectory=data + name.encode()
    )


async def keys(place: str) -> list[str]:
    bucket = open_bucket(place)
    found = [each.key for each in await bucket.objects("")]
    bucket.close()
    return found


def row_sizes(path: Path) -> list[int]:
    with sqlite3.connect(path) as database:
        return [row[0] for row in database.execute("SELECT length(data) FROM trajectories")]


async def test_rows_stay_small_and_other_processes_read_the_objects(
    store: ObjectBackedStore, place: str, tmp_path: Path
) -> None:
    for number in range(20):
        await finished(store, f"ro:{number}._-")
    assert max(row_sizes(tmp_path / "store.db")) < 200
    names = [f"ro:{number}._-" for number in range(20)]
    elsewhere = await open_store(str(tmp_path / "store.db"), trajectories=place)
    assert await elsewhere.get_trajectories(names) == {name: LONG + name.encode() for name in names}
    await elsewhere.close()


async def test_a_worker_behind_a_server_writes_objects_and_a_run_beside_it_reads_them(
    place: str, tmp_path: Path
) -> None:
    plain = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))
    async with StoreServer(plain, token="t") as server:
        far = ObjectBackedStore(HttpStore(server.url, token="t"), open_bucket(place))
        await finished(far, "ro-1")
        near = ObjectBackedStore(plain, open_bucket(place))
        assert await near.get_trajectories(["ro-1"]) == {"ro-1": LONG + b"ro-1"}
        assert await far.get_trajectories(["ro-1"]) == {"ro-1": LONG + b"ro-1"}
        await far.close()
    await near.close()


async def test_small_trajectories_and_rows_from_before_are_read_as_they_are(
    place: str, tmp_path: Path
) -> None:
    plain = await open_store(str(tmp_path / "store.db"))
    await finished(plain, "before")  # type: ignore[arg-type]
    await plain.close()
    store = await open_store(str(tmp_path / "store.db"), trajectories=place)
    await finished(store, "small", b"short")  # type: ignore[arg-type]
    assert await store.get_trajectories(["before", "small"]) == {
        "before": LONG + b"before",
        "small": b"shortsmall",
    }
    assert await keys(place) == []
    await store.close()


async def test_a_missing_or_damaged_object_is_told_by_name_and_costs_nothing_else(
    store: ObjectBackedStore, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("gone", "changed", "fine"):
        await finished(store, name)
    bucket = open_bucket(place)
    by_name = {each.split("/")[1]: each for each in await keys(place)}
    await bucket.delete([by_name["gone"]])
    await bucket.put(by_name["changed"], LONG)
    bucket.close()
    with caplog.at_level(logging.WARNING):
        found = await store.get_trajectories(["gone", "changed", "fine"])
    assert found["fine"] == LONG + b"fine"
    with pytest.raises(FormatError, match=f"rollout gone: the object {place}/{by_name['gone']} is missing"):
        Trajectory.from_bytes(found["gone"])
    with pytest.raises(FormatError, match=r"is damaged: .* another checksum"):
        Trajectory.from_bytes(found["changed"])
    assert by_name["gone"] in caplog.text


async def test_a_reader_without_the_setting_is_told_which_one_it_needs(
    store: ObjectBackedStore, tmp_path: Path
) -> None:
    await finished(store, "ro")
    plain = await open_store(str(tmp_path / "store.db"))
    with pytest.raises(FormatError, match=f"set {TRAJECTORIES_VARIABLE}"):
        Trajectory.from_bytes((await plain.get_trajectories(["ro"]))["ro"])
    await plain.close()


async def test_release_and_deletion_delete_the_objects(store: ObjectBackedStore, place: str) -> None:
    for number in range(8):
        await finished(store, f"ro-{number}")
    assert len(await keys(place)) == 8
    assert await store.release_trajectories([f"ro-{number}" for number in range(3)]) == 3
    assert len(await keys(place)) == 5
    assert await store.delete_rollouts(["ro-3", "ro-4"]) == 2
    assert {each.split("/")[1] for each in await keys(place)} == {"ro-5", "ro-6", "ro-7"}
    assert (
        await store.delete_finished(older_than=0.0, limit=4) == 4
    )  # of ro-0 to ro-2, which are released, and ro-5
    assert {each.split("/")[1] for each in await keys(place)} == {"ro-6", "ro-7"}
    assert set(await store.get_trajectories(["ro-6", "ro-7"])) == {"ro-6", "ro-7"}


async def test_a_late_attempt_leaves_an_orphan_that_is_collected_by_age(
    store: ObjectBackedStore, place: str
) -> None:
    late = await store.start_rollout({}, rollout_id="ro", config=RolloutConfig(max_attempts=5))
    await store.update_rollout("ro", status="requeuing")  # as if its lease had run out
    again = await store.dequeue_rollout("second")
    assert again is not None
    with pytest.raises(AttemptRefused):
        await store.update_attempt("ro", late.attempt.attempt_id, status="succeeded", trajectory=LONG)
    await store.update_attempt("ro", again.attempt.attempt_id, status="succeeded", trajectory=LONG + b"2")
    shard = shard_of("ro")
    assert len(await keys(place)) == 2
    assert await store.collect_orphans(shard) == 0, "too young: its report could be under way"
    assert await store.collect_orphans(shard, older_than=-60.0) == 1
    assert await store.collect_orphans(shard, older_than=-60.0) == 0
    assert await store.get_trajectories(["ro"]) == {"ro": LONG + b"2"}


async def test_objects_of_another_store_in_the_same_place_are_left_alone(
    store: ObjectBackedStore, place: str, tmp_path: Path
) -> None:
    other = await open_store(str(tmp_path / "other.db"), trajectories=place)
    await finished(other, "theirs")  # type: ignore[arg-type]
    assert await store.collect_orphans(shard_of("theirs"), older_than=-60.0) == 0
    assert set(await other.get_trajectories(["theirs"])) == {"theirs"}
    await other.close()


async def test_without_its_object_a_report_is_not_accepted(
    s3: S3Server, credentials: None, tmp_path: Path
) -> None:
    place = new_s3_bucket()
    store = await open_store(str(tmp_path / "store.db"), trajectories=place)
    claimed = await store.start_rollout({}, rollout_id="ro")
    s3.stop()
    try:
        with pytest.raises(StoreUnavailable) as failed:
            await store.update_attempt("ro", claimed.attempt.attempt_id, status="succeeded", trajectory=LONG)
    finally:
        s3.start()
    assert SECRET not in str(failed.value)
    found = await store.get_rollout_by_id("ro")
    assert found is not None
    assert found.status == "preparing"
    await store.update_attempt("ro", claimed.attempt.attempt_id, status="succeeded", trajectory=LONG)
    assert await store.get_trajectories(["ro"]) == {"ro": LONG}
    await store.close()


async def test_nothing_is_read_or_written_on_the_event_loops_thread(tmp_path: Path) -> None:
    threads: set[int] = set()

    class Noting(FolderBucket):
        def _put(self, key: str, data: bytes) -> None:
            threads.add(threading.get_ident())
            super()._put(key, data)

        def _get(self, key: str) -> bytes | None:
            threads.add(threading.get_ident())
            return super()._get(key)

    inner = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))
    store = ObjectBackedStore(inner, Noting(tmp_path / "objects"))
    await asyncio.gather(*(finished(store, f"ro-{number}") for number in range(16)))
    await store.get_trajectories([f"ro-{number}" for number in range(16)])
    await store.close()
    assert len(threads) > 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "address",
    [
        f"s3://user:{SECRET}@bucket/prefix",
        f"s3://bucket/prefix?secret={SECRET}",
        "file://host/path",
        "objects",
    ],
)
def test_an_address_with_more_than_a_place_is_refused_without_being_quoted(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^trajectories: ") as failed:
        open_bucket(address)
    assert SECRET not in str(failed.value)


async def test_workers_are_killed_at_random_and_no_confirmed_trajectory_is_lost(
    place: str, tmp_path: Path
) -> None:
    path, count = tmp_path / "store.db", 60
    store = await open_store(str(path), trajectories=place)
    lease = RolloutConfig(unresponsive_seconds=3.0, max_attempts=100)
    for number in range(count):
        await store.enqueue_rollout(number, rollout_id=f"ro-{number}", config=lease)
    environment = {**os.environ, TRAJECTORIES_VARIABLE: place, "LONG": "2000"}
    confirmed: dict[str, str] = {}
    attack = 0
    while (await store.statistics())["succeeded"] < count:
        words = [str(PROGRAM), "play", str(path), f"w{attack}", "4", "0.002"]
        worker = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=PIPE, stdout=PIPE, env=environment
        )
        assert worker.stdout is not None
        assert (await worker.stdout.readline()).split() == [b"ready"]
        if attack < 3:
            await asyncio.sleep(0.1 + 0.3 * rng.uniform("kill", attack))
            worker.kill()
        lines = [line.split() for line in (await worker.stdout.read()).decode().splitlines()]
        confirmed |= {line[1]: line[2] for line in lines if line[0] == "done" and len(line) == 3}
        await worker.wait()
        attack += 1
    names = [f"ro-{number}" for number in range(count)]
    found = await store.get_trajectories(names)
    assert len(found) == count
    for name, attempt in confirmed.items():
        assert found[name].startswith(attempt.encode()), "a confirmed result was lost or replaced"
        assert len(found[name]) > 2000
    assert complaints(await store.read_events(limit=100_000), await store.read_completions(limit=1000)) == []
    assert isinstance(store, ObjectBackedStore)
    for shard in {int(each[:2], 16) for each in await keys(place)}:
        await store.collect_orphans(shard, older_than=-60.0)
    assert len(await keys(place)) == count
    assert await store.get_trajectories(names) == found
    await store.close()
