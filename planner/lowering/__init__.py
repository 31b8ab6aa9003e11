"""Captured graphs to a `Problem`: `build`, then passes for collectives, microbatches in flight and fragmentation."""
