"""What makes tests quick and changes nothing that they see: less to do for the collector, no timing of guards."""

import ctypes
import functools
import gc

import torch._dynamo.config
import torch._dynamo.guards
from torch._functorch._aot_autograd import graph_compile


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


def collect_seldom() -> None:
    """A tenth of the time of tracing goes into looking for cycles among what it makes.

    Predictions do not depend on when the collector comes: a user may have it come as seldom.
    """
    gc.set_threshold(100_000, 50, 1_000)


def compile_and_no_more() -> None:
    """torch.compile collects garbage after each frame, and writes for logs that no test reads.

    It times each graph's guards (up to 50 ms a graph), and writes out graphs and the stack of each side effect.
    """
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
        torch._dynamo.config.side_effect_replay_policy = "silent"
    graph_compile._log_joint_graph = lambda *_: None
    graph_compile._log_fw_bw_graphs = lambda *_: (None, None)
