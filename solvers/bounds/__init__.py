"""Proven lower bounds on the cost and on the peak of every schedule within a budget."""
