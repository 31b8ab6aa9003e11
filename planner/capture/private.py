"""The private parts of torch that capture needs. Known to work on torch 2.11 to 2.13."""

import torch._dynamo.config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis as ReferenceAnalysis

__all__ = [
    "BoxedCodeGen",
    "FakeCopyMode",
    "FakeTensorMode",
    "ReferenceAnalysis",
    "aot_autograd",
    "dynamo_config",
    "sympy_interp",
]
