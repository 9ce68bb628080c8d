"""The setup in which a run was played, as far as its settings and its profile tell."""

from pathlib import Path

from rollwright.config import RunConfig
from rollwright.hardware import usable_cores
from rollwright.observe.advice import RunSetup, slots_of_policy
from rollwright.observe.profile import Profile
from rollwright.run.folder import ADDRESS, STORE


def slots_of(config: RunConfig, found: Profile) -> int | None:
    """Concurrent calls of the engines inside the worker processes; `None` if the settings do not say."""
    own = slots_of_policy(config.policy)
    return None if own is None else own * len(found.processes)


def store_of(run: Path) -> str:
    """Address of a run's store."""
    told = run / ADDRESS
    return told.read_text(encoding="utf-8").strip() if told.is_file() else str(run / STORE)


def setup_of(config: RunConfig, found: Profile, store: str | None) -> RunSetup:
    return RunSetup.of(config, processes=len(found.processes), cores=usable_cores().count, store=store)
