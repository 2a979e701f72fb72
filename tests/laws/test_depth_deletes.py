"""Laws of the methods that delete layers: what is left is the model with those layers switched off."""

import copy
import re
from dataclasses import dataclass, replace

import models
import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import accel
from accel.compiler.smoke.tiny_models import randomise
from accel.ir.axis import find_axes
from accel.ir.errors import PassError
from accel.passes.depth import _delete
from accel.passes.depth._joint import layers

from ..depth_case import LAYERS, TOKENS, far, oracle, plan, program_of

AXIS = find_axes()["depth"]
NAMES = [n for n in AXIS.names() if issubclass(AXIS.method(n), _delete.Deletes)]
ARCHES = ("llama", "gemma2", "gpt2")


def deleted(compiled, name):
    """The layers that a build's note says are gone, with what each went by."""
    (note,) = (n for n in compiled.report["notes"] if n.startswith(f"{name} deleted layers "))
    return {int(i): float(x) for i, x in re.findall(r"(\d+) \((-?[\d.]+)\)", note)}


def holds(deep, name, arch, compiled, module):
    """Whether a build is the module, and the build by call, with its layers switched off."""
    gone = deleted(compiled, name)
    stay = ~plan(*gone)
    ran = np.repeat(stay[:, None], TOKENS.shape[1], 1)
    want = oracle(module, TOKENS, ran)
    with compiled.session(2) as one, deep(arch, "eager", use="by-call")[1].session(2) as other:
        for start, end in ((0, 9), (9, 10), (10, 24)):
            part = TOKENS[:, start:end]
            got = one.run(part)
            if far(got, other.run(part, run_layers=stay)) > 1e-4 or far(got, want[:, start:end]) > 1e-4:  # fmt: skip
                return False
    names = {s.layer for s in compiled.program.state if s.layer is not None}
    assert far(want, oracle(module, TOKENS, ran | True)) > 1e-2, "they do something"
    return names == set(range(LAYERS - len(gone))) and compiled.facts.num_layers == len(names)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHES)
