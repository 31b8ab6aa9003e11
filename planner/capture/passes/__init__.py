"""Rewrites of a joint graph before it is read: dropout, duplicates, the model's own checkpoints."""
