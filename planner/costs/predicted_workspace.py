"""Workspaces on a CUDA card that is not here, from PyTorch's own kernels; only those large enough to matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import tensors
from planner.devices.specs import Device

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH = _ATEN._scaled_dot_product_flash_attention_backward.default
_CUDNN = _ATEN._scaled_dot_product_cudnn_attention_backward.default  # not public: taken to accumulate as flash does
_CPU_FLASH = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default  # of a graph traced on the CPU
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
_INDEX_PUT = {_ATEN.index_put.default, _ATEN._unsafe_index_put.default}


def predicted_workspace(node: fx.Node, device: Device) -> int:
    """Bytes of workspace of a node of a joint graph, while it runs on a card, beside its results; 0 for most ops.

    Where the graph was traced on the CPU, the card's capability says which attention kernel would run.
    """
    target = node.target
    args: list[Any] = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    if target is _CPU_FLASH:
        flash = args[1].dtype in _HALF and device.capability >= (8, 0) and node.kwargs.get("attn_mask") is None
        return _flash(*args[1:3]) if flash else _efficient(args[1], args[3])
    if target in (_FLASH, _CUDNN):
        return _flash(*args[1:3])
    if target is _ATEN._scaled_dot_product_efficient_attention_backward.default:
        return _efficient(args[1], args[3])
    if target is _ATEN.embedding_dense_backward.default:
        return _embedding(args[0], args[1].numel(), args[2])
    if target in _INDEX_PUT and len(args) > 3 and args[3]:
        # index_put_with_sort_kernel in ATen/native/cuda/Indexing.cu: linear, sorted and original positions, CUB's sort
        return 6 * 8 * max((n.meta["val"].numel() for n in args[1] if isinstance(n, fx.Node)), default=0)
    if target in _PRODUCTS:  # `prepare_matrix_for_cublas` in ATen/native/cuda/Blas.cpp copies what has no unit stride
        copied = (t for t in args if isinstance(t, torch.Tensor) and t.dim() > 1 and 1 not in t.stride()[-2:])
        return device.product + _bytes(*copied)
    if target in (_ATEN.convolution.default, _ATEN.convolution_backward.default):
        return _convolution(node)
    return 0


def _bytes(*given: torch.Tensor) -> int:
    return sum(t.nbytes for t in given)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash(query: torch.Tensor, key: torch.Tensor) -> int:
    """`mha_bwd` in ATen/native/transformers/cuda/flash_attn/flash_api.cpp: (batch, heads, length, width) inputs.

    dq and the row sums in fp32, and dk and dv for every head of the query where key and value have fewer.
    """
    batch, heads, length, width = query.shape
    accumulated = 4 * batch * heads * _rounded(length, 128) * (_rounded(width, 32 if width <= 128 else 64) + 1)
    shared = key.shape[1] != heads
    return accumulated + shared * 2 * batch * heads * key.shape[2] * width * key.element_size()


def _efficient(query: torch.Tensor, value: torch.Tensor) -> int:
    """`_efficient_attention_backward` in ATen/native/transformers/cuda/attention_backward.cu.

    In half precision the kernel accumulates dq in fp32; in fp32 the row sums are those of a product of full size.
    """
    batch, heads, length, width = query.shape
    full = _rounded(length, 64) * _rounded(width, 64) if query.dtype in _HALF else length * value.shape[-1]
    return 4 * batch * heads * (full + length)


def _embedding(grad: torch.Tensor, count: int, rows: int) -> int:
    """`embedding_dense_backward_cuda` in ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.

    Up to 3072 indices need no sort; more are summed by segments of up to 10 equal ones, in fp32.
    """
    if count <= 3072:
        return 0
    segments = min(count, rows)
    partial = count // 10 + segments
    return partial * grad.shape[-1] * max(4, grad.element_size()) + 8 * (3 * count + 2 * segments + partial)


def _convolution(node: fx.Node) -> int:
    """An assumption, for cuDNN's workspaces are not public: a copy of every tensor that is not channels-last already.

    Tensor-core kernels read and write channels-last. The two gradients are computed one after the other, each beside
    copies of two inputs and of its result, which has the size of the third. A depthwise convolution is PyTorch's own.
    """
    backward = node.target is _ATEN.convolution_backward.default
    inputs = [t for n in node.all_input_nodes for t in tensors(n)]
    if node.args[9 if backward else 8] == inputs[1 if backward else 0].shape[1]:
        return 0
    used = [t for t in (inputs if backward else [*inputs, *tensors(node)]) if t.dim() > 2]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return _bytes(*(t for t in used if t.dim() == 3 or not t.is_contiguous(memory_format=formats[t.dim()])))
