import os

import pytest
import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of torch 2.13 otherwise announces itself on stderr


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
