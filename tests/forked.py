"""What `python ARGUMENTS` does, in a fork of the process that ranks are forked from: nothing is imported again.

For processes that need not be new interpreters. Those that test what an interpreter does as it starts (a wheel that is
installed, closed streams, modules that are not there), and one of each launcher, are.
"""

import contextlib
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed as dist

from solvers.search import effort

from . import processes
from .problems import HARDLY, hardly_search


def python(*arguments: object, folder: Path | None = None, limit: float = 300, **environment: str):
    """How `python ARGUMENTS` ends, with what it writes.

    Args:
        arguments: `-m MODULE`, `-c CODE` or a script, and what it is given.
        folder: where it runs.
        limit: seconds after which it is ended.
        environment: more than this process has.
    """
    (ended,) = _run(arguments, folder, limit, [environment])
    return ended


def torchrun(ranks: int, *arguments: object, folder: Path | None = None, limit: float = 300, **environment: str):
    """How each rank ends under what torchrun tells it; `arguments` are those of Python, as for `python`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "tests",
        **{name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        **environment,
    }
    own = [{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} for rank in range(ranks)]
    return _run(arguments, folder, limit, [{**told, **more} for more in own])


def _run(
    arguments: tuple[object, ...], folder: Path | None, limit: float, environments: list[dict[str, str]]
) -> list[CompletedProcess[str]]:
    command = [str(a) for a in arguments]
    ended = []
    with tempfile.TemporaryDirectory() as written:
        ranks = []
        for i, more in enumerate(environments):
            streams = [f"{written}/{name}{i}" for name in ("out", "err")]
            ranks.append((begun(command, folder or Path.cwd(), {**os.environ, **more}, streams), streams))
        until = time.monotonic() + limit
        try:
            for process, streams in ranks:
                process.join(max(0.0, until - time.monotonic()))
                said = [Path(s).read_text(errors="backslashreplace") if os.path.exists(s) else "" for s in streams]
                if process.exitcode is None:
                    pytest.fail(f"{command} did not end in {limit} s:\n{said[1]}", pytrace=False)
                ended.append(CompletedProcess(command, process.exitcode, *said))
        finally:
            for process, _ in ranks:
                if process.exitcode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.join()
    return ended


def begun(command: list[str], folder: Path, environment: Mapping[str, str], streams: list[str]) -> BaseProcess:
    """A process that runs `python COMMAND`, with processes that it starts a group of its own, and writes to files."""
    work = (command, str(folder), dict(environment), streams, effort.STEPS <= HARDLY)
    process = processes.begun(_begin, *work)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while os.getpgid(process.pid) != process.pid:
            time.sleep(0.01)
    return process


def _begin(command: list[str], folder: str, environment: Mapping[str, str], streams: list[str], short: bool) -> None:
    assert "tests.preloaded" in sys.modules
    os.setsid()
    for number, path in enumerate(streams, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=environment.get("PYTHONIOENCODING", "utf-8"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    if short:
        hardly_search(pytest.MonkeyPatch())
    kind, *rest = command
    if kind == "-m":
        name, *rest = rest
        sys.modules.pop(f"{name}.__main__", None)  # it is run anew
        sys.path.insert(0, folder)
        sys.argv = [name, *rest]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *rest = rest
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = command
        runpy.run_path(kind, run_name="__main__")
