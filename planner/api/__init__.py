"""The front door: `plan()`, the `Plan` handle, `max_batch()`, `pareto()`."""
