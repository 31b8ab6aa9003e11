"""From a checked request to a plan: capture, estimate, solve, rewrite, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial

from torch import fx

from planner.capture.passes.checkpoints import clone_of
from planner.capture.passes.dropout import planned_for
from planner.capture.regions.region import Region
from planner.capture.trace.attention import attention_as_on, eager_attention_as_on
from planner.capture.trace.closures import gradients_kept
from planner.capture.trace.data_dependent import DRAWN
from planner.capture.trace.dynamo import GraphCompiler, Partition, op_by_op
from planner.capture.trace.layers import has_whole_rnn, rnns_in_parts, rnns_in_steps
from planner.capture.trace.loss_trace import taken_loss
from planner.capture.trace.quiet import collector_paused
from planner.capture.trace.random_state import random_kept
from planner.capture.trace.state_guard import fakes_forgotten
from planner.capture.trace.step import TrainingGraph, capture
from planner.codegen.emit import emit, keep_everything
from planner.compat.dispatch import lasting_modes_off
from planner.compat.frames import with_room
from planner.compat.inductor import NOT_DONATED
from planner.compat.interrupts import interrupted_between_ops
from planner.compat.joint_trace import traces_of
from planner.core.account import BATCH
from planner.core.plan import GraphModules
from planner.core.step import Pass, Step, replay, run_passes
from planner.core.surroundings import autocast_as_for, under
from planner.costs.account import OTHERS, account_of, attributes_line
from planner.costs.ops import OpEstimate, estimate
from planner.eager.unplanned import eager_step, look_at_other_ways
from planner.errors import CaptureError, InfeasibleBudgetError, warn
from planner.lowering.between import add_between
from planner.lowering.build import BuildSettings, build, made_again, split_by_region
from planner.lowering.collectives import insert_collectives
from planner.lowering.keep import keep_asked, places, refuse_unmatched
from planner.lowering.margin import MARGIN, add_margin
from planner.lowering.microbatches import TARGETS, add_microbatches, add_second_backward, in_words
from planner.lowering.offload import add_link, moves_by_region, nothing_leaves
from planner.lowering.several import add_calls
from planner.offload.links import link_of
from planner.parallel.fsdp import groups_of
from planner.planning.as_told import as_told
from planner.planning.eager import make_eager_plan
from planner.planning.fragmentation import solve_with_margin
from planner.planning.host_room import room_taken, solve_within_host
from planner.planning.inductor import fused_graph, in_aten, make_inductor_plan, not_fused, without_inductor
from planner.planning.notes import notes, sentence
from planner.planning.outside import TANGENTS_FREED, links_seen, outside_loss, pinned_tangents
from planner.planning.pieces import Solved, as_in, described, solve_in_pieces
from planner.planning.pieces import in_words as pieces_in_words
from planner.planning.recipe import in_parts, recipe_of
from planner.planning.record import record_of
from planner.planning.refused import refused_in_words
from planner.planning.solution import solution_of
from planner.planning.steps import with_steps
from planner.planning.uncompiled import (
    fits_uncompiled,
    make_checkpointed,
    make_uncompiled,
    may_do_better,
    outside,
    peak_of_all,
)
from planner.planning.unreached import counting_trained
from planner.requests.inductor import refuse_inductor
from planner.requests.planned import Known, Planned
from planner.requests.request import Request
from planner.requests.tensors import refuse_tensors
from solvers import Solution
from solvers.progress import bar, clock


@with_room
@interrupted_between_ops()
@collector_paused()
def make_plan(
    request: Request,
    others: Sequence[Planned] = (),
    *,
    known: Known | None = None,
    must_match: bool = False,
    captured: TrainingGraph | None = None,
    earlier: TrainingGraph | None = None,
) -> Planned:
    """Plan a checked request that has a batch: capture, estimate, solve, rewrite. Raises as `plan()` does.

    Args:
        request: what was asked for.
        others: plans of the same model: a schedule of theirs is taken where it fits this step, instead of solving anew.
        known: a plan whose schedule is taken where the step turns out to be the one that it was made for.
        must_match: whether to raise RankError, and solve nothing, where the known plan is not for this step.
        captured: the step, where it has been captured before.
        earlier: the step of another plan: what Inductor made of it is not asked again where this one is like it.
    """
    refuse_tensors(request)
    if request.options.mode == "eager":
        with _out_of_sight(request), eager_attention_as_on(request.device if request.foreign else None):
            return make_eager_plan(request, others, known=known, must_match=must_match)
    if request.options.mode == "inductor":
        return _fused(request, others, known, captured, earlier, must_match=must_match)
    try:
        return _compiled(request, others, known, captured, must_match=must_match)
    except CaptureError as e:
        if must_match or (found := _checkpointed(request, e, known)) is None:
            raise
        return found


def _fused(
    request: Request,
    others: Sequence[Planned],
    known: Known | None,
    captured: TrainingGraph | None,
    earlier: TrainingGraph | None,
    *,
    must_match: bool,
) -> Planned:
    """The plan in Inductor's graphs; with a note, one of mode "aten" where these are not for it."""
    refuse_inductor(request.options, request.model, request.device)
    if request.loop.graph_retained:
        request = replace(request, settings=tuple(sorted({*request.settings, NOT_DONATED})))
    instead, why, planned = in_aten(request), without_inductor(), None
    several = captured is not None and bool(captured.calls)  # the request is for one of them
    fixed = must_match or several or not request.any_mode
    if not why:
        plan_one = partial(make_inductor_plan, lower=lower, others=others, known=known, earlier=earlier)
        try:
            with _out_of_sight(request):
                graph = fused_graph(request, graph_of, captured)
                return as_told(request, graph, known, plan_one, partial(fused_graph, capture=graph_of))
        except CaptureError as e:
            if fixed:
                raise
            instead = not_fused(request, e)
        except InfeasibleBudgetError as e:
            if fixed:
                raise
            instead = not_fused(request, f"with these it needs budget_gb={e.minimum_gb!r}")
            planned = _leaner(e, instead, others, known)
        why = instead.instead
    planned = planned or make_plan(instead, others, known=known, must_match=must_match)
    if instead.instead != request.instead:
        warn(why)
    return replace(planned, record=replace(planned.record, note=f"{planned.record.note} {why}".strip()))


