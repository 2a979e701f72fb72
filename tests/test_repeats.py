"""Layers of a kind are traced once: the captured program is, node by node, that of every layer traced."""

from types import SimpleNamespace

import models
import pytest
import torch
from torch import nn

from accel.compiler.smoke.tiny_models import randomise, small_model
from accel.ir.capture import capture as capturing
from accel.ir.capture import export as exporting
from accel.ir.capture.capture import capture
from accel.ir.capture.inspect import inspect
from accel.ir.capture.prepare import prepared
from accel.ir.capture.repeats import _counting, _kind, _layers, repeats
from accel.ir.program import Editor

REST = ["qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "phi3"]
ALIKE = ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in REST)]
KINDS = ["gemma3_text", "qwen3_moe", "gemma3n_text", "mamba", "jamba"]


@pytest.fixture
def both(monkeypatch):
    """Both captures of a module as text, and how many of its layers' calls were copies."""

    def get(model):
        copies, texts, export = [], [], exporting.export
        real = exporting.unroll

        def unroll(program, root, found):
            real(program, root, found)
            copies.append(len(found.again))

        monkeypatch.setattr(exporting, "unroll", unroll)
        for whole in (False, True):

            def step(ready, traits, whole=whole):
                return export(ready, traits, whole)

            monkeypatch.setattr(capturing, "export", step)
            texts.append(capture(model, max_context=64).text())
        return texts, sum(copies)

    return get


class Block(nn.Module):
    """A causal mean of a few projections; `count` tells how many."""

    def __init__(self, index, count=1, read=False):
        super().__init__()
        self.index, self.count, self.read = index, count, read
        self.down = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(self.count):
            x = x + self.down(x).tanh()
        return x * (self.index + 1) if self.read else x


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embed, self.layers = nn.Embedding(31, 8), nn.ModuleList(blocks)
        self.head = nn.Linear(8, 31)
        self.begin = self.end = None

    def forward(self, tokens):
        if self.begin is not None:
            self.begin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.end is None else self.end(x))


def stack(*blocks):
    return randomise(Stack(*blocks), "repeats")


@pytest.mark.long
@pytest.mark.parametrize("name", ALIKE)
def test_copies_of_a_layer_are_what_tracing_it_gives(name, both):
    (copied, whole), copies = both(models.make(name, 4))
    assert copied == whole and copies


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_the_program_is_the_same_whatever_the_layers(name, both):
    (copied, whole), _ = both(small_model(name))
    assert copied == whole


def test_each_copy_reads_its_own_weights(both):
    (copied, whole), copies = both(stack(*(Block(i) for i in range(4))))
    assert copied == whole and copies == 3
    assert all(f"layers.{i}.down.weight" in copied for i in range(4))


def test_unequal_layers_are_each_traced(both):
    """Attributes differ, so that one layer does not do what another does."""
    (copied, whole), copies = both(stack(Block(0, 1), Block(1, 2), Block(2, 1), Block(3, 3)))
    assert copied == whole and copies == 1


def test_layers_that_read_their_number_are_each_traced(both):
    (copied, whole), copies = both(stack(*(Block(i, read=True) for i in range(3))))
    assert copied == whole and not copies


def sharing(kind, **state):
    """Layers with a common object, set back at each call of the model."""
    model, common = stack(*(kind(i) for i in range(3))), SimpleNamespace()
    for layer in model.layers:
        layer.common = common
    model.begin = lambda: vars(common).update(state)
    return model


class Beside(Block):
    """It leaves a value to whoever reads it."""

    def forward(self, x):
        self.common.kept = self.down(x)
        return x + self.common.kept


def test_what_a_layer_gives_beside_its_results_is_seen(both):
    model = sharing(Beside, kept=0.0)
    common = model.layers[0].common
    model.end = lambda x: x + common.kept
    (copied, whole), copies = both(model)
    assert copied == whole and not copies


def test_state_that_counts_calls_is_traced_whole(both):
    """A number that each call changes, of which the borders of a layer tell nothing; the check does."""

    class Counted(Block):
        def forward(self, x):
            self.common.calls += 1
            return self.down(x) * self.common.calls

    (copied, whole), copies = both(sharing(Counted, calls=0))
    assert copied == whole and copies == 2  # before the check told


def test_layers_that_were_asked_for_their_states_are_of_one_kind():
    """Each has a hook of transformers since: the control. The states that it gives stay the same."""
    model = models.make("llama", 2)
    layers = _layers(model)

    def asked():
        return model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states

    def kinds():
        return len({_kind(layer, _counting(layers)) for layer in layers})

    before = asked()
    assert len(layers) == 2 and kinds() == 2
    with prepared(model, inspect(model, 64)):
        assert kinds() == 1
        within = asked()
    for states in (within, asked()):
        assert len(states) == len(before) == 3
        assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))


def test_the_modules_are_put_back():
    model = stack(Block(0), Block(1))
    with pytest.raises(ZeroDivisionError), repeats(model):
        assert all(type(layer) is not Block for layer in model.layers)
        raise ZeroDivisionError
    assert all(type(layer) is Block for layer in model.layers)
    assert torch.equal(
        model.layers[0](torch.ones(8)), Block.forward(model.layers[0], torch.ones(8))
    )


def test_shapes_are_those_of_the_operator_and_what_it_is_given(captured):
    """An operator's shape is worked out once for operands of a kind, and again for others."""
    program = captured("llama")
    editor, aten = Editor(program, program.step.graph), torch.ops.aten
    node = program.nodes(aten.linear.default)[0]
    with node.graph.inserting_before(node.next):
        first, again = (editor.call(aten.relu.default, node) for _ in range(2))
        ways = [editor.call(aten.transpose.int, node, *axes) for axes in ((0, 1), (1, 2), (0, 1))]
        sizes = [editor.call(aten.nonzero.default, node) for _ in range(2)]
    shapes = [w.meta["val"].shape for w in ways]
    b, t, n = node.meta["val"].shape
    assert first.meta["val"] is again.meta["val"]
    assert shapes == [torch.Size((t, b, n)), torch.Size((b, n, t)), torch.Size((t, b, n))]
    assert sizes[0].meta["val"].shape[0] is not sizes[1].meta["val"].shape[0]
