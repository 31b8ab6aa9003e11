"""Traces one training step under fake tensors: forward, loss and backward pass."""
