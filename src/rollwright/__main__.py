"""`python -m rollwright` is the `rollwright` command."""

from rollwright.cli.main import main

main()
