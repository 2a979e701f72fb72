"""sleb: greedy removal by the loss, against a plain loop over transformers' module."""

import numpy as np
import pytest
import torch

from accel.ir.errors import PassError
from accel.passes.depth import sleb
from accel.passes.depth._joint import layers
from accel.passes.stream import Stream

from ...depth_case import losses_without, module_of, oracle, program_of

COUNT = 6
TEXT = torch.from_numpy(np.random.default_rng(4).integers(3, 90, (4, 30)))


def plain(count):
    """Layer -> mean loss: all that are left tried each time, on all of the text."""
    gone, found = [], {}
    for _ in range(count):
        trials = {
            i: float(losses_without(module_of(COUNT), TEXT, [*gone, i]).sum())
            for i in [j for j in range(COUNT) if j not in gone][1:-1]
        }
        gone.append(min(trials, key=trials.get))
        found[gone[-1]] = trials[gone[-1]] / (TEXT.numel() - len(TEXT))
    return found


def goes(count, text=TEXT, **options):
    program = program_of(COUNT, text)
    return sleb.Sleb(**options).goes(program, layers(program), count, text)


@pytest.mark.parametrize("at_once", [30, 512])
def test_the_layers_are_those_of_the_plain_loop(monkeypatch, at_once):
    """The first is the best of all; nothing goes twice, and the first and the last layer stay."""
    monkeypatch.setattr(sleb, "AT_ONCE", at_once)
    want = plain(COUNT - 2)
    for count in (1, COUNT - 2):
        found = goes(count)
        assert list(found) == list(want)[:count]
        np.testing.assert_allclose(list(found.values()), list(want.values())[:count], rtol=1e-4)
    assert want.keys() == set(range(1, COUNT - 1))


def test_measuring_once_gives_another_order():
    """The control: by the losses of single layers alone other layers go, or in another order."""
    module = module_of(COUNT)
    once = {i: float(losses_without(module, TEXT, [i]).sum()) for i in range(1, COUNT - 1)}
    assert sorted(once, key=once.get) != list(plain(COUNT - 2))


def test_a_trial_ends_above_the_least_so_far_and_begins_at_its_layer(monkeypatch):
    """What runs: of each trial the layers behind its own, which the trials share before it."""
    ran, text = np.ones((COUNT, 1), bool), TEXT[:3, :6].reshape(18, 1)
    ran[1] = False
    for _ in range(4):  # what the model would write without layer 1, so that this loss is low
        told = oracle(module_of(COUNT), text.numpy(), ran.repeat(text.shape[1], 1))[:, -1]
        text = torch.cat([text, torch.from_numpy(told.argmax(-1, keepdims=True))], 1)
    ran, layer = [], Stream.layer
    monkeypatch.setattr(Stream, "layer", lambda self, *x: (ran.append(x[0]), layer(self, *x))[1])
    program = program_of(COUNT, text)
    streams = [Stream(program, layers(program), row) for row in text.split(1)]
    with torch.no_grad():
        trials = sleb.measured(streams, range(COUNT))
    least, want = float("inf"), len(text) * (COUNT - 2)  # once through the layers between
    for i, found in trials.items():
        whole = losses_without(module_of(COUNT), text, [i])
        rows = next((n for n in range(1, 19) if float(whole[:n].sum()) > least), 18)
        np.testing.assert_allclose(found, whole[:rows], rtol=1e-4)
        least = min(least, float(whole.sum()))
        want += rows * (COUNT - 1 - i)
    assert any(len(found) < len(text) for found in trials.values())
    assert len(ran) == want


def test_rows_that_disagree_more_than_the_layers_are_refused(monkeypatch):
    """The control: losses of which every row says the same."""
    drawn = {1: [5.0, 5.0, 5.1], 2: [5.2, 4.7, 5.3], 3: [4.8, 5.3, 5.1], 4: [5.3, 4.8, 5.1]}
    monkeypatch.setattr(
        sleb, "measured", lambda *_: {i: torch.tensor(x).double() for i, x in drawn.items()}
    )
    with pytest.raises(PassError, match="sleb: 90 tokens of text do not order the layers"):
        goes(1, TEXT[:3])
    drawn[2] = [5.2, 5.2, 5.3]
    assert goes(1, TEXT[:3]).keys() == {1}
