"""Masks are named by what they compute, whatever way they are written; what has no name stays right."""

import math
from inspect import signature

import models
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from accel import CaptureError, PassError, optimize
from accel.ir.capture import export as exporting
from accel.ir.capture.capture import capture
from accel.ir.ops.attention import Mask, attention, position_bias
from accel.ir.ops.recurrence import causal_conv
from accel.passes import run
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.recognise import attention as recognise
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.mask import Class, classify
from accel.passes.recognise.positions import Positions

HEADS, SIZE, VOCAB = 2, 6, 23
NOTHING = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """One layer of attention whose mask is `form(scores, mask(module, q, k))`, with q [T,1], k [1,T]."""

    def __init__(self, mask, form="fill"):
        super().__init__()
        self.mask, self.form = mask, form
        self.tokens = nn.Embedding(VOCAB, HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, VOCAB)
        self.buckets = nn.Embedding(12, HEADS)
        self.register_buffer("window", torch.tensor(300))
        self.register_buffer(
            "mirror", (torch.ones(600, 600).tril() - torch.ones(600, 600).tril(-300))
        )
        models.randomise(self, "masked")

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.tokens(tokens)
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        index = torch.arange(t)
        if self.form == "theirs":
            seen = self.mask(x, positions, index)
        else:
            seen = self.mask(self, index[:, None], index[None])
        out = FORMS[self.form](q, k, v, seen)
        logits: Tensor = self.head(x + out.transpose(1, 2).reshape(b, t, -1))
        return logits


def softmax(q, k, v, change):
    return change(q @ k.transpose(-1, -2) * SIZE**-0.5).softmax(-1) @ v


FORMS = {
    "fill": lambda q, k, v, m: softmax(q, k, v, lambda s: s.masked_fill(~m, float("-inf"))),
    "where": lambda q, k, v, m: softmax(q, k, v, lambda s: torch.where(m, s, NOTHING)),
    "add": lambda q, k, v, m: softmax(q, k, v, lambda s: s + (1 - m.float()) * -10000.0),
    "bool": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    "float": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k, v, torch.zeros(m.shape).masked_fill(~m, float("-inf"))
    ),
    "bias": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    "theirs": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, is_causal=m is None),
}


def causal(module, q, k):
    return k <= q


def window(size):
    return lambda module, q, k: (k <= q) & (k > q - size)


def chunk(size):
    return lambda module, q, k: (k <= q) & (k // size == q // size)


def parity_of_keys(module, q, k):
    return (k <= q) & ((k % 2 == 0) | (k == q))


def alibi(module, q, k):
    slopes = torch.tensor([0.5, 0.125])[:, None, None]
    return torch.where(k <= q, slopes * (k - q), float("-inf"))


def t5(module, q, k):
    """Six exact distances, then buckets that grow to a distance of 40, and no further."""
    distance = (q - k).clamp(min=0)
    far = 6 + (torch.log(distance.clamp(min=1) / 6) / math.log(40 / 6) * 5).long().clamp(0, 5)
    bias = module.buckets(torch.where(distance < 6, distance, far)).permute(2, 0, 1)
    return torch.where(k <= q, bias, float("-inf"))


def recognised(model: nn.Module, max_context: int = 512):
    """The attention node after recognition, and the program."""
    program = capture(model, max_context=max_context)
    run(program, [Clean(), Fold(), Positions(), Attention()])
    (node,) = program.nodes(attention.default)
    return node, program


def named(model: nn.Module, max_context: int = 512) -> Mask:
    node, _ = recognised(model, max_context)
    assert node.args[5] is None, "no bias"
    return Mask(*node.args[8:10])


# Names


@pytest.mark.parametrize("form", ["fill", "where", "add", "bool", "float"])
def test_a_causal_mask_in_any_form(form):
    assert named(Masked(causal, form)) == Mask("causal")


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (window(1), Mask("window", 1)),
        (window(6), Mask("window", 6)),
        (chunk(7), Mask("chunk", 7)),
        (lambda module, q, k: k <= q + 0 * module.window, Mask("causal")),
        # evaluated past every size in its graph, in whatever form that size is kept
        (window(300), Mask("window", 300)),
        (lambda module, q, k: (k <= q) & (k > q - module.window), Mask("window", 300)),
        (lambda module, q, k: module.mirror[: q.shape[0], : q.shape[0]] > 0, Mask("window", 300)),
    ],
    ids=["1", "6", "chunk", "causal", "300", "300-buffer", "300-table"],
)
def test_a_mask_is_named(mask, name):
    assert named(Masked(mask, "bool")) == name


