"""Clients of inference engines that take token ids and give the ids they sampled."""

from rollwright.policies.engines.counters import EngineCounters
from rollwright.policies.engines.llama_cpp import LlamaCppPolicy
from rollwright.policies.engines.policy import EnginePolicy
from rollwright.policies.engines.router import Router
from rollwright.policies.engines.sglang import SglangPolicy
from rollwright.policies.engines.vllm import VllmPolicy

__all__ = ["EngineCounters", "EnginePolicy", "LlamaCppPolicy", "Router", "SglangPolicy", "VllmPolicy"]
