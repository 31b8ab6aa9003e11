"""What a training loop does around the planned graphs, as its first step showed it: plans are made for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from planner.core.layout import Order

Gradients = Literal["cleared", "cleared late", "accumulated"]
LaidOut = tuple[tuple[int, Order], ...]


@dataclass(frozen=True, slots=True)
class LossSeen:
    """The tensors that a loop made between the forward and the backward pass of a planned model; sizes in bytes.

    Attributes:
        output_bytes: of the model's outputs in that step: another step takes as much more or less as its outputs are.
        forward: the most that they held at once while outputs were alive that the loop lets go of before the backward
            pass; the gradients of the outputs are among them.
        backward: the most from then on.
        computed: of `forward`, the most before the backward pass of the loss itself began.
        computed_later: the same of `backward`.
        between: the same as `forward` of what came before the last of several calls, which no other one counts.
        between_later: the same as `backward`.
        left: of those that were alive when the planned backward pass began, beside the gradients of the outputs.
        read: of other tensors on the device that they were computed from, such as targets; neither the model's own,
            nor of its batch, nor parameters.
        stays: of the model's outputs that the loop still holds while the next forward pass runs.
        tangents: of the gradients of the model's outputs, of all calls, that were there when the planned backward pass
            began.
        waiting: of a call's outputs that were still there while another call of the model ran before the backward pass.
        made: of what the loop had made of them.
        given: of the gradients of the model's outputs that the loop still holds while the next forward pass runs.
        held: of the gradients of the model's outputs that were there still when the planned graphs had used them.
        inputs: of what the calls of a step were given and was there at once, at most.
        first_input: of what the first of them was given.
        given_again: of what later ones were given, and earlier ones had been given, too.
        handed_on: of what later ones were given, and earlier ones had returned.
        kept: of those that were alive when the planned backward pass began, what the loop still holds while the next
            forward pass runs, as what the graph of the loss keeps; it is in the loop's `beside`, too.
        others: of the most of these, what is there only while other planned models run, or waits for their backward
            passes.
        others_wait: of `left`, what other planned models have saved for backward passes that come later.
        parts: of those that were alive then, others, in whose place gradients of outputs came later in the pass.
        later: of outputs of later calls, those that were there when a backward pass began.
        together: whether the step has one backward pass, and that goes through several calls of the model.
    """

    output_bytes: int
    forward: int
    backward: int
    computed: int
    left: int
    read: int = 0
    stays: int = 0
    tangents: int = 0
    waiting: int = 0
    made: int = 0
    given: int = 0
    held: int = 0
    inputs: int = 0
    first_input: int = 0
    given_again: int = 0
    handed_on: int = 0
    computed_later: int = 0
    between: int = 0
    between_later: int = 0
    kept: int = 0
    others: int = 0
    others_wait: int = 0
    parts: int = 0
    later: int = 0
    together: bool = False

    def of(self, output_bytes: int) -> LossSeen:
        """The same for a step with other outputs; what stays of the step before is no less where they are smaller."""
        if output_bytes == self.output_bytes or not self.output_bytes:
            return self
        sizes = {name: -(-size * output_bytes // self.output_bytes) for name, size in asdict(self).items()}
        sizes |= {name: max(sizes[name], getattr(self, name)) for name in ("stays", "kept", "given")}
        same = ("inputs", "first_input", "given_again", "handed_on", "together")
        return LossSeen(**{**sizes, **{name: getattr(self, name) for name in same}})

    @property
    def holds_tangents(self) -> bool:
        """Whether the gradients of the model's outputs are held while the planned graphs use them."""
        return self.given > 0 or 2 * self.held > self.tangents

    def more_stays(self, output_bytes: int) -> int:
        """Bytes of the step before that are still there in a step with other outputs, beyond those that were seen."""
        then = self.of(output_bytes)
        return max(0, then.kept + then.stays + then.given - self.kept - self.stays - self.given)


