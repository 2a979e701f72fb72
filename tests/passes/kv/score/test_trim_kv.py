"""trim-kv: what its trained part must hold, how it is trained, and what is refused."""

import matrix
import numpy as np
import pytest
import torch
from reference_data import REFERENCE
from safetensors.torch import load_file, save_file

import accel
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.soft import Soft, SoftRun
from accel.ir.errors import PassError
from accel.ir.trained import Likeness
from accel.passes.calibrate import feeds
from accel.passes.kv.score.trim_kv import TrimKV
from accel.passes.trained import like_weights, sample, write

from ....kv_case import evicting, held, kept, recipe, state
from ....session_ways import close, singles

OPTIONS = TrainOptions(rate=1e-2, minutes=1.0, budget=4, pressure=1.0, inner=8, seed=0, length=24)


@pytest.fixture
def gates(stateful, tmp_path):
    """gates(b2=…) -> the file of random gates for conftest's llama, whose betas go by b2 where it is given."""

    def make(b2=None, **changes):
        program, file = stateful("llama"), tmp_path / "gates.safetensors"
        soft = Soft(program, TrimKV())
        parts = soft.start(8, 0)
        generator = torch.Generator().manual_seed(1)
        for part in parts.values():
            part["b2"].copy_(torch.randn(part["b2"].shape, generator=generator))
            if b2 is not None:
                part["w2"].zero_()
                part["b2"].fill_(b2)
            part |= changes
        write(soft.method, file, parts, sample(program, soft.keys), {})
        return str(file)

    return make


def tables(file, kept=12):
    found = recipe("knorm", kept)
    found["kv.when"] = {"use": "every", "tokens": 5}
    return {**found, "kv.score": {"use": "trim-kv", "trained": file}}


def test_gates_of_one_rate_are_a_window(stateful, gates):
    case = evicting(stateful("llama"), tables(gates(b2=2.0)))
    tokens, session = case.tokens(1, 40), case.session(1)
    for i in range(40):
        session.run(tokens[:, [i]])
        assert held(session) <= 12 + 4
    for pos in kept(session).values():
        newest = np.arange(int(pos.max()) - 11, int(pos.max()) + 1)
        assert (pos == newest).all()
    other = evicting(stateful("llama"), tables(gates())).session(1)
    other.run(tokens)
    other.run(tokens[:, :1])
    assert any(len(set(map(tuple, pos[0]))) > 1 for pos in kept(other).values()), "heads differ"


@pytest.mark.long
def test_a_budget_beyond_the_text_loses_nothing(stateful, gates):
    tokens = np.random.default_rng(0).integers(3, 60, (1, 30))
    whole = evicting(stateful("llama"), recipe("knorm", 1 << 20)).session(1)
    mine = evicting(stateful("llama"), tables(gates(), kept=1 << 20)).session(1)
    close(singles(mine, tokens), singles(whole, tokens))
    few = evicting(stateful("llama"), tables(gates(), kept=4)).session(1)
    with pytest.raises(AssertionError):
        close(singles(few, tokens), singles(whole, tokens))


def test_what_was_noted_stays_with_its_token(stateful, gates):
    """Whatever has been kept since, a slot's note is that of its own position, of each head."""
    case = evicting(stateful("llama"), tables(gates()))
    tokens = case.tokens(2, 23)
    once = evicting(stateful("llama"), tables(gates(), kept=1 << 20)).session(2)
    once.run(tokens)
    session = case.session(2)
    for part in np.split(tokens, [9, 10, 17], axis=1):
        session.run(part)
    first, full, now = session.held_from, state(once), state(session)
    for layer, pos in kept(session).items():
        want, found = full[f"note.{layer}.recent"], now[f"note.{layer}.kept"]
        for b, g, slot in np.argwhere(pos >= 0):
            if layer == 0:  # deeper ones saw what had been dropped
                close(found[b, g, slot], want[b, g, pos[b, g, slot]])
        assert (pos >= 0).any() and first.min() > 0
    assert np.ptp(full["note.0.recent"][:, :, :23]) > 0.1


def test_a_rewound_token_is_noted_anew(stateful, gates):
    case = evicting(stateful("llama"), tables(gates(), kept=8))
    tokens = case.tokens(1, 30)
    session, straight = case.session(1), case.session(1)
    session.run(tokens[:, :10])
    session.run(tokens[:, 20:23])
    session.rewind(10)
    straight.run(tokens[:, :10])
    close(singles(session, tokens[:, 10:20]), singles(straight, tokens[:, 10:20]))


# Training


