"""Models that see both ways: how they are captured, what their sessions do, and what is refused."""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.capabilities import conflicts
from accel.ir.axis import find_axes
from accel.runtime.decode.trained_part import TrainedPart
from accel.runtime.session.modes.canvas import CanvasState

from .diffusion_case import LONGEST, MASK, Filler, Slots, prompts, with_loop

LOOP = {
    "loop": {"use": "dllm-threshold", "block": 8, "threshold": 0.5},
    "canvas": {"use": "dllm-blockcache"},
}


@pytest.fixture(scope="module")
def filler():
    """(module, its builds by target)"""
    module = Filler(True).eval()
    made = {
        t: accel.optimize(module, LOOP, target=t, max_context=LONGEST, max_batch=2)
        for t in ("eager", "onnx")
    }
    yield module, made
    for each in made.values():
        each.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", models.FILLERS)
def test_models_of_published_shapes(name):
    module = models.FILLERS[name]()
    tokens = np.random.default_rng(0).integers(0, 90, (2, 12))
    with accel.optimize(module, LOOP, max_context=64, max_batch=2) as compiled:
        facts = compiled.facts
        assert facts.diffusion.shift is (name == "dream") and {
            x.attention for x in facts.layers
        } == {"full"}
        want = module(torch.tensor(tokens)).logits.detach().numpy()
        assert np.abs(compiled.logits(tokens) - want).max() < 1e-4 * np.abs(want).max()
        assert len(compiled.generate([5, 6, 7], max_new_tokens=9, eos=[]).tokens[0]) == 9
        assert compiled.report["errors"]["onnx native"] < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("name", models.FILLERS)
def test_models_of_published_shapes_decode_by_every_loop_and_canvas(name):
    """Three rows together, each what it gets alone. A loop that learnt of a model is of that one."""
    axes, given = find_axes(), [[5, 6, 7], [1, 2, 3, 4, 5, 6], [9]]
    kinds = {n: axes["loop"].method(n) for n in axes["loop"].names()}
    fills = [n for n, k in kinds.items() if "canvas" in k.asks and not issubclass(k, TrainedPart)]
    methods = {n: axes["canvas"].build(n) for n in axes["canvas"].names()}
    alone_in_graph = [n for n, method in methods.items() if method.steps()]
    recipes = {n: {"loop": {"use": "dllm-lowconf"}, "canvas": {"use": n}} for n in alone_in_graph}
    with ExitStack() as stack:
        builds = {
            n: stack.enter_context(
                accel.optimize(models.FILLERS[name](), recipe, max_context=64, max_batch=3)
            )
            for n, recipe in {"": {"loop": {"use": "freedave", "block": 8}}, **recipes}.items()
        }
        for use, canvas in itertools.product(fills, methods):
            compiled = builds.get(canvas, builds[""])
            found = {"loop": axes["loop"].build(use, block=8), "canvas": methods[canvas]}
            if not conflicts(found):
                compiled._loop, compiled._methods = found["loop"], found
                if "draft" in found["loop"].asks and compiled.draft_model is None:
                    compiled.draft_model = accel.optimize(
                        models.llama(), max_context=64, max_batch=3
                    )
                alone = [compiled.generate([p], 18, eos=[]).tokens[0] for p in given]
                assert compiled.generate(given, 18, eos=[]).tokens == alone, (use, canvas)


def test_targets_agree(filler):
    _, made = filler
    tokens = [m.generate(prompts(), max_new_tokens=20, eos=[]).tokens for m in made.values()]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_what_a_session_holds_is_what_was_written(filler, target):
    """Every way to the same canvas gives the module's logits; rows of different lengths, padded."""
    module, made = filler
    rng = np.random.default_rng(1)
    tokens, lengths = rng.integers(0, MASK, (2, 20)), np.array([20, 13])
    want = [
        module(torch.tensor(tokens[i : i + 1, :n])).detach().numpy()[0]
        for i, n in enumerate(lengths)
    ]

    def same(got, i, columns):
        assert np.abs(got - want[i][columns]).max() < 1e-4 * np.abs(want[i]).max()

    with made[target].session(2) as session:
        assert session.observer(CanvasState) and session.capabilities.width == 1
        session.run(rng.integers(0, MASK, (2, 30)))  # longer, and then forgotten
        session.rewind([9, 4])
        whole = session.write(tokens, 0, lengths)
        again = session.write(tokens[:, 5:9], 5)  # in the midst: the others are as they were
        ends = session.write(
            np.stack([tokens[0, 10:], tokens[1, 5:15]]), [10, 5], [10, 8], [[9, 0], [7, 3]]
        )
        for i, n in enumerate(lengths):
            same(whole[i, :n], i, slice(0, n))
            same(again[i], i, slice(5, 9))
        same(ends[0], 0, [19, 10])
        same(ends[1], 1, [12, 8])
        assert session.lengths.tolist() == [20, 13]
        with session.fork() as other:
            other.write(tokens[:, :2] * 0, 0)
            same(session.write(tokens[:, 5:9], 5)[0], 0, slice(5, 9))


