"""What ranks share with the process that they are forked from: modules, imported once, and a collector that skips them.

Imported there by name, and nowhere else; nothing runs that would start a thread, which a fork does not take along.
"""

import contextlib
import importlib

from . import measure, processes  # noqa: F401  with the planner, transformers, and Hypothesis
from .quick import collect_seldom, compile_and_no_more, freeze

# what a process imports late: at its first plan, at its first compiled graph
_LATE = (
    "functorch.compile",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.dce_extra_outputs",
    "torch._dynamo.repro.after_aot",
    "torch._dynamo.repro.after_dynamo",
    "torch._dynamo.testing",
    "torch._export.passes._node_metadata_hook",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.debug",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._inductor.scheduler",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.profiler",
    "tqdm.auto",
    "solvers.search.kernels",
)
for _name in _LATE:
    with contextlib.suppress(ImportError):  # of another torch: a rank imports what it has instead
        importlib.import_module(_name)

compile_and_no_more()
collect_seldom()
freeze()
