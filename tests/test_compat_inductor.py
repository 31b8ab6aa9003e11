"""What is used of Inductor: its pipeline, the wrappers that it generates, what goes into its caches."""

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx

from planner.compat import inductor, inductor_allocations, inductor_hooks, inductor_random
from planner.compat.dispatch import lasting_modes_off, switch_off, switch_on
from planner.compat.fx import boxed

from .listening import Listening

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_the_parts_of_inductor_that_are_missing_are_named(monkeypatch):
    assert inductor.missing_parts() == ()
    monkeypatch.setitem(inductor.PARTS, "torch._inductor.config", "nothing")
    monkeypatch.setitem(inductor.PARTS, "torch._inductor.nowhere", "here")
    assert inductor.missing_parts() == ("torch._inductor.config.nothing", "torch._inductor.nowhere")


def test_what_inductor_compiles_with_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in inductor.missing_compiler("cuda")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in inductor.missing_compiler("cpu")


@pytest.mark.thorough
def test_a_lasting_mode_sees_what_code_reads_and_allocates_that_was_generated_before_it_and_under_it():
    own, x = inductor_allocations.guards._empty_strided_cpu, torch.ones(8, 8)
    before, under = torch.compile(lambda x: x.sin() + 1), torch.compile(lambda x: x.cos() * 2)
    before(x)
    switch_on(mode := Listening())
    try:
        results = [before(x), under(x)]
        assert mode.ops.count(torch.ops.aten.empty_strided.default) == 2
        assert mode.ops.count(torch.ops.aten.detach.default) == 2
    finally:
        switch_off(mode)
    assert all(torch.equal(a, b) for a, b in zip(results, [before(x), under(x)], strict=True))
    assert mode.ops.count(torch.ops.aten.empty_strided.default) == 2
    switch_on(mode := Listening())
    with lasting_modes_off():  # as while a model is planned, when a recording may end
        mode.over = True
    generated = [module for name, module in sys.modules.items() if "compile_tasks." in name]
    taken = [module.empty_strided_cpu for module in generated if hasattr(module, "empty_strided_cpu")]
    assert {own} == {inductor_allocations.guards._empty_strided_cpu, *taken}


def test_what_is_drawn_op_by_op_from_a_seed_is_what_compiled_code_draws_from_it():
    from torch._inductor import compile_fx, inductor_prims

    graph = fx.Graph()
    seed = graph.placeholder("seed")
    uniform = graph.call_function(inductor_prims.random, ([4, 2, 9, 17], seed, "rand"))
    mask = graph.call_function(torch.ops.aten.gt.Scalar, (uniform, 0.1))
    turned = graph.call_function(torch.ops.aten.permute.default, (mask, [3, 0, 2, 1]))
    normal = graph.call_function(inductor_prims.random, ([33], seed, "randn"))
    moved = graph.call_function(torch.ops.aten.add.Tensor, (normal, 1))
    graph.output((turned, moved, graph.call_function(inductor_prims.randint, (0, 100, [5, 5], seed))))
    one, each = fx.GraphModule({}, graph), fx.GraphModule({}, fx.Graph())
    each.graph.output(each.graph.graph_copy(graph, {}))
    inductor_random.draw_alike(each.graph)
    mode = inductor_random.FakeTensorMode()
    seeds = torch.tensor([3, -(2**60) - 1, 2**62 + 1]).unbind()
    compiled = compile_fx.compile_fx_inner(one, [mode.from_tensor(seeds[0])])
    drawn = [(compiled([s]), boxed(each)([s])) for s in seeds]
    assert all(torch.equal(a, b) for fused, alone in drawn for a, b in zip(fused, alone, strict=True))
    assert not torch.equal(drawn[0][1][0], drawn[1][1][0])


