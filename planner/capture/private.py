"""The private parts of torch that capture needs. Known to work on torch 2.11 to 2.13."""

import torch._dynamo.config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["BoxedCodeGen", "CheckpointPolicy", "FakeCopyMode", "FakeTensorMode", "aot_autograd", "detect_fake_mode", "dynamo_config"]
