"""Which of the kernel's OOM kills count as the node's."""

from pathlib import Path

import pytest

from rollwright.swarm.supervisor.processes import memory_kills


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("group", "counter", "content"),
    [
        ("0::/node\n", "sys/fs/cgroup/node/memory.events.local", "low 0\noom 7\noom_kill 3\n"),
        (
            "9:name=systemd:/\n4:memory:/node\n",
            "sys/fs/cgroup/memory/node/memory.oom_control",
            "oom_kill 3\n",
        ),
    ],
)
def test_a_kill_in_another_control_group_is_not_the_nodes(
    tmp_path: Path, group: str, counter: str, content: str
) -> None:
    root = write(tmp_path, {"proc/self/cgroup": group, counter: content, "proc/vmstat": "oom_kill 18\n"})
    assert memory_kills(root) == 3


def test_without_control_groups_the_whole_machine_counts(tmp_path: Path) -> None:
    assert memory_kills(write(tmp_path, {"proc/vmstat": "nr_free_pages 5\noom_kill 18\n"})) == 18
    assert memory_kills(tmp_path / "elsewhere") is None
