"""One model, one way to train it, in a process of its own: `python -m benchmarks.cuda_entry ENTRY`, ENTRY as JSON.

Each line that it prints after `MARK` is a JSON object: what is under way ("stage"), or a part of the result. A later
part adds to an earlier one, so that what is known before a crash is not lost. What is timed holds a file lock that is
the process's alone, and is released by the kernel however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from planner import InfeasibleBudgetError, Plan, plan
from planner.devices.meter import record_allocations

from .blocks import checkpoint_blocks
from .cuda_models import Size, Work, build
from .cuda_probes import constants, costs
from .measure import difference

MARK = "@@ "
GB = 2**30
ROOM_TO_SPARE_GB, NOTHING_GB = 65536.0, 1e-4
OUTSIDE_THE_ALLOCATOR = ("CUDA context", "fragmentation margin")  # lines of a plan's account


@dataclass(frozen=True)
class Entry:
    """What to run.

    Attributes:
        model: of `cuda_models.MODELS`.
        way: "eager", "blocks", "plan" or "compile"; "costs" and "constants" are of `cuda_probes`.
        label: what the table calls it.
        budget: GB to plan within; 0 for the lowest that is feasible.
        setting: torch.compile's `activation_memory_budget`.
        allocator_only: the budget is for what the allocator hands out, without context and margin.
        expandable: with the allocator's expandable segments.
        offload: values may leave: for host memory, and on a CPU for a disk.
        first: measures the ops' costs for the plans that follow; nothing else is timed meanwhile.
        alone: no other process uses the device.
        device, size, steps, lock: where, how large, how many steps are timed, the file to lock.
    """

    model: str
    way: str
    label: str
    budget: float = 0.0
    setting: float | None = None
    allocator_only: bool = False
    expandable: bool = False
    offload: bool = False
    first: bool = False
    alone: bool = False
    device: str = "cuda"
    size: Size = "full"
    steps: int = 9
    lock: str = ""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def say(**part: Any) -> None:
    """A line for whoever started this process."""
    print(MARK + json.dumps(part), flush=True)


@contextlib.contextmanager
def holding(path: str, stage: str, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock while a stage lasts; several may share it as long as none wants it alone."""
    with open(path, "a") as file:
        say(stage="waiting")
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        say(stage=stage)
        yield


def main() -> None:
    """Run the entry; ends with whoever started it, for its standard input ends then."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    warnings.simplefilter("ignore")
    entry = Entry(**json.loads(sys.argv[1]))
    device = torch.device(entry.device, 0) if entry.device == "cuda" else torch.device(entry.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    say(stage="preparing")
    if entry.way == "constants":
        say(device=describe(device), **constants(device))
        return
    try:
        work = build(entry.model, device, entry.size)
    except ModuleNotFoundError as e:
        say(skipped=str(e))
        return
    say(device=describe(device), parameters=sum(p.numel() for p in work.model.parameters()))
    try:
        if entry.way == "costs":
            with holding(entry.lock, "measuring"):
                say(**costs(work))
            return
        run(entry, work, device)
    except InfeasibleBudgetError as e:
        say(infeasible=True, minimum_gb=e.minimum_gb)


def run(entry: Entry, work: Work, device: torch.device) -> None:
    """Put the way on the model, warm it up, measure it."""
    with holding(entry.lock, "reference"):
        reference = eager_results(work)
        if entry.first:
            start = time.perf_counter()
            p = make_plan(entry, work, ROOM_TO_SPARE_GB)
            account = {line: size / GB for line, size in p.account.items()}
            say(first_planning_seconds=time.perf_counter() - start, keep_everything_gb=p.peak_bytes / GB)
            say(account_gb=account)
            del p
    say(stage="preparing")
    limit: int | None = None
    if entry.way == "plan":
        limit = put_plan(entry, work)
    elif entry.way == "blocks":
        say(blocks=len(put_blocks(work)))
    elif entry.way == "compile":
        put_compile(work.model, entry.setting)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if limit is not None:
            share = min(1.0, limit / torch.cuda.mem_get_info(device)[1])
            torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        warm_and_measure(entry, work, device, reference)
    except torch.OutOfMemoryError as e:
        say(out_of_memory=True, error=str(e).partition("\n")[0][:300])
        if limit is None:
            return
    else:
        say(out_of_memory=False)
        return
    # a wrong prediction: by how much?
    work.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    warm_and_measure(entry, work, device, reference)


Results = tuple[float, dict[str, torch.Tensor]]


def eager_results(work: Work) -> Results | None:
    """Loss and gradients, on the host, of a step without a plan; None where the device has too little memory for it."""
    try:
        loss, gradients = step_results(work)
        return loss, {name: g.cpu() for name, g in gradients.items()}
    except torch.OutOfMemoryError:
        say(eager_out_of_memory=True)
    work.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return None


def make_plan(entry: Entry, work: Work, budget_gb: float) -> Plan:
    """A plan; where the budget is for the allocator alone, nothing is set aside for what lies outside it."""
    options: dict[str, Any] = {}
    if entry.allocator_only and entry.device == "cuda":
        options["account_gb"] = dict.fromkeys(OUTSIDE_THE_ALLOCATOR, 0.0)
    if entry.offload:
        options["offload"] = "cpu" if entry.device == "cuda" else "disk"
    with work.casting():
        return plan(work.model, work.batch, budget_gb=budget_gb, loss_fn=work.loss_fn, progress=False, **options)


def put_plan(entry: Entry, work: Work) -> int:
    """Plan, and apply; returns how many bytes the allocator may take from the device."""
    budget = entry.budget
    if not budget:
        try:
            budget = make_plan(entry, work, NOTHING_GB).budget_bytes / GB
        except InfeasibleBudgetError as e:
            budget = e.minimum_gb
    start = time.perf_counter()
    p = make_plan(entry, work, budget)
    outside = sum(p.account.get(line, 0) for line in OUTSIDE_THE_ALLOCATOR)
    say(
        budget_bytes=p.budget_bytes,
        predicted_bytes=p.peak_bytes,
        predicted_allocated_bytes=p.peak_bytes - outside,
        baseline_bytes=p.baseline_peak_bytes,
        overhead=p.overhead,
        gap=p.gap,
        step_seconds_estimated=p.step_seconds,
        planning_seconds=time.perf_counter() - start,
        solver_seconds=p.solve_seconds,
        recomputed=sum(d.action == "recompute" for d in p.decisions),
        note=p.note,
    )
    if entry.offload:
        say(moved_bytes=p.moved_bytes, stall_seconds=p.stall_seconds, host_peak_bytes=p.host_peak_bytes)
    p.apply()
    return p.budget_bytes - p.account.get("CUDA context", 0)


def put_blocks(work: Work) -> list[str]:
    """`torch.utils.checkpoint` around every block."""
    return checkpoint_blocks(work.model)


def put_compile(model: nn.Module, setting: float | None) -> None:
    """torch.compile with Inductor, and its own budget for activations."""
    if setting is not None:
        import torch._functorch.config as config

        config.activation_memory_budget = setting
    model.compile()


def warm_and_measure(entry: Entry, work: Work, device: torch.device, reference: Results | None) -> None:
    """Compare a step with the reference, then time steps, and read the allocator's peaks."""
    shared = holding(entry.lock, "compiling", shared=True) if entry.way == "compile" else contextlib.nullcontext()
    with shared:  # compiling is long and may overlap with other compiling, but with nothing that is timed
        start = time.perf_counter()
        for _ in range(2):
            work.step()
            work.model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        say(warming_seconds=time.perf_counter() - start)
    with holding(entry.lock, "measuring"):
        if reference is not None:
            say(**compare(step_results(work), reference))
        say(**(measure_cuda if device.type == "cuda" else measure_cpu)(entry, work, device))


