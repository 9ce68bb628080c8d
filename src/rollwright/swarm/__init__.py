"""Machines that do not trust each other train together by sharing rollouts."""
