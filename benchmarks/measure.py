"""What one training step takes, by torch's profiler, by a clock and by autograd: no figure is the planner's own."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from planner.compat.dispatch import lasting_modes_off
from tests.measure import peak_of

Step = Callable[[nn.Module], object]
PRELOAD = ["planner", "transformers", "diffusers", "torch._dynamo.backends.debugging", "torch._functorch.partitioners"]

CANCELLED = 1e-3  # a gradient of less than this share of the largest is compared with that share


def software() -> str:
    """The system, the processor's kind and the Python that measure, for a report."""
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def held_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of parameters, buffers and batch, counted by storage."""
    everything = [*model.parameters(), *model.buffers(), *batch.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything}.values())


def step_peak(step: Step, model: nn.Module) -> int:
    """The most bytes that one step holds above what was held before it."""
    with tempfile.TemporaryDirectory() as folder:
        peak = peak_of(lambda: step(model), Path(folder))
    model.zero_grad(set_to_none=True)
    return peak


def flops(step: Step, model: nn.Module) -> int:
    """FLOPs of one step's matrix products, convolutions and attention, from the shapes that the profiler records.

    The profiler's own count (`with_flops`) has none for convolutions' backward passes, for `aten::convolution` called
    by a graph rather than by `conv2d`, or for fused attention; `FlopCounterMode` makes torch.compile step aside.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(model)
    model.zero_grad(set_to_none=True)
    return sum(_flops(e) for e in profiler.events() if not _inside(e))


def _inside(event: Any) -> bool:
    """Whether an op that is counted calls this one."""
    while (event := event.cpu_parent) is not None:
        if event.name in _FORMULAS:
            return True
    return False


def _flops(event: Any) -> int:
    formula = _FORMULAS.get(event.name)
    return 0 if formula is None else formula(event.input_shapes, event.concrete_inputs)


def _product(shapes: Sequence[Sequence[int]], at: int) -> int:
    """Of matrices, or batches of them, `at` and `at + 1`."""
    return 2 * math.prod(shapes[at]) * shapes[at + 1][-1]


def _convolution(shapes: Sequence[Sequence[int]], given: Sequence[Any]) -> int:
    data, weight = shapes[:2]
    stride, padding, dilation, transposed = given[3:7]
    kernel = weight[2:]
    if transposed:
        area = math.prod(data[2:])
    else:
        sides = zip(data[2:], kernel, stride, padding, dilation, strict=True)
        area = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    return 2 * data[0] * area * math.prod(weight)


def _convolution_backward(shapes: Sequence[Sequence[int]], given: Sequence[Any]) -> int:
    gradient, data, weight = shapes[:3]
    area = math.prod((data if given[7] else gradient)[2:])
    wanted: int = sum(given[10][:2])
    return wanted * 2 * data[0] * area * math.prod(weight)


def _attention(shapes: Sequence[Sequence[int]], passes: int) -> int:
    """`passes` products of a query's length, a key's length and a head's width, causal or not."""
    query, key = shapes[:2]
    return passes * 2 * math.prod(query) * key[-2]


_FORMULAS: dict[str, Callable[[Any, Any], int]] = {
    "aten::mm": lambda shapes, _: _product(shapes, 0),
    "aten::bmm": lambda shapes, _: _product(shapes, 0),
    "aten::addmm": lambda shapes, _: _product(shapes, 1),
    "aten::baddbmm": lambda shapes, _: _product(shapes, 1),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda shapes, _: _attention(shapes, 2),
    # it computes the scores again; as torch.utils.flop_counter counts it
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda shapes, _: _attention(shapes[1:], 5),
}


def gradients(step: Step, model: nn.Module) -> dict[str, torch.Tensor]:
    """Of one step from a fixed seed."""
    torch.manual_seed(1)
    step(model)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def gradient_error(step: Step, model: nn.Module, plain: nn.Module) -> float:
    """The largest difference of any gradient, relative to the largest entry of that gradient.

    Or to `CANCELLED` of the largest of all: the gradient of a bias of attention's keys is rounding errors alone.
    """
    ours = gradients(step, model)
    with lasting_modes_off():  # a plan is not to learn what the other model's step takes
        return difference(ours, gradients(step, plain))


def difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The same of two steps' gradients, by name."""
    least = max(CANCELLED * max(float(g.abs().max()) for g in theirs.values()), 1e-30)
    return max(float((ours[n] - g).abs().max() / g.abs().max().clamp_min(least)) for n, g in theirs.items())


def slope(step: Step, model: nn.Module, loss: Callable[[], float], reach: float = 1e-3) -> float:
    """How steep the loss is along its gradient, by two forward passes from the same seed, over what the gradient says.

    It is 1 where the gradient is right, whatever masks dropout has drawn. The parameters are left as they were.

    Args:
        step: whose gradients are judged.
        model: that it trains.
        loss: one forward pass.
        reach: how far from the parameters, both ways, relative to a gradient of length 1.
    """
    found = gradients(step, model)
    length = float(sum(g.double().square().sum() for g in found.values())) ** 0.5
    moved = {p: (p.detach().clone(), found[name]) for name, p in model.named_parameters() if name in found}

    losses = []
    for distance in (reach, -reach, 0.0):
        with torch.no_grad():
            for p, (own, gradient) in moved.items():
                p.copy_(own + gradient * (distance / length))
        if distance:
            torch.manual_seed(1)
            losses.append(loss())
    return (losses[0] - losses[1]) / (2 * reach) / length


def in_turns(
    steps: Sequence[Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    after: Callable[[int], object] = lambda _: None,
) -> list[list[float]]:
    """Seconds of each of some steps in each round; the first of a round is another one each time.

    A planned model that waits for its next call may record what runs in between, here another model's step, and be
    planned anew for it: each step runs with the modes that itself left on, and with no others.

    Args:
        steps: what takes turns.
        rounds: how often each runs.
        clock: that times them.
        after: is called with the number of each, once it has run, untimed.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    with ExitStack() as others:
        others.enter_context(lasting_modes_off())
        paused = [others.enter_context(ExitStack()) for _ in steps]
        for i in range(rounds):
            for at in range(len(steps)):
                k = (i + at) % len(steps)
                paused[k].close()
                start = clock()
                steps[k]()
                seconds[k].append(clock() - start)
                after(k)
                paused[k].enter_context(lasting_modes_off())
    return seconds


def time_ratio(
    step: Step, model: nn.Module, plain: nn.Module, pairs: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median over pairs of steps of one model's seconds over the other's; which goes first alternates."""
    own, others = model_times(step, [model, plain], pairs, clock)
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def model_times(
    step: Step, models: Sequence[nn.Module], rounds: int, clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """Seconds of a step of each model, by round, after two rounds that are not timed; gradients are cleared between."""
    steps = [partial(step, model) for model in models]
    times = in_turns(steps, rounds + 2, clock, lambda at: models[at].zero_grad(set_to_none=True))
    return [each[2:] for each in times]


def keep_freed_memory() -> None:
    """Have glibc's allocator keep what is freed, as torch's allocator for GPUs does; nothing with another C library.

    It otherwise gives large blocks back to the system at each step, or not, by what was allocated before: the page
    faults of the next step were a third of an eager one's time.
    """
    if platform.libc_ver()[0] == "glibc":
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 2**30)


def in_own_process(function: Callable[..., Any], *args: Any, time_limit: float | None = None) -> Any:
    """What a module's function returns in a process of its own, with one thread; its arguments and result are pickled.

    The process is forked from one that has imported the slow libraries and has run nothing. After `time_limit` seconds
    it is killed.

    Raises:
        RuntimeError: it raised, with what, or it ended without an answer.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of torch 2.13 otherwise announces start and stop
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if receiver.poll(time_limit):
            good, found = receiver.recv()
        else:
            good, found = False, f"it did not end within {time_limit:.0f} s"
    except EOFError:
        good, found = False, "it ended without an answer"
    finally:  # an interruption, too
        process.kill()
        process.join()
    if not good:
        raise RuntimeError(f"{function.__name__}: {found}")
    return found


def _answer(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        sender.send((True, function(*args)))
    except Exception as e:
        sender.send((False, f"{type(e).__name__}: {e}"))
