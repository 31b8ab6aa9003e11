"""The whole training step, captured under fake tensors: every region, their links, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from planner.capture.regions.calls import (
    Held,
    Link,
    held_of,
    links_of,
    order_of,
    outputs_of,
    parameters_of_calls,
    regions_of,
)
from planner.capture.regions.region import Region
from planner.capture.shapes import enlarged, is_size
from planner.capture.trace.apart import (
    COMPILED,
    Paths,
    Shapes,
    inner_parts,
    shapes_of_calls,
    with_all_callers,
    with_callers,
)
from planner.capture.trace.as_if_real import as_if_real
from planner.capture.trace.data_dependent import CHANCES, Answers
from planner.capture.trace.dynamo import OP_BY_OP, GraphCompiler, Partition, lone_loss, to_fake
from planner.capture.trace.fake_step import FakeStep, NothingCapturedError
from planner.capture.trace.loss_trace import LossFn, OutsideLoss, differentiable, shares_loss
from planner.capture.trace.module_state import Attributes, containers_kept
from planner.capture.trace.quiet import quietly
from planner.capture.trace.random_state import random_kept
from planner.capture.trace.recording import Recording
from planner.capture.trace.refusals import LIMITS, refusal, state_mistaken
from planner.capture.trace.state_guard import ParameterWrites, fakes_forgotten, forget_fakes, untouched
from planner.compat.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    forget_constants,
)
from planner.core.account import EagerStep
from planner.core.call import bytes_of_elements, tensors_in
from planner.core.frames import forgotten
from planner.core.loop import LaidOut
from planner.core.maxima import Maxima
from planner.core.objects import leaves
from planner.errors import BatchError, CaptureError, ModelError
from planner.parallel.meshes import on_mesh, tracker_kept

Ways = tuple[Paths, Paths]  # which modules run apart, and which where torch.compile captures nothing so


@dataclass(frozen=True)
class TrainingGraph:
    """The training step of a model on one batch.

    Attributes:
        regions: in the order in which their forward passes run; one for each call of a compiled graph.
        order: for each Dynamo graph, by its key, the regions that its calls are; None for a call without a gradient.
        detached: for each Dynamo graph, by its key, the outputs that get no gradient.
        laid_out: the same of those whose gradient comes in another layout, and which.
        loss: the loss, as far as it is computed outside the model.
        links: the tensors that regions pass to each other and share.
        held: what variables hold of values that are made outside the compiled graphs.
        outputs: for each leaf of the model's output, the region and the result that it is; None for another object.
        fed: of these leaves, by position, those whose gradient a graph adds to: bytes of each. They are none to a plan
            for a loop that gives them no gradient.
        output_bytes: of the elements of all leaves.
        maxima: where sizes are symbols in the graphs, the largest, for which the step is read.
        asked: lines of Python that asked for values of tensors outside the graphs; other values may have other graphs.
        written: names of the parameters that the forward pass writes into.
        paths: of the modules that run as without a plan.
        note: a remark for the user; empty for none.
        eager: the same step in eager mode; None where that is not known.
        parameters: the arguments of regions that are parameters: (region, argument) -> name.
        chance: what a single random number was taken for by which Python code decides; None for the real one.
        attributes: the bytes of tensors that modules keep as plain attributes, by name, beside what the step makes.
        replaced: the same of those that the call replaces, and that graphs read: a plan may compute from them again.
        calls: where a step has several calls of the model, the number of each one's regions and leaves of its output.
    """

    regions: tuple[Region, ...]
    order: Mapping[str, tuple[int | None, ...]] = field(repr=False)
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)
    loss: OutsideLoss
    links: tuple[Link, ...] = ()
    outputs: tuple[tuple[int, int] | None, ...] = ()
    fed: Mapping[int, int] = field(default_factory=dict)
    output_bytes: int = 0
    maxima: Maxima | None = None
    asked: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    paths: Paths = field(default=COMPILED, repr=False)
    note: str = ""
    eager: EagerStep | None = None
    parameters: Mapping[tuple[int, int], str] = field(default_factory=dict, repr=False)
    laid_out: Mapping[str, LaidOut] = field(default_factory=dict, repr=False)
    calls: tuple[tuple[int, int], ...] = ()
    held: tuple[Held, ...] = ()
    chance: float | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)
    replaced: Mapping[str, int] = field(default_factory=dict)


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    split: Partition,
    loss_fn: LossFn | None = None,
    compiler: GraphCompiler = OP_BY_OP,
    maxima: Maxima | None = None,
    *,
    unreached: Collection[int] = (),
    beside_loss: bool = False,
    laid_out: LaidOut | None = None,
    symbolic: bool = True,
    likely: bool = True,
) -> TrainingGraph:
    """Capture the training step under fake tensors: no memory, no compute, the model untouched.

    Args:
        model: in the mode (training or evaluation) in which it will run.
        args: positional arguments that it is called with.
        kwargs: keyword arguments.
        split: a region -> any forward and backward graph of it, for the pass under fake tensors.
        loss_fn: the model's output -> the scalar loss; None: the loss is among the outputs (`find_loss`), or unknown,
            and then every differentiable output gets a gradient.
        compiler: compiles the graphs of the pass under fake tensors.
        maxima: sizes that may be smaller than these; the step is that of the largest.
        unreached: where the loss is unknown, positions of leaves of the model's output that get no gradient.
        beside_loss: whether the loss is not known, though there is one among the outputs: others get a gradient, too.
        laid_out: positions of those whose gradient comes in another layout than their own, and which; None: as the
            captured loss gives them.
        symbolic: whether they are symbols in the graphs.
        likely: whether Python code that decides by a random number goes as it mostly does, or as in this call.

    Raises:
        BatchError: the model does not accept the arguments, or the loss is not a differentiable scalar.
        CaptureError: the step cannot be written as graphs.
    """
    chances = CHANCES if likely else (None,)
    with _surroundings(), containers_kept(model):
        for chance in chances:
            answers = Answers(chance)
            answers.shared_loss = beside_loss
            try:
                ends = loss_fn, unreached, laid_out
                return _captured(model, args, kwargs, split, *ends, compiler, maxima, symbolic, answers)
            except (NothingCapturedError, ModelError):
                if chance == chances[-1] or not answers.by_chance:
                    raise
    raise AssertionError


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    split: Partition,
    loss_fn: LossFn | None,
    unreached: Collection[int],
    laid_out: LaidOut | None,
    compiler: GraphCompiler,
    maxima: Maxima | None,
    symbolic: bool,
    answers: Answers,
) -> TrainingGraph:
    """As `capture()`, for one way through the model's Python code."""
    fakes = _on_fakes(model, args, kwargs, answers)
    with fakes as (recording, fake_model, fake_args, fake_kwargs), forgotten() as errors:
        if maxima is not None and symbolic and on_mesh(fake_model, fake_args, fake_kwargs):
            raise CaptureError("torch.compile has no symbols for sizes of DTensors")
        if maxima is not None:
            fake_args, fake_kwargs = enlarged(fake_args, fake_kwargs, maxima, recording.mode)
        # a call may make what the next one uses (a table that is kept): the step is that of the model as it is
        before, writes = Attributes(fake_model), ParameterWrites(fake_model)
        trial = recording.mode, fake_model, fake_args, fake_kwargs, loss_fn, writes, answers
        paths, wider = _tried(errors, (model, args, kwargs), before, *trial)
        cut: dict[str, tuple[int, ...]] | None = None
        orders: dict[str, LaidOut] = {}
        for _ in range(4 if wider.inner else 3):  # what a wrong guess of the first cut off shows in the second
            before.restore()
            detach = lone_loss if cut is None and loss_fn is None else (cut or {})
            step = FakeStep(recording, split, detach, compiler, paths, orders)
            answers.begin()
            try:
                with random_drawn(fake_model, answers):
                    output = step.run(fake_model, fake_args, fake_kwargs, maxima if symbolic else None)
            except CaptureError as e:
                if not (wider.inner and isinstance(e, NothingCapturedError)):
                    _refuse(e, errors, paths, fake_model, (model, args, kwargs))
                paths, wider = wider, COMPILED
                continue
            answers.drew &= step.frames > 1  # a single graph takes the numbers for inputs
            asked = answers.lines()
            cut, loss = step.gradients(output, loss_fn, unreached, certain=not answers.shared_loss)
            if not step.reached:
                raise step.nothing_captured(fake_model, fake_args, fake_kwargs, maxima)
            orders = step.orders(output, laid_out)
            if cut == step.cut and orders == step.laid_out:
                regions, ends = regions_of(step.calls), leaves(output)
                return TrainingGraph(
                    regions=regions,
                    order=order_of(step.calls),
                    detached=cut,
                    laid_out=orders,
                    loss=loss,
                    links=links_of(step.calls, ends, step.sums, step.left, step.aside),
                    outputs=outputs_of(step.calls, ends),
                    held=held_of(step.calls, step.left),
                    fed=step.fed,
                    output_bytes=bytes_of_elements(ends),
                    maxima=maxima if any(is_size(n) for region in regions for n in region.primals) else None,
                    asked=(*asked, *step.asked),
                    chance=answers.chance,
                    attributes=step.attributes,
                    replaced=step.replaced,
                    written=tuple(sorted(writes.names)),
                    paths=paths,
                    parameters=parameters_of_calls(step.calls, {id(p): n for n, p in fake_model.named_parameters()}),
                )
        raise CaptureError(f"{type(model).__name__}: which outputs get a gradient changes from one pass to the next")


