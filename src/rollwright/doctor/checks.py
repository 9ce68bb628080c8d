"""Checks of a machine, its configuration and its swarm node; each finding says whether something must be fixed, and how."""

import asyncio
import importlib.util
import inspect
import os
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollwright.config import OpenAIPolicyConfig, RunConfig
from rollwright.engines.settings import EnginePolicyConfig, TorchPolicyConfig
from rollwright.errors import RollwrightError
from rollwright.hardware import (
    FULL_SPEED,
    GIB,
    MachineSpeed,
    cpu_only,
    free_memory,
    gigabytes,
    measured_speed,
    plan_threads,
)
from rollwright.models.catalogue import CATALOGUE, is_fetched
from rollwright.models.hub import DownloadRules, is_hub_name, local_copy
from rollwright.run.model_choice import POOLED, pick_model
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.settings import SANDBOXES
from rollwright.swarm.heartbeat import NodePhase, read_heartbeat, read_status
from rollwright.swarm.identity import IDENTITY_FILE, load_identity, short_name
from rollwright.swarm.refusals import PeerRefusal
from rollwright.swarm.supervisor.record import is_supervised, read_record
from rollwright.swarm.transports.zenoh import listening


class Health(StrEnum):
    """Severity of a finding."""

    WELL = "ok"
    NOTE = "note"
    """Works, but could be better, or could not be checked."""
    FIX = "fix"
    """Something does not work until it is fixed."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    about: str
    """Subject of the check: machine, config, engine …"""
    health: Health
    what: str
    fix: str = ""
    """Remedy; empty if there is nothing to do."""


def well(about: str, what: str) -> Finding:
    return Finding(about, Health.WELL, what)


def note(about: str, what: str, fix: str = "") -> Finding:
    return Finding(about, Health.NOTE, what, fix)


def must_fix(about: str, what: str, fix: str) -> Finding:
    return Finding(about, Health.FIX, what, fix)


LEAST_MEMORY = 2 * GIB
"""Bytes for torch, this package and rollouts of a model with 135 million parameters."""

LEAST_DISK, GOOD_DISK = GIB, 5 * GIB
"""Bytes for a few checkpoints of a small model; bytes for logs, records and larger models, too."""

NEEDED = {
    "torch": "train",
    "transformers": "engines",
    "safetensors": "train",
    "cryptography": "swarm",
    "zenoh": "swarm",
    "reasoning_gym": "reasoning",
}
"""Packages that a node imports, and the extra that installs each."""

FUTURE_SECONDS = 60.0
"""Seconds ahead of now from which a heartbeat shows that the clock was set back."""


def check_machine(home: Path) -> Iterator[Finding]:
    speed, obstacle = _speed()
    plan = plan_threads(speed=speed)
    yield well(
        "machine", f"Python {sys.version.split()[0]}; {plan.threads} threads for a model: {plan.reason}"
    )
    yield note("machine", obstacle) if speed is None else well("machine", _chosen(speed))
    if cpu_only():
        yield note("machine", "CPU_ONLY is set: no other device is used", "unset CPU_ONLY to use a GPU")
    yield _memory()
    yield from _disk(home)
    missing = {name: extra for name, extra in NEEDED.items() if importlib.util.find_spec(name) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        yield must_fix(
            "machine", f"not installed: {', '.join(missing)}", f'pip install "rollwright[{extras}]"'
        )
    else:
        yield well("machine", "all packages of a node are installed")


def _speed() -> tuple[MachineSpeed | None, str]:
    """The machine's speed, or why it is not known."""
    try:
        return measured_speed(again=True), ""
    except RollwrightError as error:
        return None, str(error)


def _chosen(speed: MachineSpeed) -> str:
    """What `auto` stands for on this machine, and the figures it rests on."""
    half = speed.rates.get("bfloat16")
    ratio = (
        "does not work here"
        if half is None
        else f"is {half / speed.rates['float32']:.2f} times as fast as float32"
    )
    more = max(speed.by_threads)
    gain = speed.by_threads[more] / speed.by_threads[1]
    threads = (
        f"{more} were {gain:.2f} times as fast as one, beside a load of {speed.load:.1f}"
        if more > 1
        else "one core"
    )
    return (
        f"`auto` is dtype {speed.dtype} (bfloat16 {ratio}), {speed.threads} threads ({threads}), and "
        f"max_batch {speed.batch} (the smallest within {1 - FULL_SPEED:.0%} of the best rate)"
    )