def test_what_is_forgotten_is_out_of_sight(filler):
    """Before the end of a call, behind a block in the midst, and a control that shows what would be seen."""
    module, made = filler
    tokens = np.random.default_rng(2).integers(0, MASK, (1, 24))
    want = module(torch.tensor(tokens[:, :12])).detach().numpy()[0]
    with made["onnx"].session() as session:
        session.run(tokens)
        session.rewind(12)
        calls = session.stats["calls"]
        got = session.write(tokens[:, :12], 0)[0]
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
        assert session.stats["calls"] == calls + 2 and session.length == 12
        session.run(tokens[:, 12:])
        session.rewind(12)
        session.observer(CanvasState).filled = session.lengths  # as if nothing had been forgotten
        assert np.abs(session.write(tokens[:, :12], 0)[0] - want).max() > 1e-2


def test_rows_go_on_as_others(filler):
    """With what was written over since they were copied, and what they have forgotten out of sight."""
    module, made = filler
    tokens = np.random.default_rng(3).integers(0, MASK, (2, 24))
    with made["onnx"].session() as session:
        session.run(tokens[:1])
        session.select([0, 0])
        session.rewind(12)
        session.write(tokens[:, :12], 0)
        session.select([1, 0])
        got = session.write(tokens[::-1, :12], 0)
        want = module(torch.tensor(tokens[::-1, :12].copy())).detach().numpy()
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
        session.select(
            [1, 1]
        )  # row 1 holds tokens[0], and the same tokens written again see the others of that
        got = session.write(tokens[[0, 0], 4:8], 4)
        assert np.abs(got - want[[1, 1], 4:8]).max() < 1e-4 * np.abs(want).max()


CALLS = ([14, 9], [3, 5], [6, 0], [4, 12], [1, 1], [0, 7], [8, 2])  # tokens of each row


def law_any_slots(module, compiled, moved=lambda places: places, calls=CALLS):
    """Calls of any tokens, batches of rows with different counts, against keys and values that lie by token; `moved`:
    what the session is told instead.
    """
    rng = np.random.default_rng(7)
    with compiled.session(2) as session:
        rows = [Slots(module), Slots(module)]
        held = np.array([0, 0])
        for counts in calls:
            width = max(counts)
            places = np.zeros((2, width), np.int64)
            for i, n in enumerate(counts):
                new = int(rng.integers(0, 3)) if held[i] else n
                old = np.sort(rng.choice(held[i], n - min(new, n), replace=False))
                its = [*old, *range(held[i], held[i] + min(new, n))]
                places[i, :n] = its
                held[i] += min(new, n)
            tokens = rng.integers(0, MASK, places.shape)
            got = session.write(tokens, moved(places), counts)
            for i, n in enumerate(counts):
                if n:
                    want = rows[i].write(tokens[i, :n], places[i, :n])
                    assert np.abs(got[i, :n] - want).max() < 1e-4 * np.abs(want).max()
            assert session.lengths.tolist() == held.tolist()
        _holds(session, rows, held)
        session.rewind(held - [5, 3])  # tokens of the end lie anywhere
        session.select([1, 0])
        for row in rows:
            row.kept = [
                {p: x for p, x in k.items() if p < len(k) - (5, 3)[rows.index(row)]}
                for k in row.kept
            ]
        ends = (held - [5, 3])[::-1]
        tokens = rng.integers(0, MASK, (2, 2))
        places = np.stack([[1, ends[0]], [2, ends[1]]])
        got = session.write(tokens, places)
        for i, row in enumerate(rows[::-1]):
            want = row.write(tokens[i], places[i])
            assert np.abs(got[i] - want).max() < 1e-4 * np.abs(want).max()


def _holds(session, rows, held):
    """What the buffers hold at each position."""
    buffers = session._core.backend.buffers()
    for i, row in enumerate(rows):
        slots = np.argsort(buffers["kv.pos"][i])[-held[i] :]
        assert buffers["kv.pos"][i][slots].tolist() == list(range(held[i]))
        for layer, kept in enumerate(row.kept):
            want = torch.stack([kept[p][0] for p in range(held[i])], 1).numpy()
            got = buffers[f"kv.{layer}.k"][i][:, slots]
            assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_any_tokens_may_be_written(filler, target):
    module, made = filler
    law_any_slots(module, made[target])


