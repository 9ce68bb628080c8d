"""Compares the losses with verl's and TRL's own functions on 1,000 random batches each: value and gradient by token. Then trains
with verl's own trainer, as far as it runs on a CPU.

    python bench/losses.py [--verl]

Makes the environment `.venvs/losses` once, lets the peers compute there, and runs `tests/training/test_peer_losses.py` on
what they wrote. `--record FILE` only writes; with 8 batches that is the file which the default tests read. `--verl` only takes
the training steps of `bench/verl_steps.py`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from venvs import add_without_dependencies, peer_python

ROOT = Path(__file__).resolve().parent.parent
_OWN = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
"""What rollwright needs, which plays verl's episodes in that environment."""
PACKAGES = (
    "torch==2.13.0",
    "trl==1.16.0",
    "transformers==5.10.*",
    "tensordict",
    "codetiming",
    "orjson",
    "ray",
    "omegaconf",
    "hydra-core",
    "pandas",
    "aiohttp",
    "cachetools",
    "fastapi",
    "peft",
    "pillow",
    "renderers",
    "torchdata",
    *_OWN,
)
VERL = "verl==0.9.1"
"""Installed without its dependencies: they include a GPU engine, which neither its losses nor its actor needs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--verl", action="store_true")
    given = parser.parse_args()
    python = add_without_dependencies("losses", peer_python("losses", PACKAGES), VERL)
    if given.verl:
        return take_steps(python)
    with tempfile.TemporaryDirectory() as folder:
        file = given.record or Path(folder) / "peers.npz"
        draw = [str(python), "bench/losses_peers.py", str(file)]
        draw += ["--batches", str(given.batches), "--seed", str(given.seed)]
        subprocess.run(draw, check=True, cwd=ROOT)
        if given.record:
            return 0
        test = [sys.executable, "-m", "pytest", "tests/training/test_peer_losses.py"]
        environment = {**os.environ, "ROLLWRIGHT_PEER_LOSSES": str(file)}
        failed = subprocess.run(test, check=False, cwd=ROOT, env=environment).returncode
    return failed or take_steps(python)


def take_steps(python: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [str(python), "bench/verl_steps.py"], check=False, cwd=ROOT, env=environment
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