def _leaner(fused: InfeasibleBudgetError, instead: Request, others: Sequence[Planned], known: Known | None) -> Planned:
    """The plan of another mode for a step that is too large as it was planned first; else the error of the leaner."""
    try:
        return make_plan(instead, others, known=known)
    except CaptureError:
        raise fused from None
    except InfeasibleBudgetError as e:
        raise min(fused, e, key=lambda error: error.minimum_bytes) from None


def _compiled(
    request: Request,
    others: Sequence[Planned],
    known: Known | None,
    captured: TrainingGraph | None,
    *,
    must_match: bool,
) -> Planned:
    """The plan in torch.compile's graphs, or without them where that does as well."""
    same = known is not None and (must_match or known.record.budget_bytes == request.budget_bytes)
    with rnns_in_parts(on=same and known is not None and in_parts(known.record.recipe)):
        graph = _captured(request, captured)
        lowered = partial(lower, request, graph, planned_before=bool(others))
        fits = request.uncompiled and fits_uncompiled(request, graph, partial(peak_of_all, lowered, request))
        if fits and (as_it_is := make_uncompiled(request, graph, known)) is not None:
            return as_it_is
        plan_one = partial(_planned, others=others, known=known, must_match=must_match)
        try:
            return as_told(request, graph, known, plan_one, _captured)
        except InfeasibleBudgetError as whole:
            if must_match or graph.calls:
                raise
            if outside(graph) or not any(map(has_whole_rnn, graph.regions)):
                if not may_do_better(graph, whole) or (found := _checkpointed(request, whole, known)) is None:
                    raise
                return found
            try:
                with rnns_in_parts():
                    return as_told(request, _captured(request), known, plan_one, _captured)
            except InfeasibleBudgetError as parted:
                if parted.minimum_bytes < whole.minimum_bytes:
                    raise parted from None
            raise


def _checkpointed(request: Request, why: CaptureError | InfeasibleBudgetError, known: Known | None) -> Planned | None:
    with _out_of_sight(request):
        return make_checkpointed(request, why, known)


@contextmanager
def _out_of_sight(request: Request) -> Iterator[None]:
    surroundings = under(request.surroundings, request.model)
    casting = autocast_as_for(request.device.type) if request.foreign else nullcontext()
    random, gradients = random_kept(request.model), gradients_kept(request.model)
    with fakes_forgotten(), random, gradients, lasting_modes_off(), surroundings, casting:
        yield


