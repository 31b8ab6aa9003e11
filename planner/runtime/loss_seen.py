"""What a recording says of the loss: the bytes that it takes beside the planned graphs, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import CodeType

import torch

from planner.core.loop import LossSeen
from planner.runtime.holders import held_in, staying
from planner.runtime.made import Event, LossEvents, Made
from planner.runtime.rebound import rebinding, rebound, with_older
from planner.runtime.recorded import Stays, outputs_held, outputs_of_all
from planner.runtime.recorder import Recorder

SEED = str(torch.ops.aten.ones_like.default)  # as `backward()` makes it


def loss_seen(
    recorder: Recorder, workspaces: Mapping[str, int], found: Stays, cleared: Collection[int] = (), *, first: bool
) -> LossSeen | None:
    """The loss that was recorded, the most of each where there were several backward passes; None where there was none.

    Args:
        recorder: of a step that has ended.
        workspaces: of ops, by key, in bytes: what each holds while it runs, beside what it makes.
        found: what the loop holds beside the step.
        cleared: of what that is, gradients that the next step clears before it makes others, by storage.
        first: whether no step was recorded before, so that what one leaves for the next was not there.
    """
    if not recorder.losses:
        return None
    gone = rebound(recorder.losses, found.kept, inspect.currentframe())
    recorded = [rebinding(loss, each, found.kept) for loss, each in zip(recorder.losses, gone, strict=True)]
    again, beside, inside = _returned(recorder, found.kept) if first else (found.again, 0, None)
    outputs = sum(outputs_held(recorder).values())
    # a graph that is kept has outputs among its saved tensors, until the loss is bound anew
    older = outputs if first and any(each.keeps for each in recorder.passes) else again
    seen = [_without_cleared(loss, found.kept, cleared).with_waiting() for loss in recorded]
    losses = [_with_renewed(with_older(loss, older, outputs, inside), found.renewed - found.returned) for loss in seen]
    with_outputs = [loss.events[loss.between : loss.let_go] for loss in losses]
    without = [loss.events[max(loss.between, loss.let_go) :] for loss in losses]
    forward, backward = (max(_most(events, workspaces) for events in each) for each in (with_outputs, without))
    alone = max(_most(map(_alone, loss.events), workspaces) for loss in losses)
    before = [loss.events[: _pass_begins(loss.events, len(loss.events))] for loss in losses]
    cut = [
        (events[loss.between : loss.let_go], events[max(loss.between, loss.let_go) :])
        for loss, events in zip(losses, before, strict=True)
    ]
    computed, later = (max(_most(events, workspaces) for events in each) for each in zip(*cut, strict=True))
    tangents = max(map(_tangents, recorder.losses, recorder.arrived))
    waiting, made = (-(-most // max(1, recorder.calls_made - 1)) for most in recorder.waiting)
    waits = max(sum(loss.waits.values()) for loss in losses)
    return LossSeen(
        output_bytes=recorder.results.nbytes,
        forward=forward,
        backward=backward,
        computed=computed,
        computed_later=later,
        between=max(_most(loss.events[: min(loss.between, loss.let_go)], workspaces) for loss in losses),
        between_later=max(_most(loss.events[loss.let_go : loss.between], workspaces) for loss in losses),
        left=found.left + again + beside + waits,
        read=found.read,
        stays=outputs + found.renewed,
        tangents=tangents,
        waiting=waiting,
        made=made,
        given=recorder.given.live,
        held=recorder.held,
        inputs=recorder.inputs_at_once,
        first_input=recorder.first_input,
        given_again=recorder.given_again,
        handed_on=recorder.handed_on,
        kept=sum(found.kept.values()),
        others=max(_most(loss.events, workspaces) for loss in losses) - alone,
        others_wait=waits,
        parts=found.parts,
        later=recorder.later_outputs,
        together=len(recorder.losses) == 1 and len(recorder.reached_calls) > 1,
    )


def _returned(recorder: Recorder, kept: Mapping[int, int]) -> tuple[int, int, CodeType | None]:
    """Bytes of the outputs, and of the loss and what it keeps, that stay until a function returns again, or until the
    loop binds anew, after its backward pass, what holds them; else the code of a function in which they still stay.
    """
    outputs, now = outputs_of_all(recorder), held_in(recorder.thread)
    stay = staying(now, recorder.held_then, {*outputs, *kept})
    again, beside = (sum(nbytes for key, nbytes in each.items() if key in stay) for each in (outputs, kept))
    return again, beside, None if stay else now.by_callers(outputs)


def _with_renewed(loss: LossEvents, nbytes: int) -> LossEvents:
    """A loss with so many bytes of before the step, which are gone when its backward pass begins."""
    begins = _pass_begins(loss.events, len(loss.events))
    events = (replace(e, live=e.live + nbytes) if at < begins else e for at, e in enumerate(loss.events))
    return replace(loss, events=tuple(events)) if nbytes else loss


def _tangents(loss: LossEvents, arrived: Mapping[int, Made]) -> int:
    return sum(nbytes for key, (number, nbytes) in loss.left.items() if (number, nbytes) == arrived.get(key))


def _pass_begins(events: Sequence[Event], at: int) -> int:
    """How many ran before the backward pass that those just before number `at` are part of, without the gradient of
    the loss itself, which begins it.

    Other backward passes may have come before, as that of a discriminator.
    """
    while at and events[at - 1].backward:
        at -= 1
    return at - 1 if at and events[at - 1].call.startswith(SEED) else at


def _without_cleared(loss: LossEvents, kept: Mapping[int, int], cleared: Collection[int]) -> LossEvents:
    """A loss whose gradients of parameters outside the model take the place of the last step's as they are made."""
    sizes = [0] * len(loss.events)
    for key in loss.left.keys() & kept.keys() & {*cleared}:
        made = next((at for at, e in enumerate(loss.events) if loss.left[key][0] in e.made), None)
        if made is not None and loss.events[made].backward:
            for at in range(_pass_begins(loss.events, made), len(sizes)):
                sizes[at] += kept[key]
    events = (replace(e, live=e.live - nbytes) for e, nbytes in zip(loss.events, sizes, strict=True))
    return replace(loss, events=tuple(events)) if any(sizes) else loss


def _alone(event: Event) -> Event:
    """The event without what other planned models take."""
    return replace(event, live=event.live - event.others) if event.others else event


def _most(events: Iterable[Event], workspaces: Mapping[str, int]) -> int:
    return max((event.live + workspaces.get(event.call, 0) for event in events), default=0)
