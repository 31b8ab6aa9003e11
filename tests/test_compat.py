"""Private parts of torch: each behaves as documented in the torch that is installed, and no other module uses one."""

import ast
import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._decomp.decompositions as decompositions
from functorch.compile import aot_function
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops import effects
from torch.profiler import ProfilerActivity, profile

import planner
from planner.compat import (
    autograd,
    bindings,
    cuda,
    dynamo,
    fake,
    layers,
    lightning,
    modules,
    ops,
    pipelining,
    profiler,
    pytree,
    symbols,
    tensors,
)
from planner.compat import fx as compat_fx
from planner.compat.autograd import in_backward
from planner.compat.dispatch import (
    LastingMode,
    finds_ops,
    lasting_modes_off,
    modes_here,
    switch_off,
    switch_on,
    written,
)
from planner.compat.profiler import allocations_of, recorded_in_thread

from .listening import Listening

ROOT = Path(planner.__file__).parent
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}  # public, by collections' documentation
OPERATORS = ("torch.ops.", "_ATEN")  # names of operators below these may begin with an underscore

ELSEWHERE = ("compat",)


pytestmark = pytest.mark.compat


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def own_privates(tree: ast.Module) -> set[str]:
    """Names that the classes of a file define: methods, fields, attributes that are set on `self` or `cls`."""
    names = set()
    for node in (n for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for n in ast.walk(kind)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(value: ast.expr) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    name = value.func if isinstance(value, ast.Call) else value
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def pokes(source: str) -> Iterator[str]:
    """The private parts of other libraries that a file imports, reads or sets."""
    tree = ast.parse(source)
    own = own_privates(tree) | NAMED_TUPLE
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                used = [part for name in names for part in name.name.split(".")]
            case ast.ImportFrom(module=module, names=names):
                used = [*(module or "").split("."), *(name.name for name in names)]
            case ast.Attribute(value=value, attr=attr):
                mine = is_own(value) or attr in own or ast.unparse(value).startswith(OPERATORS)
                used = [] if mine else [attr]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(value=attr), *_]
            ):
                used = [attr] if attr not in own else []
            case _:
                continue
        if any(map(is_private, used)):
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch._guards import detect_fake_mode", 1),
        ("import torch._dynamo", 1),
        ("from torch.nn.modules.batchnorm import _NormBase", 1),
        ("t._version", 1),
        ("torch._C._get_tracing_state()", 2),
        ("self.schedule._loss_fn", 1),
        ("getattr(module, '_buffers', {})", 1),
        ("class A:\n    def f(self, other):\n        self._x = other._x + super()._y + cls._z", 0),
        ("held._replace(a=1), torch.ops.aten._foo.default, _ATEN._foo, x.__class__, self._parameters", 0),
    ],
)
def test_the_check_sees_private_names(source, expected):
    assert len(list(pokes(source))) == expected


def test_nothing_else_uses_private_parts_of_other_libraries():
    files = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ELSEWHERE]
    assert len(files) > 50
    seen = [f"{path.relative_to(ROOT)}:{what}" for path in files for what in pokes(path.read_text())]
    assert not seen, "\n".join(seen)


# tensors


def test_views_share_a_storage_key_and_a_version():
    x, y = torch.zeros(4), torch.zeros(4)
    assert tensors.storage_key(x) == tensors.storage_key(x[1:]) != tensors.storage_key(y)
    before = tensors.version_of(x)
    x[1:].add_(1)
    assert tensors.version_of(x) == tensors.version_of(x[1:]) == before + 1
    with fake.FakeTensorMode():
        a, b = torch.empty(3), torch.empty(3)
    assert tensors.storage_key(a) != tensors.storage_key(b)


def test_a_storage_key_does_not_come_again_and_stays_while_the_storage_is_there():
    assert len({tensors.storage_key(torch.ones(3)) for _ in range(9)}) == 9
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    key = tensors.storage_key(x.grad)
    assert key == tensors.key_of(x.grad.untyped_storage()) == tensors.storage_key(x.grad.detach())
    assert tensors.storage_key(copy.deepcopy(x.grad)) != key != tensors.storage_key(copy.copy(x.grad).clone())


def test_a_view_knows_what_it_is_of():
    x = torch.zeros(4, requires_grad=True) * 2
    assert tensors.viewed(x[1:]) is x
    assert tensors.viewed(x) is tensors.viewed(x.detach()) is None


def test_a_dispatch_mode_sees_operators_unless_dispatch_is_off():
    with Listening() as mode:
        torch.ones(2).sin()
        with tensors.no_dispatch():
            torch.ones(2).cos()
    assert torch.ops.aten.sin.default in mode.ops
    assert torch.ops.aten.cos.default not in mode.ops


def test_wrapper_subclasses_are_told_from_plain_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    assert tensors.is_traceable_wrapper_subclass(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not tensors.is_traceable_wrapper_subclass(torch.ones(2))


def test_a_tensor_without_memory_stands_for_another_and_may_be_its_gradient():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("refused")

    p = torch.nn.Parameter(torch.randn(4, 3).t())
    t = tensors.without_memory(Refusing, p.detach())
    p.grad = t
    assert p.grad is t
    assert (t.shape, t.stride(), t.dtype) == (p.shape, p.stride(), p.dtype)
    assert t.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="refused"):
        t + 1


def test_trees_are_mapped_with_paths():
    tree = ({"a": 1}, [2, 3])
    assert pytree.tree_leaves(tree) == [1, 2, 3]
    leaves, spec = pytree.tree_flatten(tree)
    assert pytree.tree_unflatten([-x for x in leaves], spec) == pytree.tree_map(lambda x: -x, tree)
    assert pytree.tree_map_only(int, str, tree) == ({"a": "1"}, ["2", "3"])
    pairs, _ = pytree.tree_flatten_with_path(tree)
    assert [pytree.keystr(path) for path, _ in pairs] == ["[0]['a']", "[1][0]", "[1][1]"]
    assert pytree.tree_map_with_path(lambda path, x: len(path), tree) == ({"a": 2}, [2, 2])


