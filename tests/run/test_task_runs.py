"""Runs that play the rows of a task file: which rows, judged how, and what happens to files that change."""

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import RunConfig, build, load
from rollwright.errors import ConfigError
from rollwright.rollout.groups import Draw, GroupBook, GroupRules
from rollwright.run.build import SettingsTable
from rollwright.run.checks import check_config
from rollwright.run.folder import RunReader
from rollwright.run.run import Run
from rollwright.simulation.players import OraclePlayer
from rollwright.trajectory import Trajectory

ROWS = 12
REWARDS = [{"kind": "exact_match", "extract": r"(\S+)\s*$"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))


def write_rows(file: Path, first: int = 0, count: int = ROWS) -> Path:
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(first, first + count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def content(tmp_path: Path, **more: Any) -> dict[str, Any]:
    custom = {"tasks": "sums.jsonl", "rewards": REWARDS, **more.pop("custom", {})}
    return {
        "name": "sums",
        "folder": str(tmp_path),
        "custom_envs": {"Sums": custom},
        "policy": {"kind": "oracle"},
        "train_env_manager": {"num_env_groups": 4, "group_size": 2, "tags": ["Sums"]},
        **more,
    }


async def play(config: RunConfig, batches: int, **more: Any) -> list[Trajectory]:
    async with Run(config, **more) as run:
        return [each for _ in range(batches) for each in (await run.get_batch()).trajectories]


def rows_of(trajectories: list[Trajectory]) -> dict[str, int]:
    return {each.group_id: each.seed for each in trajectories}


def test_every_row_is_played_once_in_each_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    played = asyncio.run(play(build(content(tmp_path)), 6))
    rows = list(rows_of(played).values())
    assert Counter(rows[:ROWS]) == Counter(rows[ROWS:]) == Counter(range(ROWS))
    assert rows[:ROWS] != rows[ROWS:]
    for each in played:
        assert each.observation == f"{each.seed} + 1 = ?"
        assert (each.reward, each.components, each.success) == (1.0, {"exact_match": 1.0}, True)


def test_worker_processes_play_the_same_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    here = asyncio.run(play(build(content(tmp_path)), 2))
    there = asyncio.run(play(build(content(tmp_path)), 2, processes=2))
    assert rows_of(here) == rows_of(there)
    assert {each.components["exact_match"] for each in there} == {1.0}


def test_tags_with_tasks_and_environments_share_a_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    manager = {"num_env_groups": 4, "group_size": 1, "tags": ["Sums", "FrozenLake"]}
    played = asyncio.run(play(build(content(tmp_path, train_env_manager=manager)), 6))
    assert Counter(each.seed for each in played if each.tag == "Sums") == Counter(range(ROWS))
    assert {each.tag for each in played} == {"Sums", "FrozenLake"}


def test_a_group_book_without_a_level_function_draws_levels_by_seed(tmp_path: Path) -> None:
    plain = GroupBook(GroupRules(1), ["A"], run_seed=1, mode="train", prefix="p")
    given = GroupBook(
        GroupRules(1),
        ["A", "B"],
        run_seed=1,
        mode="train",
        prefix="p",
        draw=lambda tag, index: Draw(tag, index, 1),
    )
    assert plain.open_group().enqueue[0][1].seed > 1000
    assert [given.open_group().enqueue[0][1].seed for _ in range(3)] == [0, 1, 2]


def test_held_out_rows_are_validated_in_file_order_and_never_trained_on(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", count=40)
    val = {"num_env_groups": 4, "tags": ["Sums"]}
    config = build(content(tmp_path, custom={"held_out": 0.3}, val_env_manager=val))

    async def run() -> tuple[list[str], list[str], list[str]]:
        async with Run(config) as it:
            train = [each.observation for _ in range(10) for each in (await it.get_batch()).trajectories]
            first, second = await it.evaluate(0), await it.evaluate(1)
            return train, *([each.observation for each in batch.trajectories] for batch in (first, second))

    train, first, second = asyncio.run(run())
    assert first == second
    assert [int(each.split()[0]) for each in first] == sorted(int(each.split()[0]) for each in first)
    assert len(set(first)) == 4
    assert not set(first) & set(train)


def test_held_out_rows_may_be_a_file_of_their_own(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    write_rows(tmp_path / "test.jsonl", first=100, count=3)
    val = {"num_env_groups": 3, "tags": ["Sums"]}
    config = build(content(tmp_path, custom={"held_out": "test.jsonl"}, val_env_manager=val))

    async def run() -> list[str]:
        async with Run(config) as it:
            return [each.observation for each in (await it.evaluate(0)).trajectories]

    assert asyncio.run(run()) == ["100 + 1 = ?", "101 + 1 = ?", "102 + 1 = ?"]


def test_a_killed_run_goes_on_with_the_rows_that_it_would_have_played(crash_lab: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", count=48)
    settings = content(tmp_path, name="crash", max_steps=6, max_inflight=8)
    settings["policy"] = {"kind": "simulated", "skill": 1.0, "tokens_per_second": 100, "mean_tokens": 20}
    del settings["folder"]
    crash_lab.config(**settings)
    whole = asyncio.run(play(build({**settings, "folder": str(tmp_path), "policy": {"kind": "oracle"}}), 6))
    run = crash_lab.start("run", "crash.yaml")
    log = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(lambda: log.exists() and len(log.read_text().splitlines()) >= 2, "two batches")
    run.send_signal(signal.SIGKILL)
    run.wait()
    crash_lab.do("resume", crash_lab.run_folder)
    played = list(RunReader(crash_lab.run_folder).trajectories())
    assert {group.replace("sums", "crash"): row for group, row in rows_of(whole).items()} == rows_of(played)


def test_a_resume_with_a_changed_file_is_refused_in_one_line(crash_lab: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    settings = content(tmp_path, name="crash", max_steps=1)
    crash_lab.config(**settings)
    crash_lab.do("run", "crash.yaml")
    assert RunReader(crash_lab.run_folder).config.custom_envs["Sums"].tasks_fingerprint
    write_rows(tmp_path / "sums.jsonl", first=1)
    _, said = crash_lab.finish(crash_lab.start("resume", crash_lab.run_folder, "max_steps=2"), code=2)
    assert len(said.strip().splitlines()) == 1
    assert "custom_envs.Sums.tasks: the rows of sums.jsonl are not those that the run was begun with" in said


def test_workers_refuse_rows_that_are_not_those_of_the_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    asyncio.run(play(build(content(tmp_path)), 1))
    recorded = {"tasks_fingerprint": "0" * 32}
    with pytest.raises(ConfigError, match="not those that the run was begun with"):
        SettingsTable(build(content(tmp_path, custom=recorded)))


def test_files_are_looked_up_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "sums.jsonl")
    settings = content(tmp_path)
    del settings["folder"]
    (tmp_path / "sums.yaml").write_text(json.dumps(settings), encoding="utf-8")
    monkeypatch.chdir("/")
    config = load(tmp_path / "sums.yaml")
    assert config.folder == str(tmp_path.resolve())
    check_config(config)


@pytest.mark.parametrize(
    ("custom", "more", "says"),
    [
        (
            {"tasks": "none.jsonl"},
            {},
            r"custom_envs\.Sums\.tasks: .*none\.jsonl: cannot be read: No such file",
        ),
        (
            {"template": "{questoin}"},
            {},
            r"custom_envs\.Sums\.tasks: .*`\{questoin\}` is no field; accepted: ",
        ),
        ({"rewards": []}, {}, r"custom_envs\.Sums\.rewards: is needed"),
        ({"rewards": ["group_judge"]}, {}, r"rubric: is needed"),
        (
            {"rewards": [{"kind": "group_judge", "rubric": "r"}]},
            {"train_env_manager": {"num_env_groups": 2, "group_size": 1, "tags": ["Sums"]}},
            r"custom_envs\.Sums\.rewards: group_judge ranks the members of a group; .*group_size is 1",
        ),
        (
            {"rewards": [{"kind": "group_judge", "rubric": "r"}]},
            {"strategy": {"kind": "tree"}},
            r"custom_envs\.Sums\.rewards: group_judge ranks episodes with one answer each",
        ),
        ({"rewards": ["no_such_module:f"]}, {}, r"custom_envs\.Sums\.rewards: .*cannot be imported"),
        ({"rewards": ["exact_mach"]}, {}, r"custom_envs\.Sums\.rewards\.0\.kind: .*exact_mach"),
        ({"env_type": "FrozenLake"}, {}, r"custom_envs\.Sums\.tasks: are played in place of an environment"),
        (
            {},
            {"val_env_manager": {"num_env_groups": 1, "tags": ["Sums"]}},
            r"custom_envs\.Sums\.held_out: is needed, because val_env_manager plays the tag too",
        ),
        (
            {},
            {"train_env_manager": None, "val_env_manager": {"num_env_groups": 20, "tags": ["Sums"]}},
            r"val_env_manager\.num_env_groups: 20 groups of Sums are more than its 12 rows",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(
    tmp_path: Path, custom: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    write_rows(tmp_path / "sums.jsonl")
    with pytest.raises(ConfigError, match=says) as raised:
        check_config(build(content(tmp_path, custom=custom, **more)))
    assert "\n" not in str(raised.value)


def test_a_row_without_the_templates_field_fails_its_rollouts_with_the_cause(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "sums.jsonl", count=4)
    file.write_text(file.read_text() + '{"other": 1, "answer": 2}\n', encoding="utf-8")
    told: list[str] = []
    manager = {"num_env_groups": 5, "group_size": 1, "tags": ["Sums"]}
    config = build(content(tmp_path, train_env_manager=manager, limits={"max_attempts": 1}))

    async def run() -> list[Trajectory]:
        async with Run(config, on_failed=lambda rollout, reason: told.append(f"{rollout}: {reason}")) as it:
            return (await it.get_batch()).trajectories

    played = asyncio.run(run())
    assert 4 not in {each.seed for each in played}
    assert told
    assert "environment: EnvironmentFailure: row 4: template: `{question}` is no field" in told[0]


def test_the_oracle_answers_with_the_field_of_the_right_answer(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl")
    played = asyncio.run(play(build(content(tmp_path)), 1, policy=OraclePlayer()))
    assert [each.turns[-1].text.strip() for each in played] == [str(each.seed + 1) for each in played]


def sampled(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """A random player among four answers, of which one is right: some groups differ and others do not."""
    manager = {"num_env_groups": 4, "group_size": 4, "tags": ["FrozenLake"], "filters": ["zero_variance"]}
    sampler = {"explore": 0.4, **more.pop("task_sampler", {})}
    return {
        "name": "crash",
        "policy": {"kind": "random"},
        "train_env_manager": {**manager, "task_sampler": sampler},
        **more,
    }


def drawn(folder: Path) -> list[tuple[int, int, int]]:
    return [
        (row["group"], row["level"], row["members"]) for row in RunReader(folder).draws() if "slot" in row
    ]


def test_levels_that_teach_come_again_and_a_killed_run_draws_what_it_would_have_drawn(
    crash_lab: Any, tmp_path: Path
) -> None:
    crash_lab.config(**sampled(tmp_path, max_steps=12))
    run = crash_lab.start("run", "crash.yaml")
    log = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(lambda: log.exists() and len(log.read_text().splitlines()) >= 4, "four batches")
    run.send_signal(signal.SIGKILL)
    run.wait()
    crash_lab.do("resume", crash_lab.run_folder)
    killed = drawn(crash_lab.run_folder)
    crash_lab.run_folder.rename(tmp_path / "killed")
    crash_lab.do("run", "crash.yaml")
    assert drawn(crash_lab.run_folder) == killed
    levels = Counter(level for _, level, _ in killed)
    assert max(levels.values()) > 1, "some level was played again"
    played = list(RunReader(tmp_path / "killed").trajectories())
    by_group = {
        each.group_id: {other.seed for other in played if other.group_id == each.group_id} for each in played
    }
    assert all(len(seeds) == 1 for seeds in by_group.values()), "members of a group play one level"


def test_a_damaged_line_of_the_draws_costs_no_group(crash_lab: Any, tmp_path: Path) -> None:
    """Groups in flight play what their rollouts say, although the line that drew them is gone."""
    crash_lab.config(**sampled(tmp_path, max_steps=8))
    run = crash_lab.start("run", "crash.yaml")
    log = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, "three batches")
    run.send_signal(signal.SIGKILL)
    run.wait()
    file = crash_lab.run_folder / "draws.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    draws = [place for place, line in enumerate(lines) if b'"slot"' in line]
    lines[draws[-1]] = b"#" * 40 + b"\n"
    file.write_bytes(b"".join(lines))
    said = crash_lab.do("resume", crash_lab.run_folder)
    assert "draws.jsonl: line" in said
    played = list(RunReader(crash_lab.run_folder).trajectories())
    by_group: dict[str, set[int]] = {}
    for each in played:
        by_group.setdefault(each.group_id, set()).add(each.seed)
    assert all(len(seeds) == 1 for seeds in by_group.values())


async def test_sizes_of_groups_adapt_and_batches_are_as_large_as_asked_for(tmp_path: Path) -> None:
    settings = sampled(tmp_path, task_sampler={"largest_group": 12, "explore": 0.2}, rollout_batch_size=16)
    async with Run(build(settings)) as run:
        sizes: list[int] = []
        for _ in range(12):
            batch = await run.get_batch()
            assert len(batch.trajectories) >= 16
            for group in batch.groups:
                assert len(group.trajectories) == group.size
                sizes.append(group.size)
    assert len(set(sizes)) > 1
    assert all(2 <= size <= 12 for size in sizes)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"name": "easiest"}, "task sampler: unknown `easiest`; known: teaching, or module:name"),
        ({"low": 0.9, "high": 0.2}, "task_sampler.low: 0.9 is not below high, which is 0.2"),
        ({"largest_group": 2}, "task_sampler.largest_group: 2 is below group_size, which is 4"),
        ({"smallest_group": 5, "largest_group": 8}, "task_sampler.smallest_group: 5 is above group_size"),
    ],
)
def test_a_wrong_task_sampler_is_one_line(sampler: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(build(sampled(tmp_path, task_sampler=sampler)))


def test_a_swarm_has_no_task_sampler(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task_sampler: the nodes of a swarm verify"):
        check_config(build(sampled(tmp_path, swarm={})))
