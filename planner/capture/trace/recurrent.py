"""A layer of `nn.GRU` or `nn.RNN` as one op on a CPU: a kernel that runs the ops of eager mode, step by step of the
sequence, in its order and with its memory layouts. Captured by themselves, they are some twenty a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten
_ALIGNMENT = 64  # bytes, of what torch's allocator for CPUs returns (c10::gAlignment)


@dataclass(frozen=True)
class _Kind:
    """A kind of recurrent layer.

    Attributes:
        saved: how many times its state one step leaves for the backward pass, beside its output.
        step: (gates of the input, state, weight and bias, where the output goes, where what is saved goes).
        backward: (gradient of the output, state before, output, what was saved, where the gradient of the input's gates
            goes) -> the gradient of the state's gates, and that of the state but for what passes through them.
    """

    saved: int
    step: Callable[..., None]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def _linear(out: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return torch.mm(state, weight.t(), out=out)
    return torch.addmm(bias, state, weight.t(), out=out)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """A factor of a product, which rounds by how memory is aligned, as tensors of eager mode are."""
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()


def _split(saved: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step of a GRU leaves: its three gates side by side, as one product makes them, and its candidate."""
    rows, width = state.shape
    gates = 3 * rows * width
    return saved[:gates].view(rows, 3 * width), saved[gates:].view(rows, width)


def _gru_step(
    given: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    saved: torch.Tensor,
) -> None:
    gates, candidate = _split(saved, state)
    reset, update, new = _linear(gates, state, weight, bias).chunk(3, 1)
    for_reset, for_update, for_new = given.chunk(3, 1)
    reset.add_(for_reset).sigmoid_()
    update.add_(for_update).sigmoid_()
    torch.mul(new, reset, out=output)
    torch.add(for_new, output, out=candidate).tanh_()
    torch.sub(state, candidate, out=output).mul_(update).add_(candidate)


