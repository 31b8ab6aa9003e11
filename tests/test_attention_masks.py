"""Masks that say what a kernel of attention can be told: it is, and computes what eager mode does."""

import math

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from planner import plan
from planner.capture.passes import mask_values

from .loop_harness import Loop, differences, judged
from .measure import results
from .real_models import Case, gpt2, llama
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")
LENGTH = 32


def given(case):
    """What attention is given in a step (a mask, the flag, how many heads of queries and of keys), and its results."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        found = results(case)
    seen = []
    for event in profiler.events():
        if event.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            query, key, _, _, _, mask, _ = event.input_shapes
            seen.append((bool(mask), event.concrete_inputs[4], query[1], key[1]))
    return seen, found


def compared(case):
    """The same without a plan and by a plan's graphs; results are equal to the last bit."""
    plain, expected = given(case)
    baseline = plan(case.model, case.batch, budget_gb=4, loss_fn=case.loss_fn).baseline_peak_bytes
    p = plan(case.model, case.batch, budget_gb=0.99 * baseline / 2**30, loss_fn=case.loss_fn)
    p.apply()
    results(case)  # which compiles: the profiler sees ops on fake tensors, too
    planned, found = given(case)
    p.remove()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    return plain, planned


def mistral():
    config = transformers.MistralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=100, use_cache=False, sliding_window=64,
    )  # fmt: skip
    ids = torch.arange(64).reshape(2, LENGTH)
    return Case(transformers.MistralForCausalLM(config).train(), {"input_ids": ids, "labels": ids})


def checkpointed():
    case = llama()
    case.model.gradient_checkpointing_enable({"use_reentrant": False})
    return case


@pytest.mark.compat
@pytest.mark.parametrize("make", more(gpt2, llama, mistral, checkpointed))
def test_decoders_of_transformers_give_attention_what_they_give_it_in_eager_mode(make):
    """No mask, and keys and values of fewer heads, though torch.compile cannot ask what the mask says."""
    plain, planned = compared(make())
    assert plain[0][:2] == (False, True)
    assert set(planned) == set(plain)


class Attention(nn.Module):
    """Two layers of attention between linear ones, with a mask that is made at each call."""

    def __init__(self, mask, keys=LENGTH, heads=2):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mask, self.keys, self.heads = mask, keys, heads

    def forward(self, x):
        mask = self.mask(x)
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
            k, v = k[:, :, : self.keys], v[:, :, : self.keys]
            x = torch.tanh(self.outer(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)))
        return x


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def of_indices(x):
    at = torch.arange(x.shape[1], device=x.device)
    return (at[None, :] <= at[:, None])[None, None].expand(x.shape[0], 1, -1, -1)


def infinite(x):
    return torch.full((LENGTH, LENGTH), -math.inf).triu(1)


def window(x):
    return ones(LENGTH, LENGTH).tril() & ones(LENGTH, LENGTH).triu(-8)


def written(x):
    mask = ones(LENGTH, LENGTH).tril()
    mask[:, 0] = False
    mask[0] = True
    return mask


def written_through_a_view(x):
    mask = ones(LENGTH, LENGTH).tril()
    mask[3].view(4, 8).fill_(True)
    return mask


def written_later(x):
    mask = torch.zeros(LENGTH, LENGTH)
    torch.nn.functional.threshold(mask[5], 1.0, -1.5, True)
    return mask


def written_by_a_method(x):
    mask = ones(LENGTH, LENGTH).tril()
    mask.__ior__(ones(1, LENGTH))
    return mask


def written_by_a_checkpoint(x):
    mask = ones(LENGTH, LENGTH)
    checkpoint(lambda t: t.tril_(2).sum(), mask, use_reentrant=False)
    return mask


