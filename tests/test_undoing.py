"""A call that fails leaves the model as it was, however often calls before it have changed nothing."""

import copy
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from planner.capture.trace.generators import generators_of
from planner.capture.trace.module_state import Attributes
from planner.capture.trace.state_guard import Undoing

HAS = SimpleNamespace(others=[SimpleNamespace(rng=random.Random(0))])


LOG = []


@dataclass
class Settings:
    rate: float
    seen: dict = field(default_factory=dict)
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(names=["a"]))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.calls, self.scale, self.kept = 0, 1.5, []
        self.settings, self.several = Settings(0.1), [Settings(0.2)]
        self.rng, self.noise = random.Random(0), SimpleNamespace(rng=np.random.default_rng(0))
        self.seen, self.phase, self.last = np.int64(0), 1j, True

    def forward(self, x):
        LOG.append(len(x))
        return self.layer(x)


def state_of(model):
    """What a call may change, as values that can be compared."""
    settings = model.settings
    return copy.deepcopy(
        (
            model.calls,
            model.scale,
            model.kept,
            (settings.rate, settings.seen, settings.inner.names, model.several[0].rate, model.seen, model.phase, LOG),
            model.rng.getstate(),
            str(model.noise.rng.bit_generator.state),
            [b.tolist() for b in model.buffers()],
            len(model.layer._forward_hooks),
            sorted(vars(model)),
            torch.get_rng_state().tolist(),
        )
    )


def rename(model):
    has, gets = ("last", "renamed") if hasattr(model, "last") else ("renamed", "last")
    setattr(model, gets, getattr(model, has))
    delattr(model, has)


CHANGES = {
    "number": lambda m: setattr(m, "calls", m.calls + 1),
    "fraction": lambda m: setattr(m, "scale", m.scale * 1.5),
    "list": lambda m: m.kept.append(1),
    "object": lambda m: setattr(m.settings, "rate", 0.2),
    "dict of an object": lambda m: m.settings.seen.update(a=1),
    "list of an object in it": lambda m: m.settings.inner.names.append("b"),
    "buffer": lambda m: m.layer[1].running_mean.add_(1),
    "another buffer": lambda m: setattr(m.layer[1], "running_mean", torch.ones(4)),
    "hook": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "new attribute": lambda m: setattr(m, "made", 3),
    "another name": rename,
    "another object": lambda m: setattr(m, "settings", replace(m.settings, rate=0.3)),
    "object in a list": lambda m: setattr(m.several[0], "rate", 0.4),
    "NumPy's number": lambda m: setattr(m, "seen", m.seen + 1),
    "complex number": lambda m: setattr(m, "phase", m.phase * 1j),
    "global list": lambda m: LOG.append(1),
    "Python's generator": lambda m: m.rng.random(),
    "NumPy's generator in an object": lambda m: m.noise.rng.random(),
    "torch's generator": lambda m: torch.rand(1),
}


def fail(undoing, model, *changes):
    before = state_of(model)
    with undoing.on(KeyError, model, ()):
        for change in changes:
            change(model)
        assert state_of(model) != before
        raise KeyError


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_call_has_changed_is_put_back_if_it_fails(change):
    model, undoing = Model(), Undoing()
    for _ in range(2):  # the second finds what the first has seen
        with undoing.on(KeyError, model, ()):
            pass
    before = state_of(model)
    with pytest.raises(KeyError):
        fail(undoing, model, change)
    assert state_of(model) == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changed_before_the_call_stays(change):
    model, undoing = Model(), Undoing()
    for at in range(6):
        with undoing.on(KeyError, model, ()):
            if at in (2, 5):
                change(model)  # in a call that does not fail
        change(model)
    before = state_of(model)
    with pytest.raises(KeyError):
        fail(undoing, model, *CHANGES.values())
    assert state_of(model) == before


BETWEEN = {  # what a loop changes, and what the next call then does
    "generator": (lambda m: setattr(m.noise, "rng", np.random.default_rng(1)), lambda m: m.noise.rng.random()),
    "generator in a list": (
        lambda m: setattr(m.several[0], "inner", random.Random(1)),
        lambda m: m.several[0].inner.random(),
    ),
    "global list": (lambda _: globals().update(LOG=[]), lambda _: LOG.append(1)),
}


@pytest.mark.parametrize("before_it", BETWEEN.values(), ids=BETWEEN)
def test_what_came_in_the_place_of_another_one_between_two_calls_is_put_back_too(before_it):
    (loop, call), (model, undoing) = before_it, (Model(), Undoing())
    with undoing.on(KeyError, model, ()):
        pass
    loop(model)
    before = state_of(model), random_of(model)
    with pytest.raises(KeyError):
        fail(undoing, model, call, lambda m: setattr(m, "calls", 5))
    assert (state_of(model), random_of(model)) == before


def random_of(model):
    inner = model.several[0].inner
    return inner.getstate() if isinstance(inner, random.Random) else None


def test_a_list_that_a_call_is_given_is_put_back():
    given = [[1], {"a": [2]}]

    def call():
        with Undoing().on(KeyError, Model(), (), (given,)):
            given.append(3)
            given[1]["a"].clear()
            raise KeyError

    with pytest.raises(KeyError):
        call()
    assert given == [[1], {"a": [2]}]


def test_no_tensor_that_a_model_keeps_is_held_from_call_to_call():
    model = Model()
    assert Attributes(model).again(model)
    for has in (model, model.settings):
        has.latest = torch.ones(1)
        assert not Attributes(model).again(model)
        del has.latest
    assert Attributes(model).again(model)


def test_what_several_classes_name_has_a_generator_by_each():
    class Plain(nn.Module):
        def forward(self, x):
            return x * len(CHANGES)

    class First(nn.Module):
        def forward(self, x):
            return x * HAS.others[0].rng.random()

    class Second(First):
        def forward(self, x):
            return x + HAS.others[0].rng.random() + len(CHANGES)

    both = [Plain(), First(), Second()]
    assert {id(g) for _, g in generators_of(both)} == {id(HAS.others[0].rng)}
    assert [[g for _, g in generators_of([each])] for each in both] == [[], *[[HAS.others[0].rng]] * 2]


def test_a_model_that_each_call_changes_is_looked_at_ever_less_often(monkeypatch):
    looks, again = [], Attributes.again
    monkeypatch.setattr(Attributes, "again", lambda own, model: looks.append(model) or again(own, model))
    model, undoing = Model(), Undoing()
    for _ in range(300):
        with undoing.on(KeyError, model, ()):
            model.calls += 1
    assert 3 < len(looks) < 12


def test_tensors_that_calls_write_into_are_put_back_and_others_are_not_copied():
    model, undoing, written, read = Model(), Undoing(), torch.zeros(2), torch.zeros(2)

    def call(fails, at):
        with undoing.on(KeyError, model, (), ((read, [written]), {})):
            written.add_(1)
            if fails:
                at.add_(1)
                raise KeyError

    for _ in range(3):
        call(False, read)
    with pytest.raises(KeyError):
        call(True, written)
    assert (written.tolist(), read.tolist()) == ([3, 3], [0, 0])
    with pytest.raises(KeyError):
        call(True, read)
    assert read.tolist() == [1, 1]  # no call before has written into it
