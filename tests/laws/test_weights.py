"""Laws of the weights axis: every method keeps within the error that it declares, and saves bytes."""

import models
import numpy as np
import pytest

import accel
from accel.compiler.assemble import GRADES
from accel.ir.axis import find_axes
from accel.ir.errors import PassError
from accel.ir.ops.quantized import quantized_linear

NAMES = find_axes()["weights"].names()
TOKENS = np.random.default_rng(0).integers(0, 90, (1, 19))


def small(name: str) -> dict:
    """The method, on every matrix of a tiny model."""
    return {"weights": {"use": name, **find_axes()["weights"].small(name)}}


def stored(compiled) -> int:
    return compiled.report["bytes"]["weights.bin"]


def error(compiled, base) -> float:
    want, got = base.logits(TOKENS), compiled.logits(TOKENS)
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(3)
def test_the_error_stays_within_what_is_declared(name, build):
    base = build("llama")
    axis = find_axes()["weights"]
    with accel.optimize(base.model, small(name), max_context=64) as compiled:
        declared = axis.method(name).error
        assert error(compiled, base.compiled) <= declared
        assert compiled.report["grade"] in GRADES
        assert compiled.report["grade"] == "approximate"
        assert stored(compiled) < 0.75 * stored(base.compiled)
        eager = accel.optimize(base.model, small(name), max_context=64, target="eager")
        # where inputs of products are rounded, the last place may take a value to the next step
        bound = 0.1 if compiled.program.nodes(quantized_linear.default) else 1e-4
        want = eager.logits(TOKENS)
        assert np.abs(want - compiled.logits(TOKENS)).max() < bound * max(1.0, np.abs(want).max())


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_method_that_does_more_harm_is_caught(name, build, monkeypatch):
    cls = find_axes()["weights"].method(name)
    run = cls.run

    def broken(self, program):
        report = run(self, program)
        head = next(
            n for n in program.params if "head" in n and program.params[n].is_floating_point()
        )
        program.params[head] = -program.params[head]
        return report

    monkeypatch.setattr(cls, "run", broken)
    with pytest.raises(PassError, match="changed what the program computes"):
        accel.optimize(build("llama").model, small(name), max_context=64)


@pytest.mark.long
def test_weights_that_are_float16_already_lose_nothing(build):
    model = models.ARCHITECTURES["llama"]().half().float()
    with accel.optimize(model, small("float16"), max_context=64) as compiled:
        steps = {s["name"]: s for s in compiled.report["steps"]}
        assert steps["Float16"]["changed"]
        assert steps["Float16"]["error"] == steps["Layers"]["error"]


@pytest.mark.long
def test_values_beyond_float16_stay_as_they_are():
    import torch

    model = models.ARCHITECTURES["llama"]()
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[0, 0] = 1e6
    with accel.optimize(model, small("float16"), max_context=64) as compiled:
        steps = {s["name"]: s for s in compiled.report["steps"]}
        assert any("beyond 65504" in reason for reason in steps["Float16"]["refused"])