# ops


def test_a_schema_names_what_an_operator_reads_and_writes():
    schema = ops.schema_of(torch.ops.aten.add_.Tensor)
    assert isinstance(torch.ops.aten.add_.Tensor, ops.OpOverload)
    assert (schema.name, schema.is_mutable, len(schema.returns)) == ("aten::add_", True, 1)
    assert [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert not ops.schema_of(torch.ops.aten.add.Tensor).is_mutable


@torch.library.custom_op("planner_tests::writes", mutates_args=("x",))
def writes(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("planner_tests::makes", mutates_args=())
def makes(x: torch.Tensor, sizes: list[int], other: torch.Tensor | None) -> list[torch.Tensor]:
    return [x.clone()]


def test_an_operator_says_whether_it_only_makes_results():
    aten, profiler = torch.ops.aten, torch.ops.profiler
    assert all(
        map(ops.is_functional, (aten.bmm.default, aten.native_dropout.default, torch.ops.planner_tests.makes.default))
    )
    others = (aten.add_.Tensor, aten.view.default, aten._assert_async.msg, torch.ops.planner_tests.writes.default)
    objects = (profiler._record_function_enter_new.default, torch.ops.c10d.allreduce_.default)
    assert not any(map(ops.is_functional, (*others, *objects)))
    assert [ops.name_of(op) for op in ops.FUNCTIONAL if "triton" in ops.name_of(op)] == [
        "triton_kernel_wrapper_functional"
    ]
    assert ops.name_of(aten.bmm.default) == "aten.bmm.default"


def test_an_operator_with_an_effect_does_more():
    op = torch.ops.planner_tests.makes.default
    assert ops.is_functional(op)
    handle = effects._register_effectful_op(op, effects.EffectType.ORDERED)
    assert not ops.is_functional(op)
    handle.destroy()


# fake tensors


def test_a_fake_mode_runs_ops_by_another_function():
    mode, seen = fake.FakeTensorMode(), []
    before = fake.replace_dispatch(mode, lambda func, *more: (seen.append(func), before(func, *more))[1])
    with mode:
        t = torch.empty(2).sin()
    assert isinstance(t, fake.FakeTensor)
    assert torch.ops.aten.sin.default in seen


def test_a_fake_tensor_knows_a_constant_until_it_is_written_into():
    mode = fake.FakeTensorMode()
    known = fake.fake_of_constant(mode, torch.arange(3))
    assert known.constant.tolist() == [0, 1, 2]
    later = mode.from_tensor(torch.zeros(1))
    fake.set_constant(later, torch.ones(1))
    assert later.item() == 1
    later.add_(mode.from_tensor(torch.zeros(1)))
    with pytest.raises(fake.DataDependentOutputException):
        later.item()


def test_borrowed_constants_are_copied_with_all_that_share_them():
    mode, values = fake.FakeTensorMode(), torch.arange(4)
    fake.allow_constants(mode, 4)
    known = fake.fake_of_constant(mode, values)
    row = known[:2]
    fake.copy_constants(row, {tensors.storage_key(torch.ones(1))})
    assert row.constant.data_ptr() == values.data_ptr()
    fake.copy_constants(row, {tensors.storage_key(values)})
    assert row.constant.data_ptr() == known.constant.data_ptr() != values.data_ptr()
    assert known.constant.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("elements", [1, 8])
def test_constants_of_more_elements_are_known_where_that_is_allowed(elements):
    mode = fake.FakeTensorMode()
    fake.allow_constants(mode, elements)
    assert mode.may_turn_const(torch.zeros(8)) == (elements == 8)
    assert not mode.may_turn_const(torch.zeros(9))


def test_real_tensors_are_made_while_a_fake_mode_is_on():
    with fake.FakeTensorMode(), fake.unset_fake_temporarily():
        assert torch.ones(2).sum().item() == 2


def test_fake_tensors_refuse_what_they_cannot_know():
    with fake.FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(fake.DynamicOutputShapeException):
        torch.empty(3).nonzero()
    assert fake.detect_fake_mode((mode.from_tensor(torch.ones(1)), 2)) is mode
    assert fake.detect_fake_mode((torch.ones(1),)) is None
    assert issubclass(fake.UnsupportedOperatorException, RuntimeError)


def test_a_fake_number_is_written_as_its_value_where_it_has_one():
    three = torch.tensor(3)
    with fake.FakeTensorMode() as mode:
        number, row = fake.fake_of_constant(mode, three), torch.empty(2)
        undo = fake.replace_format()
        try:
            assert f"expert_{number}, {number:02}" == "expert_3, 03"
            assert f"{row}".startswith("FakeTensor")
            with pytest.raises(fake.DataDependentOutputException):
                f"{row[0]}"
        finally:
            undo()
        assert f"{number}".startswith("FakeTensor")


def test_a_model_on_fake_tensors_is_left_alone_by_a_conversion_that_changes_nothing():
    with fake.FakeTensorMode():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        keeps = [weakref.ref(p) for p in model.parameters()]
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            model.to(torch.float32)
        undo = modules.replace_conversions()
        try:
            assert model.to(torch.float32) is model
            assert all(ref() is p for ref, p in zip(keeps, model.parameters(), strict=True))
        finally:
            undo()
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64


def test_a_model_is_copied_onto_fake_tensors():
    model = nn.Linear(2, 2)
    with fake.FakeCopyMode(fake.FakeTensorMode()):
        copied = copy.deepcopy(model)
    assert isinstance(copied.weight, fake.FakeTensor)
    assert not isinstance(model.weight, fake.FakeTensor)


# symbolic sizes


def test_marked_dimensions_are_symbols_with_hints_and_are_unmarked_again():
    x, seen = torch.ones(6, 4), []

    def backend(graph, inputs):
        seen.extend(s for n in graph.graph.find_nodes(op="placeholder") for s in [n.meta["example_value"]])
        return graph.forward

    with symbols.dynamic_dimensions([(x, {0})]):
        torch.compile(lambda x: x * 2 + x.shape[0], backend=backend)(x)
    assert not [name for name in vars(x) if "dynamic" in name]
    (size,) = [s for s in seen if isinstance(s, torch.SymInt)]
    assert symbols.hint_of(size) == 6
    expression = symbols.expression_of(size)
    assert expression.is_symbol
    assert symbols.evaluate(2 * expression + 1, {expression: 10}) == 21
    graph = fx.Graph()
    made = symbols.evaluate(2 * expression + 1, {expression: fx.Proxy(graph.placeholder("n"))})
    assert isinstance(made, fx.Proxy)


# graphs


def _calls_of_bound_ops():
    """For each overload that has a binding, arguments to call both with."""
    aten = torch.ops.aten
    x, y = torch.rand(4, 4) + 0.5, torch.rand(4, 4) + 0.5
    image, kernel, batch = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3), torch.rand(2, 4, 4)
    unary = ("abs", "clone", "cos", "exp", "gelu", "log", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "t")
    yield from ((getattr(aten, name).default, (x,), {}) for name in (*unary, "tanh", "tril"))
    yield from ((getattr(aten, name).Tensor, (x, y), {}) for name in ("add", "div", "mul", "rsub", "sub"))
    yield aten.add.Tensor, (x, y), {"alpha": 2}
    yield aten.add_.Tensor, (x.clone(), y), {}
    for op in (aten.mul_.Scalar, aten.mul.Scalar, aten.div.Scalar):
        yield op, (x.clone(), 0.3), {}
    yield aten.mul.Tensor, (x.half(), 0.1), {}
    yield aten.add.Tensor, (torch.arange(4), 1), {}
    yield aten.clone.default, (image.permute(0, 2, 3, 1),), {"memory_format": torch.contiguous_format}
    yield aten.addmm.default, (y[0], x, y), {}
    yield aten.as_strided.default, (x, [2, 3], [1, 4], 5), {}
    yield aten.baddbmm.default, (batch, batch, batch), {"beta": 2}
    yield aten.bmm.default, (batch, batch), {}
    yield aten.mm.default, (x, y), {}
    yield aten.matmul.default, (batch, y), {}
    yield aten.tensordot.default, (batch, batch, [0, 1], [0, 1]), {}
    sequence, state, bias = torch.rand(3, 4, 4), torch.rand(4, 2), torch.rand(8)
    given = sequence, torch.rand(8, 4), torch.rand(8, 2), bias, bias, state, state
    yield aten.mkldnn_rnn_layer.default, (*given, False, [], 2, 2, 1, True, False, False, True), {}
    yield aten.cat.default, ([x, y], 1), {}
    yield aten.convolution.default, (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}
    yield aten.embedding.default, (x, torch.tensor([1, 0]), 0), {}
    yield aten.mean.dim, (batch, [0, 2], True), {}
    yield aten.sum.dim_IntList, (batch, [0, 2], False), {}
    yield aten.native_dropout.default, (x, 0.5, True), {}
    yield aten.native_layer_norm.default, (x, [4], y[0], y[1], 1e-5), {}
    yield aten.permute.default, (batch, [2, 0, 1]), {}
    yield aten.pow.Tensor_Scalar, (x, 3), {}
    yield aten.reshape.default, (batch, [8, -1]), {}
    yield aten.native_group_norm.default, (image, None, None, 1, 2, 25, 1, 1e-5), {}
    for made in (aten.ones, aten.zeros):
        yield made.default, ([2, 3],), {"dtype": torch.bool, "layout": torch.strided, "device": x.device}
    yield aten.empty_strided.default, ([0, 3], [5, 1]), {"dtype": torch.float32, "device": x.device}
    yield aten.scalar_tensor.default, (float("-inf"),), {"dtype": torch.float32, "device": x.device}
    yield aten.select.int, (batch, 1, 2), {}
    yield aten.squeeze.dim, (image, 0), {}
    yield aten.unsqueeze.default, (x, 1), {}
    yield aten.transpose.int, (batch, 0, 1), {}
    yield aten.transpose_copy.int, (batch, 0, 1), {}
    yield aten.permute_copy.default, (batch, (2, 0, 1)), {}
    yield aten.t_copy.default, (x,), {}
    yield aten.as_strided_copy.default, (x, (2, 3), (1, 2), 1), {}
    yield aten.linear.default, (batch, batch[0], batch[0, :, 0]), {}
    yield aten.where.self, (x > 1, x, y), {}
    yield aten._safe_softmax.default, (x, -1), {}
    for softmax in (aten._softmax, aten._log_softmax):
        yield softmax.default, (x, -1, False), {}
    for backward in (aten._softmax_backward_data, aten._log_softmax_backward_data):
        yield backward.default, (x, y, -1, torch.float32), {}


def test_bindings_call_their_overloads():
    called = list(_calls_of_bound_ops())
    assert {op for op, _, _ in called} == set(bindings.BOUND)
    for op, args, kwargs in called:
        results = []
        for call in (op, bindings.BOUND[op]):
            torch.manual_seed(0)
            with torch.set_grad_enabled(call is op):  # as in a planned graph
                results.append(pytree.tree_leaves(call(*copy.deepcopy(args), **kwargs)))
        for ours, theirs in zip(*results, strict=True):
            assert ours.dtype == torch.uint8 or torch.equal(ours, theirs), op  # of bytes, some are arbitrary
            assert ours.shape == theirs.shape, op
            assert ours.stride() == theirs.stride(), op


def test_a_graph_is_bound_but_for_numbers_in_the_place_of_tensors():
    graph = fx.Graph()
    x = graph.placeholder("x")
    tensors = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    number = graph.call_function(torch.ops.aten.mul.Tensor, (tensors, 2.0))
    chosen = graph.call_function(torch.ops.aten.where.self, (number, 0.0, tensors))
    graph.output(chosen)
    bindings.bind(graph)
    assert [n.target for n in (tensors, number, chosen)] == [torch.mul, torch.mul, torch.ops.aten.where.self]


@pytest.mark.parametrize(
    "part", [(0, 1, 3), (1, -2), (2, 3, 9223372036854775807), (1, 3, 1), (0, None, 2), (2, 0, 4, 2)]
)
def test_a_bound_slice_is_the_same_part_of_its_tensor(part):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = given = torch.rand(4, 4, 4)
    graph.output(graph.call_function(torch.ops.aten.slice.Tensor, (x, *part)))
    bindings.bind(graph)
    theirs, ours = torch.ops.aten.slice.Tensor(given, *part), fx.GraphModule({}, graph)(given)
    assert torch.equal(ours, theirs)
    assert (ours.stride(), ours.storage_offset(), ours._base is given) == (
        theirs.stride(),
        theirs.storage_offset(),
        True,
    )


def test_an_alias_stays_in_a_bound_graph_only_as_its_result():
    graph = fx.Graph()
    x = graph.placeholder("x")
    inner = graph.call_function(torch.ops.aten.alias.default, (x,))
    doubled = graph.call_function(torch.ops.aten.add.Tensor, (inner, inner))
    graph.output((doubled, graph.call_function(torch.ops.aten.alias.default, (x,))))
    bindings.bind(graph)
    given = torch.ones(2)
    sums, own = fx.GraphModule({}, graph)(given)
    assert sums.tolist() == [2, 2]
    assert own is not given
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.add, torch.ops.aten.alias.default]


