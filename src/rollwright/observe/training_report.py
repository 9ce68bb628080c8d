"""Report of a training as one plot and one page: learning curve, comparison with other players, episodes before and after.

All data comes from the run's folder, so a report can be made at any time, also while the run works. The episodes are those
of validation, whose levels are always the same: the first validation is before, the last one after. If the first steps are
pruned, the oldest kept validation is before, and the page says so.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from rollwright.errors import RollwrightError
from rollwright.observe.plots import Points, whole_numbers
from rollwright.observe.solved_boards import SolvedBoards, solved_boards
from rollwright.run.folder import RunReader
from rollwright.trajectory import Trajectory, Turn

CURVE, PAGE = "curve.png", "report.html"
"""Files of a report in the run's folder."""

SHOWN = {(False, True): 4, (True, True): 1, (False, False): 1, (True, False): 1}
"""Pairs of episodes on the page by success before and after: mostly learned levels, and one of each other kind, so that
forgotten and unsolved levels show, too."""

MAX_BOARDS = 10
"""Most boards of one episode: a player that walks in circles shows it with these."""

SMOOTHED = 10
"""Batches in the running mean of the sampled curve: a single batch varies by a few points."""


@dataclass(frozen=True)
class Standing:
    """One player's share of solved levels."""

    name: str
    sampled: float | None
    """`None` if it was not played with sampling."""
    greedy: float | None


@dataclass(frozen=True)
class Pair:
    """Episodes on the same level before and after training."""

    before: Trajectory
    after: Trajectory


@dataclass(frozen=True)
class TrainingReport:
    """Data of the page."""

    name: str
    sampled: Points
    """Solved share of each batch that was trained on, by step."""
    greedy: Points
    """Solved share of each validation, by step."""
    standings: Sequence[Standing]
    pairs: Sequence[Pair]
    solved: Sequence[SolvedBoards]
    """Greedy play before and after, by tag; empty with one validation."""
    figures: Mapping[str, str]
    """Further figures, by name."""
    shown: str | None = None
    """Line with the kept steps; `None` if all are kept."""


def report_of(reader: RunReader, standings: Sequence[Standing] = ()) -> TrainingReport:
    """Report of a training run's folder; `standings` are players for comparison."""
    rows = reader.metrics()
    validations = [row for row in rows if row["mode"] == "val"]
    if not validations:
        raise RollwrightError(
            f"{reader.path}: has no validation to report; set val_env_manager and eval_steps"
        )
    before, after = _first_and_last(reader, validations)
    return TrainingReport(
        name=reader.title,
        sampled=[
            (row["step"], share)
            for row in rows
            if row["mode"] == "train" and (share := _solved(row)) is not None
        ],
        greedy=[(row["step"], share) for row in validations if (share := _solved(row)) is not None],
        standings=standings,
        pairs=_pairs(before, after),
        solved=solved_boards(before.values(), after.values()),
        figures=_figures(reader.summary() or {}, rows),
        shown=reader.shown_steps(),
    )


def write_report(report: TrainingReport, folder: Path) -> tuple[Path, Path]:
    """Write the curve and the page, which contains the curve, too; returns the files."""
    curve = _curve(report)
    picture, page = folder / CURVE, folder / PAGE
    picture.write_bytes(curve)
    page.write_text(_page(report, curve), encoding="utf-8")
    return picture, page


def _solved(row: Mapping[str, Any]) -> float | None:
    judged = [
        (each["episodes"], each["success"]) for each in row["tags"].values() if each["success"] is not None
    ]
    episodes = sum(count for count, _ in judged)
    return sum(count * share for count, share in judged) / episodes if episodes else None


_Played = dict[tuple[str, int], Trajectory]
"""Episodes of one validation by tag and level."""


def _first_and_last(reader: RunReader, validations: Sequence[Mapping[str, Any]]) -> tuple[_Played, _Played]:
    """Episodes of the first and the last validation; none with one validation."""
    first, last = set(validations[0]["groups"]), set(validations[-1]["groups"])
    before: _Played = {}
    after: _Played = {}
    if first == last:
        return before, after
    for each in reader.trajectories():
        if each.group_id in first:
            before[each.tag, each.seed] = each
        elif each.group_id in last:
            after[each.tag, each.seed] = each
    return before, after


def _pairs(before: _Played, after: _Played) -> list[Pair]:
    left = dict(SHOWN)
    chosen: dict[tuple[bool, bool], list[Pair]] = {kind: [] for kind in SHOWN}
    for level, earlier in before.items():
        if (later := after.get(level)) is None:
            continue
        kind = bool(earlier.success), bool(later.success)
        if left[kind]:
            left[kind] -= 1
            chosen[kind].append(Pair(earlier, later))
    return [pair for pairs in chosen.values() for pair in pairs]


