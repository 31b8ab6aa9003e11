"""Provides the plan for a step: known, bound from a file, agreed on by the ranks, or repaired."""
