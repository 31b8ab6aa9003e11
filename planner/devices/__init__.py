"""Devices: their rates and memory, the caching allocator, and a meter of allocations."""
