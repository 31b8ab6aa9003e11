"""Whether torch has the private parts that are read as attributes; those that are imported fail where they are."""

from __future__ import annotations

import inspect
import sys
from functools import cache

import torch

from planner.compat.versions import is_newer, missing_in_words, tested_in_words
from planner.errors import TorchError, warn

# by module, or module:class
PARTS = {
    "torch": "_C _VF _dynamo",
    "torch._C": (
        "_AutoDispatchBelowAutograd _DisableAutocast _autograd _current_autograd_node _current_graph_task_id "
        "_dispatch_tls_is_dispatch_key_included _functorch _get_mkldnn_enabled _get_sdp_priority_order "
        "_get_tracing_state _len_torch_function_stack _nn _storage_Use_Count _will_engine_execute_node"
    ),
    "torch._C._autograd": (
        "_get_current_graph_task_keep_graph _saved_tensors_hooks_get_disabled_error_message "
        "_top_saved_tensors_default_hooks"
    ),
    "torch._C._dynamo.guards": "_empty_strided_cpu",
    "torch._C._functorch": "is_batchedtensor is_legacy_batchedtensor",
    "torch._C:_FunctionBase": "_raw_saved_tensors _sequence_nr",
    "torch:Tensor": (
        "_backward_hooks _base _indices _make_wrapper_subclass _nnz _post_accumulate_grad_hooks _typed_storage "
        "_use_count _values _version"
    ),
    "torch:UntypedStorage": "_cdata",
    "torch.autograd.graph": "_engine_run_backward",
    "torch._decomp.decompositions": "_rnn_helper gru_cell mkldnn_one_layer_lstm one_layer_lstm one_layer_rnn",
    "torch._dispatch.python": "no_python_dispatcher",
    "torch._dynamo.decorators": "_dynamo_weak_dynamic_indices",
    "torch._dynamo.eval_frame": "_initialize _orig_mod _torchdynamo_orig_backend _torchdynamo_orig_callable",
    "torch._inductor.config": "fallback_random",
    "torch._functorch._aot_autograd.graph_compile": "aot_dispatch_autograd_graph",
    "torch._functorch._aot_autograd.runtime_wrappers": (
        "_double_backward bw_donated_idxs opaque_objects subclass_tangent_meta symints"
    ),
    "torch._functorch._aot_autograd.schemas:ViewAndMutationMeta": "traced_tangents_descs",
    "torch._functorch._aot_autograd.utils": "_boxed_call",
    "torch._ops:OpOverload": "_dispatch_cache _op_dk _schema py_kernels",
    "torch._subclasses.fake_impls": "op_implementations_dict",
    "torch._subclasses.fake_tensor:FakeTensorMode": "dispatch fake_tensor_converter may_turn_const",
    "torch.autograd": "_disable_profiler_legacy _enable_profiler_legacy",
    "torch.autograd.forward_ad": "_current_level",
    "torch.autograd.function": "_forward_cls",
    "torch.autograd:Variable": "_execution_engine",
    "torch.distributed": "_DEFAULT_FIRST_BUCKET_BYTES",
    "torch.distributed.fsdp._fully_shard._fully_shard": "_is_fsdp_managed_module",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": (
        "_unsharded_param is_dtensor mp_policy padded_sharded_param_size sharded_param"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": (
        "_reshard_after_forward _use_post_forward_mesh fsdp_params mesh_info offload_policy reduce_grads"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": (
        "_auto_reshard_after_forward _fsdp_param_group _modules _mp_policy _post_forward_hook_handle "
        "_pre_forward_hook_handle _states_to_backward_prefetch _states_to_forward_prefetch"
    ),
    "torch.distributed.pipelining.schedules": (
        "_has_backward _loss_fn _n_microbatches _stage _stages _step_microbatches"
    ),
    "torch.distributed.tensor._random": "_rng_tracker",
    "torch.distributed.tensor.parallel.ddp": "_st_info",
    "torch.fx.graph:Graph": "_codegen _root",
    "torch.nn.modules.module:Module": (
        "_apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks "
        "_forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs "
        "_modules _non_persistent_buffers_set _parameters"
    ),
    "torch.nn.modules.transformer": "_detect_is_causal_mask",
    "torch.nn.parallel.distributed:DistributedDataParallel": "_active_ddp_module",
}


def check_torch() -> None:
    """Look for every private part of the modules that are loaded, and warn once of a torch that was not tested.

    Raises:
        TorchError: a part is missing; it names each, and the releases that are known to work.
    """
    missing = [name for owner in PARTS if owner.split(":")[0] in sys.modules for name in _missing(owner)]
    if missing:
        raise TorchError(missing_in_words(", ".join(missing)))
    if is_newer():
        _warn_of_newer(torch.__version__)


@cache
def _warn_of_newer(version: str) -> None:
    warn(
        f"torch {version} is newer than those that planner was tested with ({tested_in_words()}). The private parts of "
        "it that are used are there; Plan.verify() compares a step's gradients and its peak with those without a plan"
    )


@cache
def _missing(path: str) -> tuple[str, ...]:
    """The names that neither the owner nor its instances have: these are set in the code of its module."""
    module, _, name = path.partition(":")
    owner = getattr(sys.modules[module], name, None) if name else sys.modules[module]
    if owner is None:
        return (f"{module}.{name}",)
    absent = [part for part in PARTS[path].split() if not hasattr(owner, part)]
    try:
        code = inspect.getsource(sys.modules[module]) if absent else ""
    except (OSError, TypeError):  # compiled, and without its source
        code = ""
    return tuple(f"{path.replace(':', '.')}.{part}" for part in absent if part not in code)
