"""Entry point of the `rollwright` command: installs the signal handlers before slow imports."""

from rollwright.signals import INTERRUPTS


def main() -> None:
    INTERRUPTS.install()
    from rollwright.cli.main import main as run_command

    run_command()
