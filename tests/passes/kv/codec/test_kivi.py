"""kivi: its formula, what a session holds of it whichever way tokens come, and graphs that read it."""

import models
import numpy as np
import onnx
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.ops.attention import attention
from accel.ir.recipe import Recipe
from accel.passes import run
from accel.passes.kv.codec import At
from accel.passes.kv.codec._encode import Encode
from accel.passes.kv.codec.kivi import Kivi
from accel.passes.state.head import Head
from accel.runtime.session.state import block_codec as blocks

from ....session_case import session_of
from ....session_ways import oracle, variants

R, GROUP = 8, 4
OPTIONS = {"bits": 2, "group": GROUP, "residual": R}
TOKENS = np.random.default_rng(2).integers(3, 50, (3, 90))
RNG = np.random.default_rng(7)


# The formula, written again


def cut(x, bits, group, axis):
    """(codes, smallest, step) of groups along an axis of x [R,D], in double precision."""
    x = np.moveaxis(x.astype(np.float64), axis, -1)
    parts = x.reshape(x.shape[0], -1, group)
    low, high = parts.min(-1, keepdims=True), parts.max(-1, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), 1e-9)
    codes = np.clip(np.rint((parts - low) / step), 0, 2**bits - 1)
    return [
        np.moveaxis(np.broadcast_to(a, parts.shape).reshape(x.shape), -1, axis)
        for a in (codes, low, step)
    ]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("role", ["k", "v"])
