"""What must be true of a run that was killed again and again: nothing lost, nothing double, nothing paid twice, nothing
left out in silence."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_engine import STAMP, Paid

from rollwright.run.folder import RunReader
from rollwright.store.invariants import complaints, unfinished
from rollwright.store.opening import open_store
from rollwright.store.records import Attempt, CompletionEntry, Event, RolloutStatus
from rollwright.trajectory import Trajectory

AT_ONCE = 9
"""Episodes in flight, of the run and of a worker beside it."""

MOST_TURNS = 4
"""In one path of an episode, as the rounds are configured."""


@dataclass
class Findings:
    """By what was promised, one line for each time that it was broken."""

    lost: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    paid_twice: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    def rows(self) -> dict[str, list[str]]:
        return {name.replace("_", " "): found for name, found in vars(self).items()}

    def add(self, other: "Findings", where: str) -> None:
        for name, found in vars(other).items():
            getattr(self, name).extend(f"{where}: {line}" for line in found)


@dataclass(frozen=True)
class StoreTale:
    """What the store says of one run."""

    events: Sequence[Event]
    completions: Sequence[CompletionEntry]
    attempts: Sequence[Attempt]
    rollouts: Sequence[str]
    trajectories: Sequence[Trajectory]
    """Those that the run has not taken into its log, such as one that was finished as the run ended."""


@dataclass(frozen=True)
class Expected:
    """What the run should have come to."""

    steps: int
    batch: int
    validations: Sequence[int]
    levels: int
    width: int
    """Answers that one attempt may be waiting for at the same time."""
    cut_off: int = 0
    """Times that all calls in flight were cut off without an attempt to show for it: with the engine, whose answers were
    on their way, or with a database, which forgets the claims of its last moment."""


async def _tale(address: str, name: str) -> StoreTale:
    store = await open_store(address)
    try:
        mine = f"{name}."
        rollouts = [each.rollout_id for each in await store.query_rollouts(rollout_id_contains=mine)]
        attempts = [each for rollout in rollouts for each in await store.query_attempts(rollout)]
        events = await store.read_events(limit=10_000_000)
        completions = await store.read_completions(limit=10_000_000)
        return StoreTale(
            [each for each in events if each.rollout_id.startswith(mine)],
            [each for each in completions if each.rollout_id.startswith(mine)],
            attempts,
            rollouts,
            [Trajectory.from_bytes(each) for each in (await store.get_trajectories(rollouts)).values()],
        )
    finally:
        await store.close()


def check_run(
    folder: Path, address: str, expected: Expected, paid: Sequence[Paid], outputs: Iterable[Path]
) -> Findings:
    findings = Findings()
    reader = RunReader(folder)
    tale = asyncio.run(_tale(address, folder.name))
    trajectories = list(reader.trajectories())
    _check_record(findings, reader, expected)
    _check_log(findings, reader, trajectories)
    _check_store(findings, tale)
    _check_ledger(findings, reader, tale)
    _check_paid(findings, trajectories, paid, tale, expected)
    for file in outputs:
        text = file.read_text(errors="replace") if file.exists() else ""
        if "Traceback" in text or "Exception ignored" in text:
            findings.silent.append(f"{file}: has a traceback instead of a line")
    return findings


def _check_record(findings: Findings, reader: RunReader, expected: Expected) -> None:
    rows = reader.metrics()
    for mode, wanted in (("train", range(expected.steps)), ("val", expected.validations)):
        found = Counter(row["step"] for row in rows if row["mode"] == mode)
        findings.lost += [f"{mode} {step} is not in the record" for step in wanted if not found[step]]
        findings.double += [f"{mode} {step} is in the record {n} times" for step, n in found.items() if n > 1]
    for row in rows:
        missing = (expected.batch if row["mode"] == "train" else expected.levels) - row["trajectories"]
        if missing > 0 and not row["reasons"]:
            findings.silent.append(f"{row['mode']} {row['step']}: {missing} missing without a reason")
    groups = Counter(group for row in rows for group in row["groups"])
    findings.double += [f"group {group} was handed out {n} times" for group, n in groups.items() if n > 1]


def _check_log(findings: Findings, reader: RunReader, trajectories: Sequence[Trajectory]) -> None:
    logged = Counter(each.rollout_id for each in trajectories)
    findings.double += [f"{rollout} is in the log {n} times" for rollout, n in logged.items() if n > 1]
    members = Counter(each.group_id for each in trajectories)
    for row in reader.metrics():
        if sum(members[group] for group in row["groups"]) < row["trajectories"]:
            findings.lost.append(f"{row['mode']} {row['step']}: its trajectories are not all in the log")


def _check_store(findings: Findings, tale: StoreTale) -> None:
    findings.double += complaints(tale.events, tale.completions)
    findings.lost += [f"{rollout} was never ended" for rollout in unfinished(tale.events)]
    for each in tale.completions:
        if each.status is not RolloutStatus.SUCCEEDED and not each.reason:
            findings.silent.append(f"{each.rollout_id} is {each.status} without a reason")


def _check_ledger(findings: Findings, reader: RunReader, tale: StoreTale) -> None:
    summary: dict[str, Any] = reader.summary() or {}
    ledger = dict(summary.get("ledger") or {})
    opened = ledger.pop("opened", 0)
    if opened != sum(ledger.values()) or ledger.get("running"):
        findings.silent.append(f"the ledger does not add up: {opened} opened, {ledger}")
    if opened != len(tale.rollouts):
        findings.silent.append(f"the ledger has {opened} rollouts, the store {len(tale.rollouts)}")


def _check_paid(
    findings: Findings,
    trajectories: Sequence[Trajectory],
    paid: Sequence[Paid],
    tale: StoreTale,
    expected: Expected,
) -> None:
    """An answer that was recorded is a turn of its rollout in the end, so nobody has paid for it again. Of those that
    became no turn, there are no more than were on their way when attempts came to nothing."""
    kept = [*trajectories, *tale.trajectories]
    turns = {found[1] for each in kept for turn in each.turns if (found := STAMP.match(turn.text))}
    recorded = {stamp for each in paid for stamp in each.shown}
    results = {each.rollout_id for each in tale.completions if each.status is RolloutStatus.SUCCEEDED}
    # what may have been recorded of rollouts that were cancelled
    without = sum(each not in results for each in tale.rollouts) * MOST_TURNS * expected.width
    again = recorded - turns
    if len(again) > without:
        findings.paid_twice.append(
            f"{len(again)} answers were recorded and generated again: {sorted(again)[:5]}"
        )
    dead_ends = sum(each.status != "succeeded" for each in tale.attempts)
    extra = sum(each.stamp not in turns for each in paid)
    if extra > (dead_ends + expected.cut_off * AT_ONCE) * expected.width + without:
        findings.paid_twice.append(
            f"{extra} answers became no turn, but only {dead_ends} attempts came to nothing"
        )
