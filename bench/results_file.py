"""Where a benchmark leaves its figures: `bench/results/NAME.json`, with the date and the machine."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def write_results(name: str, figures: Mapping[str, Any]) -> Path:
    """Writes the figures and returns the file."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **figures,
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file
