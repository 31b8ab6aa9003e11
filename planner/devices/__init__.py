"""Devices: their rates and memory, the caching allocator, and what it measured."""
