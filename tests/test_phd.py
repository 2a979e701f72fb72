"""PHD-Transformer: every token is read several times; captured like any model, with the cache of the plain one."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accel
from accel.compiler.facts_json import kv_bytes
from accel.ir.capture.arch.cla import Cla, ClaConfig, turned
from accel.ir.capture.arch.phd import CopiesAttention, Phd
from accel.ir.capture.forms.phd import FORMS
from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import Editor
from accel.passes.kv._shared.more_keys import take_in

from .session_case import session_of

CONFIG = ClaConfig(60, 32, 48, 2, 4, 2, 8, factor=1)
TOKENS = np.random.default_rng(0).integers(0, 60, (2, 11))


@cache
def module(copies, apart=False):
    torch.manual_seed(0)
    return Phd(CONFIG, copies, apart).eval()


@cache
def logits(copies):
    with torch.no_grad():
        return module(copies)(torch.from_numpy(TOKENS)).numpy()


@cache
def eager(copies):
    return accel.optimize(module(copies), "base", target="eager", max_context=32)


def in_parts(model):
    """A prompt, then tokens one by one."""
    with model.session(2) as session:
        parts = [session.run(TOKENS[:, :6])]
        parts += [session.run(TOKENS[:, n : n + 1]) for n in range(6, 11)]
    return np.concatenate(parts, 1)


def one_pass(plain, copies, sees):
    """The text in which each token stands `copies` times, x1 x1 x2 x2 …, through the plain model's layers: [B,T,K,V].

    sees(i, m, j, n): whether copy j of token n attends to copy i of token m, of arrays.
    """
    row = np.arange(TOKENS.shape[1] * copies)
    place, copy = row // copies, 1 + row % copies
    mask = torch.from_numpy(sees(copy[None], place[None], copy[:, None], place[:, None]))
    angles = torch.from_numpy(place)[:, None] * plain.speed
    x = plain.embed(torch.from_numpy(TOKENS.repeat(copies, 1)))
    for layer in plain.layers:
        h = layer.before(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, layer.size)).transpose(1, 2) for f in (layer.q, *layer.kv)
        )
        q, k = turned(q, angles), turned(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + layer.out(mixed.transpose(1, 2).flatten(2))
        h = layer.between(x)
        x = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
    found = F.linear(plain.norm(x), plain.embed.weight)
    return found.unflatten(1, (-1, copies)).numpy()


def equation_2(i, m, j, n):
    return (i == 1) & (m < n) | (i <= j) & (m == n)


@torch.no_grad()
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_module_is_one_masked_pass_over_repeated_tokens(copies):
    found = one_pass(module(copies).plain, copies, equation_2)
    np.testing.assert_allclose(logits(copies), found[:, :, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_another_mask_is_another_model():
    """The control: copies that see each other across tokens; copies that do not see those of their own token."""
    plain = module(3).plain
    for sees in (
        lambda i, m, j, n: (m < n) | (i <= j) & (m == n),
        lambda i, m, j, n: (i == 1) & (m <= n) | (i == j) & (m == n),
    ):
        assert np.abs(one_pass(plain, 3, sees)[:, :, -1] - logits(3)).max() > 1e-2


@torch.no_grad()
def test_the_first_copies_are_the_plain_model():
    """Whatever comes after them; so one copy is the plain model bit for bit, and another is not."""
    plain = module(3).plain
    want = plain(torch.from_numpy(TOKENS)).numpy()
    np.testing.assert_allclose(one_pass(plain, 3, equation_2)[:, :, 0], want, atol=1e-4, rtol=1e-4)
    alone = module(1)
    assert isinstance(alone.plain, Cla)
    np.testing.assert_allclose(
        logits(1), alone.plain(torch.from_numpy(TOKENS)).numpy(), atol=1e-5, rtol=1e-4
    )
    assert np.abs(logits(3) - want).max() > 1e-2


@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.long), 3])
def test_prompts_and_single_tokens_are_the_module(copies):
    np.testing.assert_allclose(in_parts(eager(copies)), logits(copies), atol=1e-4, rtol=1e-3)


@pytest.mark.long
def test_onnx_is_the_module(tmp_path):
    with accel.optimize(
        module(3), "base", target="onnx", max_context=32, out=tmp_path / "out"
    ) as model:
        np.testing.assert_allclose(in_parts(model), logits(3), atol=1e-4, rtol=1e-3)


PROMPTS = {"prefill.prune": {"use": "yoco", "layers": 0, "least": 1}}


@pytest.mark.long
@torch.no_grad()
def test_first_copies_may_go_ahead():
    """The same numbers; and a prompt's own program runs the plain model, and no layer of the other copies."""
    ahead = module(3, apart=True)
    tokens = torch.from_numpy(TOKENS)
    np.testing.assert_allclose(ahead(tokens), logits(3), atol=1e-4, rtol=1e-4)
    model = accel.optimize(ahead, PROMPTS, target="eager", max_context=32)
    assert kv_bytes(model.program) == kv_bytes(eager(3).program)
    assert [layer.shares for layer in model.facts.layers] == [None, 0, None]
    with model.session(2) as session:
        parts = [session.prompt(TOKENS[:, :6])]
        parts += [session.run(TOKENS[:, n : n + 1])[:, -1] for n in range(6, 11)]
    np.testing.assert_allclose(
        np.stack([p.reshape(2, -1) for p in parts], 1), logits(3)[:, 5:], atol=1e-4, rtol=1e-3
    )
    found, entries = model.program, (model.program.entries["fill"], model.program.step)
    assert [len(found.nodes(attention.default, entry=e)) for e in entries] == [1, 3]


