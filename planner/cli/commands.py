"""What each command does; each returns the exit status."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from planner.api.compare import compare
from planner.api.front import plan
from planner.api.pareto import pareto
from planner.api.plan import Plan
from planner.cli.doctor import findings, lines
from planner.cli.target import arguments_of, batch_of
from planner.core.options import Options, flags
from planner.devices.accelerator import ACCELERATORS
from planner.devices.find import find_device
from planner.devices.specs import DEVICES, Device
from planner.errors import OptionError, gb
from planner.integrations.launch import launch
from planner.report.answer import fits, least_overhead
from planner.report.comparison import to_text as comparison_text
from planner.report.explanation import to_text as explanation_text
from planner.report.table import by_module
from planner.report.terminal import style_of

FITS, DOES_NOT_FIT = 0, 1
_OPTIONS = [name for name, _ in flags(Options, "step")]
_PLAN_ONLY = [*(name for name, _ in flags(Options, "budget")), "known"]


def make(options: Namespace) -> int:
    """`plan`."""
    _check_targets(options.save, options.html)
    with _apart():
        arguments = arguments_of(options.target) | _asked(options, *_OPTIONS, *_PLAN_ONLY)
        p = plan(**arguments)  # holds the model weakly; `arguments` has it
        if p.pending:
            raise OptionError(f"{options.target} gives no batch; return (model, batch), or say --batch-from SOURCE")
        if options.save is not None:
            p.save(options.save)
    return _show(p, options)


def show(options: Namespace) -> int:
    """`show`."""
    _check_targets(options.html)
    return _show(Plan.load(options.plan), options)


def curve(options: Namespace) -> int:
    """`pareto`."""
    with _apart():
        arguments = arguments_of(options.target) | _asked(options, *_OPTIONS)
        for name in _PLAN_ONLY:
            arguments.pop(name, None)
        model = arguments.pop("model")
        plans = pareto(model, points=options.points, **arguments)
    if options.json:
        return _print_json([facts(p) for p in plans])
    style = style_of()
    print(style.paint(f"{'budget':>12} {'peak':>12} {'more time':>10} {'at least':>10} {'recomputed':>12}", "bold"))
    for p in plans:
        recomputed = sum(d.nbytes for d in p.decisions if d.action == "recompute")
        print(
            f"{gb(p.budget_bytes):>12} {gb(p.peak_bytes):>12} {p.overhead:>10.1%} {least_overhead(p.record):>10.1%} "
            f"{gb(recomputed):>12}"
        )
    print("More time is an estimate; no plan within that budget takes less than the next column, which is proven.")
    return FITS


def difference(options: Namespace) -> int:
    """`compare`."""
    found = compare(Plan.load(options.a), Plan.load(options.b))
    if options.json:
        return _print_json(asdict(found))
    print(comparison_text(found, style_of()))
    return FITS


def devices(options: Namespace) -> int:
    """`devices`."""
    places = [f"{kind}:{i}" for kind, each in ACCELERATORS.items() for i in range(each.count())]
    cards = {place: find_device(place, torch.device("cpu")) for place in places}
    rows = [(name, d, name == "cpu" or name in cards) for name, d in [*DEVICES.items(), *cards.items()]]
    if options.json:
        return _print_json([_sheet(d) | {"device": name, "here": here} for name, d, here in rows])
    style = style_of()
    head = f"{'device':<12} {'memory':>10} {'bf16':>8} {'fp16':>8} {'fp32':>8} {'tf32':>8} {'bandwidth':>12}"
    print(style.paint(f"{head}  here", "bold"))
    for name, d, here in rows:
        rates = (d.flops[torch.bfloat16], d.flops[torch.float16], d.flops[torch.float32], d.tf32)
        speeds = " ".join(f"{x / 1e12:>8.4g}" for x in rates)
        line = f"{name:<12} {gb(d.memory):>10} {speeds} {d.bandwidth / 1e9:>7.5g} GB/s"
        print(f"{line}  yes" if here else line)
    print("TFLOPs per second of dense matrix products; bandwidth in GB of 10**9 bytes.")
    for name, d in cards.items():
        print(f"{name} is {style.name(d.name)}.")
    return FITS


def doctor(options: Namespace) -> int:
    """`doctor`."""
    found = []
    for finding in findings():
        found.append(finding)
        if not options.json:
            print(*map(style_of().name, lines(finding)), sep="\n", flush=True)
    works = all(finding.works is not False for finding in found)
    if options.json:
        _print_json({"works": works, "findings": [asdict(finding) for finding in found]})
    else:
        print("\nPlans can be made and run here." if works else "\nPlans cannot be made and run here, as it is.")
    return FITS if works else DOES_NOT_FIT


def demo(options: Namespace) -> int:
    """`demo`."""
    from planner.cli.demo import run

    return run(options.budget, options.steps, options.solver, False if options.quiet else None)


def launched(options: Namespace) -> int:
    """`run`; what the script raises goes through."""
    given = {name: value for name in (*_OPTIONS, *_PLAN_ONLY) if (value := getattr(options, name, None)) is not None}
    if options.quiet:
        given["progress"] = False
    return launch(
        options.script,
        options.arguments,
        module=options.module,
        which=options.model,
        plan_file=options.plan_file,
        quiet=options.quiet,
        **given,
    )


COMMANDS: Mapping[str, Callable[[Namespace], int]] = {
    "plan": make,
    "show": show,
    "pareto": curve,
    "compare": difference,
    "devices": devices,
    "doctor": doctor,
    "demo": demo,
}


def facts(p: Plan) -> dict[str, Any]:
    """A plan's numbers as plain data; bytes and seconds, None where nothing was measured."""
    names = (
        "budget_bytes peak_bytes baseline_peak_bytes eager_peak_bytes resident_bytes overhead bound gap solver "
        "solve_seconds step_seconds note device"
    )
    return {
        "fits": fits(p.record),
        **{name: getattr(p, name) for name in names.split()},
        "measured_peak_bytes": p.verification.measured_bytes if p.verification else None,
        "phase_peaks": p.phase_peaks,
        "account": dict(p.account),
        "modules": [asdict(row) for row in by_module(p.decisions)],
    }


def _show(p: Plan, options: Namespace) -> int:
    explained = None if options.explain is None else p.explain(options.explain)
    if options.html is not None:
        p.to_html(options.html)
    if options.json:
        _print_json(facts(p) | ({} if explained is None else {"explanation": asdict(explained)}))
    elif explained is not None:
        print(explanation_text(explained, style_of()))
    else:
        print(p.summary())
    return FITS if fits(p.record) else DOES_NOT_FIT


def _asked(options: Namespace, *names: str) -> dict[str, Any]:
    """The options that were given, as arguments of `plan()`."""
    found = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.quiet:
        found["progress"] = False
    if options.batch_from is not None:
        found["batch"] = batch_of(options.batch_from)
    return found


def _print_json(data: Any) -> int:
    print(json.dumps(data, indent=2, allow_nan=False))
    return FITS


@contextmanager
def _apart() -> Iterator[None]:
    """What the user's code prints is no part of the answer: on to standard error, from its child processes too."""
    sys.stdout.flush()
    own = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _check_targets(*paths: Path | None) -> None:
    """Fails now where writing would fail after a long search."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise OptionError(f"{path} cannot be written: it is a folder, or its folder is not there or not writable")


def _sheet(d: Device) -> dict[str, Any]:
    return asdict(d) | {"flops": {str(t).removeprefix("torch."): rate for t, rate in d.flops.items()}}