def test_inductor_runs_our_partition_and_generates_a_wrapper_that_compiles_nothing():
    seen, graphs, passes = [], [], []

    def partition(joint, inputs, **options):
        graphs.extend(inductor.default_partition(joint, inputs, lambda graph: graph, **options))
        return tuple(graphs)

    def looking(_own):
        def compile_one(graph, inputs, **options):
            seen.append((inductor.generate(graph, inputs, **options), options.get("is_backward", False)))
            return boxed(graph)

        return compile_one

    def backend(graph, inputs):
        return inductor.compile_graph(graph, inputs, partition, looking, first=passes.append, near=6)

    own = []
    with inductor_config.patch({"cpp.vec_isa_ok": True, "joint_custom_pre_pass": own.append}):
        x = torch.randn(8, 8, requires_grad=True)
        torch.compile(lambda t: (t @ t).sin().exp().sum(), backend=backend)(x).backward()
    assert [backward for _, backward in seen] == [False, True]
    assert len(graphs) == 2
    assert len(passes) == 1  # the joint graph, before Inductor has changed it
    assert own == passes  # a pass that the user has set still runs
    generated = seen[0][0]
    assert {node.op for node in generated.realised.values()} == {"call_function"}
    called, allocated = [], []

    def allocate(device, size, stride, dtype):
        allocated.append(device)
        return torch.empty_strided(size, stride, dtype=dtype)

    namespace = inductor.load(generated, lambda name: lambda *args: called.append(name), allocate)
    namespace["call"]([x.detach()])
    assert {name.startswith("cpp_fused") for name in called} == {True}
    assert set(allocated) == {"cpu"}


def test_what_inductor_is_configured_with_goes_into_the_keys_of_its_caches():
    first, second = (inductor_hooks.Partitioner(lambda *_, s=step, **__: (tagged(s), tagged(s))) for step in (1, 2))

    def tagged(step):
        graph = fx.Graph()
        node = graph.placeholder("x")
        node.meta[inductor_hooks.STEP] = step
        graph.output((node,))
        return fx.GraphModule({}, graph)

    assert pickle.loads(pickle.dumps(first)) == first.uuid()
    first(None, ())
    second(None, ())
    assert first.uuid() != second.uuid()
    assert pickle.loads(pickle.dumps(inductor_hooks.Near)) is inductor_hooks.Near


def test_what_is_far_apart_in_a_schedule_is_not_fused():
    class Scheduled:
        def __init__(self, step):
            node = fx.Graph().placeholder("x")
            node.meta[inductor_hooks.STEP] = step
            self.nodes = [SimpleNamespace(node=SimpleNamespace(get_origin_node=lambda: node))]

        def get_nodes(self):
            return self.nodes

    first, second = Scheduled(0), Scheduled(2)
    assert inductor_hooks.steps_of(first) == {0}
    assert not inductor_hooks.Near().can_fuse(None, first, second, 1)
    assert inductor_hooks.far((first, second), 1)
    assert not inductor_hooks.far((first, second), 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_in_groups_that_run_again_decide_no_layouts_and_weights_are_saved_as_they_come(groups):
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    made = graph.call_function(torch.ops.aten.convolution.default, (x, weight, None, [1], [0], [1], False, [0], groups))
    out = graph.output((made, weight))
    x.meta["val"], weight.meta["val"] = torch.empty(1, 2, 4, 4), torch.empty(2, 2, 1, 1)
    module = fx.GraphModule(torch.nn.Module(), graph)
    lowering = inductor_hooks.GraphLowering
    with inductor_config.patch(force_layout_optimization=True), inductor_hooks.chosen(1):
        assert lowering.decide_layout_opt(module, is_inference=False)
        made.meta["runs_again"] = True
        assert lowering.decide_layout_opt(module, is_inference=False) is (groups == 1)
        out.meta.update(user_visible_output_idxs=[], original_output_strides=[(), ()])
        strides = inductor_hooks.graph_module.get_user_visible_output_strides(graph)
    assert strides == {weight: (2, 1, 1, 1)}
