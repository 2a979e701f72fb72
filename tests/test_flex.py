"""flex_attention: captured written out, held to the real one, and put back afterwards."""

import pytest
import random_decoders
import torch
from decoders.model import build
from decoders.spec import Spec, settle
from torch.nn.attention import flex_attention as flex

from accel import CaptureError, optimize
from accel.ir.capture import flex as written
from accel.ir.capture.capture import capture

compiled_flex = torch.compile(flex.flex_attention, backend="eager")


@pytest.fixture(autouse=True)
def uncompiled():
    """The references too: compiling them for every length takes longer than all the rest."""
    with written.flex_uncompiled():
        yield


def decoder(**parts):
    spec = settle(Spec(attention="flex", **parts))
    return build(spec), spec


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "parts",
    [
        {"positions": "alibi", "mask": "window", "repeat": 2},
        {"attention": "flex_score", "softcap": 4.0, "mask": "chunk", "scale": "constant"},
        {"positions": "rope_half", "mask": "strided", "value_dim": 5, "layers": 2},
    ],
    ids=["block mask", "score_mod", "table"],
)
def test_a_module_of_flex_attention_is_right(parts):
    spec = settle(Spec(**{"attention": "flex", **parts}))
    assert random_decoders.attempt(spec) == random_decoders.Result("right")


def test_no_sub_graphs_are_captured():
    model, _ = decoder(positions="alibi")
    program = capture(model, max_context=48)
    assert not any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in program.nodes())


def test_it_may_be_compiled_by_the_module_and_run_by_onnx(monkeypatch):
    monkeypatch.setattr("decoders.attention.flex_attention", compiled_flex)
    model, spec = decoder(mask="window")
    with optimize(model, max_context=48, max_batch=3) as compiled:
        assert [f.attention for f in compiled.facts.layers] == ["window"]
        assert not random_decoders.compare(model, compiled, spec.vocab, 3)


def test_a_wrong_form_is_caught(monkeypatch):
    real = written._written_out

    def unscaled(q, k, v, mod, block, scale, *rest):
        return real(q, k, v, mod, block, 1.0, *rest)

    monkeypatch.setattr(written, "_written_out", unscaled)
    with pytest.raises(CaptureError, match="differs from the module"):
        capture(decoder()[0], max_context=44)  # of no other test: captures are shared


def test_it_is_left_as_it_was():
    before = {name: value for name, value in vars(flex).items() if not name.startswith("__")}
    capture(decoder()[0], max_context=48)
    assert all(vars(flex)[name] is value for name, value in before.items())
