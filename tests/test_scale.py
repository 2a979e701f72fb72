"""Weights are streamed: what a checkpoint holds is read as it is needed, and never changes by that."""

import gc
import json
import weakref
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from accel import CaptureError, optimize
from accel.compiler.load.shards import INDEX, SINGLE
from accel.compiler.load.source import open_source
from accel.ir import weights as storage
from accel.ir.capture.capture import capture
from accel.ir.capture.examples import example
from accel.ir.weights import Pages, Stored, Weights, reading


def mixtral():
    """Its checkpoint holds each expert alone; transformers fuses them as it loads them."""
    return models.random(
        "mixtral", vocab_size=61, hidden_size=24, intermediate_size=28, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64,
    )  # fmt: skip


MAKERS = {n: models.ARCHITECTURES[n] for n in ("llama", "gpt2", "gemma2")} | {"mixtral": mixtral}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(name, dtype, sharded) -> a checkpoint folder of two layers."""
    made = {}

    def get(name="llama", dtype=torch.float32, sharded=False) -> Path:
        key = (name, dtype, sharded)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            with models.layers(2):
                model = MAKERS[name]().to(dtype)
            model.save_pretrained(made[key], max_shard_size="30KB" if sharded else "1GB")
            assert (made[key] / INDEX).is_file() == sharded
        return made[key]

    return get


def logits(model, tokens, stored=None):
    with torch.no_grad(), reading(stored or {}):
        return model(input_ids=tokens, use_cache=False).logits


def reference(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


# Loading


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_streamed_model_is_the_one_that_transformers_loads(saved, name, sharded, dtype):
    path = saved(name, dtype, sharded)
    loaded, want = open_source(path).load(), reference(path)
    tokens = example(2, 9, 61)[0]
    assert torch.equal(logits(loaded.model, tokens, loaded.stored), logits(want, tokens))
    assert loaded.model.generation_config.eos_token_id == want.generation_config.eos_token_id
    buffers = dict(loaded.model.named_buffers())
    assert all(torch.equal(buffers[n], b) for n, b in want.named_buffers())
    assert all(t in loaded.stored for t in loaded.model.parameters())
    if dtype is not torch.float32:
        stale = logits(loaded.model, tokens)
        assert not torch.equal(stale, logits(want, tokens)), "stand-ins hold nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_transformers_writes_into_a_weight_is_kept(saved, monkeypatch, dtype):
    def double(self, *args, real=LlamaForCausalLM.tie_weights, **kwargs):
        real(self, *args, **kwargs)
        self.lm_head.weight.data.mul_(2)

    path, tokens = saved("llama", dtype), example(2, 9, 61)[0]
    plain = logits(reference(path), tokens)
    monkeypatch.setattr(LlamaForCausalLM, "tie_weights", double)
    want = logits(reference(path), tokens)
    loaded = open_source(path).load()
    assert torch.equal(logits(loaded.model, tokens, loaded.stored), want)
    assert not torch.equal(want, plain)
    assert loaded.model.lm_head.weight not in loaded.stored


def test_pages_that_are_given_back_are_read_again(saved, monkeypatch):
    path, tokens = saved(), example(2, 9, 61)[0]
    given = []
    monkeypatch.setattr(Pages, "LIMIT", 1 << 12)
    real = Pages.release
    monkeypatch.setattr(Pages, "release", lambda self: given.append(real(self)))
    loaded = open_source(path).load()
    got = [logits(loaded.model, tokens, loaded.stored) for _ in range(2)]
    assert len(given) > 4
    assert all(torch.equal(g, logits(reference(path), tokens)) for g in got)


# Capture and build


@pytest.mark.long
def test_the_program_of_a_half_checkpoint_is_that_of_its_float32_copy(saved, tmp_path):
    half = saved("llama", torch.bfloat16, sharded=True)
    reference(half).save_pretrained(tmp_path)
    programs = []
    for path in (half, tmp_path):
        loaded = open_source(path).load()
        programs.append(capture(loaded.model, stored=loaded.stored))
    assert programs[0].text() == programs[1].text()
    tokens, positions = example(2, 11, 61)
    got, want = (
        p.run("step", {"tokens": tokens, "positions": positions})["logits"] for p in programs
    )
    assert torch.equal(got, want)
    items = [programs[0].params.stored(n) for n in programs[0].params]
    weights = [s for s in items if s.source.dtype is torch.bfloat16]
    assert len(weights) > 10 and all(s.blank.dtype is torch.float32 for s in weights)


class Live:
    """Bytes of the tensors that reading made and that are still alive, at most."""

    def __init__(self, monkeypatch):
        self.most, self.alive, real = 0, weakref.WeakSet(), Stored.read

        def read(stored):
            value = real(stored)
            if value.data_ptr() != stored.source.data_ptr():
                self.alive.add(value)
            self.most = max(self.most, sum(t.nbytes for t in self.alive))
            return value

        monkeypatch.setattr(Stored, "read", read)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["base", "float16"])
def test_a_build_holds_few_weights_at_a_time(saved, monkeypatch, recipe):
    """Beside those that checks keep, up to HELD bytes."""
    path = saved("llama", torch.bfloat16, sharded=True)
    want = reference(path)
    monkeypatch.setattr(storage, "HELD", 0)
    live = Live(monkeypatch)
    with optimize(path, recipe, max_context=64) as compiled:
        assert any("bfloat16" in note for note in compiled.report["notes"])
        tokens = example(1, 9, 61)[0]
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        torch.testing.assert_close(
            got, logits(want, tokens), atol=1e-4 if recipe == "base" else 2e-2, rtol=1e-3
        )
        gc.collect()
        assert str(path) not in Path("/proc/self/maps").read_text(), "the checkpoint stays mapped"
    total = sum(p.nbytes for p in want.parameters())
    largest = max(p.nbytes for p in want.parameters())
    assert largest <= live.most <= 4 * largest < 0.5 * total


def test_what_a_check_holds_has_an_end(monkeypatch):
    some = Weights({i: Stored(torch.ones(64).half(), (torch.Tensor.float,)) for i in "abc"})
    monkeypatch.setattr(storage, "HELD", 600)  # two of 256 bytes
    with some.read_once():
        read = [some[i] for i in "abcabc"]
        assert [read[i] is read[i + 3] for i in range(3)] == [True, True, False]
    assert some["a"] is not read[0], "afterwards each reading is a new one"


def test_weights_held_all_at_once_are_seen(monkeypatch):
    some = Weights({str(i): Stored(torch.ones(64).half(), (torch.Tensor.float,)) for i in "abc"})
    live = Live(monkeypatch)
    for name in some:
        some[name].sum()
    assert live.most == 256
    held = list(some.values())
    assert live.most == 256 * len(held)


def test_derived_parameters_are_read_through(monkeypatch):
    weights = Weights({"w": torch.arange(6.0).reshape(2, 3)})
    weights.derive("t", "w", torch.t)
    weights.derive("h", "t", torch.Tensor.half)
    weights["w"] = torch.zeros(1)  # what was derived keeps its source
    assert torch.equal(weights["h"], torch.arange(6.0).reshape(2, 3).t().half())
    assert weights.blank("h").shape == (3, 2) and weights.blank("h").dtype is torch.float16
    assert weights.nbytes == 4 + 24 + 12


# Checkpoints that are not whole


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def drop(name):
    return lambda tensors: tensors.pop(name)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def resize(tensors):
    tensors["model.norm.weight"] = torch.ones(7)


def retype(path):
    """A scale as a power of two, which safetensors knows and transformers' models do not have."""
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(48).to(torch.float8_e8m0fnu)
    save_file(tensors, path, {"format": "pt"})


