"""Checks of a node: its configuration, model or engine, addresses, identity, and how its last lives ended."""

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rollwright.config import OpenAIPolicyConfig, RunConfig
from rollwright.doctor.findings import Finding, must_fix, note, well
from rollwright.engines.settings import EnginePolicyConfig, TorchPolicyConfig
from rollwright.errors import RollwrightError
from rollwright.models.catalogue import CATALOGUE, is_fetched
from rollwright.models.hub import DownloadRules, is_hub_name, local_copy
from rollwright.run.model_choice import POOLED, pick_model
from rollwright.swarm.heartbeat import NodePhase, read_heartbeat
from rollwright.swarm.identity import IDENTITY_FILE, load_identity, short_name
from rollwright.swarm.supervisor.record import is_supervised, read_record
from rollwright.swarm.transports.zenoh import listening

REACH_SECONDS = 3.0
"""For an address to answer: enough around the world."""


def check_engine(config: RunConfig) -> Iterator[Finding]:
    """What plays: a model on this machine, or an engine that answers."""
    match config.policy:
        case TorchPolicyConfig():
            yield _model(config, config.policy.model)
        case OpenAIPolicyConfig():
            yield _answers(config.policy.base_url)
        case EnginePolicyConfig():
            for url in config.policy.base_urls:
                yield _answers(url)
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


def _answers(url: str) -> Finding:
    try:
        with urllib.request.urlopen(url, timeout=REACH_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        error.close()  # it speaks HTTP, which is all that is asked
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
        yield _listens(address, at_work=_runs(home))
    reached = [address for address in told.bootstrap if _reaches(address)]
    if told.bootstrap and not reached:
        yield note(
            "ports",
            f"none of {', '.join(told.bootstrap)} can be reached",
            "the node plays alone until one can; check swarm.communication.bootstrap and firewalls",
        )
    elif reached:
        yield well("ports", f"{', '.join(reached)} can be reached")


def _listens(address: str, *, at_work: bool) -> Finding:
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


def _reaches(address: str) -> bool:
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


def _runs(home: Path) -> bool:
    """Whether the node itself is there now, under a supervisor or not."""
    beat = read_heartbeat(home)
    if beat is None or beat.phase is NodePhase.STOPPED:
        return False
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process
        pass
    return True


def check_lives(home: Path) -> Iterator[Finding]:
    record, beat = read_record(home), read_heartbeat(home)
    if record is None and beat is None:
        yield note("node", f"{home}: nothing was run here yet", "rollwright swarm run")
    elif record is None and beat is not None:
        does = "runs" if _runs(home) else "does not run now"
        what = f"it {does}, with {beat.rounds_done} rounds done; nobody starts it again when it dies"
        yield note("node", what, "rollwright swarm run")
    elif record is not None and is_supervised(home):
        yield well("node", f"it is kept at work: {record.reason}")
    elif record is not None:
        yield note("node", f"it is not kept at work; the last time: {record.reason}", "rollwright swarm run")
