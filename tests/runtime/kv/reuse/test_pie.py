"""pie: keys behind an edit are rotated to where they now are; what can be exact is."""

import numpy as np
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.ops.attention import attention
from accel.ir.recipe import Recipe
from accel.passes.kv._shared.shift import Shift
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session.modes import edits

from ....session_case import session_of
from ....session_ways import close, variants

ROPES = [
    "llama",
    "gpt_neox",
    "plain_softmax",
    "qwen3",
]  # halves, a quarter of a head, pairs, keys with a norm


def made(program):
    """A model over a program with the entry, on the eager target."""
    Shift().run(program)
    return CompiledModel(EagerBackend(program), program.facts, program=program)


def tokens_of(model, *shape, seed=0):
    return np.random.default_rng(seed).integers(3, model.facts.vocab_size, shape)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ROPES)
def test_forth_and_back_is_nothing_and_forth_is_the_later_position(stateful, name):
    model = made(stateful(name))
    with model.session() as session:
        session.run(tokens_of(model, 1, 20))
        keys = {
            n: t[:, :, :20].numpy()
            for n, t in session._core.backend._state.items()
            if n.endswith(".k")
        }
        given = {n.replace("kv.", "keys.").removesuffix(".k"): a for n, a in keys.items()}

        def shifted(delta, arrays):
            found = session._core.backend.part(
                "shift", {**arrays, "delta": np.full((1, 20), delta)}
            )
            return {n.replace("turned", "keys"): a for n, a in found.items()}

        for delta in (0, 7, -5):
            forth = shifted(delta, given)
            back = shifted(-delta, forth)
            assert all(np.abs(back[n] - given[n]).max() < 1e-5 for n in given)
            assert delta == 0 or any(np.abs(forth[n] - given[n]).max() > 0.01 for n in given)


def one_layer(program, delta, monkeypatch=None):
    """How far keys and values of the first layer behind an edit are from recomputing; it depends on no other token."""
    model = made(program)
    old = tokens_of(model, 1, 30)
    new = tokens_of(model, 1, 6 + delta, seed=1)
    with model.session() as session, model.session() as again:
        session.run(old)
        session.edit(8, 14, new[0])
        whole = np.concatenate([old[:, :8], new, old[:, 14:]], axis=1)
        again.run(whole)
        assert session.length == whole.shape[1]
        got, want = session._core.backend.buffers(), again._core.backend.buffers()
        end = whole.shape[1] - 1  # the last token is run again
        assert np.array_equal(got["kv.pos"][:, : end + 1], want["kv.pos"][:, : end + 1])
        return max(float(np.abs(got[n] - want[n])[:, :, :end].max()) for n in ("kv.0.k", "kv.0.v"))


@pytest.mark.few(8)
@pytest.mark.parametrize("delta", [-6, -2, 0, 5])
@pytest.mark.parametrize("name", ROPES)
def test_the_first_layer_behind_an_edit_is_recomputing(stateful, name, delta):
    assert one_layer(stateful(name), delta) < 1e-4


def test_a_rotation_the_wrong_way_is_caught(stateful, monkeypatch):
    right = edits._moved
    monkeypatch.setattr(edits, "_moved", lambda s, after, delta: right(s, after, -delta))
    assert one_layer(stateful("llama"), 5) > 0.01


def test_an_edit_at_the_end_is_exact(stateful):
    model = made(stateful("llama"))
    old, new = tokens_of(model, 1, 20), tokens_of(model, 1, 5, seed=1)
    for stop, cut in ((20, 20), (20, 15)):
        with model.session() as session, model.session() as again:
            session.run(old)
            got = session.edit(cut, stop, new[0])
            close(got, again.run(np.concatenate([old[:, :cut], new], axis=1), last_only=True))
    with model.session() as session, model.session() as again:
        session.run(old)
        close(session.edit(12, 20, []), again.run(old[:, :12], last_only=True))
        assert session.length == 12


def test_several_edits_forks_rewinds_and_other_rows(stateful):
    """Near to recomputing, and rows that are not edited are not touched."""
    model = made(stateful("llama"))
    model.facts.max_batch = 2
    held = [tokens_of(model, 30, seed=i).tolist() for i in range(2)]
    with model.session(2) as session:
        session.run(np.array(held))
        for start, stop, count, row in (
            (3, 5, 6, 0),
            (20, 20, 3, 0),
            (10, 18, 2, 1),
            (25, 31, 1, 0),
        ):
            new = tokens_of(model, count, seed=start).tolist()
            got = session.edit(start, stop, new, row=row)
            held[row][start:stop] = new
            assert session.lengths.tolist() == [len(h) for h in held] and np.isfinite(got).all()
            assert not got[1 - row].any()
        assert np.array_equal(session.observer(edits.Edits).log.ids[0, : len(held[0])], held[0])
        with session.fork() as other:
            other.edit(0, 1, [5, 6])
            assert other.lengths[0] == session.lengths[0] + 1
        session.rewind([3, 10])
        with model.session(2) as again:
            again.run(np.array([h[:10] for h in held]), [3, 10])
            more = tokens_of(model, 2, 4, seed=9)
            close(session.run(more), again.run(more))


