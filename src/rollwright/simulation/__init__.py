"""Engines without a model: a simulated engine with slots and a latency model, its HTTP server, and scripted players."""
