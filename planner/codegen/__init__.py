"""Schedules, written as forward and backward `torch.fx.GraphModule`s."""
