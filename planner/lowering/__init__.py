"""The bridge from captured graphs to solvers: a `Problem`, built pass by pass, and the way back."""
