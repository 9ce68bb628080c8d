"""A report and a comparison as Markdown and as a page of HTML. Pure: equal reports give equal bytes.

The page needs nothing but itself: no script, no font, no address. Whatever comes from a model or a task file is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rollwright.evaluation.charts import interval_chart, pass_curve, task_histogram

SIMULATED = "SIMULATED"
"""Marks results of the simulated engine, which say nothing about a model."""

LISTED_TASKS = 1000
"""Tasks that the page lists; the JSON has all of them."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heads and rows of a table, as text."""


def share(value: float | None, *, metric: str = "success") -> str:
    """A score as text: a percentage, or a reward."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric == "success" else f"{value:.3f}"


def interval(estimate: Mapping[str, Any] | None, *, metric: str = "success") -> str:
    """An interval as text."""
    if estimate is None or estimate["low"] is None:
        return "–"
    low, high = estimate["low"], estimate["high"]
    return f"{100 * low:.1f} – {100 * high:.1f}" if metric == "success" else f"{low:.3f} – {high:.3f}"


def title(report: Mapping[str, Any]) -> str:
    simulated = f" · {SIMULATED}" if report["simulated"] else ""
    return f"{report['model']['name']}{simulated}"


def headline(report: Mapping[str, Any]) -> str:
    """The result in one line."""
    overall, metric = report["overall"], report["metric"]
    score, percent = overall["score"], f"{100 * report['plan']['confidence']:g} %"
    if score is None:
        return "no episode has a result"
    found = f"{share(score['value'], metric=metric)} {'solved' if metric == 'success' else 'mean reward'}"
    if score["low"] is not None:
        found += f" ({percent} interval {interval(score, metric=metric)})"
    tasks, episodes = report["tasks"], report["episodes"]
    found += f" over {tasks['with_result']:,} tasks, {episodes['finished']:,} episodes"
    return f"{found}, {episodes['failed']:,} failed" if episodes["failed"] else found


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was evaluated and how, by name."""
    sampling, plan, episodes, tasks = report["sampling"], report["plan"], report["episodes"], report["tasks"]
    top_p = f", top_p {sampling['top_p']:g}" if sampling["top_p"] != 1 else ""
    found = [
        ("model", f"{report['model']['name']} ({report['model']['kind']})"),
        ("sampling", f"temperature {sampling['temperature']:g}{top_p}"),
        ("seed", str(report["seed"])),
        ("tasks", f"{tasks['played']:,} of {plan['tasks']:,}, {plan['samples']} samples of each"),
        ("state", report["state"]),
    ]
    if episodes["failed"] or episodes["not_played"]:
        text = f"{episodes['failed']:,} failed, {episodes['not_played']:,} not played; in no figure"
        found.append(("without result", text))
    if tasks["without_result"]:
        found.append(("tasks without result", f"{tasks['without_result']:,}, all their episodes failed"))
    if plan["half_width"] is not None:
        looks = ", ".join(str(each) for each in plan["looks"])
        found.append(
            (
                "stopping rule",
                f"± {plan['half_width']:g}; looks at {looks} tasks, intervals corrected for them",
            )
        )
    if plan.get("strata"):
        told = "; ".join(
            f"{each['expected']}: {each['played']:,} of {each['tasks']:,}" for each in plan["strata"]
        )
        found.append(
            ("order", f"by known difficulty, each result for all of its kind; expected score {told}")
        )
    total = report["cost"]["total"]
    money = "" if total["usd"] is None else f"${total['usd']:,.4f} · "
    tokens = (
        f"{total['prompt']:,} prompt tokens ({total['cached']:,} cached), {total['completion']:,} sampled"
    )
    reasoning = f" ({total['reasoning']:,} reasoning)" if total["reasoning"] else ""
    found.append(("cost of the results", f"{money}{tokens}{reasoning}"))
    return found


def score_table(report: Mapping[str, Any]) -> Table:
    """Scores of the whole and of every tag."""
    rows = [("all", report["overall"]), *report["tags"].items()]
    if len(report["tags"]) == 1:
        rows = rows[1:]
    return _results_table("tag", rows, report)


def breakdown_tables(report: Mapping[str, Any]) -> list[tuple[str, Table]]:
    return [
        (f"by {name}", _results_table(name, list(values.items()), report))
        for name, values in report["by"].items()
    ]


def _results_table(head: str, rows: Iterable[tuple[str, Any]], report: Mapping[str, Any]) -> Table:
    metric = report["metric"]
    percent = f"{100 * report['plan']['confidence']:g} %"
    heads = [
        head,
        "tasks",
        "episodes",
        "failed",
        "score",
        f"{percent} interval",
        "bootstrap",
        "reward",
        "turns",
        "tokens",
    ]
    made = []
    for name, each in rows:
        score, drawn = each["score"], None if each["score"] is None else each["score"]["bootstrap"]
        boot = None if drawn is None else {"low": drawn[0], "high": drawn[1]}
        made.append(
            [
                name,
                f"{each['tasks']:,}",
                f"{each['episodes']:,}",
                f"{each['failed']:,}",
                share(None if score is None else score["value"], metric=metric),
                interval(score, metric=metric),
                interval(boot, metric=metric),
                share(None if each["reward"] is None else each["reward"]["value"], metric="reward"),
                "–" if each["turns"] is None else f"{each['turns']:.1f}",
                "–" if each["tokens"] is None else f"{each['tokens']:,.0f}",
            ]
        )
    return heads, made


