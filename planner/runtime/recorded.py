"""What a recording of a training loop says of the tensors that the loop holds beside the planned step."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

from planner.compat.dispatch import lasting_modes_off
from planner.core.attributes import kept_as_attributes
from planner.core.call import Call, gradient_of, storages
from planner.core.loop import Loop
from planner.costs.measured_ops import measure
from planner.runtime.copied import tensors_of_copies
from planner.runtime.events import PlannedModel
from planner.runtime.holders import Held, bound_anew, bound_by_call, copies_of, held_in
from planner.runtime.hooks_held import held_by_hooks
from planner.runtime.made import Made, UsedStorages, takes_memory
from planner.runtime.recorder import Recorder

HOSTS = ("cpu",)  # kinds of devices whose memory has data sets and the like, which no budget of a step is for


def outputs_held(recorder: Recorder) -> dict[int, int]:
    """The storages of what the first of the recorded calls returned that are alive, in bytes."""
    results = [*(ref() for ref in recorder.results.tensors.values()), *(ref() for ref in recorder.aside)]
    one = recorder.returned.made.copy() if recorder.calls_made == 1 else {}  # of which a view may hold the memory
    return storages([t for t in results if t is not None]) | {key: nbytes for key, (_, nbytes) in one.items()}


def attributes_held(recorder: Recorder) -> tuple[tuple[str, int], ...]:
    """The names and the bytes of those that modules keep as attributes."""
    outputs, model = outputs_held(recorder).keys(), recorder.model()
    kept = {} if model is None or not outputs else kept_as_attributes(model)
    sizes = {name: storages([t]) for name, t in kept.items()}
    return tuple((name, sum(own.values())) for name, own in sizes.items() if own.keys() <= outputs)


def shown_by(recorder: Recorder, held: Collection[int], *, only_loss: bool) -> Loop:
    """The loop, as far as a recording that has ended shows it by itself.

    Args:
        recorder: of a step.
        held: the positions of outputs that the loop held at its end.
        only_loss: whether the model's own loss is the only output that got a gradient.
    """
    results, one = recorder.results, recorder.calls_made == 1
    return Loop(
        outputs_held=None if len(held) == len(results.tensors) else tuple(sorted(held)),
        outputs_late=() if one else tuple(sorted({*(results.late or ())}.intersection(held))),
        at_once=results.at_once if one else (),
        later_held=tuple(sorted(recorder.later_held)),
        only_loss=only_loss,
        beside_loss=tuple(sorted(results.reached)),  # a plan says which of them it takes to get none
        unreached=() if only_loss else results.unreached,
        by_turns=results.by_turns if one else (),
        laid_out=results.laid_out,
        graph_retained=any(each.keeps for each in recorder.passes),
        asks_first=bool(recorder.passes) and not recorder.passes[0].adds,
        attributes=attributes_held(recorder),
        without=(results.left_out,),
        aside=results.aside,
    )


def outputs_of_all(recorder: Recorder) -> dict[int, int]:
    """The same of all calls that were recorded."""
    return outputs_held(recorder) | {key: nbytes for key, (_, nbytes) in recorder.returned.made.copy().items()}


def workspaces_of(recorder: Recorder, known: Collection[str]) -> dict[str, int]:
    """The bytes that the recorded ops hold while they run, beside what they make, by key, but for known ones: they are
    measured.
    """
    ran = {event.call for loss in recorder.losses for event in loss.events} - {""}
    return workspaces({key: recorder.calls[key] for key in ran.difference(known)}, recorder.device)


def workspaces(calls: Mapping[str, Call], device: torch.device, *, gradients: bool = True) -> dict[str, int]:
    """The bytes that ops hold while they run, beside what they make: they are measured; 0 for those that fail."""
    with lasting_modes_off():
        found = measure(calls.values(), device, progress=False, gradients=gradients)
    return {key: found[key].workspace if key in found else 0 for key in calls}


@dataclass(frozen=True, slots=True)
class Stays:
    """Bytes of the tensors that a loop holds beside the planned step.

    Attributes:
        beside: from step to step: parameters of other modules and tensors that were written into, as far as the loss
            used them, what was made before the backward pass and is still there, gradients that are no `.grad`, batches
            of earlier calls that get gradients.
        around: the same of what was used between one step and the next, and what was made and used there, where another
            model is trained there; else that is part of `beside`. On a GPU, what was only read there is among it, such
            as the data that a batch is drawn from.
        read: what the loss is computed from, but for what is among `beside`, as a queue that is written into later on.
        left: from the loss to the end of the backward pass.
        kept: of `beside`, what was made before the backward pass and is still there, by storage.
        batches: of `beside`, what the calls were given.
        kept_passes: the gradients that earlier backward passes have left, at most, when one begins that keeps its
            graph, without those in `beside`.
        freed_passes: the same when one begins that does not keep it.
        again: outputs of the step before that were there until the end of the backward pass, as some are now.
        unread: of what the loss was computed from, what is gone: the next one's takes its place.
        parts: beside `left`, what was there when the backward pass began, and in whose place gradients of outputs came.
        renewed: what was made since the last backward pass, as by an evaluation, and is there until the next begins:
            the loop has bound by then what holds it to outputs and losses of its step. Gradients outside the planned
            graphs that it clears by then are among it.
        returned: of `renewed`, what is gone as soon as the call that begins returns.
    """

    beside: int
    around: int
    read: int
    left: int
    kept: Mapping[int, int] = field(default_factory=dict)
    batches: int = 0
    kept_passes: int = 0
    freed_passes: int = 0
    again: int = 0
    unread: int = 0
    parts: int = 0
    renewed: int = 0
    returned: int = 0


def stays(
    recorder: Recorder,
    batch: Any,
    counted: Any,
    optimizers: Collection[optim.Optimizer] = (),
    *,
    awaited: int = 0,
    later_inputs: int = 0,
    turns: bool = False,
    cleared: Collection[int] = (),
) -> Stays:
    """What a loop holds, when the next step begins.

    Args:
        recorder: of the step before.
        batch: of the next step.
        counted: a tree of other tensors that the account has lines for.
        optimizers: whose state is among these.
        awaited: bytes of the optimizers' state that the account has and that is not there yet: some of what they made.
        later_inputs: bytes of what calls after the first of the next step are given, and that is there before it.
        turns: whether the next step is of another kind: gradients that other models have stay in it.
        cleared: gradients outside the model that the loop clears before the next backward pass, by storage.
    """
    # copies, as what is alive may go while the collector runs; batches of several calls are in flight
    batches = recorder.makes_batches  # then the step's own counts where it is there; else as far as it gets gradients
    given = (recorder.inputs if batches else recorder.batches).made.copy() if recorder.calls_made == 1 else {}
    others = {*recorder.others, *recorder.passing}
    recorder.gone_into.bound(storages(counted))
    own, alive = storages([batch, counted, [other.tensors() for other in others]]).keys(), recorder.made.made.copy()
    coming = storages(batch).keys()
    used = _used_outside(recorder, own)
    stay = _stays_of_others(recorder, used, own, optimizers)
    later = {key: nbytes for each in (recorder.gradients.made.copy(), given) for key, (_, nbytes) in each.items()}
    left, parts, remaining = _left_by_losses(recorder, alive)
    made = {each for loss in recorder.losses for each in loss.left.values()}
    stay |= remaining | _gradients_held(recorder, others=turns)
    if batches:  # an older one that is there is no part of the loop's data, either
        older = {key: nbytes for each in recorder.undecided for key, (_, nbytes) in each.made.copy().items()}
        stay |= _without(older, later)
    there = {key for older in recorder.older for key in list(older.made)}
    earlier = _without(recorder.before, {*own, *later, *(key for loss in recorder.losses for key in loss.read)})
    stay |= {key: nbytes for key, nbytes in earlier.items() if key in there}
    before, added_to = _left_outside(recorder, {*own, *stay, *alive}, cleared)
    gone, losses, outputs = _gone(recorder, there, earlier, remaining)
    gone -= _gradients_counted(others, there)
    fresh = {key: each[1] for key, each in alive.items() if key not in stay and key not in later and each not in made}
    new, renewed, returned = _without_renewed(recorder, _without(fresh, own))  # with the next targets, later inputs
    spent = _spent(recorder, new)
    copies = _copies(recorder)  # a penalty may read what the parameters were
    read = max((sum(_without(loss.read, {*stay, *copies}).values()) for loss in recorder.losses), default=0)
    came_before = bool(coming) and coming.isdisjoint([*alive, *there, *recorder.inputs.made])
    unread = 0 if came_before else _gone_reads(recorder)
    states = min(awaited, sum(nbytes for key, nbytes in new.items() if alive[key][0] in recorder.of_optimizer))
    made_since = max(0, sum(new.values()) - states - unread)
    inputs = min(later_inputs, made_since)
    made_since -= inputs
    later = _without(later, {*own, *stay})
    # what an earlier call left, and is gone, was there with what stays; with what came later, as far as that is not in
    # its place
    since = sum(later.values()) + _bytes(gone - Counter([*fresh.values(), *later.values()]))
    more = max(since, _bytes(gone) - made_since - inputs)
    ahead = sum(nbytes for key, nbytes in remaining.items() if key in coming)  # beside the batch of this step
    beside = sum(_without(stay, own).values()) + ahead + more + added_to + _planned_stays(others, optimizers)
    data, elsewhere = recorder.device.type not in HOSTS, {*stay, *later}
    between = {k: u for k, u in used.items() if k not in elsewhere and (u.stays or (data and not u.in_step))}
    older_states = sum(between[key].nbytes for key in between.keys() & recorder.by_optimizer.made.copy())
    idle = sum(_without(copies, {*own, *stay, *alive, *later, *between}).values())
    around = idle + sum(each.nbytes for each in between.values()) + made_since - min(awaited - states, older_states)
    apart = around if any(each.trained is not None for each in between.values()) else 0
    return Stays(
        beside + around - apart,
        apart,
        read,
        left + losses + spent,
        _without(remaining, own),
        sum(nbytes for key, (_, nbytes) in given.items() if key not in own),
        *_left_by_passes(recorder, own),
        again=outputs,
        unread=unread,
        parts=parts,
        renewed=renewed + max(before, spent),
        returned=returned,
    )


def _planned_stays(others: Iterable[PlannedModel], optimizers: Iterable[optim.Optimizer]) -> int:
    """Bytes of other planned models: the state of an optimizer that steps several counts once."""
    nbytes, counted = 0, [*optimizers]
    for other in others:
        nbytes += other.stays(counted)
        counted += other.optimizers()
    return nbytes


def _used_outside(recorder: Recorder, own: Collection[int]) -> UsedStorages:
    """What the loop has used but for these storages: their gradients are counted with them, and forgotten here."""
    used = recorder.used.copy()
    for key in used.keys() & own:
        used.pop(key).trained = None
    return used


def _without_renewed(recorder: Recorder, new: Mapping[int, int]) -> tuple[dict[int, int], int, int]:
    """These without what variables hold that each step binds anew before its backward pass; the bytes of that, and of
    what the result of the call that begins takes the place of.
    """
    if not (new and recorder.bound):
        return {**new}, 0, 0
    by_call = bound_by_call(inspect.currentframe())
    renewed = bound_anew(now := held_in(recorder.thread), recorder.bound | by_call, new)
    returned = bound_anew(now, by_call, renewed)
    return _without(new, renewed), sum(new[key] for key in renewed), sum(new[key] for key in returned)


def _gone_reads(recorder: Recorder) -> int:
    """Bytes of what losses were computed from and is gone, at most; what is there is read again, as by a closure.

    Those of the next loss take its place, unless they were there before the recording began, as the next batch was.
    """
    gone = [sum(n for key, n in loss.read.items() if key not in recorder.used) for loss in recorder.losses]
    return max(gone, default=0)


def _gone(
    recorder: Recorder, there: Collection[int], earlier: Mapping[int, int], remaining: Mapping[int, int]
) -> tuple[Counter[int], int, int]:
    """Of what was there as a backward pass began, and is gone: the sizes of what is no loss and no output of the step
    before, and the bytes of those; a function returned them, so that the recorded ones will be beside the next.
    """
    gone = {key: nbytes for key, nbytes in earlier.items() if key not in there}

    def again(before: Collection[int], now: Mapping[int, int]) -> Counter[int]:
        return Counter(gone[key] for key in gone.keys() & before) & Counter(now.values())

    losses = again(recorder.kept_before, remaining)
    outputs = again(recorder.returned_before, outputs_of_all(recorder))
    return Counter(gone.values()) - losses - outputs, _bytes(losses), _bytes(outputs)


def _gradients_counted(others: Iterable[PlannedModel], there: Collection[int]) -> Counter[int]:
    """The sizes of gradients that other planned models count, but for those that were there as a pass began: the ones
    before them are gone.
    """
    trained = [p for other in others for p in other.trained() if p.requires_grad]
    return Counter(p.nbytes for p in trained if storages([gradient_of(p)]).keys().isdisjoint(there))


def _bytes(sizes: Counter[int]) -> int:
    return sum(nbytes * times for nbytes, times in sizes.items())


def _left_by_losses(recorder: Recorder, alive: Mapping[int, Made]) -> tuple[int, int, dict[int, int]]:
    """The most bytes that a loss has left for its backward pass, and that are gone, but for those in whose place
    gradients of outputs came; these; and what of all losses is alive.
    """
    left, replaced, remaining = 0, 0, dict[int, int]()
    for loss, arrived in zip(recorder.losses, recorder.arrived, strict=True):
        made = {key: each for key, each in loss.left.items() if arrived.get(key) != each}
        kept = {key: each[1] for key, each in made.items() if alive.get(key) == each}
        # of a gradient that came later, in another storage
        parts = sum(each[1] for key, each in made.items() if key in loss.parts and key not in kept)
        came = sum(each[1] for key, each in arrived.items() if loss.left.get(key) != each)
        held = sum(nbytes for _, nbytes in made.values()) - sum(kept.values())
        in_place = min(parts, came)
        left, replaced = max(left, held - in_place), max(replaced, in_place)
        remaining |= kept
    return left, replaced, remaining


def _gradients_held(recorder: Recorder, *, others: bool) -> dict[int, int]:
    """The gradients that outputs retain; those of parameters outside the planned graphs, too, where `others` asks."""
    outputs = [t for ref in recorder.results.tensors.values() if (t := ref()) is not None]
    found = [t.grad for t in outputs if t.retains_grad]
    return storages(found) | (_gradients_outside(recorder) if others else {})


def _stays_of_others(
    recorder: Recorder, used: UsedStorages, own: Collection[int], optimizers: Iterable[optim.Optimizer]
) -> dict[int, int]:
    """What stays of what the loop has used for this step or earlier ones; what hooks of parameters hold; and all
    parameters of the model's optimizers, as those of heads that take turns.
    """
    every = [used, *(each.copy() for each in recorder.used_before)]
    stay = {key: u.nbytes for each in every for key, u in each.items() if u.in_step and u.stays}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [p for group in groups for p in group["params"] if p.device == recorder.device]
    hooks = {} if (model := recorder.model()) is None else held_by_hooks(model, recorder.device)
    return _without(stay | storages(trained) | hooks, own)


def _copies(recorder: Recorder) -> dict[int, int]:
    """The model's copies that are there, and those of its state: they may become averages from some step on. Those on
    fake tensors, by which a step was captured, stay until Python's collector comes.
    """
    if (model := recorder.model()) is None:
        return {}
    copied = storages([t for t in tensors_of_copies(model) if takes_memory(t, recorder.device)])
    return copied | copies_of(held_in(recorder.thread), dict(model.named_parameters()), recorder.device)


def _gradients_outside(recorder: Recorder) -> dict[int, int]:
    """The gradients of parameters outside the planned graphs, which may be made after the graphs have run."""
    return storages([p.grad for p in trained_outside(recorder.used)])


def _spent(recorder: Recorder, new: Collection[int]) -> int:
    """Bytes of the used gradients that the latest backward pass found, but for those that the next one finds among what
    is new since.
    """
    return max(0, recorder.spent - sum(n for key, n in _gradients_outside(recorder).items() if key in new))


def _left_outside(recorder: Recorder, counted: Collection[int], cleared: Collection[int]) -> tuple[int, int]:
    """Bytes of these gradients that the next backward pass finds cleared, and of those that it adds to."""
    left = _without(_gradients_outside(recorder), counted)
    gone = sum(nbytes for key, nbytes in left.items() if key in cleared)
    return gone, sum(left.values()) - gone


def trained_outside(*used: UsedStorages) -> list[nn.Parameter]:
    """The parameters outside the planned graphs of which a loss may have asked for the gradient."""
    trained = [each.trained for those in used for each in those.copy().values() if each.trained is not None]
    return [p for ref in trained if (p := ref()) is not None]


def _left_by_passes(recorder: Recorder, own: Collection[int]) -> tuple[int, int]:
    """The gradients that earlier backward passes have left, at most, as one begins that keeps its graph, or does not.

    Those that still are there, and are not among the tensors with these keys, are `beside` the step.
    """
    now = held_in(recorder.thread) if len(recorder.passes) > 1 else Held()
    alive = recorder.gradients.made.copy()
    passes = [(each.keeps, each.beside(now, own, alive)) for each in recorder.passes]
    kept, freed = (max((nbytes for keeps, nbytes in passes if keeps is which), default=0) for which in (True, False))
    return kept, freed


def between_steps(recorder: Recorder, own: Any) -> int:
    """The bytes that a loop held at once, at least, between the last backward pass and the next call of the model.

    The workspaces of ops are measured where less than half of the plan's budget is left.

    Args:
        recorder: of these steps, not ended yet.
        own: a tree of what was there all the time.
    """
    there = {key: used.nbytes for key, used in recorder.used.copy().items() if used.stays} | storages(own)
    recorded = recorder.made, recorder.inputs, recorder.returned, recorder.added, recorder.gradients
    known = {key for each in (*recorded, *recorder.older) for key in each.made.copy()}
    beside = sum(_without(there | _copies(recorder), known).values())
    between = recorder.between.most()
    most = beside + max(between.values(), default=0)
    if most <= recorder.budget // 2:
        return most
    ran = {name: recorder.calls[name] for name in between.keys() & recorder.calls.keys()}
    held = workspaces(ran, recorder.device)
    return beside + max((level + held.get(name, 0) for name, level in between.items()), default=0)


def _without(sizes: Mapping[int, int], keys: Collection[int]) -> dict[int, int]:
    return {key: nbytes for key, nbytes in sizes.items() if key not in keys}