def test_what_is_deleted_is_switched_off(name, arch, deep):
    module, compiled = deep(arch, "eager", use=name, **AXIS.small(name))
    assert holds(deep, name, arch, compiled, module)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_another_layer_than_the_note_says_is_caught(name, deep, monkeypatch):
    """The control: the deletion takes the layer behind."""
    module, _ = deep("llama")
    taken = _delete.remove
    monkeypatch.setattr(
        _delete, "remove", lambda program, calls, gone: taken(program, calls, [i % 2 + 1 for i in gone])
    )  # fmt: skip
    table = {"depth": {"use": name, **AXIS.small(name)}}
    with accel.optimize(module, table, target="eager", max_context=64, max_batch=2, verify=False) as built:  # fmt: skip
        assert len(deleted(built, name)) == 1
        assert not holds(deep, name, "llama", built, module)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_of_the_layers_between_the_first_and_the_last_all_may_go(name, deep):
    module, _ = deep("llama")
    options = {"use": name, **AXIS.small(name), "share": 0.5}
    with accel.optimize(module, {"depth": options}, target="eager", max_context=64, verify=False) as built:  # fmt: skip
        assert deleted(built, name).keys() == {1, 2}
    with pytest.raises(PassError, match=f"{name}: 0.9 of 4 layers are 3, .* at most 0.5"):
        table = {"depth": {**options, "share": 0.9}}
        accel.optimize(module, table, target="eager", max_context=64, verify=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_orders_no_layers_is_refused(name):
    method = AXIS.build(name, **AXIS.small(name))
    words = (
        f"{name}: 4 tokens of text do not order the layers: .*calibration=.* now {method.tokens}"
    )
    with pytest.raises(PassError, match=words):
        method.run(program_of(LAYERS, torch.arange(4)[:, None]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_it_does(name):
    """Shares of the work that grow, more than one: an order takes minutes on a large model."""
    seen, text = [], torch.from_numpy(np.random.default_rng(4).integers(3, 90, (20, 30)))
    program, method = program_of(6, text), AXIS.build(name)
    program.calibration = replace(program.calibration, progress=lambda *x: seen.append(x))
    method.goes(program, layers(program), 2, method.text(program))
    shares = [share for _, share in seen]
    assert len(shares) > 1 and shares == sorted(shares) and 0 <= shares[0] and shares[-1] < 1
    assert all(re.search(r"(order|delet)ing layers: \d+ of \d+$", what) for what, _ in seen)


def test_an_order_that_is_within_the_noise_is_refused():
    """The control: the same scores, of a longer text."""

    @dataclass(frozen=True)
    class Drawn(_delete.Ranks):
        noise: float = 0.0
        use = "drawn"

        def scores(self, program, calls, text):
            return torch.tensor([0.0, 0.5, 0.4, 0.0]), torch.full((4,), self.noise)

    text = torch.arange(40).view(4, 10)
    with pytest.raises(PassError, match="drawn: .* differs by 0.05 .* and by 0.06 from text"):
        Drawn(share=0.25, noise=0.06).run(program_of(LAYERS, text))
    for share, noise in ((0.25, 0.04), (0.5, 0.06)):  # where all go, no order is needed
        assert Drawn(share=share, noise=noise).run(program_of(LAYERS, text)).changed == 4 * share


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_whose_keys_another_reads_is_refused(name):
    table = {"depth": {"use": name, **AXIS.small(name), "share": 0.5}}
    with pytest.raises(PassError, match="layer 0 outputs more than .* so it cannot be skipped"):
        accel.optimize(models.cla(), table, target="eager", max_context=64, verify=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_recurrent_layers_go_with_their_state(name):
    size = {"vocab_size": 64, "hidden_size": 32, "state_size": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MambaForCausalLM(MambaConfig(num_hidden_layers=LAYERS, **size))
    module = randomise(module, "mamba").eval()
    table = {"depth": {"use": name, **AXIS.small(name)}}
    with accel.optimize(module, table, target="eager", max_context=64, verify=False) as built:
        gone = deleted(built, name)
        assert len(gone) == 1 and len(built.program.state) == 2 * (LAYERS - 1)
        stack = module.backbone.layers
        module.backbone.layers = torch.nn.ModuleList(
            layer for i, layer in enumerate(stack) if i not in gone
        )
        tokens = TOKENS % 64
        with torch.no_grad():
            want = module(torch.tensor(tokens), use_cache=False).logits.numpy()
        assert far(built.logits(tokens), want) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "use",
    ["kv.codec=kivi", "kv.reuse=pie", "kv.reuse=cacheblend", "prefill.ranks=cp-ring"],
)  # fmt: skip
def test_what_counts_layers_counts_those_that_are_left(use, deep):
    """A build without some layers is the build of a module that never had them, in what other methods make of it."""
    axis, _, name = use.partition("=")
    other = {axis: {"use": name, **find_axes()[axis].small(name)}}
    module, _ = deep("llama")
    built = [(module, {**other, "depth": {"use": "shortgpt"}}), (without(module, 2), other)]
    found = []
    for which, table in built:
        with accel.optimize(which, table, target="eager", max_context=64, verify=False) as model:
            found.append(told(model))
    assert np.array_equal(*found)
    with accel.optimize(without(module, 1), other, target="eager", max_context=64, verify=False) as model:  # fmt: skip
        assert not np.allclose(found[0], told(model), atol=1e-2), "the control: another layer"


def without(module, gone):
    """A Llama that never had a layer."""
    module = copy.deepcopy(module)
    stack = [layer for i, layer in enumerate(module.model.layers) if i != gone]
    for i, layer in enumerate(stack):
        layer.self_attn.layer_idx = i
    module.model.layers = torch.nn.ModuleList(stack)
    module.config.num_hidden_layers = len(stack)
    return module


def told(model):
    """Logits of a prompt that repeats a part, of tokens behind it, and after an edit where there are some."""
    with model.session(1) as session, model.session(1) as later:
        out = [session.prompt(TOKENS[:1]), *(session.run(TOKENS[1:, i : i + 1]) for i in range(8))]
        if (
            "kv.reuse" in model.recipe["tables"]
            and model.recipe["tables"]["kv.reuse"]["use"] == "pie"
        ):
            out += [session.edit(5, 8, [4, 6, 8, 9])]
        out += [later.prompt(np.concatenate([TOKENS[1:, :3], TOKENS[:1]], 1))]
    return np.concatenate([x[:, -1:] for x in out], 1)
