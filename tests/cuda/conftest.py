import gc
import os
import sys

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products ask for


@pytest.fixture(autouse=True)
def _device_as_new(monkeypatch):
    """Every test starts with an empty allocator and full precision, and may change either."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    sys.last_exc = sys.last_value = sys.last_traceback = None  # a failed test's tensors
    gc.unfreeze()  # cycles of earlier tests' models, which tests/conftest.py froze
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
