"""The private parts of torch that capture needs. Known to work on torch 2.11 to 2.13."""

import torch._dynamo.config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

__all__ = ["BoxedCodeGen", "FakeCopyMode", "FakeTensor", "FakeTensorMode", "aot_autograd", "dynamo_config"]
