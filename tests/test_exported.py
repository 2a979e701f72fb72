"""Programs that the user exported, under any names and however they pack what they return."""

import pytest
import torch
from models import tiny
from torch import nn
from torch.export import Dim, export

import accel
from accel import CaptureError
from accel.ir.capture.capture import capture
from accel.ir.capture.examples import example

SIZES = {0: Dim("B", min=1), 1: Dim("T", min=1)}
VOCAB = 31


class Placed(nn.Module):
    """The tiny model at given positions: the last argument, the first, or by keyword."""

    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def at(self, tokens, positions):
        x = self.inner.tokens(tokens) + self.inner.positions(positions)
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(self.inner.norm(x)), x


class Last(Placed):
    def forward(self, ids, pos):
        return self.at(ids, pos)


class First(Placed):
    def forward(self, position_ids, input_ids):
        return self.at(input_ids, position_ids)


class Named(Placed):
    """The hidden values come first in the dict, and have three axes too."""

    def forward(self, *, input_ids, position_ids):
        logits, hidden = self.at(input_ids, position_ids)
        return {"hidden": hidden, "logits": logits}


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def forward(self, sequence):
        return [self.inner(sequence)]


class Masked(Placed):
    def forward(self, tokens, attention_mask):
        return self.at(tokens, attention_mask)


def exported(model, *args, fixed=(), **kwargs):
    sizes = {a: d for a, d in SIZES.items() if a not in fixed}
    shapes = [sizes] * len(args) or {name: sizes for name in kwargs}
    return export(model, args, kwargs, dynamic_shapes=shapes, strict=False)


TOKENS, POSITIONS = example(5, 7, VOCAB)
PROGRAMS = {
    "tuple": lambda: exported(Last(), TOKENS, POSITIONS),
    "positions first": lambda: exported(First(), POSITIONS, TOKENS),
    "dict, by keyword": lambda: exported(Named(), input_ids=TOKENS, position_ids=POSITIONS),
    "list, no positions": lambda: exported(Alone(), TOKENS),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_is_right(name):
    model = tiny()
    program = PROGRAMS[name]()
    with accel.optimize(program, target="eager", max_context=48, max_batch=3) as compiled:
        assert compiled.facts.vocab_size == VOCAB
        tokens = example(3, 19, VOCAB, seed=2)[0]
        with torch.no_grad():
            want = model(tokens)
        with compiled.session(3) as session:
            parts = [session.run(tokens[:, a:b].numpy()) for a, b in ((0, 6), (6, 7), (7, 19))]
        got = torch.cat([torch.from_numpy(p) for p in parts], 1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_fixed_size_is_refused_with_advice(axis):
    fixed = exported(Last(), TOKENS, POSITIONS, fixed=(axis,))
    with pytest.raises(
        CaptureError, match=f"fixes {'BT'[axis]} = {5 + 2 * axis}; export again with"
    ):
        capture(fixed)


def test_a_mask_is_not_taken_for_positions():
    with pytest.raises(
        CaptureError, match="takes .*'attention_mask'.*; .* under a name like position_ids"
    ):
        capture(exported(Masked(), TOKENS, POSITIONS))


def test_a_dict_without_logits_is_refused():
    class Hidden(Placed):
        def forward(self, tokens, positions):
            return {"hidden": self.at(tokens, positions)[1]}

    with pytest.raises(CaptureError, match="output has shape .*, not logits"):
        capture(exported(Hidden(), TOKENS, POSITIONS))


def test_the_users_program_is_left_as_it_was():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny()

        def forward(self, tokens):
            return (self.inner(tokens) * 2).add_(1.0)

    exported = export(Writes(), (example(5, 7, VOCAB)[0],), dynamic_shapes=(SIZES,))
    before = str(exported.graph)
    assert "add_" in before
    capture(exported, max_context=32)
    assert str(exported.graph) == before