def check_boxes() -> Iterator[Finding]:
    """Which backends run boxes on this machine, and why others do not."""
    for name, obstacle in asyncio.run(_try_backends()).items():
        if obstacle:
            yield note("boxes", f"{name} does not run here: {obstacle}")
        else:
            yield well("boxes", f"{name} runs here")


async def _try_backends() -> dict[str, str]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="rollwright-doctor-") as state:
        for name in SANDBOXES.names():
            try:
                options = (
                    {"state": state} if "state" in inspect.signature(SANDBOXES.find(name)).parameters else {}
                )
                backend = make_backend(name, **options)
            except RollwrightError as error:
                found[name] = str(error)
                continue
            try:
                found[name] = await check_backend(backend)
            finally:
                await backend.aclose()
    return found


def _memory() -> Finding:
    free = free_memory()
    if free < LEAST_MEMORY:
        return must_fix(
            "memory",
            f"{gigabytes(free)} free, {gigabytes(LEAST_MEMORY)} are the least",
            "end other programs, raise the limit of the container, or play on an engine elsewhere",
        )
    return well("memory", f"{gigabytes(free)} free")


def _disk(home: Path) -> Iterator[Finding]:
    place = home
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        yield must_fix(
            "disk", f"{place} cannot be written to", "choose another folder with --home, or its rights"
        )
        return
    free = shutil.disk_usage(place).free
    if free < LEAST_DISK:
        yield must_fix(
            "disk", f"{gigabytes(free)} free at {place}", "remove old runs, or choose another --home"
        )
    elif free < GOOD_DISK:
        yield note("disk", f"{gigabytes(free)} free at {place}", "enough to start; watch it")
    else:
        yield well("disk", f"{gigabytes(free)} free at {place}")


def check_clock(home: Path) -> Iterator[Finding]:
    """Check the clock, because peers refuse messages with a wrong time."""
    packaged = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    now = time.time()
    if now < packaged - 86_400:
        yield must_fix("clock", f"it is {time.ctime(now)} here, before this release was installed", _SET)
        return
    beat = read_heartbeat(home)
    if beat is not None and beat.time > now + FUTURE_SECONDS:
        yield must_fix("clock", f"the node's last heartbeat is {beat.time - now:.0f} s in the future", _SET)
        return
    status = read_status(home)
    skewed = 0 if status is None else status.refused.get(PeerRefusal.CLOCK_SKEW, 0)
    if skewed:
        yield note("clock", f"{skewed} groups of peers were refused: their clock or this one is wrong", _SET)
    elif Path("/run/systemd/timesync/synchronized").exists():
        yield well("clock", "kept by a time server")
    else:
        yield note("clock", "it is unknown whether a time server keeps it", "nothing, if `date -u` is right")


_SET = "set it, and keep it with a time server: `timedatectl set-ntp true`"


REACH_SECONDS = 3.0
"""Seconds for an address to answer: enough around the world."""


def check_engine(config: RunConfig) -> Iterator[Finding]:
    """Check that the model is on this machine, or that the engine answers."""
    match config.policy:
        case TorchPolicyConfig():
            yield _model(config, config.policy.model)
        case OpenAIPolicyConfig():
            yield _check_url(config.policy.base_url)
        case EnginePolicyConfig():
            for url in config.policy.base_urls:
                yield _check_url(url)
        case _:
            yield well("engine", f"policy `{config.policy.kind}` needs none")


