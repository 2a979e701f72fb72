"""Attention that methods compute beside the model's: it has the model's own scale, cap, sink and window."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import Form, Operands, attention, form_with, operands_of
from accel.ir.ops.mass import attention_weights
from accel.ir.recipe import Recipe
from accel.passes.calibrate import all_values
from accel.passes.kv._shared.tables import observed
from accel.passes.kv.compress import Compress
from accel.passes.kv.keep.drop import Drop
from accel.passes.kv.score.knorm import KNorm
from accel.passes.prefill.sparse._inputs import last_logits, probabilities
from accel.passes.prefill.sparse.minference import MInference
from accel.passes.state.layers import Layers
from accel.runtime.kv.budget.uniform import Uniform

from .kv_case import Case, evicting, kept_part

TOKENS, LOWEST = 40, torch.finfo(torch.float32).min
MODELS = {  # the part of attention that it has, and how to leave that out
    "gemma2": ("softcap", lambda form: replace(form, softcap=0.0)),
    "gpt_oss": ("sink", lambda form: replace(form, sink=None)),
    "granite": ("scale", lambda form: replace(form, scale=form.scale * 2)),
    "mistral": ("size", lambda form: replace(form, kind="causal", size=0)),
}


def program_of(stateful, name):
    """A small model whose scores are about 2, as those of trained ones, and whose cap, if any, is tight."""
    program = stateful(name)
    tokens = text(program)[:, :-1]
    for node in program.nodes(attention.default, entry=program.step):
        x, layer = operands_of(node), node.meta["layer"]
        seen = Form("causal", scale=float(x.scale)).scores(*operands(program, tokens)[layer])
        size = float(seen[seen > LOWEST].std())
        node.args = (
            *node.args[:6],
            2 / size * float(x.scale),
            3.0 if x.softcap else 0.0,
            *node.args[8:],
        )
        if x.sink is not None:
            sink = str(x.sink.target)
            program.params[sink] = torch.linspace(0.5, 2, len(program.params[sink]))
    return program


def text(program):
    r = torch.Generator().manual_seed(3)
    return torch.randint(3, program.facts.vocab_size, (2, TOKENS + 1), generator=r)


def of_the_model(program, tokens):
    """layer -> (the operands of its attention, its weights [B,G,R,T,T])."""
    found = {}
    for graph, values in all_values(program, tokens):
        for node in graph.nodes:
            if node.target is attention.default and node.meta.get("layer") is not None:
                given = {
                    name: values.get(n, program.params.get(str(n.target)))
                    if isinstance(n, torch.fx.Node)
                    else n
                    for name, n in vars(operands_of(node)).items()
                }
                x = Operands(**given)
                probs = attention_weights.reference(**given)
                found[node.meta["layer"]] = x, probs.unflatten(1, (x.k.shape[1], -1))
    return found


def operands(program, tokens):
    """layer -> queries and keys with their positions, as `Form.scores` takes them."""
    every = of_the_model(program, tokens)
    return {i: (x.q, x.q_pos, x.k, x.k_pos[:, None]) for i, (x, _) in every.items()}


def same(found, want):
    torch.testing.assert_close(found, want.float(), atol=2e-6, rtol=1e-4)


@dataclass(frozen=True)
class Shown(Drop):
    """The values of what stays say what the newest query gives to it, head by head."""

    observe: ClassVar[int] = 1

    def __call__(self, queries, query_positions, chosen, values, attends):
        return spread(attends(queries[:, :, -1:], query_positions[:, -1:]), chosen, values)


@dataclass(frozen=True)
class Without(Shown):
    """The same without a part of the model's attention."""

    model: str = ""

    def __call__(self, queries, query_positions, chosen, values, keys, positions, form):
        asked = queries[:, :, -1:], query_positions[:, -1:], keys, positions
        return spread(MODELS[self.model][1](form).weights(*asked), chosen, values)


