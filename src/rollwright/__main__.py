"""`python -m rollwright` is the `rollwright` command."""

from rollwright.cli.entry import main

main()