def _model(config: RunConfig, name: str) -> Finding:
    try:
        if name in POOLED:
            choice = pick_model(config)
            return well("engine", f"{name}: {choice.reasons[-1]}")
    except RollwrightError as error:
        return must_fix("engine", str(error).split(";")[0], "see the message of `rollwright swarm run`")
    if Path(name).is_dir():
        return well("engine", f"model {name} is a folder here")
    if name in CATALOGUE:
        if is_fetched(name):
            return well("engine", f"model {name} is here")
        return note("engine", f"model {name} is not here yet", f"rollwright model fetch {name}")
    if not is_hub_name(name):
        return must_fix(
            "engine",
            f"model {name!r}: no such folder",
            f"set policy.model to a folder, {', '.join(CATALOGUE)}, or owner/name on a hub",
        )
    if local_copy(name) is not None:
        return well("engine", f"model {name} is here")
    if DownloadRules(offline=config.downloads.offline).in_environment().offline:
        return must_fix("engine", f"model {name} is not here, and offline mode is on", "unset HF_HUB_OFFLINE")
    return note("engine", f"model {name} will be downloaded at the start")


def _check_url(url: str) -> Finding:
    try:
        with urllib.request.urlopen(url, timeout=REACH_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        error.close()  # any HTTP answer shows that the server is there
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return must_fix(
            "engine", f"{url} does not answer: {reason}", "start the engine, or correct policy.base_url"
        )
    return well("engine", f"{url} answers")


def check_ports(config: RunConfig, home: Path) -> Iterator[Finding]:
    if config.swarm is None:
        return
    told = config.swarm.communication
    if told.transport == "directory":
        folder = Path(told.folder or "")
        if folder.is_dir():
            yield well("ports", f"the shared folder {folder} is there")
        else:
            yield must_fix("ports", f"the shared folder {folder} is not there", "mount it, or make it")
        return
    for address in listening(told.listen, told.bootstrap):
        yield _check_listening(address, at_work=_is_running(home))
    reached = [address for address in told.bootstrap if _is_reachable(address)]
    if told.bootstrap and not reached:
        yield note(
            "ports",
            f"none of {', '.join(told.bootstrap)} can be reached",
            "the node plays alone until one can; check swarm.communication.bootstrap and firewalls",
        )
    elif reached:
        yield well("ports", f"{', '.join(reached)} can be reached")


def _check_listening(address: str, *, at_work: bool) -> Finding:
    place = _host_and_port(address)
    if place is None:
        return note("ports", f"{address}: only tcp/HOST:PORT can be checked")
    host, port = place
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if at_work:
            return well("ports", f"{address} is in use, by this node")
        return must_fix(
            "ports",
            f"{address} cannot be listened at: {error.strerror}",
            "choose another port in swarm.communication.listen, or end what uses it",
        )
    return well("ports", f"{address} can be listened at")


def _is_reachable(address: str) -> bool:
    place = _host_and_port(address)
    if place is None:
        return False
    try:
        with socket.create_connection(place, timeout=REACH_SECONDS):
            return True
    except OSError:
        return False


def _host_and_port(address: str) -> tuple[str, int] | None:
    kind, _, place = address.partition("/")
    host, _, port = place.rpartition(":")
    return (host.strip("[]"), int(port)) if kind == "tcp" and port.isdigit() and host else None


def check_identity(home: Path) -> Iterator[Finding]:
    file = home / IDENTITY_FILE
    if not file.exists():
        yield note("identity", f"{file}: there is none yet; the first start makes one")
        return
    try:
        yield well("identity", f"this node is {short_name(load_identity(file).peer)}")
    except RollwrightError as error:
        what, _, fix = str(error).partition("; ")
        yield must_fix("identity", what, fix)


def _is_running(home: Path) -> bool:
    """Whether the node's process runs now, supervised or not."""
    beat = read_heartbeat(home)
    if beat is None or beat.phase is NodePhase.STOPPED:
        return False
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def check_node(home: Path) -> Iterator[Finding]:
    record, beat = read_record(home), read_heartbeat(home)
    if record is None and beat is None:
        yield note("node", f"{home}: no node was started here yet", "rollwright swarm run")
    elif record is None and beat is not None:
        does = "runs" if _is_running(home) else "does not run now"
        what = f"it {does}, with {beat.rounds_done} rounds done; it is not restarted when it dies"
        yield note("node", what, "rollwright swarm run")
    elif record is not None and is_supervised(home):
        yield well("node", f"it is supervised: {record.reason}")
    elif record is not None:
        yield note("node", f"it is not supervised; the last time: {record.reason}", "rollwright swarm run")
