import os
import tempfile

import pytest
import torch

os.environ["CHECKPOINT_PLANNER_CACHE"] = tempfile.mkdtemp(prefix="checkpoint-planner-")  # not the user's
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of torch 2.13 otherwise announces itself on stderr


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
