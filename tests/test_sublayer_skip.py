"""Attentions and MLPs that are deleted, against modules whose branches add nothing."""

import re

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accel
from accel.ir.errors import PassError, RecipeError
from accel.passes.depth import _cut, sublayer_skip

from .depth_case import KINDS, LAYERS, TOKENS, branch_oracle, far


def built(module, **options):
    table = {"use": "sublayer-skip", "tokens": 5, **options}
    return accel.optimize(
        module, {"depth": table}, max_context=64, max_batch=2, target="eager", verify=False
    )


def deleted(compiled):
    """What a build's note says is gone, with its influence."""
    (note,) = (n for n in compiled.report["notes"] if n.startswith("sublayer-skip deleted "))
    return {
        (k, int(i)): float(x)
        for k, i, x in re.findall(r"(attention|mlp) (\d+) \((-?[\d.]+)\)", note)
    }


def off(name, module, gone):
    """The module's logits without these branches."""
    count = len(next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList)))
    stay = [
        np.array([(kind, i) not in gone for i in range(count)]) for kind in ("attention", "mlp")
    ]
    return branch_oracle(
        name, module, TOKENS, *(np.repeat(s[:, None], TOKENS.shape[1], 1) for s in stay)
    )


def is_without(name, module, compiled, gone):
    """Whether a build computes the module without these branches, call by call."""
    want = off(name, module, gone)
    with compiled.session(2) as session:
        for start, end in ((0, 9), (9, 10), (10, 24)):
            if far(session.run(TOKENS[:, start:end]), want[:, start:end]) > 1e-4:
                return False
    return True


@pytest.mark.few(1)
@pytest.mark.parametrize("of", sublayer_skip.KINDS)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_deleted_adds_nothing(name, of):
    module = models.make(name, LAYERS)
    with built(module, of=of, share=0.5) as compiled:
        gone = deleted(compiled)
        count = len(next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList)))
        attention = sum(kind == "attention" for kind, _ in gone)
        assert len(gone) == count // 2 * (2 if of == "both" else 1)
        assert attention == {"attention": len(gone), "mlp": 0}.get(of, attention)
        assert compiled.facts.num_layers == count - attention
        assert {s.layer for s in compiled.program.state if s.layer is not None} == set(
            range(count - attention)
        )
        assert is_without(name, module, compiled, gone)
        assert not is_without(name, module, compiled, {})


@pytest.mark.long
def test_another_branch_than_the_note_says_is_caught(monkeypatch):
    module, taken = models.make("llama", LAYERS), _cut.cut

    def wrong(program, calls, found, attention, mlp):
        taken(program, calls, found, {i % 3 + 1 for i in attention}, mlp)

    monkeypatch.setattr(sublayer_skip, "cut", wrong)
    with built(module, share=0.25) as compiled:
        assert not is_without("llama", module, compiled, deleted(compiled))


def test_memory_and_weights_are_those_of_what_stays():
    module = models.make("llama", LAYERS)
    with (
        built(module, share=0.5) as less,
        accel.optimize(module, "base", max_context=64, target="eager", verify=False) as base,
    ):
        attention = sum(p.numel() for p in module.model.layers[0].self_attn.parameters())
        norm = module.model.layers[0].input_layernorm.weight.numel()
        assert base.facts.parameters - less.facts.parameters == 2 * (attention + norm)
        assert 2 * len([s for s in less.program.state if s.layer is not None]) == len(
            [s for s in base.program.state if s.layer is not None]
        )


def test_the_influence_is_that_of_the_paper():
    """By hooks on the module: 1 - cos of a branch's input stream and of that with the branch."""
    module = models.make("llama", LAYERS)
    with built(module, of="both", share=0.75, tokens=64) as compiled:
        gone = deleted(compiled)
        text = accel.ir.calibration.Calibration.random(compiled.facts.vocab_size, 64).tokens[:1]
    streams = []
    for layer in module.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, x: streams.append(x[0]))
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, x: streams.append(x[0]))
    module.model.norm.register_forward_pre_hook(lambda _, x: streams.append(x[0]))
    with torch.no_grad():
        module(text, use_cache=False)
    near = [
        F.cosine_similarity(a, b, dim=-1)[:, 1:].mean()
        for a, b in zip(streams, streams[1:], strict=False)
    ]
    want = {
        (kind, i): 1 - float(near[2 * i + k])
        for i in range(1, LAYERS)
        for k, kind in enumerate(("attention", "mlp"))
    }
    assert gone.keys() == set(sorted(want, key=want.get)[:6])
    for branch, influence in gone.items():
        assert influence == pytest.approx(want[branch], abs=2e-3)


@pytest.mark.long
def test_it_runs_from_onnx_with_other_methods():
    recipe = {
        "depth": {"use": "sublayer-skip", "share": 0.5, "tokens": 5},
        "weights": {"use": "int8", "smallest": 256},
    }
    with accel.optimize(models.make("llama", LAYERS), recipe, max_context=64) as compiled:
        assert len(compiled.generate(TOKENS[0, :8], 6).tokens[0]) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 1.0}, "share is 1.0"),
        ({"of": "heads"}, "of 'heads' does not exist; known: attention, both, mlp"),
        ({"tokens": 0}, "tokens is 0"),
    ],
)
def test_an_option_out_of_range_is_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        accel.optimize("/nowhere", {"depth": {"use": "sublayer-skip", **options}})


def test_branches_of_the_first_layer_stay():
    with pytest.raises(PassError, match="of the first layer stay; give a share of at most 0.75"):
        built(models.make("llama", LAYERS), share=0.9, of="both")


def test_no_share_deletes_nothing():
    with built(models.make("llama", LAYERS), share=0.1) as compiled:
        assert compiled.facts.num_layers == LAYERS
        assert "0.1 of 4 attentions is none" in str(compiled.report)