def test_methods_of_tensors_are_what_their_overloads_are():
    for op, method in bindings.METHODS.items():
        args = (0.5,) if method == "bernoulli_" else ([3, 2, 2],)
        made = []
        for call in (op, getattr(torch.Tensor, method)):
            torch.manual_seed(0)
            made.append(call(torch.arange(4.0).view(2, 2), *args))
        assert torch.equal(*made)
        assert made[0].stride() == made[1].stride()


def test_tables_of_modules_are_their_own():
    model = nn.Sequential(nn.Linear(2, 2))
    own, inner, own_parameters, parameters = modules.tables_of([model, model[0]])
    assert (own, inner, own_parameters) == ({"0": model[0]}, {}, {})
    assert parameters["weight"] is model[0].weight


def test_a_boxed_graph_empties_the_list_that_it_is_given():
    graph = fx.symbolic_trace(lambda a, b: (a + b,))
    call = compat_fx.boxed(graph)
    given = [torch.ones(2), torch.ones(2)]
    assert call._boxed_call
    assert call(given)[0].tolist() == [2, 2]
    assert not given


def test_nodes_appended_to_the_root_come_first():
    graph = fx.symbolic_trace(lambda a, b: a + b).graph
    first, second = graph.find_nodes(op="placeholder")
    compat_fx.root_of(graph).append(second)
    assert list(graph.nodes)[:2] == [second, first]


