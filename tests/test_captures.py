"""Captures and first passes that tests share are of equal modules only, and nobody sees what another makes of one."""

import models
import pytest
import torch

import accel
from accel.ir.capture import capture as capturing
from accel.ir.capture.capture import capture
from accel.ir.capture.inspect import inspect
from accel.ir.errors import CaptureError, PassError
from accel.passes.recognise.norm import Norms

from . import captures


@pytest.fixture
def counted(monkeypatch):
    """The modules that were really captured."""
    found, real = [], captures._real
    monkeypatch.setattr(captures, "_made", captures.OrderedDict())
    monkeypatch.setattr(
        captures, "_real", lambda model, *rest: found.append(model) or real(model, *rest)
    )
    return found


def test_equal_modules_have_one_capture_and_programs_of_their_own(counted):
    a, b = (capture(models.tiny(), max_context=64) for _ in range(2))
    assert len(counted) == 1 and a.text() == b.text() and a.traces is not b.traces
    name = next(iter(a.params))
    a.params[name] = a.params[name] + 1
    a.facts.max_batch = 99
    a.step.graph.placeholder("more")
    assert capture(models.tiny(), max_context=64).text() == b.text() and b.facts.max_batch != 99
    assert not torch.equal(a.params[name], b.params[name])


def heavier(module):
    with torch.no_grad():
        next(module.parameters()).view(-1)[3] += 1e-4


def hooked(module):
    module.register_forward_hook(lambda module, args, out: out)


def halved(module):
    module.to(torch.float64)


def other(module):
    class Other(type(module)):
        def forward(self, *args):
            return super().forward(*args) * 2

    module.__class__ = Other


def own(module):
    plain = module.forward
    module.forward = lambda *args: plain(*args)


@pytest.mark.few(3)
@pytest.mark.parametrize("change", [heavier, hooked, halved, other, own])
def test_a_module_that_differs_is_captured(counted, change):
    capture(models.tiny(), max_context=64)
    module = models.tiny()
    change(module)
    capture(module, max_context=64)
    assert counted[1:] == [module]


def test_so_is_one_for_another_context_or_by_other_steps(counted, monkeypatch):
    for context in (64, 32):
        capture(models.tiny(), max_context=context)
    assert len(counted) == 2

    def wrong(*_):
        raise ValueError("seen")

    monkeypatch.setattr(capturing, "check", wrong)
    with pytest.raises(ValueError, match="seen"):
        capture(models.tiny(), max_context=64)


def built(**options):
    return accel.optimize(models.tiny(), "base", target="eager", max_context=40, **options)


def lines(model):
    return [(s["name"], s["changed"], s["error"]) for s in model.report["steps"]]


def test_the_first_passes_run_once_for_equal_builds(tmp_path):
    first, before = built(), len(captures._passed)
    again, dumped = built(), built(dump=tmp_path)
    assert len(captures._passed) == before > 0
    assert first.program.text() == again.program.text() == dumped.program.text()
    assert lines(first) == lines(again)
    done = [[line[:2] for line in lines(one)] for one in (again, dumped)]
    assert done[0] == done[1], "where they are run apart, what comes first is checked apart"
    assert len(list(tmp_path.iterdir())) == 1 + len(lines(first)), "and the program as captured"
    assert [(n, e) for n, _, e in lines(built(verify=False)) if e is not None] == []


def test_a_pass_that_a_test_breaks_is_run(monkeypatch):
    built()
    monkeypatch.setattr(Norms, "run", lambda self, program: 1 / 0)
    with pytest.raises(PassError, match="Norms failed"):
        built()


@pytest.fixture
def exports():
    """The adapters that were really exported. Set by hand: nothing is shared where a test replaces something."""
    found, before = [], (captures._trace, captures._forms, captures._made)
    real = captures._trace
    captures._trace = lambda adapter, *rest: found.append(adapter) or real(adapter, *rest)
    captures._forms, captures._made = captures.OrderedDict(), captures.OrderedDict()
    yield found
    captures._trace, captures._forms, captures._made = before


def test_modules_that_differ_in_weights_alone_are_exported_once(exports):
    first, second = models.tiny(), models.tiny()
    heavier(second)
    a, b = (capturing.capture_inspected(m, inspect(m, 64)) for m in (first, second))
    assert len(exports) == 1 and a.text() == b.text()
    state = dict(second.named_parameters())
    assert all(torch.equal(b.params[name], state[name]) for name in b.params if name in state)
    assert any(not torch.equal(a.params[name], b.params[name]) for name in b.params)


def test_an_export_serves_shorter_texts(exports):
    """Of a context of 64 it is as long as tests usually ask, unless the module cannot: its table may end before."""
    texts = [capture(models.tiny(), max_context=n).text() for n in (64, 32, 128)]
    assert len(exports) == 1 and len(set(texts)) == 1
    capture(models.tiny(), max_context=200)
    assert len(exports) == 2
    count, real = [], captures._trace

    def up_to_50(adapter, given, shapes, whole):
        count.append(shapes[0][1].max)
        if count[-1] > 50:
            raise ValueError("a table ends there")
        return real(adapter, given, shapes, whole)

    captures._trace = up_to_50
    assert capture(models.make("plain_latent", 1), max_context=48).facts.max_context == 48
    assert count == [127, 47]


@pytest.mark.parametrize("change", [hooked, other, own])
def test_others_are_exported_anew(exports, change):
    capture(models.tiny(), max_context=64)
    module = models.tiny()
    change(module)
    capture(module, max_context=64)
    assert len(exports) == 2


def test_weights_of_another_module_are_seen(exports):
    """The check of a capture is what holds it: with the tensors of the first, the second is refused."""
    first, second = models.tiny(), models.tiny()
    with torch.no_grad():
        second.head.weight.mul_(2)
    capture(first, max_context=64)
    values = captures._with_values
    tensors = first.named_parameters(remove_duplicate=False)
    first_tensors = {f"model.{n}": x for n, x in tensors}
    captures._with_values = lambda program, own: values(program, own | first_tensors)
    try:
        with pytest.raises(CaptureError):
            capture(second, max_context=64)
    finally:
        captures._with_values = values