def test_a_mask_that_hides_nothing_is_named(monkeypatch):
    monkeypatch.setattr(exporting, "both_ways", lambda *_: None)
    assert named(Masked(lambda module, q, k: (k <= q) | (k > q), "bool")) == Mask("full")


def test_is_causal_alone():
    assert named(Masked(lambda *_: None, "theirs")) == Mask("causal")


@pytest.mark.few(4)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("create", "name"),
    [
        (create_causal_mask, Mask("causal")),
        (create_sliding_window_causal_mask, Mask("window", 5)),
        (create_chunked_causal_mask, Mask("chunk", 9)),
    ],
    ids=["causal", "sliding", "chunked"],
)
def test_masks_made_by_transformers(create, name, implementation):
    """Given position ids, transformers looks for packed sequences: the mask depends on positions."""
    config = LlamaConfig(attn_implementation=implementation)
    config.sliding_window, config.attention_chunk_size = 5, 9

    def mask(x, positions, index):
        told = {"cache_position": index, "cache": None, "past_key_values": None}
        told = {n: v for n, v in told.items() if n in signature(create).parameters}
        return create(config, x, attention_mask=None, position_ids=positions, **told)

    assert named(Masked(mask, "theirs"), 64) == name


@pytest.mark.parametrize(("mask", "longest"), [(alibi, 512), (t5, 512), (t5, 64)])
def test_a_bias_by_distance_covers_the_context(mask, longest):
    model = Masked(mask, "bias")
    node, program = recognised(model, longest)
    assert node.args[8] == "causal"
    bias = program.params[node.args[5].target]
    assert bias.shape == (HEADS, longest)
    q, k = torch.arange(longest)[:, None], torch.arange(longest)[None]
    got = position_bias(bias, q[None, None], k[None, None])[0]
    with torch.no_grad():
        want = mask(model, q, k)
    torch.testing.assert_close(got[:, k <= q], want[:, k <= q], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "mask",
    [parity_of_keys, lambda module, q, k: (k <= q) | (k < 5)],
    ids=["every second key", "prefix"],
)
def test_a_mask_without_a_name_stays_as_a_table(mask):
    node, program = recognised(Masked(mask, "bool"), 48)
    assert node.args[8] == "full"
    table = program.params[node.args[5].target]
    q, k = torch.arange(48)[:, None], torch.arange(48)[None]
    assert table.shape == (HEADS, 48, 48)
    assert all(torch.equal(t > -1, mask(None, q, k)) for t in table)


def test_a_table_too_large_is_refused_before_it_is_computed():
    with pytest.raises(PassError, match="fits no class and would need a table of 100000 x 100000"):
        recognised(Masked(parity_of_keys, "bool"), 100_000)


def test_a_mask_that_depends_on_tokens_is_refused():
    model = Masked(lambda module, q, k: k <= q, "bool")
    inner = model.forward

    def forward(tokens, positions):
        model.mask = lambda module, q, k: (k <= q) & (tokens != 0)[:, None, None]
        return inner(tokens, positions)

    model.forward = forward
    with pytest.raises(PassError, match="Nearest miss: .*its mask .* depends on the tokens"):
        recognised(model)


