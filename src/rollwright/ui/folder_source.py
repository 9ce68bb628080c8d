"""One run folder as the page sees it: state, figures, settings, damage, and an index of its episodes.

Invariants: nothing is written to the folder. Damage in any file is a line in `problems` and costs only what it hides. What
was read once is not read again: logs are followed as they grow.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rollwright.config import RunConfig, build
from rollwright.errors import FormatError, RollwrightError
from rollwright.observe.prompt_text import PromptReader
from rollwright.run.folder import (
    CONFIG,
    FAILURES,
    METRICS,
    SUMMARY,
    RunReader,
    is_failure_row,
    is_metrics_row,
    read_settings,
)
from rollwright.run.live_snapshot import read_live
from rollwright.run.retention import FORGOTTEN, Forgotten, read_forgotten
from rollwright.run.summary import failure_causes
from rollwright.run.training_record import FIGURES, is_training
from rollwright.run.trajectory_log import TRAJECTORIES, Place
from rollwright.swarm.heartbeat import HEARTBEAT, STATUS, read_heartbeat, read_status
from rollwright.trajectory import Trajectory
from rollwright.ui import figures
from rollwright.ui.episode_index import EpisodeIndex
from rollwright.ui.figures import RunState
from rollwright.ui.growing_log import GrowingLog, GrowingRows
from rollwright.ui.judging import Judging
from rollwright.ui.redaction import without_secrets
from rollwright.ui.reports import has_report, read_report, shown_report, verdict_of

PROFILED = 1000
"""Last episodes whose timings give the verdict."""


class FolderSource:
    """A run folder. Methods that read much are for a thread; the index is safe to use beside them."""

    kind = "folder"

    def __init__(self, path: Path, name: str, prices: tuple[float, float] | None = None) -> None:
        self.path = path
        self.name = name
        self.asked = 0.0
        """When the page has asked for its episodes last, by the monotonic clock; 0: never."""
        self._prices = prices
        self._metrics = GrowingRows(path / METRICS, is_metrics_row)
        self._failures = GrowingRows(path / FAILURES, is_failure_row)
        self._trainer = GrowingRows(path / FIGURES / METRICS, sealed=False)
        self._log = GrowingLog(path / TRAJECTORIES)
        self._judging: Judging | None = None
        self._index: EpisodeIndex | None = None
        self._summary: tuple[float, dict[str, Any] | None, list[str]] | None = None
        self._forgotten: tuple[float, Forgotten] = (-1.0, Forgotten())
        self._verdict: tuple[int, dict[str, Any] | None] | None = None
        self._settings: tuple[float, dict[str, Any] | None, str | None] | None = None

    # -- what it is -----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any] | None:
        """The configuration as plain data; `None` if it is damaged."""
        changed = _changed(self.path / CONFIG)
        if self._settings is None or self._settings[0] != changed:
            try:
                self._settings = (changed, read_settings(self.path), None)
            except (RollwrightError, OSError) as error:
                self._settings = (changed, None, str(error))
        return self._settings[1]

    @cached_property
    def config(self) -> RunConfig | None:
        """The settings as the run uses them; `None` if they cannot be read."""
        settings = self.settings()
        if settings is None:
            return None
        try:
            return build(settings, source=str(self.path / CONFIG))
        except (RollwrightError, ValueError, TypeError):
            return None

    @cached_property
    def prompts(self) -> PromptReader | None:
        return None if self.config is None else PromptReader(self.config, download=False)

    @property
    def judging(self) -> Judging:
        if self._judging is None:
            self._judging = Judging.of(self.config)
        return self._judging

    @property
    def is_swarm(self) -> bool:
        return (self.path / STATUS).is_file() or (self.path / HEARTBEAT).is_file()

    @property
    def is_training(self) -> bool:
        return is_training(self.path)

    @property
    def is_evaluation(self) -> bool:
        return has_report(self.path)

    def live(self) -> dict[str, Any] | None:
        return read_live(self.path)

    def summary(self) -> dict[str, Any] | None:
        file = self.path / SUMMARY
        changed = _changed(file)
        if self._summary is None or self._summary[0] != changed:
            summary, told = None, []
            if changed:
                try:
                    reader = RunReader(self.path)
                    summary, told = reader.summary(), reader.problems
                except (RollwrightError, OSError) as error:
                    told = [str(error)]
            self._summary = (changed, summary, told)
        return self._summary[1]

    def state(self) -> RunState:
        live = self.live()
        alive = None if live is None else _is_alive(live)
        return figures.state_of(self.summary(), live, now=time.time(), alive=alive)

    def forgotten(self) -> Forgotten:
        changed = _changed(self.path / FORGOTTEN)
        if self._forgotten[0] != changed:
            try:
                self._forgotten = (changed, read_forgotten(self.path))
            except (RollwrightError, OSError):
                self._forgotten = (changed, Forgotten())
        return self._forgotten[1]

    def rows(self) -> list[dict[str, Any]]:
        """Lines of the metrics that are not pruned."""
        forgotten, rows = self.forgotten(), self._metrics.read()
        return [row for row in rows if not forgotten.has_row(row)] if forgotten.steps else rows

    def problems(self) -> list[str]:
        """What is wrong with the folder, one line each."""
        self.settings(), self.summary()
        told = [self._settings[2] if self._settings else None, self._log.problem, *self._metrics.problems]
        told += [
            *self._failures.problems,
            *self._trainer.problems,
            *(self._summary[2] if self._summary else ()),
        ]
        if self.settings() is not None and self.config is None:
            told.append(f"{self.path / CONFIG}: is not a configuration of this release")
        if not (self.path / TRAJECTORIES).is_file():
            told.append(f"{self.path / TRAJECTORIES}: is missing")
        told += self._log.condition.told(self.path / TRAJECTORIES)
        return list(dict.fromkeys(each for each in told if each))

    # -- figures --------------------------------------------------------------------------------------

    def card(self) -> dict[str, Any]:
        """The run in one line."""
        live, summary, rows, settings = self.live(), self.summary(), self.rows(), self.settings() or {}
        train = [row for row in rows if row.get("mode") == "train"]
        shown = train or rows
        state = self.state()
        at_work = live if state is RunState.RUNNING else None
        activity = (
            ((live or {}).get("activity") or (summary or {}).get("activity") or {}) if live or summary else {}
        )
        tokens = figures.number(activity.get("tokens"))
        if tokens is None:
            tokens = sum(figures.tokens_of(row) for row in rows) if rows else None
        prompt_tokens = figures.number(activity.get("prompt_tokens"))
        most = settings.get("max_steps") if settings.get("train_env_manager") else None
        return {
            "id": self.name,
            "name": str(settings.get("name") or self.path.name),
            "kind": self._kind(),
            "state": state,
            "error": (summary or {}).get("error"),
            "simulated": bool((summary or {}).get("simulated", self._is_simulated(settings))),
            "progress": figures.progress_of(rows, at_work, most, time.time()),
            "stage": (at_work or {}).get("stage"),
            "reward": figures.number(shown[-1].get("reward")) if shown else None,
            "success": figures.success_of(shown[-1]) if shown else None,
            "rewards": figures.sparkline(rows),
            "tokens": tokens,
            "prompt_tokens": prompt_tokens,
            "cost": self._cost(prompt_tokens, tokens, live, summary),
            "budget": figures.budget_of(at_work or summary),
            "seconds": self._seconds(live, summary, rows),
            "inflight": (at_work or {}).get("inflight"),
            "changed": max(_changed(self.path / each) for each in (METRICS, SUMMARY, CONFIG, TRAJECTORIES)),
            "model": _model(settings),
            "tags": _tags(settings),
            "problems": len(self.problems()),
        }

    def _kind(self) -> str:
        if self.is_swarm:
            return "swarm"
        if self.is_evaluation:
            return "evaluation"
        return "training" if self.is_training else "rollouts"

    def _cost(
        self,
        prompt_tokens: float | None,
        tokens: float | None,
        live: Mapping[str, Any] | None,
        summary: Mapping[str, Any] | None,
    ) -> float | None:
        """The cost that the run itself recorded; otherwise computed from the page's prices."""
        if self._prices is None:
            for told in (live, summary, read_report(self.path) if self.is_evaluation else None):
                if (cost := figures.told_cost(told)) is not None:
                    return cost
        return figures.cost_of(prompt_tokens, tokens, self._prices)

    def _seconds(
        self, live: Mapping[str, Any] | None, summary: Mapping[str, Any] | None, rows: Sequence[Any]
    ) -> float | None:
        if live is not None and figures.number(live.get("began")) is not None:
            return float(live["time"]) - float(live["began"])
        if summary is not None and (told := figures.number(summary.get("seconds"))) is not None:
            return told
        return sum(figures.number(row.get("seconds")) or 0.0 for row in rows) if rows else None

    def _is_simulated(self, settings: Mapping[str, Any]) -> bool:
        policy = settings.get("policy")
        return isinstance(policy, dict) and policy.get("kind") == "simulated"

    def overview(self) -> dict[str, Any]:
        """The run with its results, ledger, failures and settings."""
        summary, rows, forgotten = self.summary() or {}, self.rows(), self.forgotten()
        return {
            **self.card(),
            "path": str(self.path),
            "problem_lines": self.problems(),
            "views": self.views(),
            "results": summary.get("results"),
            "training": summary.get("training"),
            "engine": summary.get("engine"),
            "trees": summary.get("trees"),
            "row_views": summary.get("views"),
            "activity": summary.get("activity"),
            "flow": self._flow(None),
            "failures": self.failures(),
            "curves": figures.batch_curves(rows),
            "staleness": figures.staleness_sums(rows),
            "pruned_steps": forgotten.steps,
            "settings": without_secrets(self.settings()),
        }

    def views(self) -> list[str]:
        """Views that have something to show."""
        found = ["overview", "live", "trajectories"]
        rows = self.rows()
        if self.is_training or any(row.get("mode") == "val" for row in rows) or len(rows) > 1:
            found.append("training")
        found += ["swarm"] * self.is_swarm + ["evaluation"] * self.is_evaluation + ["settings"]
        return found

    def failures(self) -> list[dict[str, Any]]:
        """Permanent failures by cause."""
        self._failures.read()
        try:
            return failure_causes(RunReader(self.path)).rows(20) if self._failures.rows else []
        except RollwrightError:
            return []

    def _flow(self, live: Mapping[str, Any] | None) -> dict[str, Any] | None:
        told: Mapping[str, Any] = live if live and live.get("ledger") else self.summary() or {}
        ledger, reasons = told.get("ledger"), told.get("reasons") or {}
        if not isinstance(ledger, dict):
            last = next((row for row in reversed(self.rows()) if isinstance(row.get("ledger"), dict)), None)
            if last is None:
                return None
            ledger, reasons = last["ledger"], last.get("reasons") or {}
        trained = None
        if self.is_training:
            trained = sum(
                int(row.get("rollouts") or 0) for row in self._trainer.read() if not row.get("skipped")
            )
        return figures.flow_of(ledger, reasons, trained)

    def live_view(self) -> dict[str, Any]:
        """What the run is doing now, from its last snapshot."""
        live, rows = self.live(), self.rows()
        state = self.state()
        card = self.card()
        staleness = (live or {}).get("staleness") or figures.staleness_sums(rows)
        return {
            "card": card,
            "state": state,
            "now": time.time(),
            "age": None if live is None else round(time.time() - live["time"], 3),
            "snapshot": live if state in (RunState.RUNNING, RunState.SILENT) else None,
            "last": None
            if live is None
            else {"time": live["time"], "pid": live.get("pid"), "host": live.get("host")},
            "flow": self._flow(live),
            "staleness": staleness,
            "failures": self.failures(),
            "activity": (live or self.summary() or {}).get("activity"),
            "verdict": self.verdict(),
            "problem_lines": self.problems(),
        }

    def verdict(self) -> dict[str, Any] | None:
        """The bottleneck by the timings of the last episodes; `None` without timings."""
        index = self._index
        if index is None or not len(index) or self.config is None:
            return None
        count = len(index)
        if self._verdict is not None and (self._verdict[0] == count or count < self._verdict[0] * 1.02):
            return self._verdict[1]
        told = verdict_of(self._last_outlines(count), self.config, self.path)
        self._verdict = (count, told)
        return told

    def _last_outlines(self, count: int) -> Iterator[Trajectory]:
        for number in range(max(0, count - PROFILED), count):
            try:
                yield Trajectory.outline(self.record(number))
            except (FormatError, OSError):
                continue

    def training_view(self) -> dict[str, Any]:
        rows = self.rows()
        return {
            "batches": figures.batch_curves(rows),
            "trainer": figures.trainer_curves(self._trainer.read()),
            "staleness": figures.staleness_sums(rows),
            "split": (self.live() or {}).get("split")
            or ((self.summary() or {}).get("training") or {}).get("split"),
            "pruned_steps": self.forgotten().steps,
        }

    def swarm_view(self) -> dict[str, Any]:
        beat, status = read_heartbeat(self.path), read_status(self.path)
        return {
            "now": time.time(),
            "heartbeat": msgspec.to_builtins(beat),
            "status": msgspec.to_builtins(status),
            "state": self.state(),
        }

    def evaluation_view(self) -> dict[str, Any]:
        return shown_report(self.path)

    # -- episodes -------------------------------------------------------------------------------------

    @property
    def index(self) -> EpisodeIndex:
        if self._index is None:
            self._index = EpisodeIndex(self.judging.filters, self.judging.applies_to)
        return self._index

    def advance(self, seconds: float) -> bool:
        """Index further episodes for at most so long; returns whether there are more at hand."""
        if self._log.was_replaced():
            self._log.close()
            self._log = GrowingLog(self.path / TRAJECTORIES)
            if self._index is not None:
                self._index.close()
            self._index = None
        index, forgotten, size = self.index, self.forgotten(), self.judging.group_size
        for start, encoded in self._log.read(seconds):
            try:
                outline = Trajectory.outline(encoded)
            except FormatError as error:
                self._log.problem = f"{self.path / TRAJECTORIES}: {error}"
                continue
            if not forgotten.has_group(outline.group_id):
                index.add(outline, Place(start, len(encoded)), group_size=size)
        return self._log.read_bytes < self._log.size and not self._log.condition.cut_off

    def indexed_share(self) -> float:
        size = self._log.size
        return 1.0 if not size else min(1.0, self._log.read_bytes / size)

    def record(self, number: int) -> bytes:
        """The encoded trajectory of a row."""
        place = self.index.places[number]
        return self._log.record(place.start, place.size)

    def batch_of(self, group_id: str) -> tuple[list[str], dict[str, Any] | None]:
        """The groups of the batch that has this one, and its line of the metrics."""
        for row in reversed(self.rows()):
            if group_id in row["groups"]:
                return list(row["groups"]), row
        return [group_id], None

    def close(self) -> None:
        self._log.close()
        if self._index is not None:
            self._index.close()


def _is_alive(live: Mapping[str, Any]) -> bool | None:
    """Whether the snapshot's process lives; `None` if it is on another machine."""
    if live.get("host") != socket.gethostname() or not isinstance(live.get("pid"), int):
        return None
    try:
        process = psutil.Process(live["pid"])
        return bool(process.create_time() <= float(live["time"]) and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _changed(file: Path) -> float:
    """When a file was changed; 0 if there is none."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _model(settings: Mapping[str, Any]) -> str | None:
    policy = settings.get("policy")
    if not isinstance(policy, dict):
        return None
    return str(policy.get("model") or policy.get("kind") or "") or None


def _tags(settings: Mapping[str, Any]) -> list[str]:
    found: dict[str, None] = {}
    for key in ("train_env_manager", "val_env_manager"):
        manager = settings.get(key)
        tags = manager.get("tags") if isinstance(manager, dict) else None
        found.update(dict.fromkeys(str(each) for each in tags) if isinstance(tags, list) else {})
    return list(found)