def test_inputs_and_outputs_are_described_by_position():
    tangent = compat_fx.TangentAOTInput(compat_fx.PlainAOTOutput(3))
    assert (compat_fx.PlainAOTInput(2).idx, tangent.output.idx) == (2, 3)


# torch.compile


def test_a_compiled_call_runs_hooks_and_is_forgotten():
    model, graphs = nn.Sequential(nn.Linear(2, 2)), []
    model.register_forward_hook(lambda module, args, result: result + 1)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    call = dynamo.compile_call(model, backend)
    x = torch.ones(1, 2)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert len(graphs) == 1
    assert not any(getattr(b, "compiler_fn", b) is backend for b in dynamo.cached_backends.values())
    dynamo.forget_compiled(call)
    call(x)
    assert len(graphs) == 2


def test_settings_of_a_compiled_call_are_on_while_it_compiles_and_not_while_it_runs():
    config, seen = dynamo.dynamo_config, []
    before = config.recompile_limit

    def backend(graph, inputs):
        seen.append(("compiled", config.recompile_limit))

        def run(*inputs):
            seen.append(("run", config.recompile_limit))
            return graph(*inputs)

        return run

    class Breaks(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x.sin()

    def settings():
        return config.patch(recompile_limit=before + 1)

    call = dynamo.compile_call(Breaks(2, 2), backend, settings)
    for size in (1, 1, 3):
        call(torch.ones(size, 2))
    compiled, run = [("compiled", before + 1), ("run", before)], [("run", before)]
    assert seen == 2 * compiled + 2 * run + 2 * compiled


def test_a_backend_by_aot_autograd_traces_under_a_context():
    states = [dynamo.is_tracing()]

    def compiler(graph, inputs):
        states.append(dynamo.is_tracing())
        return compat_fx.boxed(graph)

    backend = dynamo.aot_autograd(fw_compiler=compiler)
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert torch.equal(x.grad, torch.ones(2).cos())
    assert states == [False, True, True]


def test_settings_of_dynamo_are_patched_for_a_while():
    before = dynamo.dynamo_config.recompile_limit
    with dynamo.dynamo_config.patch(recompile_limit=before + 1):
        assert dynamo.dynamo_config.recompile_limit == before + 1
    assert dynamo.dynamo_config.recompile_limit == before


@pytest.mark.parametrize("setting", ["off", "same_as_forward"])
def test_the_backward_pass_is_traced_without_autocast_where_that_is_set(setting):
    x, weight = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)

    def distances(x):
        return torch.cdist(x @ weight, weight)

    def gradient(function):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x)
        return torch.autograd.grad(y.square().mean(), x)[0]

    torch.compiler.reset()
    with dynamo.functorch_config.patch(backward_pass_autocast=setting):
        compiled = gradient(torch.compile(distances, backend="aot_eager"))
    assert torch.equal(compiled, gradient(distances)) == (setting == "off")