def k_table(report: Mapping[str, Any]) -> Table | None:
    """pass@k and majority@k; `None` if tasks are not judged as solved or not."""
    overall = report["overall"]
    if overall["pass@k"] is None or report["plan"]["k"] == [1]:
        return None
    votes = overall["majority@k"]
    heads = ["k", "pass@k", "interval", "tasks"] + (["majority@k", "interval"] if votes else [])
    rows = []
    for k, each in overall["pass@k"].items():
        row = [k, share(each and each["value"]), interval(each), str(each["tasks"] if each else 0)]
        if votes:
            row += [share(votes[k] and votes[k]["value"]), interval(votes[k])]
        rows.append(row)
    return heads, rows


def cost_table(report: Mapping[str, Any]) -> Table:
    heads = ["model", "agent", "tag", "judge", "calls", "prompt", "cached", "completion", "reasoning", "usd"]
    rows = []
    for each in report["cost"]["entries"]:
        numbers = [f"{each[name]:,}" for name in heads[4:9]]
        money = "–" if each["usd"] is None else f"{each['usd']:.4f}"
        rows.append([*(each[name] or "–" for name in heads[:4]), *numbers, money])
    return heads, rows


def render_markdown(report: Mapping[str, Any]) -> str:
    lines = [f"# {_plain(title(report))}", "", f"**{headline(report)}**", ""]
    lines += [f"- {name}: {_plain(text)}" for name, text in facts(report)]
    sections: list[tuple[str, Table | None]] = [
        ("Scores", score_table(report)),
        ("Several samples", k_table(report)),
    ]
    sections += breakdown_tables(report)
    sections.append(("Failures", _failure_table(report)))
    sections.append(("Cost", cost_table(report)))
    for name, table in sections:
        if table is not None and table[1]:
            lines += ["", f"## {_plain(name)}", "", *markdown_table(table)]
    return "\n".join(lines) + "\n"


def _failure_table(report: Mapping[str, Any]) -> Table:
    return ["cause", "episodes"], [[each["cause"], f"{each['count']:,}"] for each in report["failures"]]


def markdown_table(table: Table) -> list[str]:
    heads, rows = table
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows]


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    line = " ".join(str(text).split())
    for mark in ("\\", "|", "`", "*", "_", "<", "["):
        line = line.replace(mark, f"\\{mark}")
    return line


STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5d6b7c;--line:#dfe4ea;--ground:#fff;--panel:#f6f8fa;--mark:#2563eb;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa7b6;--line:#2c3540;--ground:#11161c;--panel:#171e26;--mark:#6ea8fe;--bad:#f97066}}
*{box-sizing:border-box}body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:2rem 1.25rem 4rem}h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.05rem;margin:2.25rem 0 .5rem}
.big{font-size:2.6rem;font-weight:650;line-height:1.1;margin:.75rem 0 .1rem}.soft{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:1rem 0}dt{color:var(--soft)}dd{margin:0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:.85rem}th:first-child,td:first-child,td.text,th.text{text-align:left;white-space:normal}
svg text{fill:var(--soft);font-size:12px}svg .axis{stroke:var(--line)}svg .bar{stroke:var(--mark);stroke-width:6;opacity:.35}
svg .dot,svg .column{fill:var(--mark)}svg .column{opacity:.75}svg .zero{stroke:var(--soft);stroke-dasharray:3 3}
svg .name{fill:var(--ink);font-size:13px}summary{cursor:pointer;color:var(--soft)}
.warn{color:var(--bad)}
"""


def render_html(report: Mapping[str, Any]) -> str:
    metric, overall = report["metric"], report["overall"]
    score = overall["score"]
    parts = [f"<h1>{escape(title(report))}</h1>"]
    if score is not None:
        parts.append(f'<p class="big">{share(score["value"], metric=metric)}</p>')
    parts.append(f'<p class="soft">{escape(headline(report))}</p>')
    if report["state"] == "incomplete":
        parts.append(
            '<p class="warn">This evaluation has not ended: the figures are those of the episodes so far.</p>'
        )
    parts.append(
        "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(t)}</dd>" for n, t in facts(report)) + "</dl>"
    )
    parts.append("<h2>Scores</h2>")
    if metric == "success":
        parts.append(interval_chart(report))
    parts.append(html_table(score_table(report)))
    if metric == "success" and len(report["results"]) > 1:
        parts += ["<h2>How difficult the tasks were</h2>", task_histogram(report)]
    if (table := k_table(report)) is not None:
        parts += ["<h2>Several samples</h2>", pass_curve(report), html_table(table)]
    for name, found in breakdown_tables(report):
        parts += [f"<h2>{escape(name.capitalize())}</h2>", html_table(found)]
    if report["failures"]:
        parts += [
            "<h2>Failures</h2>",
            '<p class="soft">Not counted as zeros: they are in no figure above.</p>',
        ]
        parts.append(html_table(_failure_table(report)))
    parts += ["<h2>Cost</h2>", html_table(cost_table(report)), _task_list(report)]
    return page(title(report), "\n".join(parts))


def page(name: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(name)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def html_table(table: Table) -> str:
    heads, rows = table
    if not rows:
        return '<p class="soft">none</p>'
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(each))}</td>" for each in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _task_list(report: Mapping[str, Any]) -> str:
    metric, results = report["metric"], report["results"]
    rows = []
    for each in results[:LISTED_TASKS]:
        scores = [
            share(one["success"] if one["success"] is not None else one["reward"], metric=metric)
            if one["success"] not in (0.0, 1.0)
            else "●"
            if one["success"]
            else "○"
            for one in each["samples"]
        ]
        rows.append(
            [
                each["task"],
                each["tag"],
                share(each["score"], metric=metric),
                str(each["failed"]),
                " ".join(scores),
            ]
        )
    more = f" (the first {LISTED_TASKS:,}; report.json has all)" if len(results) > LISTED_TASKS else ""
    table = html_table((["task", "tag", "score", "failed", "samples"], rows))
    return f"<h2>Tasks</h2><details><summary>{len(results):,} tasks{more}</summary>{table}</details>"
