"""Rollouts, attempts and turns, durable: one API with memory, SQL and HTTP backends."""