def test_tokens_elsewhere_are_seen(filler):
    """The control: the tokens of a call one place further down than they are said to be."""
    module, made = filler

    def moved(places):
        return np.where(places > 0, places - (np.diff(places, prepend=-1) > 1), places)

    with pytest.raises(AssertionError):
        law_any_slots(module, made["eager"], moved)


def test_tokens_that_lie_together_stay_where_they_are(filler, monkeypatch):
    """Nothing is copied for a block, nor for what has shrunk at its end; a call of all brings a row in order."""
    _, made = filler
    moves = []
    with made["eager"].session() as session:
        backend = session._core.backend
        own = backend.rearrange
        monkeypatch.setattr(backend, "rearrange", lambda *a: (moves.append(len(a[0])), own(*a)))
        state = session.observer(CanvasState)
        session.run([list(range(20))])
        session.write([[1, 2, 3]], 8)
        session.write([[1, 2]], [[18, 19]])
        assert not moves
        session.write([[1, 2, 3, 4]], [[3, 9, 18, 19]])
        assert moves == [2] and state.places[0].tolist() != list(range(20))
        session.write([[1, 2, 3]], [[9, 18, 19]])
        assert moves == [2]
        session.write([list(range(20))], 0)
        assert moves == [2] and state.places[0].tolist() == list(range(20))


def test_a_block_leaves_the_others_as_they_were(filler):
    _, made = filler
    tokens = np.random.default_rng(3).integers(0, MASK, (1, 24))
    with made["eager"].session() as session:
        session.run(tokens)
        before = {n: a.copy() for n, a in session._core.backend.buffers().items()}
        session.write(tokens[:, 8:12] * 0, 8)
        apart = [i for i in range(24) if not 8 <= i < 12]
        for name, now in session._core.backend.buffers().items():
            axis = -2 if now.ndim == 4 else 1
            assert np.array_equal(before[name].take(apart, axis), now.take(apart, axis))
            assert name == "kv.pos" or not np.array_equal(before[name][:, :, 8:12], now[:, :, 8:12])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda s: s.write([[1, 2]], 7),
            "token 7 of row 0 is written first, but the row holds 6 tokens; give 0..6",
        ),
        (lambda s: s.write([[1, 2]], [[4, 4]]), "the places of row 0, at [4, 4], must rise"),
        (lambda s: s.write([[1, 2]], [[-1, 4]]), "the places of row 0, at [-1, 4], must rise"),
        (
            lambda s: s.write([[1, 2]], [[5, 7]]),
            "row 0 holds 6 tokens, so token 7 cannot be written without token 6",
        ),
        (lambda s: s.write([[1, 2]], [[3]]), "at has shape [1, 1]; give [1, 2], as tokens have"),
        (
            lambda s: s.write([[1, 2]], 0, None, [[2]]),
            "rows name columns 2..2 of a call of 2; give 0..1",
        ),
        (lambda s: s.write([[1, 2]], 0, None, [1]), "rows have shape [1]; give [1, N]"),
        (lambda s: s.write([[1] * 200], 0), "row 0 would hold 200 tokens; max_context is 96"),
        (lambda s: s.run([[1]], run_layers=[True]), "run_layers and threshold need a model"),
        (lambda s: s.edit(0, 1, [2]), "this model cannot edit"),
    ],
)
def test_a_wrong_call_is_named_and_changes_nothing(filler, call, words):
    with filler[1]["eager"].session() as session:
        want = session.run([[1, 2, 3, 4, 5, 6]])
        with pytest.raises(accel.InputError) as error:
            call(session)
        assert words in str(error.value) and session.length == 6
        assert np.allclose(session.write([[1, 2, 3, 4, 5, 6]], 0), want, atol=1e-5)


# Ends


def test_rows_end_where_they_would_in_any_loop(filler):
    """At eos, at the limit, at the end of the context; nothing comes after, and a batch changes nothing."""
    _, made = filler
    with with_loop(made["eager"], "dllm-lowconf", block=8) as model:
        (whole,) = model.generate(prompts()[0], max_new_tokens=20, eos=[]).tokens
        end = whole[9]
        out = model.generate([prompts()[0], prompts()[1]], max_new_tokens=20, eos=[end])
        first = whole.index(end)
        assert out.tokens[0] == whole[: first + 1] and out.stats["finish"][0] == "eos"
        assert model.generate(prompts()[1], max_new_tokens=20, eos=[end]).tokens[0] == out.tokens[1]
        long = np.arange(LONGEST - 5) % MASK
        out = model.generate([long.tolist(), [1, 2]], max_new_tokens=9, eos=[])
        assert [len(t) for t in out.tokens] == [5, 9] and out.stats["finish"] == [
            "context",
            "length",
        ]
        assert model.generate(np.arange(LONGEST) % MASK, max_new_tokens=9).stats["finish"] == [
            "context"
        ]