def test_numbers_are_those_of_the_papers_formula(bits, role):
    """Ends of groups are float16 here, which moves them by a thousandth."""
    method = Kivi(bits=bits)
    x = RNG.standard_normal((128, 64)).astype(np.float32) * RNG.uniform(0.1, 5, 64).astype(
        np.float32
    )
    at = At(role, 64)
    parts = method.encode(at, torch.from_numpy(x)[None, None, None])
    back = method.decode(at, parts).numpy()[0, 0]
    codes, low, step = cut(x, bits, 32, 0 if role == "k" else 1)
    want = codes * step + low
    error, least = (np.square(y - x).mean() ** 0.5 for y in (back, want))
    assert error < (1.05 if bits == 8 else 1.01) * least
    assert (np.abs(back - x) <= step / 2 * 1.01 + np.abs(low) * 2**-10).all()
    if bits == 8:
        assert np.abs(back - x).max() / np.abs(x).max() < 1e-2
    packed = parts[""].numpy().reshape(128, -1)
    mine = np.concatenate([packed >> (bits * i) & (2**bits - 1) for i in range(8 // bits)], -1)
    assert (mine == codes).mean() > (0.8 if bits == 8 else 0.99)


def test_options_that_cannot_be_are_refused():
    for bad in ({"bits": 3}, {"group": 0}, {"residual": 100}, {"residual": 0}):
        with pytest.raises(RecipeError, match="kv.codec.kivi: "):
            Kivi(**bad)


# Sessions


@pytest.fixture(scope="module")
def program(stateful):
    """program(name) -> its program, with caches of floats, and one with blocks of R in 2 bits."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = [shared() if name == "cla" else stateful(name) for _ in range(2)]
            Encode(Kivi(**OPTIONS)).run(made[name][1])
        return made[name]

    return get


def shared():
    """Four layers, each second one reads the keys and values of the one before."""
    program = capture(models.cla(), max_context=128)
    steps = pipeline()
    run(program, steps[: 1 + next(i for i, s in enumerate(steps) if isinstance(s, Head))])
    return program


def session(program, batch=1):
    return session_of(program, batch)


def state(session):
    return {n: t.clone() for n, t in session._core.backend._state.items()}


def close(a, b, tolerance=2e-4):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=1e-3)


def by_hand(plain, held):
    """A session over floats that holds, in their places, what is read of the other's codes; by the formula."""
    other = session(plain, held.batch)
    other._core.lengths = held.lengths
    width = int(held.lengths.max())
    other._core.backend.resize(-(-(width + 16) // 256) * 256)
    found, into = state(held), other._core.backend._state
    for row, n in enumerate(held.lengths):
        base = int(held.held_from[row])
        into["kv.pos"][row, :n] = torch.arange(n)
        for name, buffer in into.items():
            if name == "kv.pos":
                continue
            buffer[row, :, base:n] = found[name][row, :, : n - base]
            stored = f"kept{name.removeprefix('kv')}"
            for block in range(base // R):
                args = [
                    found[f"{stored}{part}"][row, :, block] for part in ("", ".scale", ".least")
                ]
                buffer[row, :, block * R : block * R + R] = unpacked(
                    *args, name[-1], buffer.shape[3]
                )
    return other


def unpacked(codes, scale, least, role, width):
    """Codes [G,n] of one block -> [G,R,D]."""
    bits = torch.cat([codes.reshape(len(codes), R, -1).int() >> 2 * i & 3 for i in range(4)], -1)[
        ..., :width
    ]
    if role == "k":
        of = [
            x.float().reshape(len(codes), R // GROUP, 1, width).expand(-1, -1, GROUP, -1)
            for x in (scale, least)
        ]
    else:
        count = -(-width // GROUP)
        of = [
            x.float()
            .reshape(len(codes), R, count, 1)
            .expand(-1, -1, -1, GROUP)
            .reshape(len(codes), R, -1)[..., :width]
            for x in (scale, least)
        ]
    scale, least = (x.reshape(len(codes), R, width) for x in of)
    return bits * scale + least


def reads_what_it_holds(plain, held):
    """Ragged rows, stored in part, one of them not at all: the next tokens are those of a cache of the same
    numbers, and those of the first layer, which no codes have touched, are as near to its own as they may be.
    """
    ours, exact = session(held, 3), session(plain, 3)
    for one in (ours, exact):
        one.run(TOKENS[:, :45], [45, 20, 3])
    assert ours.held_from.tolist() == [32, 8, 0]
    theirs = by_hand(plain, ours)
    want, got = state(exact), state(theirs)
    for name in (n for n in want if n.startswith("kv.0.")):
        for row, n in enumerate(ours.lengths):
            base = int(ours.held_from[row])
            close(got[name][row, :, base:n], want[name][row, :, base:n])
            for head in range(want[name].shape[1]):
                if want[name].shape[3] % GROUP == 0 or name.endswith("k"):
                    near(
                        got[name][row, head, :base],
                        want[name][row, head, :base],
                        0 if name[-1] == "k" else 1,
                    )
    close(ours.run(TOKENS[:, 45:49]), theirs.run(TOKENS[:, 45:49]))


def near(got, want, axis):
    if len(want):
        codes, low, step = cut(want.numpy(), 2, GROUP, axis)
        assert (np.abs(got.numpy() - want.numpy()) <= step / 2 * 1.02 + 1e-3).all(), (
            "further off than half a step"
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "plain_latent", "cla"])
def test_what_is_stored_is_what_is_read(program, name):
    reads_what_it_holds(*program(name))


@pytest.mark.parametrize("broken", ["places", "tail"])
def test_a_block_in_another_place_is_caught(program, monkeypatch, broken):
    given = blocks.BlockCodecState.compress_inputs

    def other(self, *args):
        found = given(self, *args)
        return found | {broken: np.maximum(found[broken] - 1, -1)}

    monkeypatch.setattr(blocks.BlockCodecState, "compress_inputs", other)
    with pytest.raises(AssertionError, match="Not equal to tolerance|half a step"):
        reads_what_it_holds(*program("llama"))


def test_fewer_tokens_than_two_blocks_are_exact(program):
    plain, held = program("llama")
    ours, theirs = session(held), session(plain)
    for i in range(2 * R):
        assert np.array_equal(ours.run(TOKENS[:1, [i]]), theirs.run(TOKENS[:1, [i]]))
    assert not np.array_equal(ours.run(TOKENS[:1, [16]]), theirs.run(TOKENS[:1, [16]]))


def test_what_is_stored_goes_by_the_number_of_tokens(program):
    """However they came; of the first layer, whose keys and values no codes have touched, to the last bit but one."""
    _, held = program("llama")
    ways = []
    for step in (1, 3, 17, 60):
        ours = session(held)
        for i in range(0, 60, step):
            ours.run(TOKENS[:1, i : min(i + step, 60)])
        assert ours.held_from.tolist() == [48]
        ways.append(state(ours))
    for other in ways[1:]:
        for name, value in ways[0].items():
            if not name.startswith("kv."):
                assert value.shape == other[name].shape
        assert torch.equal(ways[0]["kept.pos"], other["kept.pos"])
        assert ways[0]["kept.pos"].flatten().tolist() == list(range(48))
        for name in ("kept.0.k", "kept.0.v"):
            assert (ways[0][name] == other[name]).float().mean() > 0.99
            close(ways[0][f"{name}.scale"].float(), other[f"{name}.scale"].float(), 1e-3)


def test_rewinds(program):
    _, held = program("llama")
    ours = session(held, 2)
    ours.run(TOKENS[:2, :45], [45, 9])
    assert ours.held_from.tolist() == [32, 0]
    with pytest.raises(InputError, match=r"cannot rewind row 0 to 31: .* give 32\.\.45, or 0"):
        ours.rewind([31, 9])
    want = ours.fork()
    ours.run(TOKENS[:2, 45:47])
    ours.rewind([45, 9])
    close(ours.run(TOKENS[:2, 50:53]), want.run(TOKENS[:2, 50:53]))
    ours.rewind([0, 12])
    fresh = session(held)
    close(ours.run(TOKENS[:2, :40], [40, 1])[:1], fresh.run(TOKENS[:1, :40]))
    assert ours.held_from.tolist() == [32, 0]
    close(ours.run(TOKENS[:2, 40:43])[:1], fresh.run(TOKENS[:1, 40:43]))


def test_the_newest_block_can_always_be_rewound(program):
    _, held = program("llama")
    ours = session(held)
    for i in range(50):
        ours.run(TOKENS[:1, [i]])
        assert ours.length - ours.held_from[0] >= min(R, ours.length)


def test_each_row_is_as_it_is_alone(program):
    _, held = program("llama")
    together = session(held, 3)
    given = [
        (TOKENS[:, :45], [45, 20, 1]),
        (TOKENS[:, 45:46], None),
        (TOKENS[:, 46:70], [24, 2, 9]),
    ]
    alone = [session(held) for _ in range(3)]
    for tokens, lengths in given:
        logits = together.run(tokens, lengths)
        for row, other in enumerate(alone):
            n = tokens.shape[1] if lengths is None else lengths[row]
            close(logits[row, :n], other.run(tokens[[row], :n])[0])
    assert together.held_from.tolist() == [int(other.held_from[0]) for other in alone]


def test_forks_go_their_own_ways(program):
    _, held = program("llama")
    ours = session(held)
    ours.run(TOKENS[:1, :45])
    before = state(ours)
    other = ours.fork()
    other.run(TOKENS[:1, 45:80])
    other.rewind(0)
    other.run(TOKENS[1:2, :40])
    for name, value in state(ours).items():
        assert torch.equal(value, before[name])


# Graphs


def drive(compiled):
    found = []
    with compiled.session(2) as ours:
        found.append(ours.run(TOKENS[:2, :33], [33, 5]))
        found += [ours.run(TOKENS[:2, i : i + 1]) for i in range(33, 36)]
        found.append(ours.run(TOKENS[:2, 36:40]))
        other = ours.fork()
        found.append(other.run(TOKENS[:2, 40:55]))
        other.close()
        ours.rewind(ours.held_from)
        found.append(ours.run(TOKENS[:2, 60:63]))
        found.append(ours.stats["kv_bytes"])
    return found


def operators(compiled):
    """Of the native step."""
    graph = onnx.load(compiled.artifact.path / "step.native.onnx", load_external_data=False).graph
    return {node.op_type for node in graph.node}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "plain_latent"])
def test_every_graph_gives_what_the_oracle_does(name):
    model = models.make(name, 2)
    recipe = {"kv": {"codec": {"use": "kivi", **OPTIONS}}}
    with accel.optimize(model, recipe, max_context=128, max_batch=2) as compiled:
        want = drive(oracle(compiled))
        for kernels, loaded in variants(compiled, None):
            got = drive(loaded)
            for a, b in zip(got, want, strict=True):
                # a number between two codes may go to either, and then a few rows move
                off = np.abs(np.subtract(a, b))
                assert np.median(off) < 1e-4 * np.abs(b).max(), kernels
            assert got[-1] == want[-1]
        if "native" in compiled.artifact.entries["step"].graphs:
            assert (nodes := operators(compiled)) >= {
                "AttentionGroups"
            } and "DecodeGroups" not in nodes
            assert "Place" in nodes or name == "plain_latent"
        assert "genai" not in compiled.artifact.entries
        assert compiled.report["grade"] == "approximate"


def test_memory_is_its_formula(program):
    """16384 tokens of heads of 64 in kivi-2: no more than 3 bits a number, the newest tokens and positions told."""
    from accel.compiler.assemble import assemble
    from accel.ir.recipe import Recipe

    method = assemble(Recipe.load("kivi-2")).methods["kv.codec"]
    assert {method.bits_of(At(role, 64)) for role in "kv"} == {2.5}
    held = 16384 - 128  # what is not stored at that length
    recent, numbers = 256, 2 * 16384  # slots of a buffer; keys and values of a channel
    heads = 32  # over all layers, whose positions are the same
    positions = 64 * (held + recent) / (heads * 64)
    assert (2.5 * 2 * held + 32 * 2 * recent + positions) / numbers < 3
    _, program = program("llama")
    ours = session(program)
    ours.run(TOKENS[:1, :45])
    taken = sum(t.nbytes for n, t in state(ours).items() if n.startswith("kept."))
    mine = Kivi(**OPTIONS)
    numbers = 2 * 2 * 10 * 32  # layers, heads, channels, tokens
    assert 8 * taken == sum(mine.bits_of(At(role, 10)) * numbers for role in "kv") + 64 * 32


# Refusals


def test_what_does_not_go_with_it_is_refused():
    score = {"score": {"use": "knorm"}, "budget": {"use": "ada-kv"}}
    with pytest.raises(
        RecipeError,
        match="kv.codec = kivi cannot be combined with kv.budget = ada-kv: .*equally many tokens",
    ):
        accel.optimize(models.ARCHITECTURES["llama"](), {"kv": {"codec": {"use": "kivi"}, **score}})


@pytest.mark.long
def test_models_that_it_cannot_serve_are_refused(stateful):
    with pytest.raises(PassError, match="bias by position"):
        Encode(Kivi()).run(stateful("bloom"))
    with pytest.raises(PassError, match="no cache of keys and values"):
        Encode(Kivi()).run(stateful("mamba"))


def test_equal_rows_are_not_promised():
    with pytest.raises(
        RecipeError,
        match="batch-invariant cannot be combined with kv.codec = kivi: .*the same bits",
    ):
        assemble(
            Recipe(tables={"kv.codec": {"use": "kivi"}, "numerics": {"use": "batch-invariant"}})
        )


def test_blocks_are_read_by_every_layer_of_a_shared_cache(program):
    _, held = program("cla")
    nodes = [n for n in held.nodes(attention.default)]
    assert len(nodes) == len(held.facts.layers) and all("kept_k" in n.kwargs for n in nodes)
    assert len([s for s in held.state if s.role == "kept.k"]) < len(nodes)
