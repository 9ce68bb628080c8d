"""How long a second client waits while a server is attacked, and what the server's memory comes to.

    python bench/stall.py [store] [gateway] [--seconds 5]

Starts `rollwright serve` and `rollwright gateway` as processes with 1,024 file handles, and attacks each in several
ways: without a key (half-open connections, large bodies, junk) and with one (the largest bodies that hold the most, the
widest queries over 100,000 rollouts, clients that never read). Meanwhile a client in a process of its own makes one small
call after the other; at the gateway it plays the rollout that is attacked, where a call is answered once those before it
are. Prints for each attack how long those calls took and the memory of the server. By the wall clock, so
other work on the machine shows: compare with the line `nobody attacks`.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from rollwright.store.call_kinds import MAX_ITEMS
from rollwright.store.http.decoding import MAX_VALUES

HANDLES = 1024
TOKEN = "bench-token"
ROLLOUTS = 100_000
LONG = 10_000_000
WANTED_MS = 100.0
"""Longest wait of the second client, on a machine with nothing else to do."""

CONFIG = """
policy: {kind: simulated, tokens_per_second: 100000}
sequence_length: 100000
val_env_manager: {num_env_groups: 1, tags: [FrozenLake]}
"""

CALM_CLIENT = """
import http.client, json, sys, time
host, port, path, key, body, seconds = sys.argv[1:]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
took, failed, end = [], 0, time.monotonic() + float(seconds)
connection = http.client.HTTPConnection(host, int(port), timeout=20)
while time.monotonic() < end:
    began = time.perf_counter()
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        failed += answer.status != 200
    except OSError:
        failed += 1
        connection.close()
    took.append(time.perf_counter() - began)
    time.sleep(0.005)
print(json.dumps([took, failed]))
"""


class Server(NamedTuple):
    process: subprocess.Popen[str]
    host: str
    port: int
    path: str
    """Of the small call."""
    body: str
    key: str
    rollout: bool = False
    """Whether it is a gateway, and attacks go to the rollout of the small call."""

    def memory(self) -> float:
        """Mebibytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024

    def connect(self) -> socket.socket:
        made = socket.create_connection((self.host, self.port), timeout=5)
        made.settimeout(2)
        return made


Attack = Callable[[Server, float], None]
"""Until the moment that it is given, by `time.monotonic`."""


def head(server: Server, path: str, length: int, key: bool, kind: str = "application/json") -> bytes:
    shown = f"Authorization: Bearer {server.key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{shown}"
        f"Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def nobody(server: Server, end: float) -> None:
    time.sleep(max(0.0, end - time.monotonic()))


def half_open(server: Server, end: float) -> None:
    held = []
    for _ in range(HANDLES + 100):
        with contextlib.suppress(OSError):
            held.append(server.connect())
            held[-1].sendall(b"POST / HTTP/1.1\r\nx: ")
    while time.monotonic() < end:
        for each in held:
            with contextlib.suppress(OSError):
                each.sendall(b"y")
        time.sleep(0.5)
    for each in held:
        each.close()


