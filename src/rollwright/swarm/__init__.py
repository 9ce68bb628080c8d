"""Nodes that train together by sharing rollouts, without trusting each other."""