def _refuse(
    e: CaptureError, errors: Sequence[Exception | None], paths: Paths, fake_model: nn.Module, call: tuple[Any, Any, Any]
) -> NoReturn:
    """Raise the error of a step that cannot be captured, or that of an earlier attempt, which says more.

    Args:
        e: the error.
        errors: of the attempts in eager mode, by their order.
        paths: of the modules that run apart.
        fake_model: on fake tensors.
        call: the model, its arguments and keyword arguments.
    """
    if paths.apart and errors[0] is not None:
        raise CaptureError(refusal(fake_model, errors[0], eagerly=True)) from errors[0]
    if errors[-1] is None:
        raise e
    blame(*call, errors[-1])
    if e.__cause__ is None:
        raise e
    raise CaptureError(refusal(fake_model, errors[-1], eagerly=True)) from errors[-1]


@contextmanager
def _on_fakes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], answers: Answers
) -> Iterator[tuple[Recording, nn.Module, Any, Any]]:
    """As `to_fake()`; afterwards the tensors know no values: torch.compile keeps some as long as the model's code."""
    found = to_fake(model, args, kwargs, answers)
    try:
        yield found
    finally:
        forget_constants(found[0].mode)


@contextmanager
def random_drawn(model: nn.Module, answers: Answers) -> Iterator[Callable[[], bool]]:
    """Has every pass draw the same random numbers of Python's and NumPy's, and notes whether it did."""
    with random_kept(model, answers.chance) as undraw:
        try:
            yield undraw
        finally:
            answers.drew = undraw()


