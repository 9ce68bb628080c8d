"""Training on several ranks: processes that share rows, and shards of weights, gradients and optimiser state."""