def test_a_stream_that_is_left_leaves_a_model_to_go_on_with(filler):
    _, made = filler
    with with_loop(made["eager"], "dllm-threshold", "dllm-blockcache", block=8) as model:
        whole = model.generate(prompts()[0], max_new_tokens=20, eos=[]).tokens[0]
        with model.stream(prompts()[0], max_new_tokens=20, eos=[]) as stream:
            assert [next(stream) for _ in range(3)] == whole[:3]
        assert list(model.stream(prompts()[0], max_new_tokens=20, eos=[])) == whole


def test_a_loop_that_ends_early_leaves_the_session_with_its_rows(filler):
    from accel.runtime.canvas.whole import Whole
    from accel.runtime.decode.context import DecodeContext
    from accel.runtime.decode.row import Row
    from accel.runtime.loop.dllm_lowconf import DllmLowconf
    from accel.runtime.sample.standard import Standard

    _, made = filler
    with made["onnx"].session(2) as session:
        rows = [
            Row(np.array(p), Standard(), np.random.default_rng(0), limit=9, max_context=LONGEST)
            for p in prompts()
        ]
        context = DecodeContext(methods={"canvas": Whole()})
        came = DllmLowconf(block=4).tokens(session, rows, context)
        for _ in range(5):
            next(came)
        came.close()
        assert session.lengths.tolist() == [r.prompt.size + max(0, len(r.tokens) - 1) for r in rows]


# What is refused


def refused(model, recipe, kind=accel.RecipeError):
    with pytest.raises(kind) as error:
        accel.optimize(model, recipe, target="eager", max_context=64)
    return str(error.value)


def test_a_loop_for_another_kind_of_model_is_refused():
    filler, causal = Filler(False).eval(), models.llama()
    assert (
        "autoregressive generates token by token, and Filler is a masked-diffusion model"
        in refused(filler, "base")
    )
    axis = find_axes()["loop"]
    fills = [n for n in axis.names() if axis.method(n).masked_diffusion and n != "da-transformer"]
    assert f"one of {', '.join(fills)}" in refused(filler, {})
    assert "loop = speculative generates token by token" in refused(filler, "prompt-lookup")
    assert (
        "loop = prophet decodes masked-diffusion models, and LlamaForCausalLM has no mask token"
        in refused(causal, "prophet")
    )
    causal.config.mask_token_id = 3
    assert (
        "loop = prophet decodes masked-diffusion models, and LlamaForCausalLM attends only to earlier tokens"
        in refused(causal, "prophet")
    )
    filler.config = SimpleNamespace()
    assert "must have config.mask_token_id" in refused(filler, "base", accel.CaptureError)
    filler.config.mask_token_id = 99
    assert "mask_token_id is 99, and its logits are of 41 tokens" in refused(
        filler, "prophet", accel.CaptureError
    )


@pytest.mark.parametrize(
    ("recipe", "loop"),
    [
        ({"canvas": {"use": "dkv-cache"}}, "autoregressive"),
        ({"loop": {"use": "jacobi"}, "canvas": {"use": "dkv-cache"}}, "jacobi"),
    ],
)
def test_a_canvas_without_a_loop_that_fills_masks_is_refused(recipe, loop):
    said = refused(Filler(False), recipe)
    assert f"computes, and loop = {loop} fills no masks; leave [canvas] out" in said
    assert "ccd, dllm-eb" in said


@pytest.mark.parametrize(
    "other", ["snapkv", "kivi-4", "quest", "paged-prefix", "calm", "gemfilter", "batch-invariant"]
)
def test_methods_that_go_by_the_order_of_tokens_are_refused(other):
    assert "cannot be combined with loop = dllm-threshold" in refused(
        Filler(False), ["dllm-threshold", other]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 0}, "loop.dllm-lowconf: block is 0; give at least 1"),
        ({"steps": -1}, "loop.dllm-lowconf: steps is -1; give at least 0"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    assert words in refused(Filler(False), {"loop": {"use": "dllm-lowconf", **options}})


def test_weights_and_rows_of_the_cache_may_be_narrow(filler):
    module, _ = filler
    with accel.optimize(module, {**LOOP, "kv": {"codec": {"use": "kv-int8"}}}, max_context=64) as m:
        assert len(m.generate([5, 6, 7], max_new_tokens=9, eos=[]).tokens[0]) == 9
        assert m.report["grade"] == "approximate"
