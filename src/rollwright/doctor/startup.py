"""Measures a start, from a new process to the first token, part by part, and compares it with an earlier measurement.

Each start is a new process. A cold start follows after dropping the kernel's page cache, which only root may do; a warm
start follows after the same start.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollwright.doctor.checks import Finding, note, well
from rollwright.errors import FormatError, RollwrightError
from rollwright.models.catalogue import is_fetched, model_folder

PARTS = ("interpreter", "command", "torch", "policy", "tokenizer", "model", "first_token")
"""In order: Python itself; the modules of `rollwright run`; torch; transformers and the policy; the tokenizer and renderer;
the weights; one token of a short prompt."""

MODEL = "smollm2"
"""Model of the measurement, if it is fetched; else a tiny model with random weights, compared only with itself."""

TINY = "tiny"

MUCH_SLOWER = 2.0
"""Factor from which a part is reported as slower: above a busy machine's noise, below the cost of a new heavy import."""

LEAST_SECONDS = 0.2
"""Seconds below which a part is not compared, because it is noise."""

START_SECONDS = 600.0
"""Time limit of one start, in seconds."""

_DROP = Path("/proc/sys/vm/drop_caches")

Start = dict[str, float]
"""Seconds of each part."""


def measure_start(model: Path) -> Start:
    """Start one process and measure it up to its first token."""
    done = subprocess.run(
        [sys.executable, "-m", "rollwright.cli.first_token", str(time.monotonic()), str(model)],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    words = done.stdout.split()
    if done.returncode or len(words) != len(PARTS):
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise RollwrightError(f"a start for measuring failed; its last line: {said[-1]}")
    return dict(zip(PARTS, map(float, words), strict=True))


def drop_page_cache() -> bool:
    """Drop the page cache, so that the next start is cold; returns false without the permission."""
    os.sync()
    try:
        _DROP.write_text("3")
    except OSError:
        return False
    return True


def median_start(starts: list[Start]) -> Start:
    return {part: round(statistics.median(each[part] for each in starts), 4) for part in PARTS}


def total(start: Mapping[str, float]) -> float:
    return sum(start[part] for part in PARTS)


class StartedModel:
    """Model for measured starts: the fetched one, or a temporary tiny one."""

    def __init__(self) -> None:
        self._made: TemporaryDirectory[str] | None = None
        self.name = MODEL if is_fetched(MODEL) else TINY

    def __enter__(self) -> Path:
        if self.name == MODEL:
            return model_folder(MODEL)
        from rollwright.models.tiny import tiny_llama, tiny_tokenizer

        self._made = TemporaryDirectory()
        tokenizer = tiny_tokenizer(["Which way do you go?"], 300)
        tiny_llama(len(tokenizer)).save_pretrained(self._made.name)
        tokenizer.save_pretrained(self._made.name)
        return Path(self._made.name)

    def __exit__(self, *error: object) -> None:
        if self._made is not None:
            self._made.cleanup()


def check_startup(baseline: Path) -> Iterator[Finding]:
    """Measure a warm start and compare it with the file; without a file, write it."""
    before = _read(baseline) if baseline.exists() else None
    measured_with = StartedModel()
    with measured_with as model:
        measure_start(model)  # warms the page cache for the next start
        now = measure_start(model)
    if before is None:
        baseline.write_text(
            json.dumps({"model": measured_with.name, "warm": now}, indent=2) + "\n", encoding="utf-8"
        )
        yield well("start-up", f"{total(now):.1f} s to the first token; kept in {baseline} to compare with")
        return
    yield from compare(before, measured_with.name, now, baseline)


def compare(before: Mapping[str, Any], model: str, now: Start, file: Path) -> Iterator[Finding]:
    if before.get("model") != model:
        yield note(
            "start-up",
            f"{file} was measured with {before.get('model')}, this start with {model}",
            f"rollwright model fetch {MODEL}, or choose another file",
        )
        return
    warm: Mapping[str, float] = before["warm"]
    slower = [
        f"{part} {now[part]:.1f} s instead of {warm[part]:.1f} s"
        for part in PARTS
        if now[part] > LEAST_SECONDS and now[part] > MUCH_SLOWER * warm[part]
    ]
    if slower:
        yield note(
            "start-up",
            f"{total(now):.1f} s to the first token, {total(warm):.1f} s in {file}: {', '.join(slower)}",
            "see what else runs here; if nothing does, what was installed or changed since then",
        )
    else:
        yield well("start-up", f"{total(now):.1f} s to the first token, {total(warm):.1f} s in {file}")


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        if all(isinstance(content["warm"][part], int | float) for part in PARTS):
            return dict(content)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FormatError(f"{file}: is no measured start; give a file that does not exist to write one")
