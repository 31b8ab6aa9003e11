"""The private parts of torch that training on several devices needs. Known to work on torch 2.11 to 2.13."""

from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = ["FSDPMeshInfo", "FSDPParam", "FSDPParamGroup", "FSDPState"]