@dataclass(frozen=True, slots=True)
class Loop:
    """What a training loop was seen to do around the planned graphs; the defaults: nothing was seen.

    Attributes:
        outputs_held: of the leaves of the model's output, the positions of those that the loop still held when the
            backward pass began; None: all of them.
        outputs_late: where calls wait, the positions of those that were gone when their own backward pass began.
        at_once: of the others, the positions of those that were gone before the loop's first op, if it made one call.
        only_loss: whether the model's own loss is the only one of its outputs that got a gradient.
        beside_loss: the positions of outputs that got one, and that a plan for the model's own loss takes to get none.
        unreached: the positions of other outputs that may get a gradient and got none.
        by_turns: the positions of those that some of several backward passes gave a gradient, and others did not.
        laid_out: the positions of those whose gradient came laid out otherwise than they are, each
            with its order.
        loss: the loss, as far as it was computed outside the model; None: not seen.
        beside: bytes of what else the loop used on the device for the loss: parameters of other models, tensors that it
            wrote into.
        around: the same of what it used between one step and the next.
        between_steps: bytes of all that was there at once between one step and the next, at most; 0 where another model
            is trained then.
        gradients: what becomes of gradients that an optimizer has used: cleared before the next forward pass, cleared
            after it, or added to by the next backward pass, as those of microbatches are.
        in_flight: how many calls of the model waited for their backward pass at once.
        graph_retained: whether a backward pass ran with `retain_graph=True`, so that saved tensors stay to the end of
            the step.
        kept_beside: bytes of gradients that earlier backward passes have left, at most, when one begins that keeps its
            graph.
        freed_beside: the same when one begins that does not; None: those of all parameters.
        asks_first: whether `torch.autograd.grad` ran before the pass that adds to `.grad`: gradients that are cleared
            late may be there by then.
        unused: whether no backward pass comes of such calls, as of an evaluation that is not under `torch.no_grad()`.
        left_over: bytes that earlier calls of that kind still hold while another call runs.
        late: bytes of the gradients that are there when a call begins, where they are cleared after it; None: those of
            all parameters.
        later_held: where calls wait, the same as `outputs_held` of those after the first: positions among the leaves of
            the outputs of all of these.
        stateless: the parameters, by name, that an optimizer has no state for, though it has stepped others: no
            gradient has come to them.
        sparse: the parameters, by name, whose gradients are sparse when an optimizer steps them, each with the most
            entries that were seen.
        without: of each step that was seen, where they differ, the positions of all outputs that got no gradient: in
            eager mode, what their graphs have saved is there as long as they are.
        attributes: the tensors that modules keep as attributes and that are part of what `loss` says to stay: names and
            bytes.
        aside: of the results that modules keep as attributes, the positions of those that the loop computed its loss
            from; they are numbered after the leaves of the output, also in `unreached`.
    """

    outputs_held: tuple[int, ...] | None = None
    outputs_late: tuple[int, ...] = ()
    at_once: tuple[int, ...] = ()
    only_loss: bool = False
    beside_loss: tuple[int, ...] = ()
    unreached: tuple[int, ...] = ()
    by_turns: tuple[int, ...] = ()
    laid_out: LaidOut = ()
    loss: LossSeen | None = None
    beside: int = 0
    around: int = 0
    between_steps: int = 0
    gradients: Gradients = "cleared"
    in_flight: int = 1
    graph_retained: bool = False
    kept_beside: int = 0
    freed_beside: int | None = None
    asks_first: bool = False
    unused: bool = False
    left_over: int = 0
    later_held: tuple[int, ...] | None = None
    late: int | None = None
    stateless: tuple[str, ...] = ()
    sparse: tuple[tuple[str, int], ...] = ()
    without: tuple[tuple[int, ...], ...] = ()
    attributes: tuple[tuple[str, int], ...] = ()
    aside: tuple[int, ...] = ()

    @property
    def others(self) -> int:
        """Bytes of all that the loop holds beside the planned step."""
        return self.beside + self.around + self.left_over

    def with_leaner_others(self, nbytes: int) -> Loop | None:
        """The loop if other planned models take so many bytes less while it computes its loss; None if they cannot.

        What they take is their plans' choice: these are made for what is held beside them, within the same budget.
        """
        loss = self.loss
        if loss is None or loss.others < nbytes:
            return None
        names = ("forward", "backward", "computed", "computed_later", "between", "between_later", "others")
        return replace(self, loss=replace(loss, **{each: max(0, getattr(loss, each) - nbytes) for each in names}))

    def more_than(self, other: Loop) -> int:
        """Bytes that it holds beside the planned step, and another one does not, in steps with equal outputs."""
        most = max((loop.loss.output_bytes for loop in (self, other) if loop.loss is not None), default=0)
        own, its = (
            loop.others + (0 if loop.loss is None else loop.loss.of(most).kept - loop.loss.kept)
            for loop in (self, other)
        )
        return own - its


