"""A real vLLM server with SmolLM2 on the CPU; what is missing for it is installed and fetched first."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

if TYPE_CHECKING:
    from vllm_server import VllmServer

FLATTER = 0.8
"""The perturbed model's last norm is scaled by this: every distribution is a little flatter, none is the same."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines: needs a real inference engine; `make test-engines`")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    from vllm_server import fetched_model

    return fetched_model()


@pytest.fixture(scope="session")
def perturbed_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("perturbed") / "model"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * FLATTER
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[VllmServer]":
    from vllm_server import vllm_server

    with vllm_server(model_folder, tmp_path_factory.mktemp("vllm") / "log.txt") as started:
        yield started
