"""accel's compiled operators: equal bits however the work is cut, and nothing lost where they cannot be made."""

from pathlib import Path

import models
import numpy as np
import onnxruntime
import pytest
import torch

import accel
from accel.ir.ops import attention, flat
from accel.lowering.onnx import native
from accel.lowering.onnx.export import export
from accel.lowering.onnx.variants.native import lower

from .op_cases import CASES, Case, query_positions, randn
from .test_ops import onnx_session, program_of

needs_native = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
rules = lower.rules  # of the compiled operators
SHAPES = [(4, 4, 64), (9, 3, 64), (14, 2, 64), (4, 1, 256), (6, 2, 24), (3, 3, 10)]
SLOTS = 700


def operands(heads, groups, size, tokens):
    rng = np.random.default_rng(heads)
    q = randn(rng, 1, heads, tokens, size)
    k, v = randn(rng, 1, groups, SLOTS, size), randn(rng, 1, groups, SLOTS, size)
    held = torch.arange(SLOTS)[None]
    held = torch.where(held < SLOTS - 30, held, -1)
    q_pos = torch.arange(SLOTS - 30 - tokens, SLOTS - 30)[None]
    return [q, k, v, q_pos, held, None, 0.3, 0.0, "causal", 0]


def session(shape, folder, exact, threads):
    def make(b, t, c, rng):
        heads, groups, size = shape
        q = randn(rng, b, heads, t, size)
        k, v = randn(rng, b, groups, c, size), randn(rng, b, groups, c, size)
        held = torch.arange(c).repeat(b, 1)
        return [q, k, v, query_positions(rng, b, t, c), held, None, 0.3, 0.0, "causal", 0]

    export(program_of(Case("rows", attention.attention, make)), folder, batch_invariant=exact)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.intra_op_num_threads = threads
    native.register(options)
    found = onnxruntime.InferenceSession(str(folder / "step.native.onnx"), options)
    names = [i.name for i in found.get_inputs()]
    return lambda args: found.run(None, {n: args[int(n[1:])].numpy() for n in names})[0]


def apart(run, args):
    """The same rows, a token at a time."""
    parts = []
    for t in range(args[0].shape[2]):
        one = [
            args[0][:, :, t : t + 1].contiguous(),
            *args[1:3],
            args[3][:, t : t + 1].contiguous(),
        ]
        parts.append(run([*one, *args[4:]]))
    return np.concatenate(parts, axis=2)


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_equal_bit_for_bit(shape, threads, tmp_path):
    run = session(shape, tmp_path, True, threads)
    for tokens in (2, 3, 8, 33):
        args = operands(*shape, tokens)
        np.testing.assert_array_equal(run(args), apart(run, args))


@needs_native
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", [(9, 3, 64), (6, 2, 24)], ids=str)
def test_what_lies_in_slots_that_nobody_sees_is_harmless(shape, exact, tmp_path):
    """Empty slots, some in a tile with others, and those of later tokens, some of which other rows of the call see."""
    run = session(shape, tmp_path, exact, 1)
    for tokens in (1, 5, 40):
        args = operands(*shape, tokens)
        want, empty = run(args), args[4][0] < 0
        q, k, v, *others = args
        k, v = (torch.where(empty[:, None], torch.nan, x) for x in (k, v))
        np.testing.assert_array_equal(run([q, k, v, *others]), want)
        last = SLOTS - 31  # the newest token's slot
        k[0, :, last], v[0, :, last] = torch.nan, torch.nan
        got = run([q, k, v, *others])
        np.testing.assert_array_equal(got[:, :, :-1], want[:, :, :-1])
        assert np.isnan(got[:, :, -1]).all()


