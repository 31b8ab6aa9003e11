"""Runs a planned model: intercepts its call, serves it by a plan's graphs, and shows what its steps took."""
