"""Fork server of one foreign package: imports it once, and forks a process for each environment.

Always true: an environment has a process of its own, so one that hangs, crashes or calls `exit` takes no other with it, and a
copy of it is a fork of that process. Nothing that a package prints reaches the protocol: standard output goes to standard
error. When the process that started the server ends, the server and all environments end, because their input ends.

    python forkserver.py FILE SOCKET       serve environments of the program in FILE
    python forkserver.py FILE --describe   print what that program says of the options on standard input

The server reads one JSON object a line from standard input: `{"token": …, "options": {…}}`. The forked process connects to
SOCKET, names its token, and then answers one JSON object a line: `{"op": "reset", "seed": 3}` calls `reset(seed=3)` of the
object that the program's `make(**options)` returned. `{"op": "fork", "token": …}` is answered by nothing: the copy connects by itself.

A program whose `make` is a coroutine plays many episodes at once in one process: see `concurrent_program`.
"""

import asyncio
import importlib
import inspect
import json
import os
import random
import signal
import socket
import sys
import traceback
from typing import Any


def main(file: str, place: str) -> None:
    folder, name = os.path.split(os.path.abspath(file))
    sys.path.insert(0, folder)
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    module = name.removesuffix(".py")
    if place == "--describe":
        describe(module)
    else:
        serve(module, place)


def describe(module: str) -> None:
    """Prints `{"value": …}` or `{"error": …, "settings": …}` on the standard output that this process was started with."""
    options = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        said = {"value": importlib.import_module(module).describe(**options)}
    except BaseException as error:  # noqa: BLE001 - whatever a foreign package raises is said in one line
        said = describe_error(error)
    json.dump(said, out)
    out.flush()
    os._exit(0)  # threads of a foreign package must not hold up the end


def serve(module: str, place: str) -> None:
    os.dup2(2, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended environments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    try:
        program = importlib.import_module(module)
        hello = {"token": "server", "pid": os.getpid()}
    except BaseException as error:  # noqa: BLE001
        hello = {"token": "server", "pid": os.getpid(), **describe_error(error)}
    line = _connect(place)
    line.sendall(json.dumps(hello).encode() + b"\n")
    if "error" in hello:
        return
    for request in sys.stdin.buffer:
        order = json.loads(request)
        if os.fork() == 0:
            line.close()
            _serve_environment(program, place, order["token"], order["options"])
            os._exit(0)


def _serve_environment(program: Any, place: str, token: str, options: dict[str, Any]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if inspect.iscoroutinefunction(program.make):
        serve_concurrently = importlib.import_module("concurrent_program").serve_concurrently
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the package may wait for programs that it starts
        asyncio.run(serve_concurrently(program, place, token, options, describe_error))
        return
    lines = _greet(place, token)
    made: Any = None
    while request := lines.readline():
        order = json.loads(request)
        operation = order.pop("op")
        if operation == "fork":
            draws = random.getstate()
            if os.fork() == 0:
                random.setstate(draws)  # Python gives every fork a new seed
                lines = _greet(place, order["token"])
            continue
        try:
            if made is None:
                made = program.make(**options)
            said = {"value": getattr(made, operation)(**order)}
            encoded = json.dumps(said)
        except BaseException as error:  # noqa: BLE001 - also `exit` and Ctrl-C of foreign code
            encoded = json.dumps(describe_error(error))
        lines.write(encoded.encode() + b"\n")
        lines.flush()


def _greet(place: str, token: str) -> Any:
    lines = _connect(place).makefile("rwb")
    lines.write(json.dumps({"token": token, "pid": os.getpid()}).encode() + b"\n")
    lines.flush()
    return lines


def _connect(place: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(place)
    return line


def describe_error(error: BaseException) -> dict[str, Any]:
    """The answer that says what was raised."""
    traceback.print_exc()
    words = " ".join(str(error).split())[:500]
    is_settings = getattr(error, "is_settings", False)
    return {"error": words if is_settings else f"{type(error).__name__}: {words}", "settings": is_settings}


if __name__ == "__main__":
    main(*sys.argv[1:3])
