"""Plans on a GPU, beside the alternatives: `python -m benchmarks.cuda [--fast] [--output PATH] [--only NAME ...]`.

Every (model, way to train, budget) has a process of its own (`benchmarks.cuda_entry`). A plan's process may take from
the device what the plan's budget is, and no more, so that a wrong prediction ends out of memory. Processes prepare side
by side, and hold a lock while they are timed. What is known is written after every part of every result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from . import cuda_hour
from .cuda_entry import GB, MARK, Entry
from .cuda_report import line, table

Row = dict[str, Any]
FRACTIONS = (0.80, 0.60, 0.45)  # of eager's peak
COMPILED: Mapping[str, Sequence[float | None]] = {"gpt2": (None, 0.5, 0.2), "llama": (None, 0.5)}
EXPANDABLE = ("gpt2", "resnet")
NAMES = ("gpt2", "llama", "resnet", "vit", "unet")
FAST = ("gpt2", "resnet")
# Seconds that each stage of an entry may take; waiting for the lock is limited by the whole run's end alone.
LIMITS = {"starting": 120.0, "preparing": 200.0, "reference": 120.0, "compiling": 200.0, "measuring": 60.0}
LATE = "not run: out of time"


@dataclass
class Run:
    """A run of the benchmark: what is known so far, and where it is written.

    Attributes:
        options: those of the command line.
        scratch: a folder that goes away with the run.
        deadline: `time.monotonic()` at which it ends.
        rows: one for each entry, as far as it is known.
    """

    options: argparse.Namespace
    scratch: Path
    deadline: float
    device: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: float = field(default_factory=time.monotonic)

    def entry(self, model: str, way: str, label: str, **more: Any) -> Entry:
        """An entry of this run."""
        options = self.options
        lock = str(self.scratch / "lock")
        return Entry(
            model, way, label, device=options.device, size=options.size, steps=options.steps, lock=lock, **more
        )

    def resume(self) -> None:
        """Take what an earlier run has written."""
        if self.path().exists():
            report = json.loads(self.path().read_text())
            self.device, self.rows = report["device"], report["rows"]

    def workers(self) -> int:
        """How many processes prepare side by side: each may hold a model and what eager mode's step takes."""
        memory = self.device.get("memory_bytes", 0) / GB
        return 1 if memory < 20 else 2 if memory < 60 else 5

    def do(self, entry: Entry) -> Row:
        """Run an entry to its end or its limit; returns its row, that of an earlier run if it came to its end there."""
        row: Row = {"model": entry.model, "label": entry.label, "way": entry.way}
        with self.lock:
            same = [r for r in self.rows if (r["model"], r["label"]) == (entry.model, entry.label)]
            if same and same[0].get("done"):
                return same[0]
            self.rows = [r for r in self.rows if r not in same] + [row]
        if time.monotonic() > self.deadline:
            row["error"] = LATE
        else:
            start = time.monotonic()
            try:
                self._follow(entry, row)
            except Exception as e:  # whatever it is, it costs this entry alone
                row["error"] = f"{type(e).__name__}: {e}"
            row["seconds"] = time.monotonic() - start
            row["done"] = "error" not in row or bool(row.get("out_of_memory"))
        tqdm.write(f"{time.monotonic() - self.begun:6.1f} s  {entry.model:>7}  {line(row)}")
        self.write()
        return row

    def _follow(self, entry: Entry, row: Row) -> None:
        variables = {**os.environ, "KINETO_LOG_LEVEL": "6"}
        variables.setdefault("CHECKPOINT_PLANNER_CACHE", str(self.scratch / "costs"))
        if entry.way == "compile":
            variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # several processes compile at a time
        if entry.expandable:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        command = [sys.executable, "-m", "benchmarks.cuda_entry", entry.to_json()]
        with tempfile.TemporaryFile("w+") as errors:
            # a session of its own: whatever it starts (Inductor's workers) ends with it
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=variables,
                start_new_session=True,
            )
            try:
                self._read(process, row)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            stage = row.pop("stage", "starting")
            if process.returncode and "error" not in row:
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:]
                row["error"] = f"ended with {process.returncode} while {stage}: {''.join(last)[:300]}"

    def _read(self, process: subprocess.Popen[str], row: Row) -> None:
        """Take what a process says into its row, until it ends or a stage takes too long."""
        assert process.stdout is not None
        said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pass_on, args=(process.stdout, said), daemon=True).start()
        until = time.monotonic() + LIMITS["starting"]
        while True:
            try:
                text = said.get(timeout=max(0.1, min(until, self.deadline + LIMITS["measuring"]) - time.monotonic()))
            except queue.Empty:
                row["error"] = f"stopped: too long while {row.get('stage', 'starting')}"
                return
            if text is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)  # CUDA's own end can hang
                return
            if not text.startswith(MARK):
                continue
            part = json.loads(text.removeprefix(MARK))
            if "stage" in part:
                until = time.monotonic() + LIMITS.get(part["stage"], float("inf"))
            device = part.pop("device", None)
            with self.lock:
                self.device = self.device or device or {}
                row.update(part)
            self.write()

    def write(self) -> None:
        """All that is known, as JSON."""
        with self.lock:
            report = {
                "device": self.device,
                "machine": platform.machine(),
                "size": self.options.size,
                "steps": self.options.steps,
                "seconds": time.monotonic() - self.begun,
                "rows": self.rows,
            }
            path = self.path()
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(".part")
            half.write_text(json.dumps(report, indent=1) + "\n")
            half.replace(path)

    def path(self) -> Path:
        """Where the results go."""
        if self.options.output:
            return Path(self.options.output)
        name = re.sub(r"\W+", "_", str(self.device.get("name", "unknown"))).lower()
        return Path(__file__).parent / "results" / f"cuda_{name}.json"


