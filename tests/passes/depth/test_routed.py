"""Routers of layers: what a token takes depends on no other, and what trains them."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import accel
from accel import reference
from accel.compiler.load.source import open_source
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.routers import RoutersRun, SoftLayers
from accel.compiler.train.source import Source
from accel.ir.axis import find_axes
from accel.passes.depth._routed import Learns, Routed
from accel.passes.depth.mod import Mod

from ...depth_case import far, module_of
from ...router_case import trained

AXIS = find_axes()["depth"]
LEARN = [n for n in AXIS.names() if issubclass(AXIS.method(n), Learns)]
ROUTED = [n for n in LEARN if issubclass(AXIS.method(n), Routed)]
COUNT = 3
TOKENS = np.random.default_rng(7).integers(3, 90, (2, 9))


def built(name):
    options = {"use": name, **trained("llama", COUNT, name), **AXIS.small(name)}
    return accel.optimize(
        *(module_of(COUNT), {"depth": options}),
        target="eager",
        max_context=64,
        max_batch=2,
        verify=False,
    )


def depends(name):
    """How far a token's logits change with the rows and the tokens that share its call."""
    with built(name) as compiled:
        with compiled.session(2) as session:
            whole = session.run(TOKENS)
        with compiled.session() as session:
            alone = [session.run(TOKENS[1:, i : i + 1]) for i in range(TOKENS.shape[1])]
    return far(np.concatenate(alone, 1), whole[1:])


@pytest.mark.parametrize("name", ROUTED)
def test_what_a_token_takes_depends_on_no_other_token_of_the_call(name):
    assert depends(name) < 1e-4


def test_the_law_finds_a_router_that_looks_at_other_tokens(monkeypatch):
    plain = Mod.spare
    monkeypatch.setattr(Mod, "spare", lambda self, x, w: plain(self, x - x.mean((0, 1)), w))
    assert depends("mod") > 1e-2


@cache
def bundled():
    folder = Path(reference.__file__).parent
    quiet = (lambda *_: None,) * 2
    return Source(folder, open_source(folder).tokenizer, None, *quiet)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LEARN)
@pytest.mark.long
def test_training_falls_from_a_seed_on_the_bundled_model(name, tmp_path):
    """The model's own weights have no part in it."""
    source, method = bundled(), AXIS.build(name)
    one = SoftLayers(source.program, method)
    options = TrainOptions(length=32, rows=1, rate=0.05, pressure=4.0)
    run = RoutersRun(one, one.start(4, 0), options, tmp_path / "run")
    batch = next(source.rows(32, 1, 0))
    before = {n: t.clone() for n, t in one.fixed.items() if "layers.0" in n}
    losses = []
    for _ in range(10):
        found = run.learn(*batch)
        losses.append(found["text"] + 4.0 * float(method.price(torch.tensor(found["mean"]))))
    assert losses[-1] < losses[0] - 0.02
    assert all(torch.equal(one.fixed[n], t) for n, t in before.items()) and before
