"""Tokens of equal score: the newest stay, on every target."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.lowering.triton.lowered import lower_program
from accel.passes.kv.score import Base
from accel.runtime.backends.triton.backend import TritonBackend
from accel.runtime.kv.budget import Base as Budget
from accel.runtime.kv.budget._share import Share
from accel.runtime.model.compiled import CompiledModel

from .kv_case import kept, recipe
from .kv_slots import AXES, G, build, choose, real, sets, slots

LENGTH, KEPT = 23, 9


class Modulo(Base):
    """A score of `values` different values."""

    def __init__(self, values):
        self.values = values

    def __call__(self, positions):
        return (positions % self.values).float()


def law_newest(budget, seed, values=1, refine=None):
    """A head keeps the best, of equal ones the newest; heads of equal scores keep the same."""
    x, score = slots(seed, base=(0, 0, 0), recent=(14, 11, 9)), Modulo(values)
    for count in (1, 3, 6, 8):
        most = budget.most(count, G)
        found = sets(choose(x, count, score, budget, most=most, refine=refine))
        for row, there in zip(found, real(x), strict=True):
            order = sorted(there[0], key=lambda p: (p % values, p))
            assert row == [set(order[-count:])] * G


@pytest.mark.parametrize(
    "name", [n for n in AXES["budget"].names() if not AXES["budget"].method(n).adaptive]
)
@pytest.mark.parametrize("values", [1, 2, 5])
def test_law_newest(name, values):
    for seed in range(3):
        law_newest(build("budget", name), seed, values)


@pytest.mark.parametrize("values", [1, 5])
def test_a_refine_that_ranks_takes_the_newest(values):
    whole = build("refine", "critical-kv", share=1.0)
    for seed in range(3):
        law_newest(build("budget", "ada-kv"), seed, values, whole)


def test_heads_whose_slots_hold_other_tokens_share_by_position():
    """Kept slots of one index hold tokens of another position in each head."""
    x = slots(3)
    for count in (1, 4, 7):
        budget = build("budget", "ada-kv", safeguard=0.0)
        found = sets(choose(x, count, Modulo(1), budget, most=budget.most(count, G)))
        for row, there in zip(found, real(x), strict=True):
            every = sorted(p for head in there for p in head)[-count * G :]
            assert sorted(p for head in row for p in head) == every


def test_the_law_catches_a_budget_that_ranks_by_slot():
    class BySlot(Share, Budget):
        def tokens(self, seen, layer, layers):
            return self.average(seen)

        def most(self, tokens, heads):
            return heads * tokens

        def heads(self, scores, keep):
            order = scores.flatten(1).sort(stable=True, dim=1, descending=True).indices
            taken = order.sort(1).indices < (keep * scores.shape[1])[:, None]
            return taken.unflatten(1, scores.shape[1:]).sum(2)

    with pytest.raises(AssertionError):
        law_newest(BySlot(), 0)


@pytest.fixture(scope="module")
def module():
    """A Llama whose keys are all zero: to `knorm` each is as good as another."""
    made = models.make("llama", 1)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    return made


@pytest.mark.long
def test_every_target_keeps_the_newest(module):
    tables = recipe("knorm", kept=KEPT, budget="ada-kv")
    ids = np.random.default_rng(0).integers(3, 99, (2, LENGTH + 1))
    options = dict(max_context=64, max_batch=2, verify=False)
    eager = accel.optimize(module, tables, target="eager", **options)
    lowered = lower_program(eager.program)
    triton = CompiledModel(
        TritonBackend(lowered), eager.facts, recipe=eager.recipe, program=lowered
    )
    onnx = accel.optimize(module, tables, target="onnx", **options)
    found = []
    for model in (eager, triton, onnx):
        with model, model.session(2) as session:
            session.run(ids[:, :LENGTH])
            session.end_prompt()
            if model is not onnx:
                want = np.arange(LENGTH - KEPT, LENGTH)
                where = kept(session)[0][..., :KEPT]
                assert (where == want).all(), where
            found.append(session.run(ids[:, LENGTH:]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=2e-4, rtol=1e-4)
