"""Rows come from files, datasets and Python; a mistake is one line that names the file and the row."""

import csv
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.tasks import TaskError, TaskSource, open_tasks, split

ROWS = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(5) for b in range(4)]

FROM_A_FUNCTION = "tasks.test_sources:rows_of_a_function"


def rows_of_a_function() -> Iterator[dict[str, str]]:
    yield from ROWS


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., TaskSource]:
    def open_it(tasks: Any) -> TaskSource:
        return open_tasks(tasks, folder=tmp_path, cache=tmp_path / "cache")

    return open_it


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


@pytest.mark.parametrize(
    ("name", "write"),
    [("t.jsonl", write_jsonl), ("t.csv", write_csv), ("t.parquet", write_parquet)],
)
def test_a_file_gives_its_rows_by_number(
    tmp_path: Path, opened: Callable[..., TaskSource], name: str, write: Callable[..., None]
) -> None:
    write(tmp_path / name, ROWS)
    for _ in range(2):  # the second time from the index that the first has left
        source = opened(name)
        assert [source.row(number) for number in reversed(range(len(source)))] == ROWS[::-1]


@pytest.mark.parametrize(
    "tasks", [FROM_A_FUNCTION, ROWS, lambda: iter(ROWS)], ids=["named", "list", "function"]
)
def test_python_gives_rows_too(
    opened: Callable[..., TaskSource], tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    source = opened(tasks)
    assert [source.row(number) for number in range(len(source))] == ROWS


def test_a_folder_of_the_datasets_package_gives_rows(
    tmp_path: Path, opened: Callable[..., TaskSource]
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
    ).save_to_disk(str(tmp_path / "sums"))
    assert len(opened("sums#test")) == 3
    assert opened("sums#train").row(19) == ROWS[19]
    with pytest.raises(TaskError, match="has the splits train, test; name one behind a `#`"):
        opened("sums")
    with pytest.raises(TaskError, match="no such split; there are train, test"):
        opened("sums#dev")


def test_blank_lines_and_a_missing_last_newline_are_no_rows(
    tmp_path: Path, opened: Callable[..., TaskSource]
) -> None:
    (tmp_path / "t.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}')
    source = opened("t.jsonl")
    assert [source.row(number) for number in range(len(source))] == [{"a": 1}, {"a": 2}]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.fixed_dictionaries({"q": TEXTS, "other, one": TEXTS}), min_size=1, max_size=8))
def test_any_text_survives_both_text_formats(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    for name, write in (("t.jsonl", write_jsonl), ("t.csv", write_csv)):
        write(tmp_path / name, rows)
        source = open_tasks(name, folder=tmp_path, cache=tmp_path / f"cache{random.random()}")
        assert [source.row(number) for number in range(len(source))] == rows


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", '{"a": 1}\n{"a": \n', "t.jsonl, line 2: is not a JSON object"),
        ("t.jsonl", '{"a": 1}\n\n[1]\n', "t.jsonl, line 3: is not a JSON object"),
        ("t.jsonl", "", "t.jsonl: holds no rows"),
        ("t.csv", "a,b\n", "t.csv: holds no rows"),
        ("t.csv", 'a,b\n1,"x\ny"\n3\n', r"t.csv, line 4: 1 fields; 2 are expected \(a, b\)"),
        ("t.csv", "a,a\n1,2\n", "line 1: names of columns must differ"),
        ("t.csv", b"a\n\xff\xfe\n", "t.csv, line 2: is not UTF-8 text"),
        ("t.parquet", "nonsense", "t.parquet: cannot be read as Parquet"),
        ("t.txt", "nonsense", "is no file that is known; accepted: a file ending in .jsonl"),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(
    tmp_path: Path, opened: Callable[..., TaskSource], name: str, content: str | bytes, said: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TaskError, match=said) as raised:
        opened(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("missing.jsonl", "missing.jsonl: cannot be read: No such file"),
        ("no_such_module:rows", "`no_such_module:rows` cannot be imported"),
        ("json:no_such_name", "`json:no_such_name` cannot be imported"),
        ("math:pi", "gives a float; an iterable of mappings is accepted"),
        ("os:getcwd", "gives a str; an iterable of mappings is accepted"),
        ([{"a": 1}, 2], "row 1: is a int; a mapping is accepted"),
        ([{"a": object()}], "row 0: holds what JSON cannot"),
        ([], "gives no rows"),
    ],
)
def test_what_gives_no_rows_is_one_line(opened: Callable[..., TaskSource], tasks: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said) as raised:
        opened(tasks)
    assert "\n" not in str(raised.value)


def test_the_fingerprint_follows_the_content_and_nothing_else(
    tmp_path: Path, opened: Callable[..., TaskSource]
) -> None:
    file = tmp_path / "t.jsonl"
    write_jsonl(file, ROWS)
    before = opened("t.jsonl").fingerprint
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert opened("t.jsonl").fingerprint == before
    write_jsonl(file, [*ROWS[:-1], {**ROWS[-1], "answer": "8"}])
    assert opened("t.jsonl").fingerprint != before


def test_a_damaged_index_is_built_anew(tmp_path: Path, opened: Callable[..., TaskSource]) -> None:
    write_jsonl(tmp_path / "t.jsonl", ROWS)
    opened("t.jsonl")
    (index,) = (tmp_path / "cache" / "tasks").iterdir()
    whole = index.read_bytes()
    for damaged in (b"", whole[:20], whole[:-8], b"x" + whole[1:]):
        index.write_bytes(damaged)
        assert opened("t.jsonl").row(7) == ROWS[7]


def test_the_rows_of_a_large_file_are_not_held_in_memory(
    tmp_path: Path, opened: Callable[..., TaskSource]
) -> None:
    """A row is read by its offset: what stands elsewhere in the file is not looked at."""
    file = tmp_path / "t.jsonl"
    write_jsonl(file, ROWS)
    source = opened("t.jsonl")
    text = file.read_text()
    wanted = json.dumps(ROWS[9])
    spoilt = "".join(
        wanted + "\n" if line == wanted else "?" * len(line) + "\n" for line in text.splitlines()
    )
    file.write_text(spoilt)
    assert source.row(9) == ROWS[9]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", ROWS)
    (tmp_path / "cache").write_text("a file where a folder should be")
    source = open_tasks("t.jsonl", folder=tmp_path, cache=tmp_path / "cache")
    assert source.row(3) == ROWS[3]


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.parquet"])
def test_a_split_parts_the_rows_and_is_the_same_when_others_are_added(
    tmp_path: Path, opened: Callable[..., TaskSource], name: str
) -> None:
    rows = [{"n": str(number)} for number in range(200)]
    write = {"t.jsonl": write_jsonl, "t.csv": write_csv, "t.parquet": write_parquet}[name]

    def parts() -> list[set[str]]:
        return [
            {part.row(number)["n"] for number in range(len(part))} for part in split(opened(name), 0.25, name)
        ]

    write(tmp_path / name, rows)
    train, held_out = parts()
    assert not train & held_out
    assert train | held_out == {row["n"] for row in rows}
    write(tmp_path / name, [{"n": "another"}, *reversed(rows)])
    assert [part - {"another"} for part in parts()] == [train, held_out]


def test_rows_too_few_to_split_are_refused(opened: Callable[..., TaskSource]) -> None:
    with pytest.raises(
        TaskError, match=r"1 rows cannot be split with 0\.1 held out; give a file of its own instead"
    ):
        split(opened([{"a": 1}]), 0.1, "tasks")
