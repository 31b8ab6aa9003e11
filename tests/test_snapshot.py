"""The predicted timeline in PyTorch's memory viewer: torch's readers take it, and its blocks add up to the plan's."""

import pickle
import pickletools
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz

from planner import Plan, PlanFileError, plan

# the opcodes that torch/utils/viz/MemoryViz.js of torch 2.13 reads
OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)) for _ in range(4)
        )

    def forward(self, x):
        x = x + self.blocks[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks[1:]:
            x = x + block(x)
        return x.square().mean()


CASES = {
    "one region": (False, {}),
    "several regions": (True, {"budget_gb": 0.0035}),
    "dynamic": (False, {"dynamic": True}),
    "eager": (False, {"mode": "eager"}),
    "a card": (False, {"device": "h100", "budget_gb": 2, "costs": "roofline"}),
    "accumulated": (False, {"accumulate": True, "optimizer": "adamw"}),
}


@pytest.fixture(scope="module", params=CASES)
def made(request):
    """A plan; with its model, which it does not hold."""
    breaks, options = CASES[request.param]
    model = Net(breaks).train()
    common = {"budget_gb": 0.0026, "solver": "chen", "loss_fn": torch.sum}
    yield plan(model, torch.randn(512, 64), **(common | options))
    del model


def levels_of(trace):
    """Bytes in use after each event that changes them; blocks must not overlap, and are freed as they were made."""
    live = {}
    requested = None
    found = []
    for event in trace:
        start, size = event.get("addr"), event.get("size")
        if event["action"] == "alloc":
            assert all(start + size <= other or other + n <= start for other, n in live.items())
            live[start] = size
        elif event["action"] == "free_requested":
            requested = start
        elif event["action"] == "free_completed":
            assert live.pop(start) == size
            assert requested == start
        else:
            assert event["action"] == "segment_alloc"
            continue
        found.append(sum(live.values()))
    return found, live


def test_the_blocks_add_up_to_the_timeline(made, tmp_path):
    made.memory_snapshot(tmp_path / "step.pickle")
    content = (tmp_path / "step.pickle").read_bytes()
    assert {op.name for op, _, _ in pickletools.genops(content)} <= OPCODES
    found = pickle.loads(content)
    (trace,) = found["device_traces"]
    levels, live = levels_of(trace)
    assert max(levels) == made.peak_bytes
    passed = iter(levels)
    assert all(held in passed for held, _ in groupby(m.held_bytes for m in made.timeline))
    # at the end, the blocks are what is left of the trace, each within its segment
    blocks = [b for segment in found["segments"] for b in segment["blocks"]]
    active = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    assert active == live
    for segment in found["segments"]:
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
        assert segment["allocated_size"] == sum(b["size"] for b in segment["blocks"] if b["state"] != "inactive")
    grown = {e["addr"]: e["size"] for e in trace if e["action"] == "segment_alloc"}
    assert grown == {segment["address"]: segment["total_size"] for segment in found["segments"]}
    assert "unknown" in {e.get("category") for e in trace}


def test_torchs_own_readers_take_it(made, tmp_path):
    made.memory_snapshot(tmp_path / "step.pickle")
    with open(tmp_path / "step.pickle", "rb") as f:
        found = pickle.load(f)
    assert "Active Memory Timeline" in viz.trace_plot(found)
    assert "Allocator State History" in viz.segment_plot(found)
    assert f"{len(found['device_traces'][0])} entries" in viz.trace(found)
    assert "total_reserved" in viz.segsum(found)
    lines = viz.memory(found, lambda text: text)
    assert f"parameters {made.account['parameters']}" in lines


def test_blocks_are_called_as_the_users_modules_and_lines(made, tmp_path):
    made.memory_snapshot(tmp_path / "step.pickle")
    with open(tmp_path / "step.pickle", "rb") as f:
        trace = pickle.load(f)["device_traces"][0]
    frames = [e["frames"][0] for e in trace if e["action"] == "alloc"]
    assert all(viz._frame_filter(f["name"], f["filename"]) for f in frames)
    own = [f for f in frames if f["filename"] == __file__]
    assert {"blocks.2.1: gelu"} <= {f["name"].split(" (")[0] for f in frames}
    with open(__file__, encoding="utf-8") as f:
        lines = f.read().splitlines()
    if made.problem is not None:  # eager mode knows modules alone
        assert any("x = x + block(x)" in lines[f["line"] - 1] for f in own)


def test_a_plan_from_a_file_has_one_too(made, tmp_path):
    made.save(tmp_path / "plan.json")
    made.memory_snapshot(tmp_path / "one.pickle")
    Plan.load(tmp_path / "plan.json").memory_snapshot(tmp_path / "two.pickle")
    assert (tmp_path / "one.pickle").read_bytes() == (tmp_path / "two.pickle").read_bytes()
    with pytest.raises(PlanFileError, match="cannot be written"):
        made.memory_snapshot(tmp_path)
