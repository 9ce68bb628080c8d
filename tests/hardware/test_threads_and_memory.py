"""Rows E2 and E3: cores, memory and devices as this process may use them, with both layouts of groups."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollwright.errors import ConfigError
from rollwright.hardware import (
    GIB,
    ROOT,
    Cgroups,
    Cores,
    cpu_only,
    device_name,
    free_memory,
    is_out_of_memory,
    plan_threads,
    usable_cores,
)

HERE = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.fixture
def second(tmp_path: Path) -> Cgroups:
    """Version 2: the pod above is tighter than the container."""
    write(
        tmp_path / "fs",
        {
            "pod/cpu.max": "150000 100000",
            "pod/memory.max": str(8 * GIB),
            "pod/memory.current": str(6 * GIB),
            "pod/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
            "pod/box/cpu.max": "max 100000",
            "pod/box/memory.max": "max",
            "pod/box/memory.current": str(GIB),
        },
    )
    write(tmp_path, {"member": "0::/pod/box\n"})
    return Cgroups(tmp_path / "fs", tmp_path / "member")


@pytest.fixture
def first(tmp_path: Path) -> Cgroups:
    """Version 1, as seen inside a container: the path is the host's, and only the root is mounted."""
    place = tmp_path / "first"
    write(
        place / "fs",
        {
            "cpu/cpu.cfs_quota_us": "50000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": str(4 * GIB),
            "memory/memory.usage_in_bytes": str(3 * GIB),
            "memory/memory.stat": f"total_inactive_file {2 * GIB}\n",
        },
    )
    write(place, {"member": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/docker/abc\n"})
    return Cgroups(place / "fs", place / "member")


def test_the_tightest_group_on_the_way_up_counts(second: Cgroups, first: Cgroups) -> None:
    assert second.cores() == 1.5
    assert first.cores() == 0.5
    assert usable_cores(second).count == 1
    assert usable_cores(first).count == 1


def test_a_group_without_limit_leaves_what_the_process_may_run_on(tmp_path: Path) -> None:
    write(tmp_path, {"member": "0::/\n", "fs/cpu.max": "max 100000", "fs/memory.max": "max"})
    groups = Cgroups(tmp_path / "fs", tmp_path / "member")
    assert groups.cores() is None
    assert groups.free_memory() is None
    assert usable_cores(groups).count == HERE
    assert usable_cores(Cgroups(tmp_path / "none", tmp_path / "none")).count == HERE


def test_free_memory_is_the_groups_when_that_is_less(second: Cgroups, first: Cgroups) -> None:
    assert free_memory(second, lambda: 32 * GIB) == 3 * GIB
    assert free_memory(first, lambda: 32 * GIB) == 3 * GIB
    assert free_memory(second, lambda: GIB) == GIB


def test_free_memory_of_this_machine_is_a_part_of_what_it_has() -> None:
    assert 0 < free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def real_quota() -> Iterator[Path]:
    """A real group of version 1 that may use one core's worth of time, where this machine lets one make it."""
    place = ROOT / "cpu" / f"rollwright-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / "cpu.cfs_quota_us").write_text("100000")
    except OSError:
        pytest.skip("groups cannot be made here")
    yield place
    place.rmdir()


def test_a_real_group_limits_a_real_process(real_quota: Path) -> None:
    code = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()));"
        "from rollwright.hardware import usable_cores; print(usable_cores().count)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(real_quota)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("environment", "wanted", "expected"),
    [
        ({}, "auto", 8),
        ({"ROLLWRIGHT_WORKERS": "4"}, "auto", 2),
        ({"ROLLWRIGHT_WORKERS": "100"}, "auto", 1),
        ({}, 3, 3),
        ({"OMP_NUM_THREADS": "5,2"}, 3, 5),
        ({"MKL_NUM_THREADS": "5"}, "auto", 5),
        ({"OMP_NUM_THREADS": "8", "ROLLWRIGHT_THREADS": "8", "ROLLWRIGHT_WORKERS": "2"}, "auto", 4),
    ],
)
def test_threads_are_shared_out_unless_the_user_says_how_many(
    environment: dict[str, str], wanted: int | str, expected: int
) -> None:
    assert plan_threads(wanted, environment, Cores(8, "")).threads == expected  # type: ignore[arg-type]


TORCH_THREADS = """
from rollwright.models.loading import set_threads
set_threads()
import torch, os
print(torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize(
    ("variables", "prefix", "expected"),
    [
        ({}, ["taskset", "-c", str(min(os.sched_getaffinity(0)))], "1 PASSIVE"),
        ({"OMP_NUM_THREADS": "3"}, [], "3 PASSIVE"),
        ({"MKL_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}, [], "3 ACTIVE"),
    ],
)
def test_torch_gets_the_threads_that_were_decided(
    variables: dict[str, str], prefix: list[str], expected: str
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "MKL_", "ROLLWRIGHT_"))
    }
    done = subprocess.run(
        [*prefix, sys.executable, "-c", TORCH_THREADS],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_cpu_only_wins_and_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def touched() -> int:
        raise AssertionError("CUDA was asked for")

    monkeypatch.setattr(torch.cuda, "device_count", touched)
    monkeypatch.delenv("CPU_ONLY", raising=False)
    assert device_name("cpu") == "cpu"
    monkeypatch.setenv("CPU_ONLY", "true")
    assert device_name("auto") == device_name("cuda:1") == "cpu"
    monkeypatch.setenv("CPU_ONLY", "0")
    assert not cpu_only()
    with pytest.raises(AssertionError):
        device_name("auto")


def test_a_device_is_named_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("CPU_ONLY", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_name("auto") == device_name("cuda") == "cuda:0"
    assert device_name("cuda:1") == "cuda:1"
    with pytest.raises(
        ConfigError, match="device cuda:2 does not exist here; accepted: auto, cpu, cuda:0, cuda:1"
    ):
        device_name("cuda:2")
    with pytest.raises(ConfigError, match="'gpu' is unknown; accepted: auto, cpu, cuda, cuda:N, mps"):
        device_name("gpu")


def test_an_error_of_memory_is_known_as_one() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))


def test_a_command_that_runs_out_of_memory_ends_like_one_that_is_killed_for_it() -> None:
    code = """
import torch
import rollwright.cli.main as command
command.app = lambda: torch.empty(1 << 60)
command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 137
    assert done.stderr.startswith("error: out of memory: ")
    assert "training.tokens_per_micro_batch" in done.stderr
    assert "Traceback" not in done.stderr
