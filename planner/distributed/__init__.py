"""Training on several devices: what PyTorch's own engines hold on each, and one plan for all of them."""
