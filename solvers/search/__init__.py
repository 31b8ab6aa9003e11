"""The heuristic search: simulated annealing over policies, its starts, and the curve of many budgets."""
