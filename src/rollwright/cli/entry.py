"""Entry point of the `rollwright` command: installs the signal handlers before slow imports, and leaves without sorting out the
memory that the operating system takes back anyway."""

import gc

from rollwright.signals import INTERRUPTS


def main() -> None:
    INTERRUPTS.install()
    from rollwright.cli.main import main as run_command

    try:
        run_command()
    finally:
        # Python's last collection looks at every object that is left, which took longest of all after many episodes. Exit
        # handlers, threads and open files are ended as always.
        gc.freeze()
