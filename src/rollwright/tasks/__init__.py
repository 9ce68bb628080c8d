"""Task files and datasets as environments: where rows come from, in which order they are drawn, how a row reads."""

from rollwright.tasks.index import TaskError
from rollwright.tasks.order import HeldOut, epoch_row, is_held_out
from rollwright.tasks.sources import TaskSource, open_tasks

__all__ = ["HeldOut", "TaskError", "TaskSource", "epoch_row", "is_held_out", "open_tasks"]