@contextmanager
def _surroundings() -> Iterator[None]:
    """Quiet, with gradients on, whatever the caller has; fake tensors stay in no cache, and are taken for real ones."""
    with fakes_forgotten(), quietly(), tracker_kept(), torch.inference_mode(False), as_if_real():
        yield


def _try_eagerly(
    mode: FakeTensorMode,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    loss_fn: LossFn | None,
    writes: ParameterWrites,
    answers: Answers,
) -> Exception | None:
    """Call the fake model without a compiler; returns its error, which may be a limit of fake tensors."""
    answers.begin()
    mistaken = state_mistaken(model)
    try:
        with mode, writes, tracker_kept(off=True), torch.enable_grad():
            output = model(*args, **kwargs)
    except Exception as e:
        return e
    if why := mistaken():
        raise CaptureError(f"{type(model).__name__}: {why}")
    if not any(map(differentiable, leaves(output))):
        raise ModelError(f"{type(model).__name__}: no output of the model depends on a parameter that needs a gradient")
    with mode:
        answers.shared_loss |= shares_loss(loss_fn, output)
    return None


def _tried(errors: list[Exception | None], call: tuple[Any, Any, Any], before: Attributes, *trial: Any) -> Ways:
    """`_try_eagerly(*trial)`, and `_try_again()` where its error is that values of tensors are not known.

    Args:
        errors: takes those of the attempts, by their order.
        call: the model, its arguments and keyword arguments.
        before: the attributes that the fake model had.
        trial: arguments of `_try_eagerly()`.
    """
    model, answers = trial[1], trial[-1]
    with random_drawn(model, answers) as undraw:
        errors.append(_try_eagerly(*trial))
        if not isinstance(errors[0], (DataDependentOutputException, DynamicOutputShapeException)):
            return COMPILED, COMPILED
        undraw()
        return _try_again(errors, learnt(answers, *call), before, *trial)


