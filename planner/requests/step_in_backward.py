"""What `step_in_backward` cannot do, refused in words before anything is captured."""

from __future__ import annotations

from collections import Counter

from torch import nn, optim

from planner.core.call import storages
from planner.core.options import Options
from planner.errors import ApplyError, OptionError
from planner.parallel.group import world_size
from planner.parallel.meshes import on_mesh
from planner.requests.optimizers import trained_by
from planner.stepping.step import ONE_BY_ONE, has_gradient_hooks


def refuse_step_in_backward(options: Options, optimizer: object, model: nn.Module) -> None:
    """Raise OptionError where an optimizer is to step in the backward pass and cannot.

    Args:
        options: of the plan.
        optimizer: as for `plan()`.
        model: that it would step.
    """
    if not options.step_in_backward:
        return
    if not isinstance(optimizer, optim.Optimizer):
        raise OptionError(
            f"step_in_backward=True needs the optimizer that steps, and was given optimizer={optimizer!r}: give the "
            "object, as in plan(model, batch, optimizer=torch.optim.AdamW(model.parameters()), step_in_backward=True)"
        )
    if type(optimizer) not in ONE_BY_ONE:
        known = ", ".join(sorted(kind.__name__ for kind in ONE_BY_ONE))
        raise OptionError(
            f"step_in_backward=True with {type(optimizer).__name__}, which is not known to treat each parameter alone; "
            f"these are: {known}"
        )
    given = {
        "accumulate=True (a gradient that is used at once cannot be added to others)": options.accumulate,
        f"shard={options.shard}": options.shard > 1,
        f"in_flight={options.in_flight} (a step changes the weights of calls that wait)": options.in_flight > 1,
        f"mode={options.mode!r} (mode='aten' does it)": options.mode != "aten",
        f"pieces={options.pieces!r}": bool(options.pieces),
        f"offload={options.offload!r}": options.offload is not None,
        f"{world_size()} processes (each would step by gradients of its own)": world_size() > 1,
        "parameters that several devices share (fully_shard, parallelize_module)": on_mesh(model),
        **_unable(optimizer, model),
    }
    if unable := [name for name, is_given in given.items() if is_given]:
        raise OptionError(f"step_in_backward=True does not go with {'; nor with '.join(unable)}. Leave one of them out")


def _unable(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, bool]:
    """What of the model's parameters does not go with it, in words, and whether there are such."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kind, there = type(optimizer).__name__, trained_by(optimizer)
    used = Counter(s for t in (*model.parameters(), *model.buffers()) for s in storages(t))
    shared = [name for name, p in trained.items() if any(used[s] > 1 for s in storages(p))]
    found = {
        f"parameters that {kind} lacks": [name for name, p in trained.items() if id(p) not in there],
        "hooks on gradients of parameters": [name for name, p in trained.items() if has_gradient_hooks(p)],
        "parameters that share their storage": shared,
    }
    return {f"{what} ({', '.join(names[:3])})": bool(names) for what, names in found.items()}


def refuse_trial_step(options: Options) -> None:
    """Raise ApplyError where a step that is only measured would step the optimizer."""
    if options.step_in_backward:
        raise ApplyError(
            "a trial step (verify(), repair(), apply(verify=True)) would step the optimizer, as step_in_backward=True "
            "asks for: verify the same plan with step_in_backward=False"
        )
