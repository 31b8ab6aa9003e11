"""How many microbatches a device holds at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The microbatches in flight, and those done, while one runs; and the buffers of a pipeline stage beside them.

    Attributes:
        forward: pairs (others that wait for their backward pass, others that are done) that occur during a forward
            pass; the pair that holds most counts.
        backward: the same during a backward pass.
        inputs: microbatches whose inputs are held all the time, beside the batch itself.
        received: microbatches with buffers for the gradients of their outputs all the time, so that no op makes
            these gradients; 0 where the loss makes them.
        leaves_inputs: of so many that are done, at most, the gradients of the inputs are still held.
        leaves_outputs: of so many, at most, the outputs.
        merged: microbatches whose outputs become one tensor once all are done; 0 where they do not.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    inputs: int = 0
    received: int = 0
    leaves_inputs: int = 0
    leaves_outputs: int = 0
    merged: int = 0


# a loop that clears gradients late: those that the optimizer used last are there in the forward pass, and cleared
# before the backward pass
USED = Occupancy(forward=((0, 1),), backward=((0, 0),))