def spread(drawn, chosen, values):
    wide = drawn[:, :, :, 0].transpose(2, 3)  # [B,G,S,R]
    wide = torch.nn.functional.pad(wide, (0, values.shape[3] - wide.shape[3]))
    return wide.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_part_that_is_left_out(stateful, name):
    program, (part, without) = program_of(stateful, name), MODELS[name]
    forms = [form_with(x) for x, _ in of_the_model(program, text(program)[:, :-1]).values()]
    assert any(
        getattr(form, part) is not None and getattr(form, part) != getattr(without(form), part)
        for form in forms
    ), forms


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_tables_have_the_weights_of_the_model(stateful, name):
    program, (_, without) = program_of(stateful, name), MODELS[name]
    tokens = text(program)
    want = of_the_model(program, tokens[:, :-1])
    (rows,) = observed(program, [(tokens, torch.ones(2, TOKENS))])
    assert rows.layers
    for layer, x in rows.layers.items():
        same(x.weights(), want[layer][1])
    with pytest.raises(AssertionError):
        for layer, x in rows.layers.items():
            same(replace(x, form=without(x.form)).weights(), want[layer][1])


def law_eviction(stateful, name, keep):
    program = program_of(stateful, name)
    tokens = text(program)[:, :-1]
    want = of_the_model(program, tokens)
    assert Compress(KNorm(), Uniform(), keep).run(program).changed
    tables = {
        "kv.score": {"use": "knorm"},
        "kv.budget": {"use": "uniform", "tokens_kept": 30},
        "kv.when": {"use": "prompt"},
    }
    session = Case(program, tables).session(2)
    session.prompt(tokens.numpy())
    where, drawn = kept_part(session, "pos", -1), kept_part(session, "v")
    for layer, places in where.items():
        probs = want[layer][1][:, :, :, -1].numpy()  # [B,G,R,T]
        there = places >= 0
        assert there.any()
        rows, groups, _ = np.nonzero(there)
        got = drawn[layer][there][:, : probs.shape[2]]
        np.testing.assert_allclose(got, probs[rows, groups, :, places[there]], atol=2e-6, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_an_eviction_has_the_weights_of_the_model(stateful, name):
    law_eviction(stateful, name, Shown())
    with pytest.raises(AssertionError):
        law_eviction(stateful, name, Without(model=name))


@pytest.mark.parametrize("name", [n for n in MODELS if n != "mistral"])
def test_a_segment_has_the_weights_of_the_model(stateful, name):
    program, (_, without) = program_of(stateful, name), MODELS[name]
    start, last, told = TOKENS - 16, 8, 0
    for x, want in of_the_model(program, text(program)[:, :-1]).values():
        if x.mask == "causal":
            first = torch.full((2,), start)
            asked = x.q[:, :, start:], x.k, x.k_pos, first, last
            form = form_with(x)
            same(probabilities(last_logits(*asked, form), form), want[:, :, :, -last:])
            other = without(form)
            with pytest.raises(AssertionError):
                same(probabilities(last_logits(*asked, other), other), want[:, :, :, -last:])
            told += 1
    assert told


@pytest.mark.long
def test_a_segment_is_given_the_sink(stateful):
    program = program_of(stateful, "gpt_oss")
    for node in program.nodes(attention.default, entry=program.step):
        node.args = (
            *node.args[:8],
            "causal",
            0,
            *node.args[10:],
        )  # the last of two layers reads nothing
    Layers().run(program)
    MInference(first=0, **MInference.small).run(program)
    entry, readers = program.entries["sparse"], 0
    for graph in program.graphs(entry):
        for node in graph.nodes:
            x = operands_of(node) if node.target is attention.default else None
            if x is not None and x.kept_k is not None:
                readers += sum(user is not node for user in x.sink.users)
    assert readers


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["zipcache", "qaq"])
@pytest.mark.long
def test_a_method_may_ask_with_some_of_its_queries(stateful, name):
    """Which are no whole tensor in memory: both take the last ones of the entry's."""
    case = evicting(stateful("llama"), dict(Recipe.load(name).tables))
    assert case.program.entries["compress"].outputs