def _figures(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    trained = [row for row in rows if row["mode"] == "train"]
    figures = {
        "steps": f"{len(trained):,}",
        "episodes trained on": f"{sum(row['trajectories'] for row in trained):,}",
        "sampled tokens trained on": f"{sum(row.get('tokens', 0) for row in trained):,}",
    }
    if (seconds := summary.get("seconds")) is not None:
        figures["time"] = f"{seconds / 60:.1f} min"
    if weights := summary.get("training", {}).get("weights"):
        figures["weights"] = str(weights)[:16]
    return figures


def _curve(report: TrainingReport) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RollwrightError("report needs matplotlib: install rollwright[dashboard]") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    steps = [step for step, _ in report.sampled]
    shares = [share for _, share in report.sampled]
    axis.plot(steps, [100 * each for each in shares], color="tab:blue", alpha=0.25, linewidth=1)
    axis.plot(
        steps,
        [100 * each for each in _smoothed(shares)],
        color="tab:blue",
        label="sampled, levels to train on",
    )
    axis.plot(
        [step for step, _ in report.greedy],
        [100 * share for _, share in report.greedy],
        color="tab:orange",
        marker="o",
        label="greedy, validation levels",
    )
    for standing in report.standings:
        if standing.sampled is not None and standing.greedy is not None:
            continue  # a model, which the curves show
        share = standing.sampled if standing.greedy is None else standing.greedy
        if share is not None:
            axis.axhline(100 * share, color="gray", linestyle=":", linewidth=1)
            axis.annotate(
                standing.name, (1, 100 * share), xycoords=("axes fraction", "data"), ha="right", va="bottom"
            )
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    whole_numbers(axis)
    axis.set(title=report.name, xlabel="step", ylabel="levels solved, %", ylim=(0, 104))
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    return picture.getvalue()


def _smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over `SMOOTHED` values."""
    windows = (values[max(0, end - SMOOTHED) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem 1rem .25rem 0; text-align: left }
td.number, th.number { text-align: right } img { max-width: 100% }
.episode { display: flex; flex-wrap: wrap; gap: .75rem; margin: .25rem 0 1rem }
.board { font: 14px/1.25 ui-monospace, monospace; margin: 0; padding: .4rem .6rem; background: #f2f4f7;
  border-radius: .3rem; white-space: pre }
.answer { font-size: 12px; color: #555; text-align: center } .solved { color: #1a7f37 } .failed { color: #b42318 }
"""


def _page(report: TrainingReport, curve: bytes) -> str:
    picture = base64.b64encode(curve).decode()
    body = [
        f"<h1>{escape(report.name)}</h1>",
        f'<p><img alt="share of levels solved, by step" src="data:image/png;base64,{picture}"></p>',
    ]
    if report.standings:
        body += ["<h2>Levels solved</h2>", _standings(report.standings)]
    if report.solved:
        body += ["<h2>Distinct boards solved, greedy</h2>", _solved_boards(report.solved)]
    body.append("<h2>The run</h2>")
    if report.shown is not None:
        body.append(f"<p>{escape(report.shown)}</p>")
    body.append("<table>")
    body += [
        f'<tr><td>{escape(name)}</td><td class="number">{escape(value)}</td></tr>'
        for name, value in report.figures.items()
    ]
    body.append("</table>")
    if report.pairs:
        first, last = report.greedy[0][0], report.greedy[-1][0]
        when = "before and after" if report.shown is None else f"after {first:g} and after {last:g} steps"
        body.append(f"<h2>The same levels {when}</h2>")
        body += [part for pair in report.pairs for part in _pair(pair)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(report.name)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _standings(standings: Iterable[Standing]) -> str:
    rows = [
        f'<tr><td>{escape(each.name)}</td><td class="number">{_percent(each.sampled)}</td>'
        f'<td class="number">{_percent(each.greedy)}</td></tr>'
        for each in standings
    ]
    head = '<tr><th></th><th class="number">sampled</th><th class="number">greedy</th></tr>'
    return f"<table>{head}{''.join(rows)}</table>"


def _solved_boards(solved: Iterable[SolvedBoards]) -> str:
    heads = ("levels", "boards", "before", "after", "95 % interval")
    head = "".join(f'<th class="number">{each}</th>' for each in heads)
    rows = [
        f"<tr><td>{escape(each.tag)}</td>{''.join(map(_number_cell, _boards_row(each)))}</tr>"
        for each in solved
    ]
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _boards_row(each: SolvedBoards) -> tuple[str, ...]:
    return (str(each.levels), str(each.boards), *boards_solved(each))


def _number_cell(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def boards_solved(each: SolvedBoards) -> tuple[str, str, str]:
    """Shares before and after, and the interval, as text."""
    found = each.interval
    between = "–" if found is None else f"{100 * found.low:.1f} to {100 * found.high:.1f} %"
    return _percent(each.before), _percent(each.after), between


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _pair(pair: Pair) -> list[str]:
    parts = [f"<h3>{escape(pair.before.tag)}, level {pair.before.seed}</h3>"]
    for when, trajectory in (("before", pair.before), ("after", pair.after)):
        ended = '<b class="solved">solved</b>' if trajectory.success else '<b class="failed">not solved</b>'
        turns = len(trajectory.turns)
        parts.append(f"<div>{when}: {ended} in {turns} {'turn' if turns == 1 else 'turns'}</div>")
        parts.append(f'<div class="episode">{"".join(_boards(trajectory))}</div>')
    return parts


def _boards(trajectory: Trajectory) -> list[str]:
    boards = [_board(trajectory.observation, "")]
    boards += [_board(_seen(turn), turn.text) for turn in trajectory.turns[:MAX_BOARDS]]
    if len(trajectory.turns) > MAX_BOARDS:
        boards.append("<div>…</div>")
    return boards


def _seen(turn: Turn) -> str:
    return turn.outcome.observation if turn.outcome is not None else ""


def _board(observation: str, answer: str) -> str:
    said = f'<div class="answer">{escape(answer)}</div>' if answer else '<div class="answer">start</div>'
    return f'<div>{said}<pre class="board">{escape(observation)}</pre></div>'