def test_a_compiled_module_has_the_module_inside():
    model = nn.Linear(2, 2)
    assert dynamo.inner_module(torch.compile(model)) is model
    assert dynamo.inner_module(model) is None


def test_how_a_model_was_compiled_is_read_off_it():
    model = nn.Linear(2, 2)
    assert dynamo.compiled_by(model) is None
    wrapped = dynamo.compiled_by(torch.compile(model, dynamic=True, options={"epilogue_fusion": False}))
    assert wrapped == dynamo.Compiled("inductor", {"epilogue_fusion": False}, True)
    model.compile(backend="aot_eager")
    assert dynamo.compiled_by(model) == dynamo.Compiled("aot_eager", {}, None)
    assert dynamo.compiled_call(model) is model._compiled_call_impl
    model._compiled_call_impl = print
    assert dynamo.compiled_by(model) is None


# layers


def test_helpers_of_layers_are_replaced_and_restored():
    asked = []
    try:
        layers.replace_helpers(lambda mask, *more: bool(asked.append(mask)), lambda *given: "replaced")
        layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.TransformerEncoder(layer, 1)(torch.ones(1, 2, 4), mask=torch.zeros(2, 2))
        assert torch._decomp.decompositions._rnn_helper() == "replaced"
    finally:
        layers.restore_helpers()
    assert asked
    assert torch._decomp.decompositions._rnn_helper is layers.RNN_HELPER


# modules


def test_a_call_is_replaced_and_put_back():
    model = nn.Linear(2, 2)
    assert modules.replaced_call(model) is None
    modules.replace_call(model, lambda x: "replaced")
    assert model(torch.ones(2)) == modules.replaced_call(model)(0) == "replaced"
    assert isinstance(modules.call_of(model)(torch.ones(2)), torch.Tensor)
    assert modules.replaced_call(copy.deepcopy(model)) is None
    modules.replace_call(model, None)
    assert isinstance(model(torch.ones(2)), torch.Tensor)
    model.compile()
    assert modules.replaced_call(model) is not None


def test_modules_and_parameters_are_listed_in_torchs_order():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.BatchNorm1d(2)), shared, nn.ModuleDict({"a": nn.Linear(2, 2)}))
    model[2]["a"].weight = shared.weight
    model.register_module("none", None)
    model[0].register_parameter("none", None)
    listed = modules.modules_in(model)
    assert [id(m) for m in listed] == [id(m) for m in model.modules()]
    assert [id(p) for p in modules.parameters_in(listed)] == [id(p) for p in model.parameters()]
    modules.replace_call(shared, print)
    assert modules.replaced_calls(listed) == [modules.replaced_call(m) for m in model.modules()]
    assert modules.replaced_calls(listed).count(print) == 1


def test_hooks_are_seen():
    model = nn.Linear(2, 2)
    assert not modules.has_forward_hooks(model)
    model.register_forward_pre_hook(lambda *_: None)
    assert modules.has_forward_hooks(model)
    before = list(map(len, modules.GLOBAL_HOOKS))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert sum(map(len, modules.GLOBAL_HOOKS)) == sum(before) + 1
    handle.remove()
    assert list(map(len, modules.GLOBAL_HOOKS)) == before


def test_tables_of_tensors_are_the_modules_own():
    model = nn.BatchNorm1d(2)
    model.register_buffer("cache", torch.ones(1), persistent=False)
    assert isinstance(model, modules.NormBase)
    assert modules.unsaved_buffers(model) == {"cache"}
    assert modules.parameters_of(model).keys() == {"weight", "bias"}
    modules.buffers_of(model)["cache"] = torch.zeros(1)
    assert model.cache.item() == 0
    assert not modules.managed_by_fsdp(model)


# autograd


def test_saved_tensors_are_there_until_the_backward_pass():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x)
    z = y.sin()
    assert autograd.is_custom(y.grad_fn)
    assert autograd.holds_saved(y.grad_fn)
    assert not autograd.is_custom(z.grad_fn)
    assert any(t is y for t in autograd.saved_by(z.grad_fn))
    assert any(t is x for t in autograd.saved_by(y.grad_fn)[0])
    ended = []
    z.register_hook(lambda _: autograd.when_backward_ends(lambda: ended.append(x.grad is not None)))
    z.sum().backward()
    assert ended == [True]
    assert not autograd.holds_saved(y.grad_fn)
    assert autograd.is_custom(y.grad_fn)  # asked for what it saved, it would raise
    with pytest.raises(RuntimeError):
        autograd.saved_by(z.grad_fn)