class Tril(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        mask.tril_(2)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def written_by_a_function(x):
    mask = ones(LENGTH, LENGTH)
    Tril.apply(x, mask)
    return mask


def written_by_a_flag(x):
    mask = torch.zeros(LENGTH, LENGTH)
    F.hardtanh(mask[3:], -3.0, -2.0, inplace=2)
    return mask


def written_by_a_norm(x):
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
    F.embedding(torch.arange(4), mask, max_norm=0.1)
    return mask


def cast(x):
    with torch.autocast("cpu", torch.bfloat16):
        at = torch.arange(480.0, 480.0 + LENGTH)[:, None] @ torch.ones(1, LENGTH)
    return at >= at.T


def finite(x):
    return torch.full((LENGTH, LENGTH), -1.0).triu(1)


def of_the_batch(x):
    return ones(LENGTH, LENGTH).tril() & (x[:, None, :1, :1] < 100)


@torch.compiler.allow_in_graph
def of_someone(length):
    return ones(length, length).tril()


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (of_indices, (False, True)),
        *more((infinite, (False, True))),
        (lambda x: ones(1, 1, LENGTH, LENGTH), (False, False)),
        *more((lambda x: ones(LENGTH, LENGTH).tril(1), (True, False))),
        *more((lambda x: ones(1, LENGTH).tril(), (True, False))),  # the same for each query
        (window, (True, False)),
        (written, (True, False)),
        *more(
            (written_through_a_view, (True, False)),
            (written_later, (True, False)),
            (written_by_a_method, (True, False)),
            (written_by_a_checkpoint, (True, False)),
            (written_by_a_function, (True, False)),
            (written_by_a_flag, (True, False)),
            (written_by_a_norm, (True, False)),
        ),
        (cast, (True, False)),
        (finite, (True, False)),
        (of_the_batch, (True, False)),
        (lambda x: of_someone(LENGTH), (True, False)),  # which may have another value next time
        (lambda x: torch.rand(LENGTH, LENGTH) + 1 > 0, (True, False)),  # which draws numbers at each call
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_mask_is_dropped_where_it_is_known_to_say_no_more_than_a_flag(mask, told):
    torch.manual_seed(0)
    case = Case(Attention(mask), {"x": torch.randn(4, LENGTH, 16)}, lambda out: out.square().mean())
    _, planned = compared(case)
    assert {seen[:2] for seen in planned} == {told}


class Grouped(nn.Module):
    """Attention of 4 heads with one or two of keys and values, repeated in some way, and a causal mask."""

    def __init__(self, repeat):
        super().__init__()
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(16, 16)
        self.repeat = repeat

    def forward(self, x):
        mask = ones(LENGTH, LENGTH).tril()
        q = self.queries(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.keys(x).chunk(2, -1))
        k, v = self.repeat(k), self.repeat(v)
        return F.scaled_dot_product_attention(q[:, : k.shape[1]] if k.dim() == 4 else q[:, None], k, v, mask)


@pytest.mark.parametrize(
    ("repeat", "heads"),
    [
        (lambda t: t[:, :, None].expand(4, 2, 2, LENGTH, 4).reshape(4, 4, LENGTH, 4), 2),
        # one after the other
        *more((lambda t: t[:, :, None].expand(2, 4, 2, 1, LENGTH, 4).reshape(4, 4, LENGTH, 4), 4)),
        (lambda t: t[:, :1, None].expand(4, 1, 1, LENGTH, 4).reshape(4, 1, LENGTH, 4), 1),
        (
            lambda t: t[:, :, None].expand(4, 2, 2, LENGTH, 4).reshape(4, 1, 4, LENGTH, 4),
            None,
        ),  # no such kernel takes it
    ],
)
def test_heads_are_not_repeated_where_that_is_what_kernels_do(repeat, heads):
    torch.manual_seed(0)
    case = Case(Grouped(repeat), {"x": torch.randn(4, LENGTH, 16)}, lambda out: out.square().mean())
    _, expected = given(case)
    baseline = plan(case.model, case.batch, budget_gb=4, loss_fn=case.loss_fn).baseline_peak_bytes
    plan(case.model, case.batch, budget_gb=1.5 * baseline / 2**30, loss_fn=case.loss_fn).apply()
    for _ in range(3):  # in which the loop is learnt
        results(case)
    seen, found = given(case)
    assert {kernel[3] for kernel in seen} == ({heads} if heads else set())
    for name, theirs in expected.items():  # sums of gradients have another order
        torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=1e-7)


def test_heads_may_be_repeated_before_a_checkpoint_and_merged_in_it():
    """What a checkpoint's graph is given has names that are those of methods."""

    def merged(expanded):
        k = expanded.reshape(4, 4, LENGTH, 4)
        return F.scaled_dot_product_attention(k, k, k, ones(LENGTH, LENGTH).tril())

    class Model(nn.Linear):
        def forward(self, input):
            once = super().forward(input).unflatten(-1, (2, 4)).transpose(1, 2)
            return checkpoint(merged, once[:, :, None].expand(4, 2, 2, LENGTH, 4), use_reentrant=False)

    torch.manual_seed(0)
    case = Case(Model(16, 8), {"input": torch.randn(4, LENGTH, 16)}, lambda out: out.square().mean())
    _, expected = given(case)
    plan(case.model, case.batch, budget_gb=4, loss_fn=case.loss_fn, mode="aten").apply()
    torch.testing.assert_close(results(case), expected)


def test_what_vmap_makes_stays():
    """As masks of transformers that are made for each pair of positions."""

    def made(x):
        at = torch.arange(LENGTH)
        return torch.vmap(lambda i: torch.vmap(lambda j: j <= i)(at))(at)

    case = Case(Attention(made), {"x": torch.randn(4, LENGTH, 16)}, lambda out: out.square().mean())
    assert {seen[:2] for seen in compared(case)[1]} == {(True, False)}


