"""quantspec-kv and quantspec: drafts read half of what is stored, tokens are those of plain decoding over all."""

import numpy as np
import pytest
import torch

from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.passes.kv.codec import At
from accel.runtime.draft.quantspec import Quantspec, cost_of
from accel.runtime.session.session import Session

from ....draft_case import plain, rows_of, speculated
from ....prefill_case import TOKENS, built
from ....select_case import Selecting
from ....session_ways import close

AXIS = find_axes()["kv.codec"]
CODEC = AXIS.build("quantspec-kv", group=8)


@pytest.fixture(scope="module")
def blocks():
    """[2,3,5,128,16], channels of different sizes and means."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 128, 16, generator=generator)
    return x * 2.0 ** torch.arange(-4, 12) + torch.arange(16)


@pytest.mark.parametrize("role", ["k", "v"])
def test_the_upper_bits_are_within_half_a_step_and_both_within_a_sixteenth(blocks, role):
    method = AXIS.build("quantspec-kv")
    at = At(role, 16)
    parts = method.encode(at, blocks)
    few = {name: parts[name] for name in method.storage.coarse}
    axis = -2 if role == "k" else -1
    step = (blocks.amax(axis, keepdim=True) - blocks.amin(axis, keepdim=True)) / 15
    half = blocks.abs().amax(axis, keepdim=True) * 2**-10  # the ends are float16
    coarse, whole = (
        (method.decode(at, p).unflatten(2, (-1, 128)) - blocks).abs() for p in (few, parts)
    )
    assert (coarse <= step / 2 * 1.01 + half).all() and (coarse > step / 4).any()
    assert (whole <= step / 16 * 1.01 + half).all()
    assert (whole > step / 32 * 1.01).float().mean() < 0.06  # 8 was to be added, 7 was
    kivi = AXIS.build("kivi", bits=8, group=128)
    other = kivi.decode(at, kivi.encode(at, blocks)).unflatten(2, (-1, 128)) - blocks
    assert whole.square().mean() < 1.5 * other.square().mean()
    size = {name: part.nbytes for name, part in parts.items()}
    assert size["lower"] == size[""]
    if role == "k":
        assert sum(size[n] for n in few) / sum(size.values()) == pytest.approx(4.25 / 8.25)


def session_of(stateful, codec=CODEC, name="llama"):
    case = Selecting(stateful(name), codec)
    return case, case.session()


@pytest.mark.long
def test_a_coarse_call_reads_no_lower_bits_and_leaves_nothing(stateful):
    """What lies there is turned to noise; the control, that others read it."""
    case, session = session_of(stateful)
    tokens = case.tokens(1, 41)
    with session:
        session.run(tokens[:, :40])
        backend = session._core.backend
        stored = {n: a.copy() for n, a in backend.buffers().items() if n.startswith("kept.")}
        assert stored["kept.0.k.lower"].shape[2] == 4

        def told(coarse):
            logits = session.run(tokens[:, 40:], coarse=coarse)
            session.rewind(40)
            return logits

        few, whole = told(True), told(False)
        assert all(np.array_equal(backend.buffers()[n], a) for n, a in stored.items())
        noise = np.random.default_rng(0)
        backend.put(
            {
                n: noise.integers(0, 256, a.shape, np.uint8)
                for n, a in stored.items()
                if n.endswith("lower")
            }
        )
        assert np.array_equal(told(True), few)
        assert np.abs(told(False) - whole).max() > 1e-3
    want, base = Selecting(stateful("llama")), []
    with want.session() as session:
        session.run(tokens[:, :40])
        base.append(session.run(tokens[:, 40:]))
    assert np.abs(whole - base).max() < 0.5 * np.abs(few - base).max()


def test_the_newest_tokens_are_exact(stateful):
    case, session = session_of(stateful)
    tokens = case.tokens(1, 15)
    with session, Selecting(stateful("llama")).session() as other:
        close(session.run(tokens, coarse=True), other.run(tokens))


def three_rows(case):
    return rows_of([case.tokens(30 - 9 * i, seed=i) for i in range(3)], limit=40)


def test_tokens_are_those_of_plain_decoding_over_eight_bits(stateful, monkeypatch):
    """The control: verification that reads coarsely too."""
    case = Selecting(stateful("llama"), CODEC)
    want = plain(case.session(3), three_rows(case))

    run, called = Session.run, set[bool]()

    def drafted(**verified):
        def noted(*args, **more):
            called.add(more.get("coarse", False))
            return run(*args, **more | verified)

        monkeypatch.setattr(Session, "run", noted)
        rows, session = three_rows(case), case.session(3)
        with session:
            for _ in speculated(session, rows, Quantspec(), tokens=4):
                pass
        return [row.tokens for row in rows]

    assert drafted() == want and called == {False, True}
    assert drafted(coarse=True) != want


def test_a_draft_costs_less_where_the_cache_is_much_of_what_a_step_reads(stateful):
    facts = stateful("llama").facts
    costs = [cost_of(facts, n) for n in (0, 100, 10**9)]
    assert costs[0] == 1 and costs[0] > costs[1] > costs[2] > 0.5


def test_what_cannot_be_is_refused(stateful):
    with Selecting(stateful("llama"), AXIS.build("kv-int8")).session() as session:
        with pytest.raises(InputError, match="coarse: this model reads its cache in one way"):
            session.run([[5, 6]], coarse=True)
        assert session.length == 0
    with pytest.raises(RecipeError, match="group is 0; give"):
        AXIS.build("quantspec-kv", group=0)
    tables = {"draft": {"use": "quantspec"}, "kv.codec": {"use": "kv-int8"}}
    with pytest.raises(RecipeError, match="relies on COARSE_READS"):
        assemble(Recipe(tables=tables))
    tables = {"kv.score": {"use": "snapkv"}, "kv.codec": {"use": "quantspec-kv"}}
    with pytest.raises(RecipeError, match="ALL_TOKENS_HELD"):
        assemble(Recipe(tables=tables))
    assert assemble(Recipe.load("quantspec")).recipe.tables["kv.codec"] == {"use": "quantspec-kv"}


@pytest.mark.long
def test_onnx_reads_what_torch_reads_and_layers_may_be_left_out():
    """Under `depth = by-call` too: what chooses between two readings is no layer."""
    tables = {"kv.codec": {"use": "quantspec-kv", "group": 8}, "depth": {"use": "by-call"}}

    def logits(target, coarse):
        with built("llama", target, tables=tables).session() as session:
            session.prompt(TOKENS[:1, :30])
            layers = np.array([True, True, False])
            found = [session.run(TOKENS[:1, [30]], coarse=coarse)]
            return np.concatenate(
                [*found, session.run(TOKENS[:1, [31]], coarse=coarse, run_layers=layers)]
            )

    found = {coarse: logits("onnx", coarse) for coarse in (False, True)}
    for coarse, got in found.items():
        assert np.allclose(got, logits("eager", coarse), atol=1e-4)
    assert not np.allclose(found[True], found[False], atol=1e-3)