def test_what_autograd_saves_of_a_tensor_need_not_keep_it_alive():
    x = torch.ones(3, requires_grad=True)

    def saved(then):
        y = x * 2
        with autograd.saving_aliases():
            z = y.square()
        then(y)
        return weakref.ref(y), z

    alive, z = saved(lambda y: None)
    assert alive() is None
    z.sum().backward()
    assert x.grad.tolist() == [8, 8, 8]
    _, z = saved(lambda y: y.mul_(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        saved(lambda y: None)
    assert len(packed) == 1  # the user's hooks see what they always do
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        saved(lambda y: None)


def test_leaves_are_found_behind_nodes_that_hand_gradients_on():
    class HandsOn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.marked = True
            return x.detach()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    node = (HandsOn.apply(x) * y).grad_fn
    assert [t is y for t in autograd.leaves_of(node)] == [True]
    assert sorted(t is y for t in autograd.leaves_of(node, "marked")) == [False, True]


def test_backward_graphs_run_without_autocast_on_any_device():
    with torch.autocast("cpu", torch.bfloat16):
        with autograd.autocast_off():
            assert not torch.is_autocast_enabled("cpu")
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_the_node_of_a_compiled_graph_passes_undefined_gradients_on_and_runs_again():
    came, kept = [], []

    class TwiceError(Exception):
        pass

    def twice():
        raise TwiceError

    def compiler(graph, _):
        run = compat_fx.boxed(graph)

        def call(arguments):
            node = autograd.running_node()
            if node is not None:
                came.append([t is None for t in arguments[-2:]])
                kept.append((autograd.graph_is_kept(), [t is x for t in autograd.leaves_of(node)]))
                if None in arguments:
                    arguments[-1] = torch.zeros(2)
            return run(arguments)

        return compat_fx.takes_a_list(call)

    backend = dynamo.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    x = torch.ones(2, requires_grad=True)
    one, two = results = torch.compile(lambda x: (x.sin().sin(), x.cos().cos()), backend=backend)(x)
    autograd.like_eager([*results, None, torch.ones(1)], twice)
    node = autograd.compiled_node(one)
    assert node is autograd.compiled_node(two) is one.grad_fn
    assert autograd.compiled_node(one.view(2)) is autograd.compiled_node(x) is None
    (one.sum() + two.sum()).backward(retain_graph=True)
    one.sum().backward(retain_graph=True)
    saved = autograd.saved_in_order(node)
    assert saved
    assert all(isinstance(t, torch.Tensor) for t in saved)
    assert came == [[False, False], [False, True]]
    assert kept == [(True, [True])] * 2
    (slope,) = torch.autograd.grad(one.sum() + two.sum(), x, create_graph=True)
    with pytest.raises(TwiceError):
        slope.sum().backward()
    one.sum().backward()
    assert kept[-1] == (False, [True])
    with pytest.raises(RuntimeError, match="second time"):
        autograd.saved_in_order(node)


def test_a_backward_pass_has_a_number_and_comes_to_leaves_that_are_not_asked_for_only_by_backward():
    x, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    leaf = torch.autograd.graph.get_gradient_edge(other).node
    y = x * other
    seen = []
    y.register_hook(lambda _: seen.append((autograd.running_pass(), autograd.runs_in_this_pass(leaf))))
    y.backward(retain_graph=True)
    torch.autograd.grad(y, x)
    (first, reached), (second, asked) = seen
    assert first != second
    assert (reached, asked) == (True, False)
    assert len(autograd.hooks_of(y)) == 1
    assert autograd.hooks_of(x) == {}


def test_a_compiled_graph_saves_a_parameter_as_itself_and_tells_who_runs_its_backward_pass():
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            ctx.save_for_backward(p)
            return p * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append((ctx.saved_tensors[0], autograd.is_backward_call(autograd.running_node())))
            return gradient

    p = torch.nn.Parameter(torch.randn(3))
    Watched.apply(p).sum().backward()
    torch.autograd.grad(Watched.apply(p).sum(), p)
    (one, backward), (_, asked) = seen
    assert one is p
    assert (backward, asked) == (True, False)


def test_a_backward_pass_adds_to_the_gradient_of_a_leaf_only_where_it_is_one_of_its_own():
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []

    def loss():
        y = leaf * other
        y.register_hook(lambda _: seen.append((autograd.adds_to_gradient(leaf), autograd.adds_to_gradient(other))))
        return y.sum()

    loss().backward()
    loss().backward(inputs=[leaf])
    torch.autograd.grad(loss(), leaf)
    assert seen == [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize("defined", [True, False])
def test_hooks_of_a_leaf_do_not_run_where_no_gradient_arrives(defined):
    ran = []

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 0

        @staticmethod
        def backward(ctx, gradient):
            autograd.skip_undefined(x)
            autograd.skip_undefined(x)
            return gradient if defined else None

    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: ran.append("hook") or 2 * g)
    x.register_post_accumulate_grad_hook(lambda _: ran.append("after"))
    Half.apply(x).backward()
    assert ran == (["hook", "after"] if defined else [])
    assert (x.grad is not None) == defined
    x.sum().backward()
    assert ran[-2:] == ["hook", "after"]
    assert (len(x._backward_hooks), len(autograd.post_accumulate_hooks(x))) == (1, 1)


def test_transforms_of_torch_are_seen():
    seen = []

    def look(t):
        seen.append(autograd.is_transformed([t]))
        return t.sum()

    x = torch.ones(2)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
        look(torch.autograd.forward_ad.make_dual(x, x))
    assert [bool(what) for what in seen] == [False, True, True, False, True]


def test_hooks_after_accumulation_are_in_a_table():
    p = nn.Parameter(torch.ones(1))
    assert not autograd.post_accumulate_hooks(p)
    handle = p.register_post_accumulate_grad_hook(lambda _: None)
    assert len(autograd.post_accumulate_hooks(p)) == 1
    handle.remove()
    assert not autograd.post_accumulate_hooks(p)


def test_a_trace_is_seen():
    seen = [autograd.is_jit_tracing()]
    torch.jit.trace(lambda x: (seen.append(autograd.is_jit_tracing()), x + 1)[1], torch.ones(1), check_trace=False)
    assert seen == [False, True]


# the profiler


def test_a_profile_lists_allocations():
    assert not profiler.is_profiling()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        assert profiler.is_profiling()
        kept = torch.empty(1000)
        torch.empty(500)
    assert [nbytes for _, at, nbytes in profiler.allocations_of(run) if at == kept.data_ptr()] == [4000]
    times, places, sizes = zip(*profiler.allocations_of(run), strict=True)
    assert sizes[-2:] == (2000, -2000)
    assert places[-2] == places[-1]
    assert times[0] > 0
    assert all(e.start_ns() > 0 and e.duration_ns() >= 0 for e in profiler.events_of(run))


# other libraries


def test_schedules_of_pipelines_have_the_parts_that_are_read():
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.distributed.pipelining.stage import _RecvInfo

    class Stage:
        is_first = is_last = True
        num_stages = group_size = group_rank = stage_index = stage_index_to_group_rank = 1
        has_backward = False
        device = torch.device("cpu")

    loss = nn.MSELoss()
    schedule = schedules.ScheduleGPipe(Stage(), 3, loss)
    (stage,) = pipelining.stages_of(schedule)
    assert isinstance(stage, Stage)
    assert pipelining.loss_of(schedule) is loss
    assert pipelining.microbatches_of(schedule) == 3
    assert pipelining.runs_backward(schedule)
    assert pipelining.step_of(schedule).__func__ is schedules.ScheduleGPipe._step_microbatches
    pipelining.replace_step(schedule, print)
    assert pipelining.step_of(schedule) is print
    stage = PipelineStage.__new__(PipelineStage)
    assert pipelining.buffers_stay(stage) == (not hasattr(_RecvInfo, "allocate_buffer"))
    several = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    several._stages = [stage, stage]
    assert pipelining.stages_of(several) == [stage, stage]


def test_lightning_says_what_is_compiled_and_checkpointed():
    import lightning as L
    from lightning.pytorch.strategies import FSDPStrategy
    from lightning.pytorch.utilities.compile import from_compiled

    module = L.LightningModule()
    assert not lightning.is_compiled(module)
    assert lightning.is_compiled(from_compiled(torch.compile(module)))
    assert not lightning.checkpoints_activations(FSDPStrategy())
    assert lightning.checkpoints_activations(FSDPStrategy(activation_checkpointing_policy={nn.Linear}))


def test_references():
    t = torch.zeros(2)
    alone = autograd.references(t)
    view = t[:1]
    assert autograd.references(t)[1] == alone[1] + 1
    del view
    assert autograd.references(t) == alone


def test_only_what_cpp_holds_is_a_use_of_a_tensor():
    t = torch.zeros(2, requires_grad=True) * 2
    named = [t, t]
    assert autograd.uses_of(named[0]) == 1
    view = t[:1]
    assert (autograd.uses_of(t), autograd.uses_of(view)) == (2, 1)
    del view
    saves = t.square()
    assert saves.requires_grad
    assert autograd.uses_of(t) == 2
    saves.sum().backward()
    assert autograd.uses_of(t) == 1


def test_decompositions_of_ops_with_kernels_are_away_for_a_while():
    op = torch.ops.aten.upsample_bicubic2d.vec
    before = dict(op.py_kernels)
    put_back = layers.replace_decompositions()
    try:
        assert before
        assert {key.name for key in before.keys() - op.py_kernels.keys()} == {"Autograd", "CompositeImplicitAutograd"}
    finally:
        put_back()
    assert op.py_kernels == before


def test_attention_is_traced_by_another_function_for_a_while():
    op = torch.ops.aten.scaled_dot_product_attention.default
    before, asked = dict(op.py_kernels), []

    def instead(native, *args, **kwargs):
        asked.append(len(args))
        return native(*args, **kwargs)

    def traced():
        x = torch.randn(1, 2, 4, 8, requires_grad=True)

        def forward(x):
            return nn.functional.scaled_dot_product_attention(x, x, x).sum()

        aot_function(forward, fw_compiler=lambda graph, _: graph)(x).backward()
        return x.grad, torch.autograd.grad(forward(x), x)[0]

    put_back = layers.replace_attention(instead)
    try:
        ours, theirs = traced()
    finally:
        put_back()
    assert asked
    assert torch.allclose(ours, theirs)
    assert op.py_kernels == before
    asked.clear()
    traced()
    assert not asked


def test_cuda_is_asked_for_its_libraries_where_there_is_one():
    if not torch.cuda.is_available():
        assert cuda.asked_blas_workspace(torch.device("cuda", 0)) is None
        cuda.clear_blas_workspaces(torch.device("cpu"))  # there are none
        with pytest.raises((RuntimeError, AssertionError)):
            cuda.pin(torch.zeros(8))  # nothing can lock it
    else:
        slab = torch.zeros(1000)
        cuda.pin(slab)
        assert slab.is_pinned()
    assert isinstance(cuda.allocator_settings(), str)


def test_fake_results_of_onednns_lstm_are_as_large_as_real_ones():
    lstm = nn.LSTM(4, 6, 2, bidirectional=True)
    x, hidden = torch.rand(5, 3, 4), [torch.rand(4, 3, 6) for _ in range(2)]
    params = [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0]
    op, backward = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
    found = []
    for mode in (nullcontext(), fake.FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            given = [torch.zeros(t.shape) for t in (x, *params, hidden[0][0], hidden[1][0])]
            y, hy, cy, saved = op(*given, False, [], 2, 6, 2, True, True, False, True)
            last = *given, y, hy, cy, y, None, None, False, 2, 6, 2, True, True, True, [], False, saved
            found.append(
                [(t.shape, t.stride(), t.dtype, tensors.storage_key(t)) for t in (y, hy, cy, saved, *backward(*last))]
            )
    real, faked = found
    assert [each[:3] for each in faked] == [each[:3] for each in real]
    assert len({key for *_, key in faked}) == len(faked)  # no two share a storage


def test_kinds_of_recurrent_layers_are_told_from_what_takes_them_apart():
    told = []

    def helper(*given):
        told.append(layers.kind_of(given[-1]))
        return layers.RNN_HELPER(*given)

    layers.replace_helpers(lambda mask, *more: False, helper)
    try:
        kinds = [nn.GRU(2, 2), nn.RNN(2, 2), nn.RNN(2, 2, nonlinearity="relu"), nn.LSTM(2, 2)]
        with enable_python_dispatcher():
            for layer in kinds:
                layer(torch.zeros(3, 1, 2))
    finally:
        layers.restore_helpers()
    assert told == ["gru", "tanh", "relu", None]


def test_the_lstm_of_onednn_is_told_from_the_other():
    x, hidden = torch.zeros(2, 1, 4), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    weights = [[torch.zeros(16, 4), torch.zeros(16, 4)]]
    assert decompositions.select_one_layer_lstm_function(x, hidden, weights) is layers.ONEDNN_LSTM
    assert layers.ONE_LAYER_LSTM is decompositions.one_layer_lstm


class Seeing(LastingMode):
    """Notes the ops that run under it."""

    def __init__(self):
        super().__init__()
        self.ops, self.results = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_lasting_mode_stays_on_and_is_off_for_a_while():
    mode = Seeing()
    switch_on(mode)
    try:
        torch.ones(2).neg()
        with lasting_modes_off() as off:
            assert off == [mode]
            assert modes_here() == []
            torch.ones(2).exp()
        assert modes_here() == [mode]
    finally:
        switch_off(mode)
    assert modes_here() == []
    assert torch.ops.aten.neg.default in mode.ops
    assert torch.ops.aten.exp.default not in mode.ops


def test_a_lasting_mode_that_is_over_leaves_where_it_came():
    mode = Seeing()
    ours = {"__name__": "planner.called", "switch_on": switch_on, "lasting_modes_off": lasting_modes_off, "mode": mode}
    exec("def call(first):\n if first:\n  switch_on(mode)\n else:\n  with lasting_modes_off(): mode.over = True", ours)
    for first in (True, False):
        ours["call"](first)
    assert modes_here() == []


@pytest.mark.parametrize("enters", [torch.inference_mode, partial(torch.inference_mode, False)])
def test_a_lasting_mode_that_is_over_stays_in_a_context_that_puts_keys_back(enters):
    mode = Seeing()
    switch_on(mode)
    with enters(), lasting_modes_off():
        mode.over = True
    assert finds_ops()
    assert modes_here() == [mode]
    assert torch.ones(2).add(1).tolist() == [2, 2]
    switch_off(mode)
    assert not finds_ops()


def test_allocations_are_recorded_in_a_thread_beside_a_profiler():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as outer:
        events = recorded_in_thread(lambda: torch.ones(1000) + 1)
    sizes = [nbytes for kind, _, nbytes in events if kind == "memory_alloc"]
    assert sizes.count(4000) == 2
    assert sum(sizes) == 0
    assert allocations_of(outer) == []


def test_torch_compile_compiles_under_a_lasting_mode():
    frames = []
    mode = Seeing()
    switch_on(mode)
    try:
        compiled = torch.compile(lambda x: x.sin(), backend=lambda graph, _: frames.append(graph) or graph.forward)
        compiled(torch.ones(2))
    finally:
        switch_off(mode)
    assert len(frames) == 1


def test_a_schema_tells_what_a_call_writes_into():
    a, b = torch.zeros(2), torch.ones(2)
    assert written(torch.ops.aten.add_.Tensor, (a, b), {}) == [a]
    assert written(torch.ops.aten.add.Tensor, (a, b), {}) == []
    assert written(torch.ops.aten.add.out, (a, b), {"out": a})[0] is a
    assert written(torch.ops.aten._foreach_add_.List, ([a], [b]), {}) == [[a]]


def test_a_backward_pass_is_told_from_other_code():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda _: seen.append(in_backward()))
    y.backward()
    assert seen == [True]
    assert not in_backward()


def test_what_a_tensor_is_computed_from_is_found_behind_other_nodes():
    x = torch.ones(2, requires_grad=True)
    a, b = x.sin(), x.cos()
    known = {(autograd.sequence_number(t.grad_fn), t.output_nr): name for name, t in (("a", a), ("b", b))}
    assert len(known) == 2
    assert set(autograd.origins((a * 2 + b.exp()).grad_fn, known)) == {"a", "b"}
    known[autograd.sequence_number((c := a.tanh()).grad_fn), 0] = "c"
    assert autograd.origins((c + 1).grad_fn, known) == ("c",)  # not "a", which is behind it
    assert autograd.origins(x.sin().grad_fn, known) == ()
    parts = x.exp().chunk(2)  # of one node
    known |= {(autograd.sequence_number(t.grad_fn), t.output_nr): t.output_nr for t in parts}
    assert autograd.origins((parts[0] * 2).grad_fn, known) == (0,)
    assert set(autograd.origins((parts[0] + parts[1]).grad_fn, known)) == {0, 1}


def test_a_module_with_another_call_shares_its_parts():
    model = nn.Sequential(nn.Linear(2, 2))
    twice = modules.with_call(model, lambda self, x: 2 * self[0](x))
    x = torch.ones(2)
    assert torch.equal(twice(x), 2 * model(x))
    assert twice.get_parameter("0.weight") is model[0].weight
    assert type(twice).__name__ == "Sequential"
    assert torch.equal(modules.call_function(model[0])(model[0], x), model(x))


def test_code_of_a_frame_of_its_own_goes_with_it():
    frames = []
    linear = nn.Linear(2, 2)

    def compiled():
        frame = dynamo.own_frame(linear, type(linear).forward)
        return torch._dynamo.optimize(lambda graph, _: frames.append(graph) or graph.forward)(frame)

    for _ in range(2):
        run = compiled()
        assert torch.equal(run(torch.ones(2)), linear(torch.ones(2)))
        assert torch.equal(run(torch.ones(2)), linear(torch.ones(2)))
    assert len(frames) == 2


def test_fake_tensors_forget_what_they_know():
    mode = fake.FakeTensorMode()
    known = fake.fake_of_constant(mode, torch.ones(8))
    assert known.constant is not None
    fake.forget_constants(mode)
    assert known.constant is None
    with mode:
        assert (known + 1).shape == (8,)


@pytest.mark.parametrize("fakes", [False, True])
def test_the_parts_of_a_sparse_tensor_have_its_storages(fakes):
    with fake.FakeTensorMode() if fakes else torch.device("cpu"):
        weight = torch.ones(8, 4, requires_grad=True)
        looked_up = nn.functional.embedding(torch.zeros(3, dtype=torch.long), weight, sparse=True)
        (gradient,) = torch.autograd.grad(looked_up.sum(), weight)
    indices, values = tensors.dense_parts(gradient)
    assert (tuple(indices.shape), tuple(values.shape)) == ((1, 3), (3, 4))
    assert tensors.storage_key(values) == tensors.storage_key(tensors.dense_parts(gradient)[1])
    assert tensors.dense_parts(weight) == [weight]
