"""Layers that read another's keys and values: one cache for all of them, whatever is done with it."""

import math
from dataclasses import asdict
from inspect import signature

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.layer_summary import groups, summaries
from accel.compiler.pipeline import pipeline
from accel.compiler.smoke.clone import own_logits
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.capture.arch.cla import ClaConfig
from accel.ir.capture.capture import capture
from accel.ir.capture.inspect import inspect
from accel.ir.capture.prepare import prepared
from accel.ir.errors import PassError
from accel.passes import run
from accel.passes.fuse.residual import Residual
from accel.passes.state.cache import Cache

from .session_ways import oracle, recut

TOKENS = np.random.default_rng(5).integers(0, 90, (2, 21))


def kv_shapes(program):
    return {s.name: s.shape for s in program.state if s.role in ("k", "v")}


@pytest.fixture(scope="module", params=["base", "kv-int8"])
def built(request):
    """Four layers, each second one sharing; built with a recipe."""
    model = models.cla()
    with accel.optimize(model, request.param, max_context=64, max_batch=2) as compiled:
        compiled.named, compiled.module = request.param, model
        yield compiled


@pytest.mark.few(1)
def test_every_variant_and_every_way_gives_the_models_logits(built):
    with torch.no_grad():
        want = built.module(torch.from_numpy(TOKENS)).numpy()
    bound = (0.3 if built.named == "kv-int8" else 1e-4) * np.abs(want).max()
    models = {"eager": oracle(built)}
    for kernels in built.artifact.entries["step"].graphs:
        models[kernels] = accel.load(built.artifact.path, kernels=kernels)
    ways, held = recut(models["eager"].session(batch=2), TOKENS)
    for model in models.values():
        got, taken = recut(model.session(batch=2), TOKENS)
        for logits, part in zip(
            got, (slice(21), slice(5, 6), slice(6, 14), slice(6, 10)), strict=False
        ):
            assert np.abs(logits - want[:, part]).max() <= bound
        for a, b in zip(got, ways, strict=True):
            assert np.abs(a - b).max() <= 2e-3 * np.abs(b).max()
        assert taken == held
        model.close()


def test_the_layers_stand_apart_and_say_whose_cache_they_read(built):
    layers = built.artifact.facts.layers
    assert [layer.shares for layer in layers] == [None, 0, None, 2]
    assert all(layer.nodes for layer in layers)
    assert [n for n in kv_shapes(built.program)] == ["kv.0.k", "kv.0.v", "kv.2.k", "kv.2.v"]
    state = [s for s in built.report["state"]]
    chain = summaries([asdict(layer) for layer in layers], state)
    assert [link.back for link in chain] == [0, 1, 0, 1]
    assert chain[1].state() == "cache of 1 before" and "token" in chain[0].state()
    (pattern,) = groups(chain)
    assert pattern.times == 2
    assert "genai" not in built.artifact.entries


def through(model, last=Residual):
    """The program after the passes up to one."""
    program, passes = capture(model, max_context=32), pipeline()
    end = next(i for i, step in enumerate(passes) if isinstance(step, last))
    run(program, passes[: end + 1])
    return program


@pytest.mark.few(1)
@pytest.mark.parametrize(("layers", "factor"), [(3, 1), (3, 2), (4, 3)])
def test_memory_is_its_formula(layers, factor):
    program = through(models.cla(factor, layers), Cache)
    owners = math.ceil(layers / factor)
    assert kv_shapes(program) == {
        f"kv.{factor * i}.{part}": ("B", 2, "C", 10) for i in range(owners) for part in "kv"
    }


def test_keys_that_are_equal_by_chance_are_not_shared():
    model = models.cla(factor=1, layers=2)
    own, other = model.layers
    for a, b in zip(own.kv, other.kv, strict=True):
        b.weight = a.weight  # the same product, of another value
    assert len(kv_shapes(through(model, Cache))) == 4


def test_a_cache_of_another_layer_is_noticed():
    program = through(models.cla())
    tokens = torch.from_numpy(TOKENS[:1])
    state = {s.name: s.allocate(B=1, C=32) for s in program.state}
    positions = torch.arange(21)[None]
    given = {
        "tokens": tokens,
        "positions": positions,
        "slots": torch.zeros(1, dtype=torch.int64),
        "rows": positions,
    }
    want = program.run("step", {**given, **state})["logits"]
    call = next(n for n in program.step.graph.nodes if getattr(n.target, "name", "") == "layer.3")
    stored = program.step.output_nodes()
    swap = {stored[f"kv.2.{p}.next"]: stored[f"kv.0.{p}.next"] for p in "kv"}
    call.args = tuple(swap.get(a, a) for a in call.args)
    assert (program.run("step", {**given, **state})["logits"] - want).abs().max() > 0.1


@pytest.mark.parametrize("recipe", ["snapkv", "unified-skip"])
def test_what_cannot_be_done_to_one_of_them_is_refused(recipe):
    with pytest.raises(PassError, match=r"cache of layer 0|more than the residual stream"):
        accel.optimize(models.cla(layers=4), recipe, max_context=32, target="eager", verify=False)


@pytest.mark.parametrize("wrong", [{"factor": 0}, {"num_key_value_heads": 3}, {"head_dim": 7}])
def test_a_configuration_that_cannot_be_is_an_error(wrong):
    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=4)  # fmt: skip
    with pytest.raises(ValueError, match="factor"):
        ClaConfig(**{**sizes, **wrong})


def gemma3n():
    """transformers shares where there is a cache; without one, earlier versions make keys of every layer's own."""
    from transformers import AutoModelForCausalLM

    config = small_config("gemma3n_text")
    assert config.num_kv_shared_layers == 2
    model = randomise(AutoModelForCausalLM.from_config(config), "gemma3n_text").eval()
    ids = torch.from_numpy(TOKENS[:1])
    with torch.no_grad():
        cached, apart = (model(ids, use_cache=c).logits for c in (True, False))
        with prepared(model, inspect(model)) as ready:
            got = ready(ids, torch.arange(21)[None])
    assert (got - cached).abs().max() < 1e-4 * cached.abs().max()
    handed = "shared_kv_states" in signature(model.model.layers[-1].self_attn.forward).parameters
    assert bool((got - apart).abs().max() > 0.01) is not handed
    assert torch.equal(own_logits(model, ids), cached)
    return model


def test_gemma3n_shares_as_when_it_generates():
    gemma3n()


@pytest.mark.long
def test_gemma3n_in_full():
    model = gemma3n()
    with accel.optimize(model, max_context=32, target="eager") as compiled:
        assert [layer.shares for layer in compiled.facts.layers] == [None, None, 0, 1]
        with torch.no_grad():
            want = model(torch.from_numpy(TOKENS[:1])).logits.numpy()
        assert np.abs(compiled.logits(TOKENS[:1]) - want).max() < 1e-4 * np.abs(want).max()
