"""Clients of inference engines that take token ids and give the ids they sampled."""

from rollwright.policies.engines.http_policy import HttpEnginePolicy
from rollwright.policies.engines.llama_cpp import LlamaCppPolicy
from rollwright.policies.engines.pool import EngineCounters, Router
from rollwright.policies.engines.sglang import SglangPolicy
from rollwright.policies.engines.vllm import VllmPolicy

__all__ = ["EngineCounters", "HttpEnginePolicy", "LlamaCppPolicy", "Router", "SglangPolicy", "VllmPolicy"]