def test_a_causal_mask_of_fewer_keys_than_queries_stays():
    torch.manual_seed(0)
    model = Attention(lambda x: ones(LENGTH, 8).tril(), keys=8)
    case = Case(model, {"x": torch.randn(4, LENGTH, 16)}, lambda out: out.square().mean())
    assert {seen[:2] for seen in compared(case)[1]} == {(True, False)}


@pytest.mark.thorough
@pytest.mark.compat
def test_a_batch_without_padding_is_seen_to_need_no_mask():
    case = checkpointed()
    case.batch["attention_mask"] = torch.ones_like(case.batch["input_ids"])
    plain, planned = compared(case)
    assert plain[0][:2] == (False, True)
    assert set(planned) == set(plain)


class Padded(Attention):
    """Its mask is made of another input, too."""

    def __init__(self, mask):
        super().__init__(self.of_two)
        self.of = mask

    def of_two(self, x):
        return self.of(self.padding)

    def forward(self, x, padding):
        self.padding = padding
        return super().forward(x)


def causal(padding):
    return (padding[:, None, None, :] != 0) & ones(LENGTH, LENGTH).tril()


def after_writing(padding):
    padding[:, 0] = 0
    return causal(padding)


def after_writing_to_a_view(padding):
    padding.view(-1)[3:].clamp_(0, 0)
    return causal(padding)


@pytest.mark.parametrize(
    ("mask", "padding", "told"),
    [
        (causal, torch.ones(4, LENGTH, dtype=torch.long), (False, True)),
        (lambda padding: padding[:, None, None] > 0, torch.ones(4, LENGTH, dtype=torch.long), (False, False)),
        *more((causal, ones(4, LENGTH), (False, True))),
        *more((causal, torch.ones(4, LENGTH).tril().long(), (True, False))),
        (causal, torch.ones(4, LENGTH, dtype=torch.long) * 2, (True, False)),  # it might be a number of a document
        (lambda padding: causal(padding) & (padding[:, :1, None, None] < 1), ones(4, LENGTH).long(), (True, False)),
        (after_writing, torch.ones(4, LENGTH, dtype=torch.long), (True, False)),
        *more((after_writing_to_a_view, torch.ones(4, LENGTH, dtype=torch.long), (True, False))),
    ],
)
def test_an_input_tells_a_mask_where_it_holds_ones_only(mask, padding, told):
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, LENGTH, 16), "padding": padding}
    _, planned = compared(Case(Padded(mask), batch, lambda out: out.square().mean()))
    assert {seen[:2] for seen in planned} == {told}


class Later(Padded):
    """A graph runs before that of the mask, as where embeddings are told to require gradients (PEFT does)."""

    def forward(self, x, padding):
        x = 2 * x
        torch._dynamo.graph_break()
        return super().forward(x, padding)


def test_an_input_tells_a_mask_after_a_graph_break():
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, LENGTH, 16), "padding": torch.ones(4, LENGTH, dtype=torch.long)}
    _, planned = compared(Case(Later(causal), batch, lambda out: out.square().mean()))
    assert {seen[:2] for seen in planned} == {(False, True)}


@pytest.mark.parametrize(
    ("kind", "padded"),
    [*more((Padded, (0, 1, 2, 3, 4, 5)), (Padded, (0,)), (Later, (0, 3))), (Padded, (1, 2, 4)), (Later, (1, 2, 4))],
)
def test_padded_batches_and_others_have_plans_of_their_own(kind, padded):
    def loop(put, ended):
        model = put(kind(causal))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(6):
            x, padding = torch.randn(8, LENGTH, 16), torch.ones(8, LENGTH, dtype=torch.long)
            padding[1, 20:] = step not in padded
            loss = model(x, padding).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ended(loss)

    unplanned, seen = judged(Loop(loop))
    assert differences(seen, unplanned) == []
    assert seen.peak <= seen.budget
    assert seen.plans <= (2 if len(padded) == 6 else 3)


@pytest.mark.parametrize("at_once", [64, *more(200, 2000)])
@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (of_indices, (False, True)),
        (lambda x: of_indices(x) | ones(4, 1, 1, 1), (False, False)),
        (lambda x: of_indices(x) & (torch.arange(4) < 4)[:, None, None, None], (False, True)),
        (lambda x: of_indices(x) & (torch.arange(4) < 3)[:, None, None, None], (True, False)),
        (lambda x: ones(1, LENGTH).tril().expand(4, 2, LENGTH, LENGTH), (True, False)),
        (lambda x: torch.where(of_indices(x), 0.0, -math.inf).expand(4, 2, -1, -1), (False, True)),
        (written, (True, False)),
    ],
)
def test_large_masks_are_computed_in_parts(mask, told, at_once, monkeypatch):
    monkeypatch.setattr(mask_values, "AT_ONCE", at_once)
    test_a_mask_is_dropped_where_it_is_known_to_say_no_more_than_a_flag(mask, told)