FIRST = "model-00001-of"
BROKEN = {
    "a missing shard": (True, lambda f: shard(f).unlink(), "lacks model-00001-of.*lists for"),
    "a cut shard": (True, lambda f: cut(shard(f)), "model-00001-of.* is cut or damaged"),
    "an empty shard": (True, lambda f: shard(f).write_bytes(b""), "model-00001-of.* is cut"),
    "a header of no length": (False, lambda f: (f / SINGLE).write_bytes(b"\xff" * 99), "is cut"),
    "a tensor that is not in its shard": (
        True,
        lambda f: edit(shard(f), drop(placed(f))),
        "model-00001-of.* lacks the tensor",
    ),
    "an index that is none": (True, lambda f: (f / INDEX).write_text("[]"), "is not an index"),
    "a shard elsewhere": (
        True,
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}})),
        "lacks ../x.safetensors",
    ),
    "a missing tensor": (
        False,
        lambda f: edit(f / SINGLE, drop("model.layers.1.mlp.up_proj.weight")),
        r"lacks 1 of LlamaForCausalLM's tensors: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "another shape": (
        False,
        lambda f: edit(f / SINGLE, resize),
        r"model\.norm\.weight is \[7\] in the checkpoint and \[48\] in LlamaForCausalLM",
    ),
    "another type": (
        False,
        lambda f: retype(f / SINGLE),
        "model.safetensors: model.norm.weight is of the type F8_E8M0, and accel reads F64, F32",
    ),
    "other names": (True, lambda f: (f / INDEX).unlink(), f"neither {SINGLE} nor {INDEX}"),
}


def shard(folder):
    return next(folder.glob(f"{FIRST}*"))


def placed(folder):
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(n for n, file in places.items() if file.startswith(FIRST))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_is_named(tmp_path, monkeypatch, name):
    sharded, damage, words = BROKEN[name]
    models.make("llama", 2).save_pretrained(tmp_path, max_shard_size="30KB" if sharded else "1GB")
    open_source(tmp_path).load()  # whole
    damage(tmp_path)
    with pytest.raises(CaptureError, match=words):
        open_source(tmp_path).load()
