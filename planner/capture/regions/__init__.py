"""Captured graphs, read as ops on storages, and how the graphs of a step are linked."""