def _captured(request: Request, captured: TrainingGraph | None = None) -> TrainingGraph:
    """The step, which may have been captured before, with the same step in eager mode."""
    with _out_of_sight(request):
        graph = captured or graph_of(request)
        if graph.calls:  # the request is for one of them
            return graph
        with eager_attention_as_on(request.device if request.foreign else None):
            if not captured and DRAWN in graph.asked and outside(graph):
                look_at_other_ways(request, graph.chance)
            return replace(graph, eager=eager_step(request, graph.chance))


def capture_step(request: Request) -> TrainingGraph:
    """The step of a request that has a batch, and nothing else."""
    with _out_of_sight(request), collector_paused():
        return fused_graph(request, graph_of) if request.options.mode == "inductor" else graph_of(request)


def _planned(
    request: Request, graph: TrainingGraph, others: Sequence[Planned], known: Known | None, *, must_match: bool
) -> Planned:
    """The plan for a captured step."""

    def problem_of(of: TrainingGraph) -> Step:
        return lower(request, of, planned_before=bool(others))

    def solved(of: TrainingGraph, lowered: Step) -> Solved:
        solve_here = partial(solution_of, request=request, graph=of, others=others, known=known, must_match=must_match)
        first = None if known is None else known.record.account.get(MARGIN)
        with_margin = partial(solve_with_margin, request=request, solve=solve_here, first=first)
        return of, *solve_within_host(lowered, request, of, with_margin)

    if known is not None and (must_match or request.options.pieces):
        again = as_in(graph, known.record)
        if must_match or again is not graph:
            return write(request, *solved(again, problem_of(again)), captured=graph)
    if request.options.pieces:
        return write(
            request, *solve_in_pieces(graph, problem_of, solved, partial(add_margin, request=request)), captured=graph
        )
    return write(request, *solved(graph, problem_of(graph)))