def large_bodies(key: bool, count: int, size: int) -> Attack:
    def attack(server: Server, end: float) -> None:
        def one() -> None:
            chunk = b"[" * 65536
            while time.monotonic() < end:
                with contextlib.suppress(OSError), server.connect() as made:
                    made.sendall(head(server, server.path, size, key))
                    for _ in range(size // len(chunk)):
                        made.sendall(chunk)
                    made.recv(1000)

        together(one, count)

    return attack


def repeated(
    path: str, body: bytes, key: bool = True, callers: int = 2, kind: str = "application/json"
) -> Attack:
    def attack(server: Server, end: float) -> None:
        def one() -> None:
            while time.monotonic() < end:
                with contextlib.suppress(OSError), server.connect() as made:
                    made.settimeout(30)
                    where = server.path.removesuffix("/chat/completions") + path if server.rollout else path
                    made.sendall(head(server, where, len(body), key, kind) + body)
                    while made.recv(1 << 20):
                        if time.monotonic() > end:
                            break

        together(one, callers)

    return attack


def never_read(path: str, body: bytes) -> Attack:
    def attack(server: Server, end: float) -> None:
        held = []
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                made = server.connect()
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                made.sendall(head(server, path or server.path, len(body), True) + body)
                held.append(made)
            time.sleep(0.01)
        for each in held:
            each.close()

    return attack


def junk(server: Server, end: float) -> None:
    blocks = [
        os.urandom(1000),
        b"GET /health HTTP/1.1\r\n\r\n" * 5000,
        b"x: y\r\n" * 40_000,
        b"\r\n" * 50_000,
    ]
    while time.monotonic() < end:
        for block in blocks:
            with contextlib.suppress(OSError), server.connect() as made:
                made.sendall(block)
                made.recv(1000)


def together(one: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def store_attacks() -> dict[str, Attack]:
    many = json.dumps({"resources": {"x": [[]] * (MAX_VALUES // 2 - 10)}}).encode()
    too_many = json.dumps({"resources": {"x": [[]] * 3_000_000}}).encode()
    enqueue = json.dumps({"requests": [{"input": {"n": n}} for n in range(MAX_ITEMS)]}).encode()
    page = json.dumps({"limit": MAX_ITEMS}).encode()
    long_input, long_metadata, long_id = (
        json.dumps({"requests": [{"input": 1} | each]}).encode()
        for each in ({"input": "x" * LONG}, {"metadata": {"k": "\n" * LONG}}, {"rollout_id": "x" * LONG})
    )
    long_wanted = json.dumps({"rollout_id": "x" * LONG}).encode()
    last = json.dumps({"limit": MAX_ITEMS, "offset": ROLLOUTS - 1, "sort_by": "rollout_id"}).encode()
    return {
        "nobody attacks": nobody,
        "1,124 half-open connections": half_open,
        "40 × 30 MiB without a key": large_bodies(False, 40, 30 << 20),
        "8 × 60 MiB with a key": large_bodies(True, 8, 60 << 20),
        "junk": junk,
        "pages of 1,000 of 100,000": repeated("/v1/query_rollouts", page),
        "pages from the far end": repeated("/v1/query_rollouts", last),
        "all pages are never read": never_read("/v1/query_rollouts", page),
        "as many values as may be": repeated("/v1/add_resources", many),
        "3,000,000 values": repeated("/v1/add_resources", too_many),
        "1,000 rollouts enqueued": repeated("/v1/enqueue_many_rollouts", enqueue),
        "an input of 10 MB": repeated("/v1/enqueue_many_rollouts", long_input),
        "metadata of 10 MB": repeated("/v1/enqueue_many_rollouts", long_metadata),
        "an id of 10 MB": repeated("/v1/enqueue_many_rollouts", long_id),
        "asks for an id of 10 MB": repeated("/v1/get_rollout_by_id", long_wanted),
    }


def gateway_attacks() -> dict[str, Attack]:
    def chat(messages: list[dict[str, Any]], **more: Any) -> Attack:
        return repeated("/chat/completions", json.dumps({"messages": messages} | more).encode())

    def elsewhere(path: str, **request: Any) -> Attack:
        return repeated(path, json.dumps({"max_tokens": 4} | request).encode())

    one, text = {"role": "user", "content": "x"}, "x" * LONG
    part = {"type": "text", "text": "x" * 100}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": text})}}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"a": text}}}
    deep = b'{"messages": ' + b"[" * LONG
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"a": [n] * 50}}} for n in range(900)
    ]
    return {
        "nobody attacks": nobody,
        "1,124 half-open connections": half_open,
        "40 × 30 MiB without a key": large_bodies(False, 40, 30 << 20),
        "8 × 30 MiB with a key": large_bodies(True, 8, 30 << 20),
        "junk": junk,
        "400,000 messages": chat([one] * 400_000),
        "10,000 messages": chat([one] * 10_000),
        "a message of 10 MB": chat([one | {"content": text}]),
        "a message of 30 MB": chat([one | {"content": 3 * text}]),
        "a stream of 10 MB": chat([one | {"content": text}], stream=True),
        "90 kB that fit": chat([one | {"content": "x" * 90_000}]),
        "90,000 parts of a message": chat([one | {"content": [part] * 90_000}]),
        "a system text of 10 MB": chat([one | {"role": "system", "content": text}, one]),
        "a tool's result of 10 MB": chat([called, result | {"content": text}]),
        "a call's arguments of 10 MB": chat([called, result]),
        "thoughts of 10 MB": chat([{"role": "assistant", "reasoning_content": text}, one]),
        "900 tools": chat([one], tools=tools),
        "a tool of 10 MB": chat([one], tools=[schema]),
        "100,000 stop texts": chat([one], stop=["\n"] * 100_000),
        "a stop text of 10 MB": chat([one], stop=text),
        "a model's name of 10 MB": chat([one], model=text, stream=True),
        "10 MB of brackets": repeated("/chat/completions", deep),
        "10 MB to /messages": elsewhere("/messages", messages=[one], system=text, stream=True),
        "10 MB to /responses": elsewhere("/responses", input=text, instructions=text, stream=True),
    }


def start(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    def fewer_handles() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (HANDLES, HANDLES))

    return subprocess.Popen(
        [sys.executable, "-m", "rollwright", *words],
        env={**os.environ, **environment},
        preexec_fn=fewer_handles,
        stdout=subprocess.PIPE,
        text=True,
    )


def address(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://([\d.]+):(\d+)", line):
            return found[1], int(found[2])
    raise SystemExit("the server did not start")


@contextlib.contextmanager
def store_server(folder: Path) -> Iterator[Server]:
    kept = "memory" if os.environ.get("STALL_STORE") == "memory" else str(folder / "store.db")
    process = start(["serve", "--store", kept, "--port", "0"], {"ROLLWRIGHT_STORE_TOKEN": TOKEN})
    try:
        host, port = address(process)
        server = Server(process, host, port, "/v1/get_rollout_by_id", '{"rollout_id": "ro-000007"}', TOKEN)
        for begin in range(0, ROLLOUTS, MAX_ITEMS):
            rows = [{"input": {"n": n}, "rollout_id": f"ro-{n:06d}"} for n in range(begin, begin + MAX_ITEMS)]
            ask(server, "/v1/enqueue_many_rollouts", {"requests": rows}, TOKEN)
        yield server
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def gateway_server(folder: Path) -> Iterator[Server]:
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    words = ["gateway", str(config), "--store", "memory", "--port", "0"]
    process = start(words, {"ROLLWRIGHT_GATEWAY_KEY": TOKEN})
    try:
        host, port = address(process)
        opened = ask(Server(process, host, port, "", "", TOKEN), "/rollouts", {"input": 1}, TOKEN)
        path = f"/rollouts/{opened['rollout_id']}/v1/chat/completions"
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
        yield Server(process, host, port, path, body, opened["api_key"], rollout=True)
    finally:
        process.terminate()
        process.wait(30)


def ask(server: Server, path: str, body: object, key: str) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"http://{server.host}:{server.port}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, str] = json.loads(answer.read())
        return found


def measure(server: Server, attack: Attack, seconds: float) -> tuple[list[float], int, float]:
    """How long the second client's calls took, in milliseconds, how many failed, and the most memory seen."""
    words = [server.host, str(server.port), server.path, server.key, server.body, str(seconds)]
    client = subprocess.Popen([sys.executable, "-c", CALM_CLIENT, *words], stdout=subprocess.PIPE, text=True)
    most, end = 0.0, time.monotonic() + seconds
    thread = threading.Thread(target=attack, args=(server, end))
    thread.start()
    while thread.is_alive():
        most = max(most, server.memory())
        thread.join(0.05)
    took, failed = json.loads(client.communicate()[0])
    return sorted(1000 * each for each in took), failed, most


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("servers", nargs="*", default=[], help="store, gateway; both if none is named")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each attack")
    told = parser.parse_args()
    screen = Console(width=110)
    for name, serve, attacks in (
        ("store", store_server, store_attacks),
        ("gateway", gateway_server, gateway_attacks),
    ):
        if told.servers and name not in told.servers:
            continue
        table = Table(title=f"the second client of the {name}'s server", title_justify="left")
        for column in ("attack", "calls", "failed", "p50 ms", "p99 ms", "max ms", "server MiB"):
            table.add_column(column, justify="left" if column == "attack" else "right")
        with TemporaryDirectory() as folder, serve(Path(folder)) as server:
            for words, attack in attacks().items():
                took, failed, memory = measure(server, attack, told.seconds)
                places = [took[int(len(took) * share)] for share in (0.5, 0.99)]
                figures = [f"{each:.1f}" for each in (*places, took[-1])]
                style = "" if took[-1] <= WANTED_MS and not failed else "bold"
                table.add_row(words, str(len(took)), str(failed), *figures, f"{memory:.0f}", style=style)
        screen.print(table)


if __name__ == "__main__":
    main()
