"""Which modules of a traced step may be checkpointed, and why the others may not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from planner.compat.modules import has_forward_hooks
from planner.core.call import storages
from planner.eager.checkpointing import statistics_of
from planner.eager.costs import OpCost
from planner.eager.trace import ModuleCall, Trace

_PACK = "aten._pack_padded_sequence.default"


@dataclass(frozen=True)
class Candidate:
    """A module that may be checkpointed; ops and storages by their number in the trace.

    Attributes:
        path: of the module.
        calls: of modules, it among them.
        begin: the first op of its call.
        stop: the op at which running it again ends: autograd saves nothing from there on.
        end: the first op after its call.
        starts, ends: the first op of the backward pass for which it has run again, and the first one after the last
            that needs what it saves.
        inputs: storages of its arguments.
        saved: storages that autograd saves in it and it makes -> the op up to which they are needed.
        forced: ops whose results must be kept.
        optional: ops whose results may be kept, alone or together.
    """

    path: str
    calls: range
    begin: int
    stop: int
    end: int
    starts: int
    ends: int
    inputs: frozenset[int]
    saved: Mapping[int, int]
    forced: frozenset[int]
    optional: tuple[tuple[int, ...], ...]


def find_candidates(model: nn.Module, trace: Trace, costs: Sequence[OpCost]) -> tuple[list[Candidate], dict[str, str]]:
    """The modules that may be checkpointed, outer ones first, and for others the reason why not.

    Args:
        model: what was traced, on the same fake tensors.
        trace: a detailed one.
        costs: of its ops.
    """
    written: dict[int, list[int]] = defaultdict(list)  # storage -> ops that write into it
    for i, op in enumerate(trace.ops):
        for s in op.mutates if op.phase != "backward" else ():
            written[s].append(i)
    # running statistics are frozen while a module runs again, where torch's own code is all that uses them
    own = {path for path, module in model.named_modules() if type(module).forward.__module__.startswith("torch.nn.")}
    used = {s for op in trace.ops if op.phase != "backward" and op.module not in own for s in op.reads}
    for norm in statistics_of(model):
        for key in storages(list(norm.buffers(recurse=False))):
            if (s := trace.given.get(key, -1)) not in used:
                written.pop(s, None)
    called = defaultdict(list)
    for at, call in enumerate(trace.calls):
        called[call.path].append(at)
    candidates, refused = [], {}
    for path, calls in called.items():
        call = trace.calls[calls[0]]
        if not path or call.phase != "forward":
            continue
        inner = trace.calls[calls[0] + 1 : call.inner]
        reason = _twice(calls, trace.calls) or _inside(model, call, inner, called, trace.calls)
        reason = reason or _data(call, trace, written)
        candidate = None if reason or not call.differentiable else _candidate(calls[0], trace, costs, written)
        if isinstance(candidate, Candidate) and _varies(model, call, (call, *inner), trace):
            candidate = _without_kept(candidate)
        if isinstance(candidate, Candidate):
            candidates.append(candidate)
        elif reason or candidate:
            refused[path] = reason or str(candidate)
    return candidates, refused


def _twice(calls: Sequence[int], every: Sequence[ModuleCall]) -> str:
    if any(every[at].phase == "backward" for at in calls):
        return "it is checkpointed already"
    return f"it is called {len(calls)} times in a step" if len(calls) > 1 else ""


def _inside(
    model: nn.Module,
    call: ModuleCall,
    inner: Sequence[ModuleCall],
    called: Mapping[str, Sequence[int]],
    every: Sequence[ModuleCall],
) -> str:
    """What a call or those made in it do beside computing."""
    for c in (call, *inner):
        if c.changed:
            return f"{c.path} sets its attribute {c.changed[0]!r}, which would be set again"
    for c in inner:
        module = model.get_submodule(c.path)
        if has_forward_hooks(module):
            return f"hooks of {c.path} would run again"
        if any(every[at].phase == "backward" for at in called[c.path]):
            return f"{c.path}, in it, is checkpointed already"
    return ""


def _varies(model: nn.Module, call: ModuleCall, within: Sequence[ModuleCall], trace: Trace) -> bool:
    """Whether the number of ops in a call depends on the lengths of packed sequences."""
    packs = [i for i, op in enumerate(trace.ops) if op.target == _PACK]
    if any(call.begin <= i < call.end for i in packs):
        return True
    return bool(packs) and any(isinstance(model.get_submodule(c.path), nn.RNNBase) for c in within)


def _without_kept(candidate: Candidate) -> Candidate | str:
    """The candidate, all of which runs again: what is kept is told by how many ops ran before it."""
    if candidate.forced:
        return "what must not run twice in it is found by a number of ops, which depends on the lengths of sequences"
    return replace(candidate, optional=())


def _data(call: ModuleCall, trace: Trace, written: Mapping[int, Sequence[int]]) -> str:
    """Whether what a call reads from outside is there, unchanged, when it runs again."""
    for op in trace.ops[call.begin : call.end]:
        for s in op.mutates:
            if trace.born[s] < call.begin and s in written:
                return "it writes into a tensor that it is given" if trace.born[s] >= 0 else "it writes into a buffer"
        for s in op.reads:
            if trace.born[s] >= call.begin or (trace.born[s] >= 0 and not trace.sizes[s]):
                continue
            if any(i >= call.begin or trace.born[s] < 0 for i in written.get(s, ())):
                return "a tensor that it reads is overwritten"
            if trace.born[s] >= 0 and s not in call.inputs:
                return "it reads a tensor that is none of its arguments"
    return ""


def _candidate(
    at: int, trace: Trace, costs: Sequence[OpCost], written: Mapping[int, Sequence[int]]
) -> Candidate | str | None:
    """The candidate; or why it cannot be one; None where it saves nothing of its own."""
    call = trace.calls[at]
    packed = [s for s in trace.saved if s.within in range(at, call.inner)]
    asked = [n for s in packed for n in s.unpacked]
    saved: dict[int, int] = {}
    for s in packed:
        if trace.born[s.storage] >= call.begin and s.unpacked:
            died = trace.died[s.storage]  # the ops that need it have ended then, unless it is held for the user
            needed = died if died <= len(trace.ops) else max(s.unpacked) + 1
            saved[s.storage] = max(saved.get(s.storage, 0), needed)
    if not saved:
        return None
    stop = min(call.end, max(s.packed for s in packed))
    sorted_out = _sort_out(range(call.begin, stop), trace, costs, written)
    if isinstance(sorted_out, str):
        return sorted_out
    return Candidate(
        call.path,
        range(at, call.inner),
        call.begin,
        stop,
        call.end,
        min(asked),
        max(*saved.values(), max(asked) + 1),
        call.inputs,
        saved,
        *sorted_out,
    )


def _sort_out(
    span: range, trace: Trace, costs: Sequence[OpCost], written: Mapping[int, Sequence[int]]
) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]] | str:
    """Of the ops that would run again, those to keep, and those that may be kept; or why they must not run again."""
    forced: set[int] = set()
    optional: list[tuple[int, ...]] = []
    random: list[tuple[int, ...]] = []
    for i in span:
        op, cost = trace.ops[i], costs[i]
        if not op.writes:
            if cost.keep_because:
                return f"{op.target} must not run twice"
            continue
        group = _group(i, span, trace, written)
        draws = any(costs[j].replayed for j in group or (i,))
        if cost.keep_because:
            if not group:
                return f"{op.target} must not run twice"
            forced.update(group)
        elif draws:
            random.append(group)
        elif group and any(costs[j].seconds for j in group):
            optional.append(group)
    drawn = sum(costs[i].replayed for i in span)
    kept = [i for i in forced if costs[i].replayed]
    if kept and len(kept) < drawn:
        return f"{trace.ops[kept[0]].target} must not run twice, and what is drawn in its module beside it would differ"
    if random and all(random) and drawn == sum(costs[i].replayed for group in random for i in group):
        # one drawn again would draw what those kept before it have drawn
        optional.append(tuple(i for group in random for i in group))
    return frozenset(forced), tuple(optional)


def _group(i: int, within: range, trace: Trace, written: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """An op and those that write into what it makes, which can be kept together; empty where that would be wrong."""
    made = trace.ops[i].writes
    later = sorted({j for s in made for j in written.get(s, ())})
    own = all(j in within and not trace.ops[j].writes and set(trace.ops[j].mutates) <= set(made) for j in later)
    last = later[-1] if later else i
    read = any(
        not set(made).isdisjoint(trace.ops[j].reads) and trace.ops[j].distinct is not None
        for j in range(i + 1, last)
        if j not in later
    )
    changes = any(s in written for s in trace.ops[i].mutates)  # running statistics are left out
    return () if changes or not own or read else (i, *later)
