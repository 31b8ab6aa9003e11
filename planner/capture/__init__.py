"""The training step as joint graphs: traced under fake tensors, rewritten by passes, read as regions."""