def most_of(one: Loop, other: Loop) -> Loop:
    """What a loop that was seen twice does, where another step may do other things: the most of each."""
    freed = (one.freed_beside, other.freed_beside)
    both = tuple(each for each in one.attributes if each in other.attributes)
    losses = [asdict(_staying(loop, both)) for loop in (one, other) if loop.loss is not None]
    # what one step reads may be among what is beside the other
    reads = [0 if loop.loss is None else loop.loss.read for loop in (one, other)]
    most = most_beside(*(replace(loop, beside=loop.beside + n) for loop, n in zip((one, other), reads, strict=True)))
    beside = max(0, most.beside - max(reads))
    loss = LossSeen(**{name: max(each[name] for each in losses) for name in losses[0]}) if losses else None
    if loss is not None:  # what is left by the loss in one step may stay beside the other
        in_all = max(_in_backward(loop) for loop in (one, other))
        loss = replace(loss, left=max(0, min(loss.left, in_all - beside - most.around - loss.read)))
    return replace(
        other,
        outputs_held=_either(one.outputs_held, other.outputs_held),
        outputs_late=tuple(at for at in one.outputs_late if at in other.outputs_late),
        later_held=_either(one.later_held, other.later_held),
        at_once=tuple(at for at in one.at_once if at in other.at_once),
        only_loss=one.only_loss and other.only_loss,
        beside_loss=tuple(sorted({*one.beside_loss, *other.beside_loss})),
        unreached=tuple(at for at in one.unreached if at in other.unreached),
        by_turns=tuple(sorted({*one.by_turns, *other.by_turns})),
        laid_out=tuple(each for each in one.laid_out if each in other.laid_out),
        loss=loss,
        beside=beside,
        around=most.around,
        between_steps=max(one.between_steps, other.between_steps),
        kept_beside=max(one.kept_beside, other.kept_beside),
        freed_beside=None if None in freed else max(n for n in freed if n is not None),
        stateless=tuple(name for name in one.stateless if name in other.stateless),
        without=tuple(sorted({*one.without, *other.without})),
        attributes=both,
        aside=tuple(sorted({*one.aside, *other.aside})),
    )


def _staying(loop: Loop, attributes: Sequence[tuple[str, int]]) -> LossSeen:
    """The loss of a loop of which no other attributes of modules stay: they are counted as what the model has."""
    assert loop.loss is not None
    rest = sum(nbytes for name, nbytes in loop.attributes if (name, nbytes) not in attributes)
    return replace(loop.loss, stays=loop.loss.stays - rest)


def _in_backward(loop: Loop) -> int:
    """Bytes of what a loop holds beside the step until the end of the backward pass, at least."""
    return loop.beside + loop.around + (0 if loop.loss is None else loop.loss.read + loop.loss.left)


def _either(*held: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if None in held else tuple(sorted({at for each in held for at in each or ()}))


def most_beside(one: Loop, other: Loop) -> Loop:
    """The first loop with the most that either holds beside the step: what one uses for a step, the other may use
    between steps.
    """
    around = max(one.around, other.around)
    return replace(one, beside=max(one.beside + one.around, other.beside + other.around) - around, around=around)


def same_facts(one: Loop, other: Loop, tolerance: int) -> bool:
    """Whether two loops do the same with the model, but for its loss, the entries of sparse gradients, and outputs
    without a gradient; what is beside may differ by so many bytes.
    """

    def facts(loop: Loop) -> Loop:
        none = 0 if loop.freed_beside is not None else None
        return replace(
            loop,
            outputs_held=None,
            outputs_late=(),
            at_once=(),
            later_held=None,
            loss=None,
            beside=0,
            around=0,
            between_steps=0,
            left_over=0,
            sparse=(),
            without=(),
            attributes=(),
            kept_beside=0,
            freed_beside=none,
        )

    sizes = [(one.more_than(other), 0), (one.kept_beside, other.kept_beside)]
    sizes.append((one.freed_beside or 0, other.freed_beside or 0))
    return facts(one) == facts(other) and all(abs(a - b) <= tolerance for a, b in sizes)
