"""A policy that runs a transformers model in this process. Importing it imports torch."""

from rollwright.engines.torch.policy import Divergence, TorchPolicy, divergence, load_policy

__all__ = ["Divergence", "TorchPolicy", "divergence", "load_policy"]
