"""Agents of a team that are said to be trained sample in a way that can be."""

from typing import Any

import pytest

from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.run.build import SettingsTable


def team(**agent: Any) -> dict[str, Any]:
    return {
        "custom_envs": {"Sums": {"env_type": "rollwright.teams.toy_envs:Sums"}},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Sums"]},
        "orchestras": {"Sums": {"kind": "math", "agents": {"verifier": agent}}},
    }


@pytest.mark.parametrize(
    ("sampling", "why"),
    [({"temperature": 0}, "sampled at temperature 0"), ({"top_p": 0.9}, "sampled with top_p 0.9")],
)
def test_a_trained_agent_of_a_distribution_that_is_not_modelled_is_refused(
    sampling: dict[str, float], why: str
) -> None:
    SettingsTable(build(team(sampling=sampling)))
    SettingsTable(build({**team(sampling=sampling, trainable=False), "training": {"model": "m"}}))
    SettingsTable(build({**team(sampling={"temperature": 0.3}), "training": {"model": "m"}}))
    with pytest.raises(ConfigError, match=rf"agents\.verifier\.sampling: what is {why} cannot be trained"):
        SettingsTable(build({**team(sampling=sampling), "training": {"model": "m"}}))
