"""Where a cache keeps a few bits, codes that turn by rounding turn others: checks go by what the last places do."""

from dataclasses import dataclass, replace
from typing import ClassVar

import models
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import Miscompiled
from accel.ir.recipe import Recipe
from accel.lowering.onnx import verify
from accel.passes import Pass, Report, check
from accel.passes.check import NumericCheck

from .kv_case import evicting


@dataclass(frozen=True)
class Other(Pass):
    """Computes what was before, the weights of norms times 1 + `by`."""

    by: float = 0.0
    error: ClassVar[float] = 1e-12

    def run(self, program):
        for name in program.params:
            if program.params.blank(name).dim() == 1:
                program.params[name] = program.params[name] * (1 + self.by)
        return Report(1)


@pytest.fixture(params=["kivi-2", "kv-fp8"])
def packed(stateful, request):
    """A program that keeps 2 bits of a number, or 8 by operators of no codec, and its check."""
    program = evicting(
        stateful("llama"), assemble(Recipe.load(request.param)).recipe.tables
    ).program
    return program, NumericCheck(program)


@pytest.mark.parametrize(("by", "passes"), [(5e-7, True), (1e-4, False)])
def test_a_pass_may_move_logits_as_far_as_their_last_places_do(packed, monkeypatch, by, passes):
    program, numeric = packed
    monkeypatch.setattr(check, "STEP_OF_CODES", 1e-12)
    step = Other(by)
    step.run(program)
    if passes:
        assert numeric(program, step) > 1e-12
        monkeypatch.setattr(check, "NOISE", 0.0)
    with pytest.raises(Miscompiled, match="Other changed what the program computes"):
        numeric(program, step)


def test_without_codes_nothing_is_allowed(stateful):
    program = stateful("llama")
    numeric = NumericCheck(program)
    step = Other(5e-7)
    step.run(program)
    with pytest.raises(Miscompiled, match="Other changed what the program computes"):
        numeric(program, step)


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", [2.0, 0.0])
def test_a_graph_may_differ_as_far_as_its_last_places_do(monkeypatch, noise):
    kinds = verify.kind_of
    monkeypatch.setattr(verify, "NOISE", noise)
    near = {"compress": replace(kinds("compress"), error=1e-12)}
    monkeypatch.setattr(verify, "kind_of", lambda name: near.get(name) or kinds(name))
    ran = verify._run
    scaled = lambda v: v * (1 + 5e-7) if v.is_floating_point() else v  # noqa: E731
    monkeypatch.setattr(verify, "_run", lambda *a: {n: scaled(v) for n, v in ran(*a).items()})
    module = models.ARCHITECTURES["llama"]()
    if noise:
        accel.optimize(module, "kivi-2", max_context=64).close()
        return
    with pytest.raises(Miscompiled, match="compress.onnx, run by onnxruntime"):
        accel.optimize(module, "kivi-2", max_context=64)


def test_where_the_model_chooses_the_bound_is_of_nine_tokens_in_ten(monkeypatch):
    """Half of the tokens count there, and codes turn for fewer than half by the last places of vectors."""
    kinds, shares = verify.kind_of, []
    near = {"step": replace(kinds("step"), error=1e-12)}
    monkeypatch.setattr(verify, "kind_of", lambda name: near.get(name) or kinds(name))
    monkeypatch.setattr(verify, "codes_slack", lambda program: 1e-12)
    right = verify._moved
    monkeypatch.setattr(verify, "_moved", lambda *a: shares.append(a[-1]) or right(*a))
    monkeypatch.setattr(verify, "NOISE", 1e6)
    accel.optimize(models.ARCHITECTURES["llama"](), "quantized-pruning", max_context=64).close()
    assert set(shares) == {0.9}