def _gru_backward(
    gradient: torch.Tensor, state: torch.Tensor, output: torch.Tensor, saved: torch.Tensor, given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    gates, candidate = _split(saved, state)
    reset, update, new = gates.chunk(3, 1)
    of_state = gradient * update
    of_update = aten.sigmoid_backward(gradient * (state - candidate), update)
    of_candidate = aten.tanh_backward(gradient - of_state, candidate)
    of_reset = aten.sigmoid_backward(of_candidate * new, reset)
    torch.cat([of_reset, of_update, of_candidate], 1, out=given)
    return torch.cat([of_reset, of_update, of_candidate * reset], 1), of_state


def _rnn_step(activation: Callable[..., Any]) -> Callable[..., None]:
    def step(
        given: torch.Tensor,
        state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        output: torch.Tensor,
        saved: torch.Tensor,
    ) -> None:
        activation(_linear(output, state, weight, bias).add_(given))

    return step


def _rnn_backward(derivative: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def backward(
        gradient: torch.Tensor, state: torch.Tensor, output: torch.Tensor, saved: torch.Tensor, given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return given.copy_(derivative(gradient, output)), None

    return backward


def _relu_backward(gradient: torch.Tensor, output: torch.Tensor) -> Any:
    return aten.threshold_backward(gradient, output, 0)


_KINDS = {
    "gru": _Kind(4, _gru_step, _gru_backward),
    "tanh": _Kind(0, _rnn_step(torch.tanh_), _rnn_backward(aten.tanh_backward)),
    "relu": _Kind(0, _rnn_step(torch.relu_), _rnn_backward(_relu_backward)),
}


def _shapes(gates: torch.Tensor, state: torch.Tensor, kind: str) -> list[Sequence[int]]:
    """Shapes of what the op returns: outputs, last state, and what it saves for its backward pass."""
    time, (rows, width) = gates.shape[0], state.shape
    return [(time, rows, width), (rows, width), (time, _KINDS[kind].saved * rows * width)]


@torch.library.custom_op("planner::recurrent_layer", mutates_args=())
def _layer(
    gates: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs, final, saved = (gates.new_empty(shape) for shape in _shapes(gates, state, kind))
    for t in reversed(range(len(gates))) if reverse else range(len(gates)):
        _KINDS[kind].step(gates[t], state, weight, bias, outputs[t], saved[t])
        state = _aligned(outputs[t])
    return outputs, final.copy_(state), saved


@_layer.register_fake
def _(
    gates: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, reverse: bool
) -> tuple[torch.Tensor, ...]:
    return tuple(gates.new_empty(shape) for shape in _shapes(gates, state, kind))


@torch.library.custom_op("planner::recurrent_layer_backward", mutates_args=())
def _layer_backward(
    of_outputs: torch.Tensor | None,
    of_final: torch.Tensor | None,
    state: torch.Tensor,
    weight: torch.Tensor,
    outputs: torch.Tensor,
    saved: torch.Tensor,
    kind: str,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    time, rows, _ = outputs.shape
    steps = list(reversed(range(time)) if reverse else range(time))
    of_gates = outputs.new_empty((time, rows, len(weight)))
    of_weight, of_bias = torch.zeros_like(weight), weight.new_zeros(len(weight))
    later = [of_final]  # gradients of a state by what comes after it, in autograd's order
    for n, t in reversed(list(enumerate(steps))):
        own = None if of_outputs is None else of_outputs[t]
        gradient = reduce(torch.add, (each for each in (own, *later) if each is not None))
        before = _aligned(outputs[steps[n - 1]]) if n else state
        of_linear, of_state = _KINDS[kind].backward(gradient, before, outputs[t], saved[t], of_gates[t])
        later = [of_state, of_linear.mm(weight)]
        of_weight += of_linear.t().mm(before)
        of_bias += of_linear.sum(0)
    return of_gates, reduce(torch.add, (each for each in later if each is not None)), of_weight, of_bias


@_layer_backward.register_fake
def _(
    _outputs: Any, _final: Any, state: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    shapes = (*outputs.shape[:2], len(weight)), state.shape, weight.shape, weight.shape[:1]
    return tuple(outputs.new_empty(shape) for shape in shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, state, weight, _, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(state, weight, output[0], output[2])


def _differentiate(ctx: Any, of_outputs: torch.Tensor | None, of_final: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    gradients = _layer_backward(of_outputs, of_final, *ctx.saved_tensors, *ctx.options)
    return *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)), None, None


_layer.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.planner.recurrent_layer)
def _flops(gates: Sequence[int], state: Any, weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(gates[:2]) * math.prod(weight)


@register_flop_formula(torch.ops.planner.recurrent_layer_backward)
def _flops_backward(
    of_outputs: Any, of_final: Any, state: Any, weight: Sequence[int], outputs: Sequence[int], *_: Any, **__: Any
) -> int:
    return 4 * math.prod(outputs[:2]) * math.prod(weight)


def can_run(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel is for a layer with these: its input, states and parameters, all of one dtype, on a CPU."""
    alike = all(t.device.type == "cpu" and t.dtype == tensors[0].dtype and t.is_floating_point() for t in tensors)
    return alike and not torch.is_autocast_enabled("cpu")


def recurrent_layer(
    kind: str,
    sequence: torch.Tensor,
    state: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One direction of one layer, as eager mode runs it on a CPU (`FullLayer`, RNN.cpp).

    Args:
        kind: "gru", or the activation of a plain one: "tanh" or "relu".
        sequence: of shape (time, batch, features).
        state: the first one, of shape (batch, hidden).
        params: the two weights, and the two biases where it has any.
        has_biases: whether it has.
        reverse: whether it goes backwards in time.

    Returns:
        The outputs, of shape (time, batch, hidden), and the last state.
    """
    biases = params[2:4] if has_biases else (None, None)
    outputs, final, _ = _layer(F.linear(sequence, params[0], biases[0]), state, params[1], biases[1], kind, reverse)
    return outputs, final