def _pass_on(stream: IO[str], said: queue.Queue[str | None]) -> None:
    for text in stream:
        said.put(text)
    said.put(None)


def run_all(run: Run, names: Sequence[str], *, fast: bool) -> None:
    """Every entry that torch.compile's Inductor has no part in, as soon as what it needs is known."""
    if not names:
        return
    first = run.entry(names[0], "eager", "eager", alone=True)
    known = {(first.model, "eager"): run.do(first)}
    waiting: list[tuple[tuple[tuple[str, str], ...], Callable[[], Entry | None]]] = []
    for name in names:
        if name != names[0]:
            waiting.append(((), lambda name=name: run.entry(name, "eager", "eager")))  # type: ignore[misc]
        waiting.append(((), lambda name=name: run.entry(name, "plan", "plan, lowest", first=True)))  # type: ignore[misc]
        waiting.append(((), lambda name=name: run.entry(name, "blocks", "every block")))  # type: ignore[misc]
    for name in names:
        waiting += _plans(run, name, known, (0.60,) if fast else FRACTIONS, expandable=name in EXPANDABLE and not fast)
    _side_by_side(run, waiting, known, run.workers())


def run_compiled(run: Run, names: Sequence[str]) -> None:
    """torch.compile with and without its own budget, of models."""
    known = {name: COMPILED.get(name, ())[: 1 if run.options.size == "tiny" else None] for name in names}
    settings = [(name, setting) for name in names for setting in known[name]]
    compiling = [run.entry(name, "compile", _compiled(s), setting=s) for name, s in settings]
    _side_by_side(run, [((), lambda e=e: e) for e in compiling], {}, run.workers())  # type: ignore[misc]


def _compiled(setting: float | None) -> str:
    return "torch.compile" if setting is None else f"torch.compile, budget {setting:g}"


