"""A transformers model in this process as a policy. Importing it imports torch; nothing else of the package does."""

from rollwright.engines.torch.policy import Divergence, TorchPolicy, divergence, load_policy

__all__ = ["Divergence", "TorchPolicy", "divergence", "load_policy"]