def test_copies_cost_no_cache():
    """Keys and values of 2 layers, 2 KV heads and 8 channels, and a position, as of the plain model."""
    program = eager(3).program
    assert kv_bytes(program) == 2 * 2 * 2 * 8 * 4 + 8
    assert len(program.facts.layers) == 2
    assert {s.shape for s in program.state} == {("B", "C"), ("B", 2, "C", 8)}


def test_the_form_is_the_rule():
    """For any number of heads that share keys."""
    rng = torch.Generator().manual_seed(1)
    rule = CopiesAttention(6)
    for asked in (4, 3):  # of 4 copies
        q, k, v = (torch.randn(2, n, 7, 4, generator=rng) for n in (6 * asked, 3, 3))
        own = torch.randn(2, 2, 3, 3, 7, 4, generator=rng)
        got = FORMS["CopiesAttention"](rule, q, k, v, *own)
        torch.testing.assert_close(got, rule(q, k, v, *own), atol=1e-5, rtol=1e-5)


def test_a_method_that_merges_more_keys_loses_no_copies():
    """As that of evicted tokens does; here these keys have no share. The control: it takes the copies' place."""
    for merge, same in ((take_in, True), (in_their_place, False)):
        program = eager(3).program.copy()
        for node in program.nodes(attention.default):
            editor, x = Editor(program, node.graph), operands_of(node)
            with node.graph.inserting_before(node):
                nothing = editor.call(torch.ops.aten.sub.Tensor, x.beside_lse, 1e9)
            merge(editor, node, x.beside, nothing)
        found = session_of(program, 2).run(TOKENS)
        assert np.allclose(found, logits(3), atol=1e-4, rtol=1e-3) == same


def in_their_place(editor, node, value, lse):
    node.kwargs = {**node.kwargs, "beside": value, "beside_lse": lse}


@pytest.mark.parametrize(("copies", "factor"), [(0, 1), (2, 2)])
def test_what_does_not_fit_is_refused(copies, factor):
    with pytest.raises(ValueError, match=f"copies {copies} must be 1 or more, and factor {factor}"):
        Phd(ClaConfig(60, 32, 48, 2, 4, 2, 8, factor=factor), copies)
