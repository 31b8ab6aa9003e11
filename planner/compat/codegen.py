"""The private parts of torch that rewriting needs. Known to work on torch 2.11 to 2.13."""

from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

__all__ = ["run_and_save_rng_state", "run_with_rng_state"]
