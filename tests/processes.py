"""Functions run on several gloo ranks, each in a process of its own; nothing here is the planner's own."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from solvers.search import effort

from .problems import HARDLY, hardly_search

# ranks are forked from a process that has imported this and run nothing
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        value: what the function returned.
        error: its traceback; None where it returned.
        exitcode: of its process; negative for a signal, None where it had to be killed as it did not end.
        seconds: from the start of all ranks.
    """

    value: Any
    error: str | None
    exitcode: int | None
    seconds: float

    @property
    def well(self) -> bool:
        """Whether the function returned."""
        return self.exitcode == 0 and self.error is None


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any, limit: float = 300, **options: Any) -> list[Any]:
    """What a function returns on each rank, as `function(*args)`; where one fails, all are ended, and the test fails.

    Args:
        ranks: how many.
        function: of a module, not a local one; it finds a gloo process group of all ranks.
        args: what it is given; they and what it returns are pickled, tensors with their contents.
        limit: seconds after which all are ended.
        options: of `dist.init_process_group`.
    """
    ended = ends_of(ranks, function, *args, limit=limit, together=True, **options)
    if not all(end.well for end in ended):
        pytest.fail("\n".join(f"rank {rank}: {end.error or end}" for rank, end in enumerate(ended)), pytrace=False)
    return [end.value for end in ended]


def ends_of(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = 100,
    together: bool = False,
    **options: Any,
) -> list[Ended]:
    """How each rank ends; see `on_ranks`. With `together`, all are ended where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        processes, pipes = [], {}
        found: dict[int, Any] = {}
        ended: dict[int, Ended] = {}
        work = pickle.dumps((effort.STEPS <= HARDLY, function, args))
        for rank in range(ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = begun(_rank, rank, ranks, folder, work, options, theirs, daemon=True)
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            while len(ended) < ranks and (left := started + limit - time.monotonic()) > 0:
                for pipe in wait(list(pipes), left):
                    rank = pipes[pipe]
                    try:
                        found[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:  # it has ended
                        del pipes[pipe]
                        processes[rank].join(max(0.0, started + limit - time.monotonic()))
                        value, error = found.get(rank, (None, None))
                        code = processes[rank].exitcode
                        ended[rank] = Ended(value, error, code, time.monotonic() - started)
                if together and not all(end.well for end in ended.values()):
                    break
        finally:
            for process in processes:
                process.kill()
                process.join()
        value = [found.get(rank, (None, None)) for rank in range(ranks)]
        late = time.monotonic() - started
        return [ended.get(rank) or Ended(*value[rank], None, late) for rank in range(ranks)]


def begun(function: Callable[..., None], *args: Any, daemon: bool = False) -> BaseProcess:
    """A fork that runs a function, whatever folder and searches are where the first one is begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SHORT_SEARCHES", raising=False)
        patch.chdir(Path(__file__).parents[1])  # from which the server imports what it preloads, silently if it cannot
        forkserver.ensure_running()
    process = _CONTEXT.Process(target=function, args=args, daemon=daemon)
    process.start()
    return process


def _rank(rank: int, ranks: int, folder: str, work: bytes, options: dict[str, Any], pipe: Any) -> None:
    assert "tests.preloaded" in sys.modules
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    options = {"timeout": timedelta(seconds=60), **options}
    failed = None
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, **options)
        short, function, args = pickle.loads(work)
        if short:  # as where it was asked for
            hardly_search(pytest.MonkeyPatch())
        value = function(*args)
        told = pickle.dumps((value, None))
    except BaseException:
        failed = traceback.format_exc()
        told = pickle.dumps((None, failed))
    pipe.send_bytes(told)
    pipe.close()
    if failed is not None:
        os._exit(1)  # what still waits for another rank does not keep this one
    dist.destroy_process_group()
