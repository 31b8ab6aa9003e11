"""How many microbatches are in flight while one runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The microbatches in flight, and done, while one runs, and which of their tensors a pipeline stage holds.

    Attributes:
        forward: pairs (others that wait for their backward pass, others that are done) during a forward pass; of these,
            the one that takes most bytes counts.
        backward: the same during a backward pass.
        inputs: microbatches whose inputs stay allocated all the time, beside the batch itself.
        received: microbatches for whose gradients of the outputs there are buffers all the time, so that no op makes
            them; 0 where the loss makes them.
        leaves_inputs: of so many that are done, at most, the gradients of the inputs are still allocated.
        leaves_outputs: of so many, at most, the outputs.
        merged: microbatches whose outputs become one tensor once all are done; 0 where they do not.
        sent: of so many that wait, at most, the outputs are on their way during a forward pass, and gone before a
            backward pass begins; 0 where each holds its outputs until its own backward pass.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    inputs: int = 0
    received: int = 0
    leaves_inputs: int = 0
    leaves_outputs: int = 0
    merged: int = 0
    sent: int = 0


# gradients of the step before are there in the forward pass, and cleared before the backward pass
CLEARED_LATE = Occupancy(forward=((0, 1),), backward=((0, 0),))
ALONE = Occupancy(forward=((0, 0),), backward=((0, 0),))  # one microbatch, and no gradients of others
