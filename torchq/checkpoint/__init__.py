"""Reading and writing compressed-tensors checkpoints."""
