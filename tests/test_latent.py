"""Multi-head latent attention: the cache holds the latent, and the numbers stay the module's."""

import coverage
import models
import pytest
import torch
from models import LatentBlock
from torch import nn

import accel
from accel import PassError
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.ops.attention import attention
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.state import latent

RANK, TURNED, PLAIN, VALUE = (getattr(LatentBlock, n) for n in "RANK TURNED PLAIN VALUE".split())


def youtu(layers=1):
    """A transformers model; its rotation is on halves of interleaved channels."""
    return models.random(
        "youtu",
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=14, kv_lora_rank=RANK, qk_rope_head_dim=TURNED,
        qk_nope_head_dim=PLAIN, v_head_dim=VALUE, max_position_embeddings=128, bos_token_id=1,
        eos_token_id=2, pad_token_id=None,
    )  # fmt: skip


def written():
    """Rotary channels first, biases, a scaled latent; one layer."""
    return models.randomise(models.PlainLatent(layers=1), "written")


def rewritten(model):
    program = capture(model, max_context=64)
    steps = run(program, pipeline(), NumericCheck(program))
    return program, next(s for s in steps if s.name == "Latent")


@pytest.fixture(scope="module", params=["youtu", "plain_latent"])
def built(request, build):
    if request.param == "plain_latent":  # tests/parity compares what it computes
        made = build("plain_latent")
        yield made.model, made.compiled
        return
    model = youtu()
    with accel.optimize(model, max_context=64, max_batch=3) as compiled:
        errors = coverage.check(model, compiled)
        assert 0 < max(errors.values()) < 1e-5, errors
        yield model, compiled


@pytest.mark.few(1)
@pytest.mark.long
def test_a_token_costs_its_latent_and_what_heads_share(built):
    _, compiled = built
    layers = compiled.facts.layers
    state = compiled.report["state"]
    assert [s["name"] for s in state] == ["kv.pos", *(f"kv.{i}.k" for i in range(len(layers)))]
    assert all(s["shape"] == ["B", 1, "C", RANK + TURNED] for s in state[1:])
    assert compiled.report["kv_bytes_per_token"] == 8 + 4 * len(layers) * (RANK + TURNED)
    assert {(x.num_kv_heads, x.head_dim) for x in layers} == {(1, RANK + TURNED)}


def test_no_weight_grew(built):
    model, compiled = built
    assert compiled.program is not None
    own = {n for n, _ in model.named_parameters()}
    made = {n: t for n, t in compiled.program.params.items() if n not in own}
    up = [t for n, t in made.items() if n.endswith((".key", ".value"))]
    heads = compiled.facts.layers[0].num_heads
    assert sum(t.numel() for t in up) == len(compiled.facts.layers) * heads * RANK * (PLAIN + VALUE)
    assert not any("kv_b_proj" in n or ".key." in n for n in compiled.program.params if n in own)


def test_the_step_is_measured_and_small(built):
    steps = built[1].report["steps"]
    at = next(i for i, s in enumerate(steps) if s["name"] == "Latent")
    error = next(s["error"] for s in steps[at:] if s["error"] is not None)  # of its group
    assert steps[at]["changed"] >= 1 and 0 < error < 1e-5


def test_onnxruntime_genai_is_refused_such_a_cache(built):
    _, compiled = built
    step = next(s for s in compiled.report["steps"] if s["name"] == "Concat")
    assert step["changed"] == 0 and "latent" in step["refused"][0]
    assert list(compiled.report["entries"]) == ["step"]


def test_one_layer_as_text(built, golden):
    if hasattr(built[0], "config"):  # Youtu
        if not hasattr(built[0].model.layers[0].self_attn, "expand_kv"):
            pytest.skip("the text is of a later transformers")
        golden.check("latent", built[1].program.text())


@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_product_is_caught(monkeypatch, part):
    """Negative control: heads of a weight exchanged, or a bias that is left out."""
    right = latent._matrix

    def wrong(*args):
        weight, bias = right(*args)
        return (weight.flip(0), bias) if part == 0 else (weight, torch.zeros_like(bias))

    monkeypatch.setattr(latent, "_matrix", wrong)
    with pytest.raises(PassError, match="^Latent changed what the program computes"):
        rewritten(written())


def test_what_is_not_linear_in_the_latent_is_left_alone():
    """A squashed latent still is one (the squashing comes before it); squashed keys are none."""
    model = written()
    model.blocks[0].between = torch.tanh
    program, step = rewritten(model)
    assert step.changed == 1
    model = written()
    model.blocks[0].key = nn.Sequential(model.blocks[0].key, nn.Tanh())
    program, step = rewritten(model)
    assert step.changed == 0 and "not a linear function of" in step.refused[0]
    assert [s.name for s in program.state] == ["kv.pos", "kv.0.k", "kv.0.v"]


def test_plain_heads_are_not_mistaken_for_a_latent(captured):
    """Keys and values of plain attention are linear in the hidden values, which are no smaller."""
    program = captured("plain_sdpa")
    steps = run(program, pipeline())
    assert next(s for s in steps if s.name == "Latent").changed == 0
    (node, *_) = program.nodes(attention.default)
    assert node.args[1] is not node.args[2]
