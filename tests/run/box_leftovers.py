"""What boxes may have left on this machine, for tests that everything is gone."""

from pathlib import Path

import psutil

from rollwright.sandbox import cgroups
from rollwright.sandbox.leases import boxes_folder, id_prefix


def leftovers(state: Path) -> list[str]:
    """Everything on this machine that belongs to boxes of this state folder."""
    found = [f"folder {each.name}" for each in boxes_folder(state).glob("*")]
    found += [f"group {each}" for each in cgroups.all_groups() if each.startswith(id_prefix(state))]
    mounts = Path("/proc/mounts").read_text().splitlines()
    found += [f"mount {line}" for line in mounts if str(state) in line]
    for process in psutil.process_iter(["cmdline"]):
        if str(boxes_folder(state)) in " ".join(process.info["cmdline"] or ()):
            found.append(f"process {process.pid}")
    return found
