"""The private parts of torch that capture needs. Known to work on torch 2.11 to 2.13."""

import torch._dynamo.config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

__all__ = [
    "BoxedCodeGen",
    "FakeCopyMode",
    "FakeTensorMode",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TracingContext",
    "aot_autograd",
    "dynamo_config",
]