def graph_of(request: Request, compiler: GraphCompiler | None = None) -> TrainingGraph:
    """The training step; where sizes may be smaller, at the largest, with symbols for them if that is possible."""
    with bar("capturing", request.options.progress, bar_format="{desc}: {n} graphs, {elapsed}") as shown, clock(shown):

        def split(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            shown.update()
            return keep_everything(region, on_fakes=True)

        card, options = request.device if request.foreign else None, request.options
        traces = None if request.foreign else traces_of(request.model)  # attention is traced as that of the card
        own = op_by_op(options.checkpoints, step_in_backward=options.step_in_backward, traces=traces)
        apart = rnns_in_steps() if request.foreign else nullcontext()
        kind = (request.device if request.foreign else request.model_device).type
        advice = "Plan with mode='eager', or a submodule of it"
        with refused_in_words(request.model, "captured", advice), attention_as_on(card), planned_for(kind), apart:
            return _graph_of(request, split, compiler or own)


def _graph_of(request: Request, split: Partition, compiler: GraphCompiler) -> TrainingGraph:
    batch = (request.args or (), request.kwargs)
    step = partial(
        capture,
        request.model,
        *batch,
        split,
        taken_loss if request.loss_fn is None and request.loop.only_loss else request.loss_fn,
        compiler,
        unreached=request.loop.unreached,
        beside_loss=bool(request.loop.beside_loss),
        laid_out=None if request.loop.loss is None else request.loop.laid_out,
        likely=request.assume_median_branch,
    )
    if request.maxima is None:
        return step()
    why = "none of its sizes is a symbol once it is traced"
    try:
        graph = step(request.maxima)
        if graph.maxima is not None:
            return graph
    except CaptureError as e:
        why = str(e)
    if request.options.dynamic is None:
        raise CaptureError(f"no graph serves every size: {why}")
    note = f"No graph serves every size ({why}): each new one is compiled, and runs by this schedule where that fits."
    return replace(step(request.maxima, symbolic=False), note=note)


def lower(
    request: Request,
    graph: TrainingGraph,
    *,
    planned_before: bool = False,
    estimates: Sequence[Sequence[OpEstimate]] | None = None,
) -> Step:
    """The training step as a problem, without a margin for fragmentation, by these estimates where there are any.

    Raises OptionError where a name in `keep` names nothing; a step after the first may do without it.
    """
    device, here, options, timed = request.device, request.measure_on, request.options, request.costs == "measured"
    loss, links = outside_loss(request, graph), links_seen(request.loop, graph)
    account, optimizer_step = account_of(counting_trained(request, graph))
    if loss.read:
        account |= {TARGETS: loss.read}
    account |= {OTHERS: account.get(OTHERS, 0) + loss.more} if loss.more else {}
    account |= attributes_line(graph.attributes, graph.replaced, request.loop)
    if loss.inputs is not None and BATCH not in options.account_gb:
        account |= {BATCH: loss.inputs}
    if statistics := sum(region.statistics_bytes() for region in graph.regions):
        account |= {"statistics between calls of a layer": statistics}
    groups = groups_of(request.model)
    settings = BuildSettings(
        account=account,
        modules={name for name, _ in request.model.named_modules()},
        loss_workspace=loss.workspace,
        loss_forward=loss.forward,
        let_go=loss.let_go,
        at_once=loss.at_once,
        waited=loss.waited,
        loss_bytes=loss.left,
        tangents_pinned=pinned_tangents(request, graph),
        tangents_held=not TANGENTS_FREED,
        accumulate=request.gradients_copied,
        optimizer_step=optimizer_step,
        shard=options.shard,
        reduced=bool(groups),
        granularity=512 if device.caches else 1,
        budget=request.budget_bytes,
    )
    if estimates is None:
        estimates = estimate(graph.regions, device, measure_on=here, timed=timed, progress=options.progress)
    step = build(graph.regions, with_steps(request, graph, estimates), links, settings, graph.held)
    if loss.between is not None:
        step = add_calls(step, loss.between)
    if not planned_before:
        refuse_unmatched(places(step), options.keep, settings.modules)
    passes: list[Pass] = [
        partial(keep_asked, keep=options.keep, repeated=_repeated(graph)),
        partial(insert_collectives, groups=groups, accumulate=request.accumulates, granularity=settings.granularity),
        partial(
            add_microbatches,
            request=request,
            waits=(loss.waiting, loss.waiting_backward),
            loss_left=loss.excess,
            stays=max(0, loss.stays - sum(n for name, n in request.loop.attributes if name in graph.replaced)),
        ),
    ]
    if request.loop.graph_retained:
        passes.append(partial(add_second_backward, request=request, loss_bytes=loss.waiting_backward))
    if options.offload is not None:
        passes.append(partial(add_link, regions=graph.regions, link=link_of(options, device, here)))
    return run_passes(step, [*passes, partial(add_between, nbytes=request.loop.between_steps)])


def _repeated(graph: TrainingGraph) -> frozenset[tuple[int, int]]:
    """The ops that checkpoints of the model's own run again: region and index."""
    regions = [(r, region) for r, region in enumerate(graph.regions) if region.checkpointed]
    return frozenset((r, i) for r, region in regions for i, op in enumerate(region.ops) if clone_of(op.node))


def write(
    request: Request, graph: TrainingGraph, step: Step, solution: Solution, captured: TrainingGraph | None = None
) -> Planned:
    """The plan that a solution of the step is; `captured` is the step with every op whole, where it is another."""
    problem = step.problem
    planned = replay(problem, solution.schedule, solution.timeline)
    passes = split_by_region(step, solution.schedule, len(graph.regions))
    moves = moves_by_region(step, solution.schedule, graph.regions)
    again = made_again(step, graph.regions, passes)

    @cache
    def graphs() -> tuple[GraphModules, ...]:
        rows = zip(graph.regions, passes, moves, again, strict=True)
        written = (emit(r, *each, own, made_again=values) for r, each, own, values in rows if r.fingerprint)
        return tuple(GraphModules(*each) for each in written)

    cut = described(graph, step)
    words = [sentence(solution.note), in_words(problem, planned), pieces_in_words(cut), graph.note]
    if request.options.offload is not None and (stays := nothing_leaves(problem)):
        warn(stays)
        words.append(stays)
    note = " ".join(filter(None, [*words, *notes(request, graph)]))
    recipe, host_bytes = recipe_of(graph, passes, moves, again), room_taken(graph, passes, moves)
    record = record_of(request, step, planned, replace(solution, note=note), recipe, host_bytes=host_bytes)
    record = replace(record, eager_peak_bytes=graph.eager.peak_bytes if graph.eager else None, pieces=cut)
    return Planned(record, request, graphs, captured=captured or graph)
