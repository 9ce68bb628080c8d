"""Task files and datasets as environments: where rows come from, in which order they are drawn, how a row reads."""

from rollwright.tasks.index import Row, TaskError
from rollwright.tasks.order import draw_of, epoch_row
from rollwright.tasks.sources import TaskSource, open_tasks, split

__all__ = ["Row", "TaskError", "TaskSource", "draw_of", "epoch_row", "open_tasks", "split"]
