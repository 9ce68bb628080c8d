"""A transformers model in this process as a policy. Importing it imports torch; nothing else of the package does."""

from rollwright.policies.torch.divergence import Divergence, divergence
from rollwright.policies.torch.policy import TorchPolicy, load_policy

__all__ = ["Divergence", "TorchPolicy", "divergence", "load_policy"]
