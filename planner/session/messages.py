"""Texts between the first of some ranks and the others; who does not answer is named, and not waited for in vain.

They go over gloo, whose connections break when a process ends, from rank to rank: a collective would not say whose did.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import RankError

PATIENCE = 10.0  # seconds before a log line says what is waited for

log = logging.getLogger("planner")


class Channel:
    """Connections of some ranks.

    Attributes:
        ranks: all of them, by their numbers in the whole world.
        first: the one that the others talk to.
        here: the one of this process.
    """

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self.ranks = list(ranks)
        self.first = self.ranks[0]
        self.here = dist.get_rank()
        self.group = group

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.here]

    def send(self, rank: int, text: str, what: str) -> None:
        """Send a text, once the other rank takes it; `what` that is to do, for messages. Raises RankError."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with self._talking(rank, what):
            dist.send(torch.tensor([len(data)]), dst=rank, group=self.group)
            dist.send(data, dst=rank, group=self.group)

    def receive(self, rank: int, what: str) -> str:
        """The next text of a rank; `what` that is to do, for messages. Raises RankError where none comes."""
        size = torch.zeros(1, dtype=torch.int64)
        with self._talking(rank, what):
            dist.recv(size, src=rank, group=self.group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, src=rank, group=self.group)
        return bytes(data.tolist()).decode()

    @contextmanager
    def _talking(self, rank: int, what: str) -> Iterator[None]:
        with noted(f"rank {self.here} waits for rank {rank} {what}"):
            try:
                yield
            except RuntimeError as e:
                late = "imed out" in str(e) or "imeout" in str(e)
                how = "has not come within the timeout of the process group" if late else "has ended, or is cut off"
                raise RankError(f"rank {self.here} waited for rank {rank} {what}; that {how} ({_short(e)})") from e


@contextmanager
def noted(what: str) -> Iterator[None]:
    """Log what is waited for, where it takes long."""
    timer = threading.Timer(PATIENCE, log.warning, (f"{what}, for {PATIENCE:.0f} seconds now",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def connected(ranks: Sequence[int], group: Any = None) -> Iterator[Channel]:
    """Connections of some ranks, all of which come here; over a group of theirs, where that is of gloo.

    Raises:
        RankError: not all of them come.
    """
    if group is not None and "cpu:gloo" in dist.get_backend_config(group):
        yield Channel(ranks, group)
        return
    own: Any = None
    with noted(f"rank {dist.get_rank()} waits for {_named(ranks)} to come to the first planned step"):
        try:
            own = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        except RuntimeError as e:
            raise RankError(f"not all of {_named(ranks)} came to the first planned step ({_short(e)})") from e
    try:
        yield Channel(ranks, own)
    finally:
        dist.destroy_process_group(own)


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _short(error: Exception) -> str:
    """What gloo says, without the place in its source and its advice."""
    text = str(error)
    return text[text.startswith("[") and text.find("] ") + 2 :].partition(". ")[0].partition("\n")[0]