def _plans(
    run: Run, name: str, known: Mapping[tuple[str, str], Row], fractions: Sequence[float], *, expandable: bool
) -> list[tuple[tuple[tuple[str, str], ...], Callable[[], Entry | None]]]:
    """Plans of a model at shares of eager's peak and at per-block checkpointing's, once those are known."""
    eager, blocks, costs = (name, "eager"), (name, "every block"), (name, "plan, lowest")

    def at(share: float, label: str, **more: Any) -> Callable[[], Entry | None]:
        def make() -> Entry | None:
            peak = known[eager].get("allocated_bytes")
            return run.entry(name, "plan", label, budget=share * peak / GB, **more) if peak else None

        return make

    def at_blocks() -> Entry | None:
        peak = known[blocks].get("allocated_bytes")
        label = "plan at every block's peak"
        return run.entry(name, "plan", label, budget=peak / GB, allocator_only=True) if peak else None

    found = [((eager, costs), at(share, f"plan, {share:.0%}")) for share in fractions]
    found.append(((blocks, costs), at_blocks))
    found.append(((eager, costs), at(fractions[-1], f"plan, {fractions[-1]:.0%}, offload", offload=True)))
    if expandable:
        found.append(((eager, costs), at(fractions[-1], f"plan, {fractions[-1]:.0%}, expandable", expandable=True)))
    return found  # type: ignore[return-value]


def _side_by_side(
    run: Run,
    waiting: list[tuple[tuple[tuple[str, str], ...], Callable[[], Entry | None]]],
    known: dict[tuple[str, str], Row],
    workers: int,
) -> None:
    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[Row], tuple[str, str]] = {}
        while waiting or running:
            for needs, make in [w for w in waiting if all(n in known for n in w[0])]:
                waiting.remove((needs, make))
                if (entry := make()) is not None:
                    running[pool.submit(run.do, entry)] = (entry.model, entry.label)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                known[running.pop(future)] = future.result()


def main() -> None:
    """Run, and print a line for each entry as it ends, and a Markdown table for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument(
        "--fast", action="store_true", help=f"smaller {' and '.join(FAST)}, fewer budgets, no compiling"
    )
    parser.add_argument(
        "--hour", action="store_true", help="the first hour on a card, most valuable first; begun again, it goes on"
    )
    parser.add_argument("--output", help="where the JSON goes; else benchmarks/results/cuda_<device>.json")
    parser.add_argument(
        "--only", nargs="+", choices=cuda_hour.NAMES, metavar="NAME", help=f"of {', '.join(cuda_hour.NAMES)}"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to try this program"
    )
    parser.add_argument("--minutes", type=float, help="start nothing later; 8, 1.7 with --fast, 58 with --hour")
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed")
    options = parser.parse_args()
    options.size = "tiny" if options.device == "cpu" else "fast" if options.fast else "full"
    minutes = options.minutes or (58.0 if options.hour else 1.7 if options.fast else 8.0)
    if options.hour:
        options.output = options.output or str(Path(__file__).parent / "results" / "hour.json")
        if missing := cuda_hour.install_wheels():
            print(f"not installed: {', '.join(missing)}; what needs them is skipped")
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(options, Path(scratch), time.monotonic() + 60 * minutes)
        with _search_compiled():
            if options.hour:
                run.resume()
                everything = partial(run_all, run, fast=options.device == "cpu")
                cuda_hour.phases(run, everything, partial(run_compiled, run))
            else:
                names = options.only or (FAST if options.fast else NAMES)
                run_all(run, names, fast=options.fast)
                if not options.fast:
                    run_compiled(run, names)
        run.write()
    if options.hour:
        print(cuda_hour.page(run.device, run.rows))
        print(f"written to {run.path()} and {cuda_hour.page_path(run.path())}")
        return
    print(f"\n{run.device}")
    for name in dict.fromkeys(r["model"] for r in run.rows):
        print(f"\n### {name}\n\n{table([r for r in run.rows if r['model'] == name])}")
    print(f"\nwritten to {run.path()}")


@contextlib.contextmanager
def _search_compiled() -> Any:
    """Meanwhile compile the solver's inner loop, once for all processes; it stays beside the package."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KINETO_LOG_LEVEL": "6"}
    process = subprocess.Popen([sys.executable, "-c", _SMALL_PLAN], env=hidden, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


_SMALL_PLAN = """
import torch
from planner import plan
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.Tanh()] * 6)
options = {"loss_fn": torch.Tensor.mean, "progress": False}
baseline = plan(model, torch.zeros(512, 64), budget_gb=1, **options).baseline_peak_bytes
plan(model, torch.zeros(512, 64), budget_gb=0.9 * baseline / 2**30, **options)
"""

if __name__ == "__main__":
    main()
