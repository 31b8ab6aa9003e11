"""Ops in pieces: sets of ops that are independent along a dimension, recognised, and run as one op piece by piece."""