def test_copies_of_a_row_share_nothing_behind_an_edit(stateful):
    model = made(stateful("llama"))
    old = tokens_of(model, 1, 20)
    with model.session() as session, model.session() as alone:
        for one in (session, alone):
            one.run(old)
        session.select([0, 0])
        for one in (session, alone):
            one.edit(6, 8, [5])
        first, _ = session._core.kin.slots(np.array([1, 0]), session.lengths, 0)
        assert first <= 6  # as ONNX Runtime's sessions copy them
        session.select([1, 0])
        got = session.run([[7], [7]])
        close(got[1], alone.run([[7]])[0])
        with model.session() as plain:
            close(got[0], plain.run([[*old[0], 7]])[0, -1:])


def test_an_edit_that_fails_leaves_all_as_it_was(stateful, monkeypatch):
    model = made(stateful("llama"))
    old = tokens_of(model, 1, 20)
    with model.session() as session, model.session() as again:
        session.run(old)
        again.run(old)
        step = session._core.backend.step

        def fails(tokens, *rest):
            if tokens.shape[1] == 1:
                raise RuntimeError("out of luck")
            return step(tokens, *rest)

        monkeypatch.setattr(session._core.backend, "step", fails)
        with pytest.raises(RuntimeError, match="luck"):
            session.edit(4, 6, [7, 8, 9])
        monkeypatch.undo()
        assert session.length == 20
        close(session.run(old[:, :3]), again.run(old[:, :3]))
        for one in (session, again):  # tokens are known again, too
            one.rewind(20)
        close(session.edit(4, 6, []), again.edit(4, 6, []))
        close(session.edit(1, 16, []), again.edit(1, 16, []))


def test_what_makes_no_sense_is_named(stateful):
    model = made(stateful("llama"))
    with model.session() as session:
        session.run(tokens_of(model, 1, 10))
        for args, words in (
            ((3, 2, [5]), "not a span of row 0"),
            ((0, 11, [5]), "holds 10 tokens"),
            ((0, 10, []), "use rewind"),
            ((0, 1, [-1]), "token"),
            ((0, 1, [[5]]), "takes"),
            ((0, 0, [5] * 119), "max_context is 128"),
            ((0, 1, [5], 1), "rows 0..0"),
            ((0, 1.5, [5]), "stop = 1.5 .*give an integer"),
            (("0", 1, [5]), "start = '0' .*give an integer"),
            ((0, 1, [5], None), "row = None .*give an integer"),
        ):
            with pytest.raises(InputError, match=words):
                session.edit(*args)
        assert session.length == 10
    with pytest.raises(InputError, match="kv.reuse = pie"):
        session_of(stateful("llama")).edit(0, 1, [5])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "are not rotated"),
        ("plain_latent", "are not rotated"),
        ("bloom", "bias by position"),
        ("falcon_h1", "recurrent.*which cannot be rotated"),
        ("mamba", "recurrent"),
    ],
)
def test_models_whose_keys_cannot_move_are_refused(stateful, name, reason):
    with pytest.raises(PassError, match=reason):
        Shift().run(stateful(name))


def test_rotations_that_do_not_add_up_are_refused(stateful):
    program = stateful("llama")
    rotation = next(n for n in program.nodes(attention.default)).args[1].args[1]
    cos = rotation.args[2]
    program.params[cos.target] = program.params[cos.target] ** 2
    with pytest.raises(PassError, match="do not compose to one"):
        Shift().run(program)


def test_a_common_factor_is_taken_off(stateful):
    """As YaRN has it: on both tables, so on the keys already."""
    program, plain = stateful("llama"), stateful("llama")
    rotation = next(n for n in program.nodes(attention.default)).args[1].args[1]
    for table in rotation.args[2:4]:
        program.params[table.target] = program.params[table.target] * 1.2
    given = {"delta": torch.full((1, 3), 4)}
    for layer in (0, 1):
        given[f"keys.{layer}"] = torch.randn(
            1, 2, 3, 10, generator=torch.Generator().manual_seed(layer)
        )
    Shift().run(program), Shift().run(plain)
    a, b = program.run("shift", given), plain.run("shift", given)
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)


@pytest.mark.parametrize(
    ("axis", "use"), [("kv.score", "knorm"), ("kv.codec", "kv-int8"), ("depth", "calm")]
)
def test_what_it_cannot_go_with_is_refused(axis, use):
    recipe = Recipe(name="both", tables={"kv.reuse": {"use": "pie"}, axis: {"use": use}})
    with pytest.raises(RecipeError, match=f"kv.reuse = pie cannot be combined with {axis} = {use}"):
        assemble(recipe)


@pytest.mark.long
def test_an_artifact_edits_as_the_eager_target_does(build):
    model = build("llama").model
    built = accel.optimize(model, "pie", max_context=256, max_batch=2)
    eager = accel.optimize(model, "pie", target="eager", max_context=256, max_batch=2, verify=False)
    tokens = tokens_of(eager, 2, 40)
    with eager.session(2) as oracle:
        oracle.run(tokens)
        want = [
            oracle.edit(5, 9, tokens[1, :7]),
            oracle.edit(2, 30, [4], row=1),
            oracle.run(tokens[:, :3]),
        ]
    for _, loaded in variants(built):
        with loaded.session(2) as session:
            session.run(tokens)
            got = [
                session.edit(5, 9, tokens[1, :7]),
                session.edit(2, 30, [4], row=1),
                session.run(tokens[:, :3]),
            ]
            for a, b in zip(got, want, strict=True):
                close(a, b)
    assert built.report["grade"] == "approximate"
    built.close()
