"""A chat-completions server of the standard library that counts the answers it has been asked for.

The answer to a conversation depends on the conversation alone, so two runs that ask the same play the same.
"""

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MOVES = ("Up", "Down", "Left", "Right")


class CountingEngine(ThreadingHTTPServer):
    """`generations` is what a hosted engine would send a bill for."""

    daemon_threads = True

    def __init__(self, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.latency = latency
        self.generations = 0
        self.lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingEngine

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "counting", "object": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.generations += 1
        time.sleep(self.server.latency)
        move = MOVES[zlib.crc32(json.dumps(asked["messages"]).encode()) % len(MOVES)]
        choice = {"index": 0, "finish_reason": "stop"}
        message = {"role": "assistant", "content": f"<answer>{move}</answer>"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        self._answer(
            {
                "id": "c",
                "object": "chat.completion",
                "model": "counting",
                "choices": [{**choice, "message": message}],
                "usage": usage,
            }
        )

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client was killed

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def counting_engine(latency: float = 0.0) -> Iterator[CountingEngine]:
    server = CountingEngine(latency)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
