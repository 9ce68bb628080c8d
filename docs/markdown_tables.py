"""Tables in Markdown."""

from collections.abc import Sequence


def promise_table(rows: Sequence[tuple[str, str, bool]]) -> str:
    return table(
        ("promise", "measured", "kept"),
        [(promise, measured, "yes" if kept else "**no**") for promise, measured, kept in rows],
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([each.replace("|", "\\|") for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
