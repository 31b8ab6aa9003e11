"""Ops that run again in groups only, as checkpointed modules do: the record, a memory model, and a search over it."""