def step_results(work: Work) -> Results:
    """Loss and gradients of a step from a fixed seed; the model's own gradients and buffers are as before."""
    buffers = [(b, b.detach().clone()) for b in work.model.buffers()]
    torch.manual_seed(1)
    loss = work.step().item()
    gradients = {name: p.grad for name, p in work.model.named_parameters() if p.grad is not None}
    work.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, saved in buffers:
            buffer.copy_(saved)
    return loss, gradients


def compare(ours: Results, theirs: Results) -> dict[str, float]:
    """Difference of the losses, and of any gradient relative to its largest entry."""
    error = difference({n: g.cpu().float() for n, g in ours[1].items()}, {n: g.float() for n, g in theirs[1].items()})
    return {"loss": theirs[0], "loss_difference": ours[0] - theirs[0], "gradient_error": error}


def measure_cuda(entry: Entry, work: Work, device: torch.device) -> dict[str, Any]:
    """Peaks of the allocator and median time over some steps."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    pairs = []
    for _ in range(entry.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work.step()
        end.record()
        work.model.zero_grad(set_to_none=True)
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    found = {
        **_times(seconds),
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "requested_bytes": stats.get("requested_bytes.all.peak", 0),
        "alloc_retries": stats.get("num_alloc_retries", 0) - retries,
    }
    found |= _kernels(work, device)
    if entry.alone:  # the driver says what the device holds, not who holds it
        found["outside_the_allocator_bytes"] = total - free - torch.cuda.memory_reserved(device)
    return found


def _kernels(work: Work, device: torch.device) -> dict[str, Any]:
    """What runs on the device in one step, and for how long: what a host that is slow cannot change."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work.step()
        torch.cuda.synchronize(device)
    work.model.zero_grad(set_to_none=True)
    events = [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA]
    return {"kernels": len(events), "kernel_seconds": sum(e.device_time for e in events) / 1e6}


def measure_cpu(entry: Entry, work: Work, device: torch.device) -> dict[str, Any]:
    """The same on a CPU, to try this program where there is no GPU."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _held(work)}
    peak = sum(held.values()) + record_allocations(_step_of(work)).peak()
    seconds = []
    for _ in range(entry.steps):
        work.model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        work.step()
        seconds.append(time.perf_counter() - start)
    return {**_times(seconds), "allocated_bytes": peak, "reserved_bytes": peak}


def _held(work: Work) -> list[torch.Tensor]:
    return [*work.model.parameters(), *work.model.buffers(), *work.batch.values()]


def _step_of(work: Work) -> Callable[[], object]:
    return lambda: work.step()


def _times(seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {"step_seconds": median, "spread": (max(seconds) - min(seconds)) / median, "steps": len(seconds)}


def describe(device: torch.device) -> dict[str, Any]:
    """The device, its driver, and what runs on it."""
    found: dict[str, Any] = {"name": "CPU", "torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {"name": properties.name, "memory_bytes": properties.total_memory, "driver": _driver()}
        found |= {"capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda, "cudnn": cudnn}
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    main()
