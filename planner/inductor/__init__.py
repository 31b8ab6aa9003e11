"""Inductor mode: schedules of what Inductor realises, compiled by it, their peaks known before a kernel is."""
