"""The private parts of torch that capture needs. Known to work on torch 2.11 to 2.13."""

import torch._decomp.decompositions as decompositions
import torch._dynamo.config as dynamo_config
import torch.nn.modules.transformer as nn_transformer
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import cached_backends
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils._mode_utils import no_dispatch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis as ReferenceAnalysis
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "BoxedCodeGen",
    "CheckpointPolicy",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ReferenceAnalysis",
    "TangentAOTInput",
    "TracingContext",
    "UnsupportedOperatorException",
    "aot_autograd",
    "cached_backends",
    "decompositions",
    "detect_fake_mode",
    "dynamo_config",
    "nn_transformer",
    "no_dispatch",
    "reset_code",
    "sympy_interp",
]