@needs_native
@pytest.mark.parametrize("name", [n for n in CASES if "beside" in n or n == "partial_attention"])
def test_partial_attention_equals_the_reference(name, tmp_path):
    case = CASES[name]
    run = onnx_session(case, tmp_path, "step.native.onnx")
    for sizes in ((1, 1, 1), (2, 1, 9), (3, 4, 11)):
        made = case.operands(sizes)
        got, want = run(made), case.op.reference(*made)
        if case.op is attention.attention:  # what is beside is read by all
            got, want = (got, got[..., 0]), (want, want[..., 0])
        seen = attention.partial_attention(*made)[1] > torch.finfo(torch.float32).min / 2
        torch.testing.assert_close(got[1][seen], want[1][seen], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(got[0][seen], want[0][seen], atol=2e-5, rtol=2e-5)
        assert all(x.isfinite().all() for x in got)


ATTENTION = (attention.attention, attention.partial_attention, flat.flat_attention)


@pytest.mark.few(35)
@needs_native
@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if c.op.default in rules and c.op not in ATTENTION]
)
def test_compiled_operators_equal_the_reference(name, tmp_path):
    case = CASES[name]
    export(program_of(case), tmp_path)
    if not (tmp_path / "step.native.onnx").exists():
        pytest.skip("a form that the portable rule takes")
    run = onnx_session(case, tmp_path, "step.native.onnx")
    for sizes in ((1, 1, 1), (2, 1, 9), (3, 4, 11)):
        made = case.operands(sizes)
        got, want = run(made), case.op.reference(*made)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5, equal_nan=True)


@needs_native
@pytest.mark.parametrize("exact", [True, False])
def test_a_partial_result_over_many_slots_is_merged(exact, tmp_path):
    """Rows that are split over threads, too."""
    rng = np.random.default_rng(0)
    made = operands(4, 2, 64, 3)
    made += [None] * 7 + [0, randn(rng, 1, 4, 3, 64), randn(rng, 1, 4, 3) * 3]

    def make(b, t, c, rng):
        shapes = (b, 4, t, 64), (b, 2, c, 64), (b, 2, c, 64)
        where = query_positions(rng, b, t, c), torch.arange(c).repeat(b, 1)
        beside = randn(rng, b, 4, t, 64), randn(rng, b, 4, t)
        return [*(randn(rng, *s) for s in shapes), *where, *made[5:18], *beside]

    case = Case("beside", attention.partial_attention, make)
    export(program_of(case), tmp_path, batch_invariant=exact)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    native.register(options)
    found = onnxruntime.InferenceSession(str(tmp_path / "step.native.onnx"), options)
    given = {i.name: made[int(i.name[1:])].numpy() for i in found.get_inputs()}
    for got, want in zip(found.run(None, given), attention.partial_attention(*made), strict=True):
        np.testing.assert_allclose(got, want.numpy(), atol=2e-5)
    given["x19"] = given["x19"] - 1
    assert np.abs(found.run(None, given)[0] - want_of(made)).max() > 1e-3


def want_of(made):
    return attention.attention(*made).numpy()


@needs_native
def test_without_the_promise_some_bits_differ(tmp_path):
    shape = SHAPES[0]
    run = session(shape, tmp_path, False, 1)
    args = operands(*shape, 33)
    np.testing.assert_allclose(run(args), apart(run, args), atol=1e-5)
    assert (run(args) != apart(run, args)).any()


@needs_native
def test_sizes_that_do_not_fit_are_an_error_not_a_crash(tmp_path):
    run = session(SHAPES[0], tmp_path, True, 1)
    args = operands(*SHAPES[0], 2)
    args[4] = args[4][:, :-1].contiguous()
    with pytest.raises(Exception, match="do not fit"):
        run(args)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A cache of its own, and nothing remembered, before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.forget()
    yield tmp_path
    native.forget()


@pytest.mark.long
def test_without_a_compiler_the_artifact_is_portable(elsewhere, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with accel.optimize(models.tiny(), max_context=64) as compiled:
        assert "native" not in compiled.artifact.entries["step"].variants
        assert any("no C++ compiler" in note for note in compiled.report["notes"])
        assert len(compiled.generate([1, 2, 3], 4).tokens[0]) == 4
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        native.register(onnxruntime.SessionOptions())


def test_without_a_home_there_is_no_library(elsewhere, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.warns(UserWarning, match="portable kernels run instead"):
        path, reason = native.library()
    assert path is None and "no home" in reason


def test_a_cache_that_cannot_be_written_is_no_error(elsewhere, monkeypatch):
    (elsewhere / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="portable kernels run instead"):
        path, reason = native.library()
    assert path is None and "XDG_CACHE_HOME" in reason
