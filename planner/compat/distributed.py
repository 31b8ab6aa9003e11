"""The private parts of torch that training on several devices needs. Known to work on torch 2.11 to 2.13."""

from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state as state_of
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FSDPMeshInfo", "FSDPParam", "FSDPParamGroup", "FSDPState", "running_ddp", "state_of"]


def running_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass runs, or None."""
    return DistributedDataParallel._active_ddp_module
