"""From groups of trajectories to new weights: advantages, rows, losses, the trainer.

Advantages and rows are pure and light. What needs torch (losses, trainer, checkpoints) is imported by
whoever trains, never from here.
"""
