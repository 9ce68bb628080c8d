"""Where the `rollwright` command begins: signals are answered before anything slow is imported."""

from rollwright.signals import INTERRUPTS


def main() -> None:
    INTERRUPTS.install()
    from rollwright.cli.main import main as run_command

    run_command()
