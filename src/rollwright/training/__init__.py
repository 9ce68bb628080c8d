"""From groups of trajectories to new weights: advantages, rows, losses, the trainer.

Advantages and rows are pure and need no torch. This module imports nothing, so that the modules that need torch (losses,
trainer, checkpoints) are loaded only by processes that train.
"""
