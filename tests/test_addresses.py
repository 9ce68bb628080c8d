"""No secret of an address comes out anywhere, in whatever form the address was written."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from rollwright.addresses import canonical, check_address, has_password, redacted, scrubbed, without_password
from rollwright.cli import queue
from rollwright.config import RunConfig, build
from rollwright.errors import ConfigError, RollwrightError
from rollwright.rollout import Activity
from rollwright.run.fleet import ScaleRules
from rollwright.run.folder import RunFolder
from rollwright.run.process_fleet import ProcessFleet
from rollwright.store.http.client import HttpStore
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import ADDRESS_VARIABLE, open_store

BEGIN, END = "S3cr", "tW0rd"
"""Stand at the ends of every secret; neither may be seen."""

secrets = st.text(st.sampled_from("ab1@:/?#&=%+;,. []\\'\"é$!*()~^{}|<>"), max_size=8).map(
    lambda odd: f"{BEGIN}{odd}{END}"
)

FORMS = [
    "postgresql://user:{}@127.0.0.1:1/db",
    "postgres://user:{}@127.0.0.1:1/db?sslmode=disable",
    "POSTGRESQL://user:{}@127.0.0.1:1/db",
    "postgresql://:{}@127.0.0.1:1/db",
    "postgresql://user:{}@127.0.0.1:1,127.0.0.1:2/db",
    "postgresql://user:{}@[::1]:1/db",
    "postgresql://127.0.0.1:1/db?user=user&password={}",
    "postgresql://user@127.0.0.1:1/db?sslmode=disable&password={}",
    "postgresql://127.0.0.1:1/db?sslpassword={}&application_name=x",
    "postgresql://127.0.0.1:1/db?pass%77ord={}",
    "postgresql://user:{}@/db?host=127.0.0.1&port=1",
    "postgresql+asyncpg://user:{}@127.0.0.1:1/db",
    "postgresql:/user:{}@127.0.0.1:1/db",
    "postgresql:user:{}@127.0.0.1:1/db",
    "user:{}@127.0.0.1:1/db",
    "host=127.0.0.1 port=1 user=user password={} dbname=db",
    "password='{}' host=127.0.0.1 port=1",
    "http://user:{}@127.0.0.1:1",
    "http://{}@127.0.0.1:1",
    "https://127.0.0.1:1?token={}",
    "HTTP://127.0.0.1:1/?api_key={}",
    "redis://user:{}@127.0.0.1:1",
]
CONFIG = {"policy": {"kind": "random"}, "val_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}}


def seen(address: str, place: Callable[[str], str]) -> str:
    """What a place makes of an address: what it shows or writes, or the error that it ends with."""
    try:
        return place(address)
    except RollwrightError as error:
        return str(error)


def in_the_run_folder(address: str) -> str:
    with TemporaryDirectory() as folder:
        run = RunFolder.begin(Path(folder) / "run", build(CONFIG))
        try:
            run.store_address(address)
        finally:
            run.log.close()
            written = [file.read_text(errors="replace") for file in Path(folder, "run").iterdir()]
        return "\n".join(written)


def in_the_workers_command(address: str) -> str:
    fleet = ProcessFleet(MemoryStore(), address, ScaleRules(envs_per_worker=1, maximum=1), Activity())
    assert fleet._environment[ADDRESS_VARIABLE] == address
    return " ".join(fleet._command)


def in_the_error_of_opening(address: str) -> str:
    """Nothing listens at any of the addresses, and no files are made of them."""

    async def opened() -> str:
        store = HttpStore(address) if address.lower().startswith("http") else await open_store(address)
        await store.close()
        return "opened"

    return asyncio.run(opened())


def in_a_configuration(address: str) -> str:
    policy = {"kind": "openai", "base_url": address, "model": "m"}
    shown: RunConfig = build({**CONFIG, "policy": policy})
    return str(shown)


PLACES: list[Callable[[str], str]] = [
    redacted,
    without_password,
    check_address,
    in_the_run_folder,
    in_the_workers_command,
    in_a_configuration,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=15)
@given(secret=secrets)
@example(secret=f"{BEGIN}@{END}")
@example(secret=f"{BEGIN}@1/{END}")
@example(secret=f"{BEGIN}/@{END}")
@example(secret=f"{BEGIN}?x=@{END}")
@example(secret=f"{BEGIN}#{END}")
@example(secret=f"{BEGIN}%40{END}")
@example(secret=f"{BEGIN}${{{END}")
@example(secret=f"{BEGIN}{END}")
def test_no_place_shows_a_secret(place: Callable[[str], str], form: str, secret: str) -> None:
    address = form.format(secret)
    shown = seen(address, place)
    if place is check_address and shown == address:
        return  # it is fine as it is, and handed on
    assert BEGIN not in shown
    assert END not in shown
    assert has_password(address)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("odd", ["", "@", "@1/", "/", "?x=@", "#", "%40", ":", " "])
def test_no_error_of_opening_shows_a_secret(
    form: str, odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RollwrightError) as caught:
        pytest.fail(in_the_error_of_opening(form.format(f"{BEGIN}{odd}{END}")))
    assert BEGIN not in str(caught.value)
    assert END not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("odd", ["", "@", ":", "%40", "@:@"])
def test_an_address_without_its_password_leads_to_the_same_place(odd: str) -> None:
    address = (
        f"PostgreSQL://us%40er:{BEGIN}{odd}{END}@h1:1,[::1]:2/db?sslmode=require&password=x&passfile=/a/b"
    )
    assert without_password(address) == "postgresql://us%40er@h1:1,[::1]:2/db?sslmode=require&passfile=/a/b"
    assert redacted(address) == "postgresql://…@h1:1,[::1]:2/db?sslmode=require&password=…&passfile=…"


def test_a_password_with_an_at_sign_reaches_the_driver_whole() -> None:
    assert canonical("postgresql://u:p@ss:w%2Frd@h/db") == "postgresql://u:p%40ss%3Aw%2Frd@h/db"


@pytest.mark.parametrize(
    "address",
    [
        "memory",
        "store.db",
        "/tmp/a b/c@d.db",
        "runs/x:y/store.db",
        "sqlite:////tmp/a@b.db",
        "http+unix:///run/a@b",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(address: str) -> None:
    assert (
        redacted(address)
        == without_password(address)
        == canonical(address)
        == check_address(address)
        == address
    )
    assert not has_password(address)


def test_an_empty_password_is_none() -> None:
    assert not has_password("postgresql://postgres:@/postgres?host=/tmp/a")
    assert has_password("postgresql://postgres:x@/postgres?host=/tmp/a")


def test_somebody_elses_words_lose_the_secret_too() -> None:
    said = scrubbed('no host "p@ss", tried p%40ss', "postgresql://u:p%40ss@h/db?sslpassword=tried")
    assert said == 'no host "…", … …'


def test_two_parts_that_cannot_be_told_apart_are_refused_before_anybody_connects() -> None:
    with pytest.raises(ConfigError, match="percent-encode"):
        check_address("postgresql://user:pa/ss@host/db")


def test_commands_show_no_password_and_warn_of_one_in_the_arguments(tmp_path: Path) -> None:
    """`ps` stands for all that open a store by its address."""
    address = f"postgresql://user:{BEGIN}@{END}@127.0.0.1:1/db"
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS_VARIABLE}
    for words, told in ((["--store", address], {}), ([], {ADDRESS_VARIABLE: address})):
        done = subprocess.run(
            [sys.executable, "-m", "rollwright", "ps", *words],
            env={**environment, **told},
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 2
        assert BEGIN not in done.stdout + done.stderr
        assert END not in done.stdout + done.stderr
        assert ("can be read by every user" in done.stderr) == bool(words)
        assert "Traceback" not in done.stderr


async def test_the_servers_banner_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(address: str) -> MemoryStore:
        return MemoryStore()

    monkeypatch.setattr(queue, "open_store", opened)
    screen = Console(file=StringIO())
    address = f"postgresql://user:{BEGIN}@{END}@host/db"
    serving = asyncio.create_task(queue._serve(address, "127.0.0.1", 0, None, screen))
    while "serving" not in screen.file.getvalue():  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert "serving postgresql://…@host/db at http://" in screen.file.getvalue()  # type: ignore[attr-defined]