def _try_again(errors: list[Exception | None], knows: bool, before: Attributes, *trial: Any) -> Ways:
    """As `_try_eagerly(*trial)`, with what a real call told, if one did; without its sizes where these do not help.

    Enters the error as the last one. Returns the modules that run apart: those whose sizes depend on values; and these
    with all that call them, where torch.compile captures nothing so, as of a loop over them.
    """
    model, answers, first = trial[1], trial[-1], len(errors)
    shapes: list[tuple[Shapes, Shapes]] = []
    for answers.more in (0, 1) if knows else ():
        before.restore()
        shapes.append(shapes_of_calls(model, lambda: errors.append(_try_eagerly(*trial))))
        if not answers.sized:
            del errors[first + 1 :]
            return COMPILED, COMPILED
    answers.more = 0
    sized = tuple(sorted(answers.sized))
    inner: tuple[str, ...] = ()
    wider = COMPILED
    if sized and not any(errors[first:]):
        given, returned = zip(*shapes, strict=True)
        sized = with_callers(sized, *returned)
        inner = inner_parts(model, sized, *given)
        around = with_all_callers(sized, given[0])
        wider = Paths(around, inner_parts(model, around, *given))
    if sized and errors[first] is None and ("" not in sized or inner):
        errors.append(None)
        return Paths(sized, inner), wider
    answers.forget_sizes()
    before.restore()
    errors.append(_try_eagerly(*trial))
    return COMPILED, COMPILED


def learnt(answers: Answers, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a real call gave answers; `blame()` judges a call that fails."""
    if on_mesh(model, args, kwargs):
        return False
    forget_fakes()
    try:
        return answers.learn(model, args, kwargs)
    except Exception:
        return False


def blame(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raise BatchError if the model itself refuses the batch, run for real without gradients; return if it does not.

    A model on a mesh, which other processes would have to run as well, is not run: its error is raised again unless
    only fake tensors raise such errors.
    """
    try:
        if on_mesh(model, args, kwargs):
            if not isinstance(error, LIMITS):
                raise error
            return
        with untouched(model, args, kwargs) as (own_args, own_kwargs):
            model(*own_args, **own_kwargs)
    except Exception as e:
        tensors = tensors_in((args, dict(kwargs)))
        if any(t.is_meta for t in [*tensors, *model.parameters()]) and type(e) is not type(error):
            return  # the model needs values of tensors
        raise BatchError(
            f"{type(model).__name__} does not accept the batch ({given(tensors)}): {type(e).__name__}: {e}",
            of_model=e,
        ) from error


def given(tensors: Sequence[torch.Tensor]) -> str:
    """Shapes and types of a batch's tensors, for messages."""
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors) or "no tensors"
