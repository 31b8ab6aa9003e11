"""A device that finds races: it interprets emitted graphs, with a vector clock per stream.

Ops run on the stream "compute", and each copy on a stream of its own, so that the end of no copy tells of another's.
Each access to bytes on the device or on the host is checked against earlier ones of the same bytes: of two of which one
writes, the earlier must have happened before (vector clocks as in FastTrack, Flanagan and Freund 2009). Memory that is
freed goes to the next tensor of its size, and is filled with NaN, which is a write. Copies are done as early as they
may be, or as late, so that a race shows in values, too.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from planner.offload import transfers
from planner.offload.layout import ALIGNMENT

Wait = tuple[str, str]  # what is waited for, and the name of the node that waits
Clock = dict[str, int]


@dataclass
class _Block:
    """A storage on the device: real memory that is kept, so that it can be filled once it is freed."""

    address: int
    storage: torch.UntypedStorage


@dataclass
class _Copy:
    run: Callable[[], None]
    after: Clock
    done: bool = False

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.run()


@dataclass
class _History:
    write: tuple[str, int, str] | None = None
    reads: list[tuple[str, int, str]] = field(default_factory=list)


class Device:
    """Runs graphs, with some of their waits taken out.

    Args:
        copies: when each is done.
        without: waits to take out.
        outside: tensors that the caller goes on holding.

    Attributes:
        races: what was found, in words.
        waits: all that there are.
    """

    def __init__(
        self, copies: Literal["early", "late"], without: Collection[Wait] = (), outside: Sequence[torch.Tensor] = ()
    ) -> None:
        self.outside = {t.untyped_storage().data_ptr() for t in outside}
        self.early, self.without = copies == "early", set(without)
        self.clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))  # by stream
        self.histories: dict[object, _History] = defaultdict(_History)
        self.blocks: dict[int, _Block] = {}  # of storages that live, by where they really are
        self.unused: dict[int, list[int]] = defaultdict(list)  # addresses, by size
        self.addresses = 0
        self.host: dict[int, tuple[int, int, Any]] = {}  # of each value: its place, and what lies there
        self.copies: dict[tuple[str, int], _Copy] = {}
        self.races: list[str] = []
        self.waits: list[Wait] = []
        self.node = ""

    def run(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """The results of a graph, which consumes its inputs."""
        env: dict[fx.Node, Any] = {}
        last = {n: user for user in graph.graph.nodes for n in user.all_input_nodes}
        given = iter(inputs)
        del inputs
        for node in graph.graph.nodes:
            self.node = f"{type(graph).__name__}.{node.name}"
            if node.op == "output":
                results = list(tree_map(lambda a: env[a] if isinstance(a, fx.Node) else a, list(node.args[0])))
                env.clear()
                self._free_all_but(results)
                return results
            if node.op == "placeholder":
                env[node] = next(given)
                self._enter(env[node])
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = self._call(node, args, kwargs)
            del args, kwargs
            for n in node.all_input_nodes:
                if last[n] is node:
                    env.pop(n, None)
            if not node.users:
                env.pop(node, None)
            self._free_all_but(env)
        raise AssertionError("a graph has an output")

    def finish(self) -> None:
        """All copies end."""
        for copy in self.copies.values():
            copy.finish()

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if (moving := getattr(self, f"_{getattr(target, '__name__', '')}", None)) and target in _MOVES:
            return moving(*args)
        if target is operator.getitem:
            return target(*args)
        for t in _tensors((args, kwargs)):
            self._access("compute", "read", self._block(t).address)
        result = target(*args, **kwargs)
        for t in _tensors(result):
            if t.untyped_storage().data_ptr() not in self.blocks:
                self._enter(t)
                self._access("compute", "write", self._block(t).address)
        return result

    def _begin(self, store: int, nbytes: int) -> torch.Tensor:
        return torch.zeros(0)

    def _send(self, _: Any, x: torch.Tensor, value: int, offset: int, room: int) -> None:
        block = self._block(x)
        meta, storage = (x.shape, x.stride(), x.dtype), block.storage
        out = f"out by {self.node}"
        self._wait("compute", out)
        self._access(out, "read", block.address)
        self._on_host(out, "write", offset, room)

        def run() -> None:
            self.host[value] = (offset, room, (meta, storage.clone()))

        self._begin_copy("out", value, out, run)

    def _free(self, _: Any, x: torch.Tensor, value: int) -> None:
        if (copy := self.copies.get(("out", value))) is not None and self._waits("out"):
            copy.finish()
            self._join("compute", copy.after)
            del self.copies["out", value]  # a value that leaves again waits for nothing

    def _fetch(self, _: Any, value: int) -> torch.Tensor:
        if ("out", value) in self.copies:  # what a missing wait leaves undone happens some time
            self.copies.pop(("out", value)).finish()
        offset, room, ((shape, stride, dtype), saved) = self.host[value]
        whole = torch.empty(len(saved) // dtype.itemsize, dtype=dtype)
        _fill(whole.untyped_storage())
        x = whole.as_strided(shape, stride)
        self._enter(x)
        storage = whole.untyped_storage()
        self._access("compute", "write", self._block(x).address)
        back = f"back by {self.node}"
        self._wait("compute", back)
        self._on_host(back, "read", offset, room)
        self._access(back, "write", self._block(x).address)
        self._begin_copy("back", value, back, lambda: storage.copy_(saved) and None)
        return x

    def _ready(self, _: Any, x: torch.Tensor, value: int) -> torch.Tensor:
        if self._waits("back"):
            copy = self.copies["back", value]
            copy.finish()
            self._join("compute", copy.after)
        return x

    def _begin_copy(self, way: str, value: int, stream: str, run: Callable[[], None]) -> None:
        self.copies[way, value] = copy = _Copy(run, dict(self.clocks[stream]))
        if self.early:
            copy.finish()

    def _wait(self, earlier: str, stream: str) -> None:
        if self._waits(earlier):
            self._join(stream, self.clocks[earlier])

    def _waits(self, what: str) -> bool:
        self.waits.append((what, self.node))
        return (what, self.node) not in self.without

    def _join(self, stream: str, other: Clock) -> None:
        mine = self.clocks[stream]
        for s, time in other.items():
            mine[s] = max(mine[s], time)

    def _on_host(self, stream: str, kind: str, offset: int, room: int) -> None:
        for page in range(offset // ALIGNMENT, -(-(offset + room) // ALIGNMENT)):
            self._access(stream, kind, ("host", page))

    def _access(self, stream: str, kind: str, place: object) -> None:
        clock, history = self.clocks[stream], self.histories[place]
        earlier = [history.write] if kind == "read" else [history.write, *history.reads]
        for s, time, node in filter(None, earlier):
            if clock[s] < time:
                self.races.append(f"{self.node} ({stream}, {kind}) races with {node} ({s}) for {place}")
        clock[stream] += 1
        stamp = (stream, clock[stream], self.node)
        if kind == "read":
            history.reads.append(stamp)
        else:
            history.write, history.reads = stamp, []

    def _enter(self, value: Any) -> None:
        for t in _tensors(value):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.blocks and storage.nbytes():
                unused = self.unused[storage.nbytes()]
                if not unused:
                    self.addresses += 1
                    unused.append(self.addresses)
                self.blocks[storage.data_ptr()] = _Block(unused.pop(), storage)

    def _block(self, t: torch.Tensor) -> _Block:
        return self.blocks.get(t.untyped_storage().data_ptr()) or _Block(0, t.untyped_storage())

    def _free_all_but(self, live: Any) -> None:
        kept = {t.untyped_storage().data_ptr() for t in _tensors(live)} | self.outside
        for at in [at for at in self.blocks if at not in kept]:
            block = self.blocks.pop(at)
            self._access("compute", "write", block.address)
            _fill(block.storage)
            self.unused[block.storage.nbytes()].append(block.address)


_MOVES = {getattr(transfers, name) for name in ("begin", "send", "free", "fetch", "ready")}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def _fill(storage: torch.UntypedStorage) -> None:
    """NaN, in any floating-point type; in another type, numbers that are no indices."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