def test_gates_that_forget_nothing_change_nothing(stateful):
    program = stateful("llama")
    soft = Soft(program, TrimKV())
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    plain, none = soft.logits(tokens)
    with torch.no_grad():
        want = program.run("step", feeds(program, "step", tokens))["logits"]
    torch.testing.assert_close(plain, want)
    assert not none
    parts = soft.start(8, 0)
    for part in parts.values():
        part["b2"].fill_(60.0)
    torch.testing.assert_close(soft.logits(tokens, parts, 100)[0], plain)
    for part in parts.values():
        part["b2"].fill_(0.0)
    found, over = soft.logits(tokens, parts, 1)
    assert (found - plain).abs().max() > 1e-3 and over > 0


@pytest.mark.long
def test_training_learns_and_can_be_left(stateful, tmp_path):
    def begun(name):
        soft = Soft(stateful("llama"), TrimKV())
        return SoftRun(soft, soft.start(8, 0), OPTIONS, tmp_path / name)

    ids = torch.randint(3, 60, (2, 25), generator=torch.Generator().manual_seed(0))
    known = torch.ones(2, 24)
    whole, first = begun("a"), begun("b")
    losses = [whole.learn(ids, known) for _ in range(12)]
    assert losses[-1]["excess"] < losses[0]["excess"]
    before = begun("c").tensors
    assert all((a != b).any() for a, b in zip(whole.tensors, before, strict=True)), (
        "each part learns"
    )
    for _ in range(5):
        first.learn(ids, known)
    first.save()
    second = begun("b")
    second.load()
    for _ in range(7):
        second.learn(ids, known)
    for a, b in zip(whole.tensors, second.tensors, strict=True):
        torch.testing.assert_close(a, b)


# What is refused


def test_what_was_not_trained_for_this_is_refused(stateful, gates, tmp_path):
    file = gates()
    tensors = load_file(file)

    def refused(words, changed=None, metadata=None):
        other = tmp_path / "other.safetensors"
        if changed is not None:
            told = {"method": "trim-kv", "model": model, **(metadata or {})}
            save_file(changed, other, told)
        with pytest.raises(PassError, match=words):
            evicting(stateful("llama"), tables(str(other)))

    program = stateful("llama")
    model = sample(program, Soft(program, TrimKV()).keys)
    refused("does not exist.*train it")
    save_file(tensors, tmp_path / "other.safetensors", {"method": "trim-kv", "model": model})
    evicting(stateful("llama"), tables(str(tmp_path / "other.safetensors")))  # the control
    refused("'lagkv'", tensors, {"method": "lagkv"})
    refused("another model", tensors, {"model": "[0.5, 0.25]"})
    refused("another model", tensors, {"model": "nonsense"})
    refused("1.w2 of size", {n: t for n, t in tensors.items() if n != "1.w2"})
    refused(
        "0.w1 of size", {n: t[:, :3].contiguous() if n == "0.w1" else t for n, t in tensors.items()}
    )
    (tmp_path / "other.safetensors").write_bytes(b"no file of tensors")
    refused("not a complete safetensors file")
    with pytest.raises(
        PassError, match="the bundled file was trained for another model|does not exist"
    ):
        evicting(stateful("llama"), {**tables(""), "kv.score": {"use": "trim-kv"}})


def test_a_model_is_known_in_any_type_and_near_it_in_four_bits():
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(0))
    told = str([round(float(x), 6) for x in numbers])
    step = (numbers.max() - numbers.min()) / 15
    for changed, how in (
        (numbers.bfloat16(), Likeness.SAME),
        ((numbers / step).round() * step, Likeness.NEAR),
        (numbers.flip(0), Likeness.OTHER),
        (numbers[:9], Likeness.OTHER),
    ):
        assert like_weights(told, str([float(x) for x in changed])) is how


@pytest.mark.long
def test_onnx_equals_the_oracle():
    outcome = matrix.Matrix().run(
        matrix.Case("llama", (("kv.score", "trim-kv"), ("weights", "int8")))
    )
    assert outcome.kind == "equal", outcome.why


@pytest.mark.long
def test_what_comes_with_accel_is_for_the_bundled_model():
    with accel.optimize(REFERENCE, "trim-kv", target="eager") as model:
        with model.session(1) as session:
            session.run(np.arange(3, 83)[None])
            notes = state(session)["note.3.recent"][0, :, :80]
        assert (notes < 0).all() and notes.min() < 4 * notes.max() < 0, (
            "tokens fade at their own rates"
        )
        assert len(model.generate(["def"], max_new_tokens=4).tokens[0]) == 4
