"""Rules about an agent's calls hold in a run: another policy of the configuration answers, and the title is not trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.run.checks import check_config
from rollwright.run.run import Run

AGENT = """
import openai

async def titles(task, session):
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        said = []
        for model in ("main", "mini"):
            messages = [{"role": "user", "content": task["question"]}]
            answer = await client.chat.completions.create(model=model, messages=messages)
            said.append(answer.choices[0].message.content)
    return 1.0 if said == ["from the script", "from the small one"] else 0.0
"""


def content(tmp_path: Path, policy: str = "small") -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "go"}) + "\n", encoding="utf-8")
    (tmp_path / "agent_of_rules.py").write_text(AGENT, encoding="utf-8")
    scripted = {"kind": "simulated", "tokens_per_second": 1e5}
    return {
        "name": "rules",
        "folder": str(tmp_path),
        "custom_envs": {
            "Rules": {"tasks": "rows.jsonl", "agent": "agent_of_rules:titles", "rewards": ["returned"]}
        },
        "policy": {**scripted, "script": [{"say": "from the script"}]},
        "policies": {"small": {**scripted, "script": [{"say": "from the small one"}]}},
        "gateway": {"calls": [{"model": "mini", "policy": policy}]},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Rules"]},
    }


@pytest.mark.parametrize("processes", [None, 1])
async def test_a_rules_policy_answers_in_every_kind_of_worker(
    processes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    more: Any = {} if processes is None else {"processes": processes}
    async with Run(build(content(tmp_path)), **more) as run:
        batch = await run.get_batch()
    for trajectory in batch.trajectories:
        assert trajectory.reward == 1.0
        assert [turn.filtered for turn in trajectory.turns] == [None, "gateway.calls"]


def test_a_rule_that_names_no_policy_of_the_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"gateway.calls\[0\].policy: no 'tiny' in `policies`; there are: small"
    ):
        check_config(build(content(tmp_path, "tiny")))
