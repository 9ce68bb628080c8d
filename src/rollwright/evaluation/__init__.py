"""Evaluations: statistics, early stops, reports and comparisons. Pure; `run.evaluating` plays them."""
