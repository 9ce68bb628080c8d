"""Training with environments of other packages, killed with -9 and resumed: every group is trained once, and the weights are those
of a training that nobody killed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.engines.rendering.bytes import VOCABULARY_SIZE
from rollwright.models.tiny import tiny_llama
from rollwright.run.folder import RunReader

pytestmark = pytest.mark.foreign

SETS = Path(__file__).parent / "verifiers_sets"
TRAINING = Path(__file__).parents[2] / "training"
STEPS, GROUPS, MEMBERS = 4, 2, 4

TAGS = {
    "verifiers": {"env_type": f"verifiers:{SETS / 'vf_odd.py'}"},
    "verifiers through the gateway": {
        "env_type": f"verifiers:{SETS / 'vf_odd.py'}",
        "env_config": {"way": "gateway"},
    },
    "textarena": {"env_type": "textarena:GuessTheNumber-v0", "max_steps": 3},
    "gymnasium": {"env_type": "gymnasium:CartPole-v1", "max_steps": 3},
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TRAINING))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


@pytest.mark.parametrize("name", TAGS)
async def test_a_killed_training_goes_on_to_the_same_weights(tiny: Any, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    tiny_llama(VOCABULARY_SIZE, hidden_size=16, layers=1, heads=2, max_length=2048).save_pretrained(model)
    more = {
        "max_steps": STEPS,
        "async_generation_ratio": 0,
        "custom_envs": {"Odd": {"max_tokens_per_step": 4, **TAGS[name]}},
        "train_env_manager": {"num_env_groups": GROUPS, "group_size": MEMBERS, "tags": ["Odd"]},
    }
    killed = [tiny.kill_after(tmp_path / "runs", model, more, 1, pause) for pause in (0.0, 0.3)]
    assert any(killed), "the run was too fast to be killed"
    run = await tiny.train(tmp_path / "runs", tiny.configuration(model, **more), model)

    rows = RunReader(run.folder.path).metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    groups = [group for row in rows for group in row["groups"]]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    assert run.local.ledger.counts["delivered"] == STEPS * GROUPS * MEMBERS
    lines = (run.folder.path / "training" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))
    whole = await tiny.train(tmp_path / "whole", tiny.configuration(model, **more), model)
    assert run.checksum == whole.checksum
