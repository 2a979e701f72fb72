"""The draft model that comes with accel, and how it is trained."""

import argparse
import json

import draft
import pytest
import reference_data
import reference_export
import torch
from reference_model import Llama, Shape
from transformers import AutoModelForCausalLM, LlamaForCausalLM

FOLDER = reference_data.REFERENCE / "draft"
TINY = Shape(vocab=40, hidden=8, layers=2, heads=2, kv_heads=1, ffn=6, positions=64, head_dim=4)


@pytest.fixture(scope="module")
def held_out():
    """The bundled model's logits over a window of a held-out file, and the window."""
    window = reference_export.windows(reference_export.load_tokenizer())[3, :512]
    teacher = reference_export.load()
    with torch.no_grad():
        return teacher.head(draft.last_state(teacher, window[None])[0]), window


def stands(model, held_out):
    """The chance that a token drawn from the model stands."""
    want, window = held_out
    with torch.no_grad():
        found = model(window[None]).logits[0]
    return float(torch.minimum(found.softmax(-1), want.softmax(-1)).sum(-1).mean())


def test_it_is_small_and_says_what_the_bundled_model_would(held_out):
    """Of a draft that knows nothing, and of one whose layers do, little stands."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    assert isinstance(model, LlamaForCausalLM) and model.config.tie_word_embeddings
    assert model.num_parameters() < 1e6 and (FOLDER / "model.safetensors").stat().st_size < 2e6
    bundled = json.loads((FOLDER.parent / "config.json").read_text())
    names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    assert all(getattr(model.config, name) == bundled[name] for name in names)
    found = stands(model, held_out)
    told = json.loads((FOLDER / "training.json").read_text())
    assert found > told["runs"][told["shipped"]]["held_out"]["alpha"] - 0.1
    torch.manual_seed(0)
    assert found > 0.5 > 0.3 > stands(LlamaForCausalLM(model.config).eval(), held_out)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    assert stands(model, held_out) < found - 0.1


def test_the_readme_reports_it():
    told = json.loads((FOLDER / "training.json").read_text())
    text = (FOLDER.parent / "README.md").read_text()
    for name, run in told["runs"].items():
        assert (
            f"| {name} | {100 * run['held_out']['alpha']:.1f}% | {100 * run['held_out']['greedy']:.1f}% |"
            in text
        )


def test_the_filter_keeps_what_can_still_be_learnt():
    """A share of the tokens, by how far each is behind the reference, whatever all of them are behind it."""
    rng = torch.Generator().manual_seed(0)
    loss, other = torch.rand(200, generator=rng), torch.rand(200, generator=rng)
    kept = draft.learnable(loss, other, 0.4)
    assert int(kept.sum()) == 80
    assert (loss - other)[kept].min() >= (loss - other)[~kept].max()
    assert torch.equal(kept, draft.learnable(loss, other + 3, 0.4))
    assert draft.learnable(loss, other, 1.0).all()
    assert not torch.equal(kept, draft.learnable(loss, torch.zeros(200), 0.4)), (
        "the reference counts"
    )


@pytest.fixture
def begun(tmp_path):
    """begun(name, …) -> a run over a tiny teacher."""
    torch.manual_seed(0)
    teacher = Llama(TINY).eval()
    states = torch.randn(6, 16, 8)

    class Taught:
        head, half = teacher.embed_tokens.weight.detach(), False

        def __init__(self):
            self.teacher = teacher

        def batch(self, step):
            tokens = torch.arange(32).reshape(2, 16) * (1 + step % 3) % 40
            known = torch.ones(2, 16, dtype=torch.bool)
            known[:, 5] = False
            return (
                tokens,
                known,
                torch.cat([states[step % 3], states[step % 3 + 3]]).reshape(2, 16, 8)[known],
            )

    def make(name, steps=12, reference=None, keep=0.4):
        options = argparse.Namespace(
            out=tmp_path / name, steps=steps, rows=2, rate=1.0, keep=keep, seed=0
        )
        options.out.mkdir(exist_ok=True)
        torch.manual_seed(0)
        shape = Shape(
            vocab=40, hidden=4, layers=2, heads=2, kv_heads=1, ffn=4, positions=64, head_dim=4
        )
        return draft.Run(Taught(), draft.beginning(teacher, shape), options, reference)

    return make


def same(one, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(one.draft.parameters(), other.draft.parameters(), strict=True)
    )


def test_a_run_learns_and_can_be_left(begun):
    whole, left = begun("whole"), begun("left")
    losses = [whole.learn()["kl"] for _ in range(12)]
    assert sum(losses[-3:]) < sum(losses[:3])
    for _ in range(5):
        left.learn()
    left.save()
    again = begun("left")
    assert not same(again, left)
    again.load()
    for _ in range(7):
        again.learn()
    assert same(again, whole) and again.step == 12
    assert same(argparse.Namespace(draft=draft.stored(left.options.out)), left)


def test_all_tokens_kept_is_plain_distillation(begun):
    other = begun("r").draft
    plain, every, some = (
        begun("a"),
        begun("b", reference=other, keep=1.0),
        begun("c", reference=other),
    )
    for run in (plain, every, some):
        for _ in range(4):
            run.learn()
    assert same(plain, every) and not same(plain, some)