class Related(Masked):
    """Adds to the scores what the queries make of the distance; `recurrent`: after a short convolution over tokens."""

    def __init__(self, recurrent):
        super().__init__(None)
        self.taps = torch.ones(HEADS * SIZE, 3) if recurrent else None

    def forward(self, tokens, positions):
        x = self.tokens(tokens)
        if self.taps is not None:
            x = x + causal_conv(x, self.taps, None, None, None)[0]
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4).unbind(0)
        distance = positions[0][:, None] - positions[0][None]
        bias = q.sum(-1, keepdim=True) / (1 + distance.abs())
        bias = torch.where(distance < 0, NOTHING, bias)
        out = F.scaled_dot_product_attention(q, k, v, bias)
        return self.head(x + out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_bias_computed_of_the_tokens_is_named(recurrent):
    """Beside a recurrence, too, with which a program without an attention is allowed."""
    with pytest.raises(PassError, match="adds .* to its scores, a bias .* of the tokens' own vec"):
        optimize(Related(recurrent).eval(), max_context=32, target="eager")


# The whole way


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (window(6), "fill"),
        (chunk(7), "bool"),
        (alibi, "bias"),
        (t5, "bias"),
        (parity_of_keys, "add"),
    ],
    ids=["window", "chunk", "alibi", "t5", "table"],
)
def test_the_compiled_model_is_right(mask, form):
    model = Masked(mask, form)
    tokens = torch.randint(0, VOCAB, (2, 45), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(tokens, torch.arange(45).repeat(2, 1))
    with optimize(model, max_context=48, max_batch=2) as compiled, compiled.session(2) as session:
        for start, end in ((0, 1), (1, 19), (19, 20), (20, 45)):
            got = torch.from_numpy(session.run(tokens[:, start:end].numpy()))
            torch.testing.assert_close(got, want[:, start:end], atol=1e-4, rtol=1e-4)


def test_a_mask_that_looks_ahead_is_refused():
    with pytest.raises(CaptureError, match="Masked is bidirectional: .* token by token"):
        optimize(Masked(lambda module, q, k: (k <= q) | (k > q), "bool"), target="eager")
    with pytest.raises(PassError, match="cannot be decoded token by token"):  # in the prefix only
        optimize(
            Masked(lambda module, q, k: (k <= q) | (k < 5), "bool"), target="eager", max_context=64
        )


def test_a_wrong_name_is_caught(monkeypatch):
    """The check after each pass sees a window that is one too wide."""
    real = recognise.classify

    def off_by_one(*args):
        found = real(*args)
        return Class(Mask(found.mask.kind, found.mask.size + 1), found.bias)

    monkeypatch.setattr(recognise, "classify", off_by_one)
    with pytest.raises(PassError, match="Attention changed what the program computes"):
        optimize(Masked(window(6), "bool"), target="eager", max_context=64)


# Classification on its own


def square(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["window", "chunk"]), size=st.integers(1, 70), length=st.integers(2, 80)
)
def test_windows_and_chunks_of_any_size(kind, size, length):
    """Whatever the name, it means the same matrix; past the size it is the very name."""
    mask = Mask(kind, size)
    visible = mask.visible(*square(length))
    found = classify(visible[None], None, length, "m")
    assert isinstance(found, Class) and found.bias is None
    assert torch.equal(found.mask.visible(*square(length)), visible)
    if length > 2 * size and size > 1:
        assert found.mask == mask


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_random_mask_is_never_misnamed(data):
    length = data.draw(st.integers(2, 9))
    bits = data.draw(st.lists(st.booleans(), min_size=length**2, max_size=length**2))
    visible = torch.tensor(bits).view(length, length)
    found = classify(visible[None], None, length, "m")
    assert isinstance(found, Class)
    meant = found.mask.visible(*square(length))
    if found.bias is not None:
        meant = meant & (found.bias[0] > NOTHING / 2)
    assert torch.equal(meant, visible)


@settings(deadline=None, max_examples=30)
@given(slope=st.floats(-2, 2), length=st.integers(4, 40), more=st.integers(0, 40))
def test_a_line_by_distance_goes_on(slope, length, more):
    q, k = square(length)
    added = (slope * (k - q)).float()[None]
    found = classify((k <= q)[None], added, length + more, "m")
    assert isinstance(found, Class)
    if found.bias is None:
        assert abs(slope) * length < 1e-30
        return
    want = -slope * torch.arange(length + more)
    torch.testing.assert_close(found.bias[0], want.float(), atol=1e-2, rtol=1e-3)


def test_a_curve_that_may_go_anywhere_is_refused():
    q, k = square(40)
    found = classify((k <= q)[None], torch.sin((q - k) * 0.3)[None], 80, "wavy")
    assert found == "its mask wavy fits no class, and was evaluated only up to 40 positions"
