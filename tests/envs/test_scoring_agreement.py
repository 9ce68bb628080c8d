"""Judges, which evaluate no code, give honest answers the scores of reasoning-gym itself."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.envs.scoring import shared
from rollwright.envs.scoring.readers import CORRECTIONS

CONSOLATION = 0.01
"""Score of countdown and puzzle24 for unparsable text, including code, which judges refuse."""

WITH_READERS = [
    *("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens"),
    *("number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix"),
    *("string_insertion", "decimal_arithmetic"),
]


@pytest.mark.parametrize(
    ("seeds", "names"), [((0, 1), []), ((1, 2), WITH_READERS)], ids=["every dataset", "with readers"]
)
async def test_honest_answers_right_and_wrong_get_the_datasets_own_score(
    seeds: tuple[int, int], names: list[str]
) -> None:
    command = [sys.executable, str(Path(__file__).parent / "bare_scores.py"), *map(str, seeds), *names]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=environment, check=True
    )
    lines = [line[line.index('{"dataset"') :] for line in done.stdout.splitlines() if '{"dataset"' in line]
    assert len(lines) >= (100 if not names else len(names))
    for line in lines:
        bare = json.loads(line)
        dataset, seed = bare["dataset"], bare["seed"]
        if dataset in CORRECTIONS:
            continue
        entry = await shared().entry(dataset, {}, seed)
        assert entry.question == bare["question"], dataset
        scores = await asyncio.gather(
            *(shared().score(dataset, {}, seed, each, seconds=60) for each in bare["answers"])
        )
        for answer, own, score in zip(bare["answers"], bare["scores"], scores, strict=True):
            wanted = min(max(own or 0.0, 0.0), 1.0)
            if score.refused:
                assert (score.value, wanted <= CONSOLATION) == (0.0, True), (dataset, answer)
            else:
                assert score.value == pytest.approx(wanted, abs=1e-12), (dataset, answer)
                assert score.failed == (own is None)
