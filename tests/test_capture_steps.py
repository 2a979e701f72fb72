"""Capture looks at a model once: four steps in a row, and nobody else is given the module."""

import ast
from pathlib import Path

import models
import pytest
import torch
from torch.export import Dim

import accel.ir.capture
from accel.compiler.smoke.tiny_models import randomise
from accel.ir.capture import capture as capturing
from accel.ir.capture.examples import example
from accel.ir.capture.inspect import inspect
from accel.ir.capture.traits import Kind
from accel.ir.errors import CaptureError

FOLDER = Path(accel.ir.capture.__file__).parent
STEPS = {
    "capture",
    "inspect",
    "prepare",
    "export",
    "check",
}  # prepare: swaps forms, and puts them back
READERS = {  # of one module for `inspect`
    "decoder_checks.refuse_kind", "encoder.encoder_facts", "encoder._vocabulary", "encoder._start", "encoder._speech",
    "length_limits.limit_of", "length_limits.is_indexer", "length_limits.turns_anew", "length_limits._types",
    "length_limits._rotary_limit", "length_limits._tables", "length_limits._asks", "length_limits.pools",
    "length_limits._choice", "length_limits._of_keys", "length_limits._of_blocks", "length_limits._of_pooled",
}  # fmt: skip
WEIGHTS = {
    "weights_check.check_weights",
    "weights_check._parameters",
}  # for `capture`, of prepared ones
SWAPS = {"length_limits.short_forms", "length_limits._rotary_held", "adapter.__init__"}
HOOKS = {
    "decoder_checks.both_ways",
    "decoder_checks._culprit",
    "decoder_checks.see",
}  # for a message


TRACED = {
    f"repeats.{name}"
    for name in "call _forward called read write repeats _layers _kind _value _tensors unroll "
    "_placeholders _copy".split()
}  # for `export`, while it traces


def takers(name, source):
    """Functions of a file that are given a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            words = {a.arg for a in given} | {
                ast.unparse(a.annotation) for a in given if a.annotation
            }
            if words & {"model", "module", "nn.Module", "Adapter", "Prepared"}:
                found.add(f"{name}.{node.name}")
    return found


def test_only_the_steps_are_given_the_module():
    files = [f for f in FOLDER.glob("*.py") if f.stem not in STEPS]
    found = set().union(*(takers(f.stem, f.read_text()) for f in files))
    assert found == READERS | WEIGHTS | SWAPS | HOOKS | TRACED
    assert takers("x", "def f(inner: nn.Module): ...") == {"x.f"}
    assert takers("x", "def f(model): ...") == {"x.f"} and not takers("x", "def f(tokens): ...")


def exported():
    model = randomise(models.PlainSdpa(vocab=31, layers=1), "steps")
    sizes = {0: Dim("B", min=1), 1: Dim("T", min=1, max=255)}
    return torch.export.export(model, (example(5, 7, 31)[0],), dynamic_shapes=(sizes,))


@pytest.mark.parametrize(
    "make", [lambda: randomise(models.PlainSdpa(vocab=31, layers=1), "steps"), exported]
)
def test_each_step_is_entered_once_in_order(make, monkeypatch):
    entered = []

    def watched(name, step):
        def call(*args):
            entered.append(name)
            return step(*args)

        return call

    names = ["inspect", "prepared", "export", "convert", "check"]
    for name in names:
        monkeypatch.setattr(capturing, name, watched(name, getattr(capturing, name)))
    capturing.capture(make(), 64)
    assert entered == names


def test_what_would_be_refused_is_read_without_a_forward():
    with torch.device("meta"):
        model = models.PlainSdpa(vocab=31, layers=1)
    traits = inspect(model, 64)
    assert (traits.kind, traits.name, traits.vocab_size) == (Kind.MODULE, "PlainSdpa", 31)
    assert "weights on the meta device" in traits.refused
    with pytest.raises(CaptureError, match="meta device"):
        traits.require()
    assert inspect(randomise(models.PlainSdpa(layers=1), "steps")).refused is None
