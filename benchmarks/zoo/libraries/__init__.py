"""Models that libraries ship, small and with random weights: one module a library, with what it imports.

Each entry of a module's `CASES` is one model: a name, and a function that builds it with its batch and its loss.
"""
