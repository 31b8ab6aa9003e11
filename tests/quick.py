"""What makes tests quick and changes nothing that they see: less to do for the collector, no timing of guards."""

import ctypes
import functools
import gc

import torch._dynamo.config
import torch._dynamo.guards


def freeze() -> None:
    """Keep garbage collections, one of which precedes every measured step, from traversing what stays anyway.

    Imported modules make one take 0.3 s, and each compiled graph, of which torch keeps guards for good, adds to it.
    The planner clears `functools.lru_cache`s, for which it asks the collector, so these stay tracked.
    """
    gc.collect()
    caches = [ctypes.py_object(c) for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]
    gc.freeze()
    for cache in caches:
        ctypes.pythonapi.PyObject_GC_UnTrack(cache)
        ctypes.pythonapi.PyObject_GC_Track(cache)


def compile_and_no_more() -> None:
    """torch.compile collects garbage after each frame, and times each graph's guards for a log: up to 50 ms a graph."""
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
