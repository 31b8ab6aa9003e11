"""Custom ops run again where they only make results, as under torch.utils.checkpoint; `keep=` names what must not.

Each op counts its runs, by the number of the block that called it.
"""

import threading
from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.utils.checkpoint import checkpoint

from planner import OptionError, Plan, plan
from planner.capture.recomputability import keep_reason
from planner.cli.arguments import parser
from planner.codegen.replay import run_and_save_state, run_with_state
from planner.compat.ops import FUNCTIONAL, name_of

from .measure import held_before, results, step_peak
from .plans import leanest
from .real_models import Case
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")
BLOCKS = 3
runs: Counter[int] = Counter()


@torch.library.custom_op("planner_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, block: int) -> torch.Tensor:
    runs[block] += 1
    return x.sin() * 2


@torch.library.custom_op("planner_tests::tagged", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def tagged(x: torch.Tensor, block: int) -> torch.Tensor:
    runs[block] += 1
    return x + torch.randn_like(x)


@torch.library.custom_op("planner_tests::untagged", mutates_args=())
def untagged(xs: list[torch.Tensor], block: int) -> torch.Tensor:
    runs[block] += 1
    return xs[0] + torch.randn_like(xs[0])


@torch.library.custom_op("planner_tests::written", mutates_args=("x",))
def written(x: torch.Tensor, block: int) -> None:
    runs[block] += 1
    x.mul_(2)


@torch.library.custom_op("planner_tests::counted", mutates_args=())
def counted(x: torch.Tensor, block: int) -> torch.Tensor:
    runs[block] += 1
    return x * (1 + 0.1 * runs[block])


for op in (scaled, tagged, counted):
    op.register_fake(lambda x, block: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, gradient: (gradient * ctx.saved_tensors[0].cos(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
untagged.register_fake(lambda xs, block: torch.empty_like(xs[0]))
untagged.register_autograd(
    lambda ctx, gradient: ([gradient * ctx.saved_tensors[0].cos(), None], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def write(x, block):
    x = x.sin()
    written(x.detach(), block)
    return x


class Block(nn.Module):
    def __init__(self, number, op):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.number, self.op = number, op
        self.uncopied = threading.Lock(), nn.functional

    def forward(self, x):
        return x + self.narrow(self.op(self.wide(x), self.number))


class Net(nn.Module):
    def __init__(self, op=scaled, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, op) for i in range(BLOCKS))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def case(op=scaled) -> Case:
    return Case(Net(op), {"x": torch.randn(256, 64)}, lambda loss: loss)


def lean(of: Case, **options) -> Plan:
    return leanest(plan(of.model, of.batch, budget_gb=1, **options))


def counted_in_a_step(of: Case) -> list[int]:
    """By block, once the step is known: planning runs ops for their costs."""
    results(of)
    results(of)
    runs.clear()
    results(of)
    return [runs[block] for block in range(BLOCKS)]


def runs_in_a_step(of: Case, p: Plan) -> list[int]:
    """By block."""
    p.apply()
    found = counted_in_a_step(of)
    p.remove()
    return found


def test_a_custom_op_runs_again(tmp_path):
    """Gradients are eager's, and the peak is the predicted one, below that with the op kept."""
    of = case()
    eager = results(of)
    again, once = lean(of), lean(of, keep=["planner_tests::scaled"])
    peaks = []
    for p in (again, once):
        p.apply()
        ours = results(of)
        assert all(torch.equal(ours[key], theirs) for key, theirs in eager.items())
        peaks.append(held_before(of) + step_peak(of, tmp_path))
        assert peaks[-1] == pytest.approx(p.peak_bytes, rel=0.01)
        p.remove()
    assert peaks[0] < 0.9 * peaks[1]
    assert max(runs_in_a_step(of, again)) > 1
    assert runs_in_a_step(of, once) == [1] * BLOCKS


@pytest.mark.parametrize("mode", ["aten", "eager"])
@pytest.mark.parametrize("op", [tagged, lambda x, block: untagged([x, x], block)], ids=["tagged", "untagged"])
def test_what_a_custom_op_draws_is_drawn_again(op, mode):
    of = case(lambda x, block: torch.dropout(op(x, block), 0.1, True))
    eager = results(of)
    p = lean(of, mode=mode)
    p.apply()
    ours = results(of)
    p.remove()
    assert all(torch.equal(ours[key], theirs) for key, theirs in eager.items())
    assert mode == "eager" or max(runs_in_a_step(of, p)) > 1


def test_an_op_that_writes_runs_once():
    of = case(write)
    assert runs_in_a_step(of, lean(of)) == [1] * BLOCKS


@pytest.mark.parametrize("mode", ["aten", "eager"])
@pytest.mark.parametrize(
    ("keep", "once"),
    [
        (["planner_tests::scaled"], range(BLOCKS)),
        (["blocks.1"], [1]),
        *more((["block?.2", "planner_*::*"], range(BLOCKS))),
    ],
)
def test_what_is_named_runs_once(keep, once, mode):
    of = case()
    p = lean(of, keep=keep, mode=mode)
    found = runs_in_a_step(of, p)
    assert [found[block] for block in once] == [1] * len(once)
    assert len(once) == BLOCKS or max(found) > 1
    assert {d.reason for d in p.decisions if d.reason} <= {f"keep={name!r} names it" for name in keep}


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (["planner_tests::scald"], "'planner_tests.scaled'"),
        (["addmm"], "'aten.addmm'"),
        (["blocks.1.wde"], "'blocks.1.wide'"),
        (["planner_tests::scaled", "aten.bmm"], "'aten.bmm' names no op"),
        ("planner_tests::scaled", "must be a list of names"),
        ([""], "must be a list of names"),
    ],
)
@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_what_names_nothing_is_refused_with_the_nearest(keep, words, mode):
    of = case()
    with pytest.raises(OptionError, match="keep=.*" + words.replace(".", r"\.")):
        plan(of.model, of.batch, budget_gb=1, keep=keep, mode=mode)


def test_what_the_models_own_checkpoint_runs_again_cannot_be_named():
    of = Case(Net(checkpointed=True), case().batch, lambda loss: loss)
    with pytest.raises(OptionError, match="leave one of the two out"):
        plan(of.model, of.batch, budget_gb=1, keep=["planner_tests::scaled"], checkpoints="keep")


def test_a_plan_file_and_the_command_line_have_the_names(tmp_path):
    of = case()
    p = lean(of, keep=["planner_tests::scaled", "blocks.1"])
    p.save(tmp_path / "plan.json")
    filed = Plan.load(tmp_path / "plan.json")
    assert filed.options.keep == ("planner_tests::scaled", "blocks.1")
    assert plan(of.model, of.batch, budget_gb=p.budget_bytes / 2**30, keep=filed.options.keep, known=filed).solver == (
        p.solver
    )
    filed.apply(of.model)
    assert counted_in_a_step(of) == [1] * BLOCKS
    filed.remove(of.model)
    other = plan(of.model, of.batch, budget_gb=p.budget_bytes / 2**30, known=filed)
    assert "Solved anew" in other.note
    for command in (["plan", "a:b"], ["pareto", "a:b"], ["run", "--budget-gb", "1"]):
        given = [*command, "--keep", "aten.bmm,blocks.*.attn", *(["train.py"] if command[0] == "run" else [])]
        assert parser().parse_args(given).keep == ("aten.bmm", "blocks.*.attn")


def test_verify_names_an_op_whose_second_run_is_another():
    of = case(lambda *given: counted(*given))
    seen = lean(of).verify()
    assert not seen.gradients_agree
    assert seen.unlike == ("planner_tests::counted",)
    assert "planner_tests::counted gave other results" in str(seen)
    assert "keep=['planner_tests::counted']" in str(seen)
    assert not lean(case()).verify().unlike


def test_a_draw_is_repeated_from_a_state():
    draw, x, device = torch.ops.aten.rand_like.default, torch.ones(3), torch.device("cpu")
    state, first = run_and_save_state("cpu", draw, x, device=device)
    torch.rand(5)
    before = torch.get_rng_state()
    assert torch.equal(run_with_state(state, "cpu", draw, x, device=device), first)
    assert torch.equal(torch.get_rng_state(), before)


class Kernel:
    """What a Triton kernel is to torch: called with a grid, it writes into one of its arguments."""

    arg_names = ("x", "out")

    def __getitem__(self, grid):
        def launch(x, out):
            runs[0] += 1
            torch.sin(x, out=out)

        return launch


KERNEL = Kernel()


class Launched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return triton_kernel_wrapper_functional(
            kernel_idx=kernel_side_table.add_kernel(KERNEL),
            constant_args_idx=kernel_side_table.add_constant_args({}),
            grid=[(1, 1, 1)],
            tma_descriptor_metadata={},
            kwargs={"x": x, "out": torch.empty_like(x)},
            tensors_to_clone=["out"],
        )["out"]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


@torch.compiler.allow_in_graph
def launched(x, block):
    return Launched.apply(x)


def test_a_triton_kernel_runs_again(tmp_path):
    of = case(launched)
    eager = results(of)
    p = lean(of)
    p.apply()
    ours = results(of)
    assert all(torch.equal(ours[key], theirs) for key, theirs in eager.items())
    assert held_before(of) + step_peak(of, tmp_path) == pytest.approx(p.peak_bytes, rel=0.01)
    p.remove()
    assert sum(runs_in_a_step(of, p)) > BLOCKS
    once = lean(of, keep=["triton_kernel_wrapper_functional"])
    assert sum(runs_in_a_step(of, once)) == BLOCKS


@pytest.mark.parametrize(
    ("inner", "words"), [(torch.ops.aten.sin.default, ""), (torch.ops.aten.rand_like.default, "rand_like")]
)
def test_a_kernel_is_as_safe_as_the_graph_that_it_is_given(inner, words):
    score = fx.Graph()
    score.output(score.call_function(inner, (score.placeholder("score"),)))
    root = nn.Module()
    root.score = fx.GraphModule(nn.Module(), score)
    graph = fx.Graph(root)
    flex = next(op for op in FUNCTIONAL if name_of(op) == "flex_attention")
    node = graph.call_function(flex, (graph.placeholder("query"), graph.get_attr("score")))
    graph.output(node)
    module = fx.GraphModule(root, graph)
    reason = keep_reason(next(n for n in module.graph.nodes if n.target is flex), ())
    assert (words in reason) if words else not reason
