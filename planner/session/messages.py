"""Objects that the ranks of one training job tell each other; where a rank has ended, the others learn which.

Collectives of torch on objects do not say that (tried: torch 2.13): where a process has ended, `all_gather_object`,
`gather_object` and `broadcast_object_list` raise an error with a port in the place of the rank, on its neighbours; the
others wait until the timeout of the group. `monitored_barrier` names the rank on the first rank alone. So `gather`
sends objects between the first rank and each of the others, with torch's functions for that, over gloo.

Objects are pickled, and loading a pickle runs code: a rank trusts the other ranks of its job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import RankError

PATIENCE = 10.0  # seconds before a log line says which rank is waited for
CPU = torch.device("cpu")

log = logging.getLogger("planner")


@dataclass(frozen=True)
class Failure:
    """Why a rank cannot train by the plan of all ranks; `capture` where its step could not be captured."""

    rank: int
    reason: str
    capture: bool = False


@contextmanager
def connected(ranks: Sequence[int], group: Any = None) -> Iterator[Any]:
    """A gloo process group of some ranks, each of which calls this; it is their own group, where that has gloo.

    Raises:
        RankError: not all of them come.
    """
    if group is not None and "cpu:gloo" in dist.get_backend_config(group):
        yield group
        return
    with _waiting(f"ranks {', '.join(map(str, ranks))}", "to come to the first planned step"):
        own: Any = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    try:
        yield own
    finally:
        dist.destroy_process_group(own)


def gather(group: Any, message: Any, task: str, first_task: str, grace: float | None = None) -> dict[int, Any]:
    """The objects of all ranks, by rank, on every rank; a `Failure` in the place of that of a rank that has ended.

    Args:
        group: of the ranks, with gloo for CPU tensors.
        message: the object of this rank.
        task: of the other ranks before they call this, in words for errors and log lines.
        first_task: of the first rank.
        grace: seconds for which a rank that comes after another has ended can still learn which; such ranks are left
            out of the result. None to wait for all ranks.

    Raises:
        RankError: the first rank has ended.
    """
    here, (first, *others) = dist.get_rank(), dist.get_process_group_ranks(group)
    if here != first:
        _send(group, first, message, first_task)
        told: dict[int, Any] = _receive(group, first, "to hear from all ranks")
        return told
    heard, limit = {here: message}, None
    for rank in others:
        try:
            heard[rank] = _receive(group, rank, task)
        except RankError as e:
            heard[rank] = Failure(rank, str(e))
            if grace is not None:
                limit = grace
                break

    def answer() -> None:
        for rank in others:
            with suppress(RankError):
                if rank not in heard:
                    _receive(group, rank, task)
                _send(group, rank, heard, "to listen")

    # in a thread, as gloo closes all connections where a wait for one rank ends early
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(limit)
    return heard


def _send(group: Any, rank: int, message: Any, task: str) -> None:
    with _waiting(f"rank {rank}", task):  # until the other rank takes it
        dist.send_object_list([message], rank, group, CPU)


def _receive(group: Any, rank: int, task: str) -> Any:
    messages: list[Any] = [None]
    with _waiting(f"rank {rank}", task):
        dist.recv_object_list(messages, rank, group, CPU)
    return messages[0]


@contextmanager
def _waiting(ranks: str, task: str) -> Iterator[None]:
    """Log a wait for ranks to do a task, where it takes long; raise RankError where it is in vain."""
    here = dist.get_rank()
    line = f"rank {here} waits for {ranks} {task}, for {PATIENCE:.0f} seconds now"
    timer = threading.Timer(PATIENCE, log.warning, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as e:
        text = str(e)
        late = "imed out" in text or "imeout" in text
        how = "has not come within the timeout of the process group" if late else "has ended, or is cut off"
        # without the place in gloo's source and its advice
        short = text[text.startswith("[") and text.find("] ") + 2 :].partition(". ")[0].partition("\n")[0]
        raise RankError(f"rank {here} waited for {ranks} {task}; that {how} ({short})") from e
    finally:
        timer.cancel()
