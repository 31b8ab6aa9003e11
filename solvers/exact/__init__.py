"""The exact solver: Checkmate's mixed-integer program, and how large problems are contracted to its size."""
