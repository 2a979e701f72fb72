"""Rotary embeddings in their many forms: recognised, and the numbers stay the module's."""

import copy

import models
import pytest
import torch
from torch import nn

import accel
from accel import PassError
from accel.compiler.pipeline import pipeline
from accel.compiler.smoke.tiny_models import randomise
from accel.ir.capture import length_limits as steady
from accel.ir.capture.capture import capture
from accel.ir.ops.rope import rope
from accel.passes import run
from accel.passes.check import NumericCheck

ORIGINAL, LONGEST = 24, 96


def llama(longest=LONGEST, **scaling):
    """One layer; `scaling` is the configuration's rope_parameters."""
    return models.random(
        "llama", "rotary",
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=longest,
        rope_parameters={"rope_theta": 100.0, **scaling},
    )  # fmt: skip


def phi3(long_factor=3.0):
    """One layer, of which half the channels turn; short sequences turn otherwise than long ones."""
    return models.random(
        "phi3", "longrope",
        vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, original_max_position_embeddings=ORIGINAL,
        pad_token_id=None, partial_rotary_factor=0.5, rope_parameters={
            "rope_theta": 100.0, "rope_type": "longrope", "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0, 1.5, 2.0], "long_factor": [long_factor, 1.5, 2.0]},
    )  # fmt: skip


SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}


def ropes(program):
    return program.nodes(rope.default)


def module_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def worst(program, model, length):
    """The largest error of one call of `length` tokens, relative to the largest logit."""
    tokens = torch.arange(length)[None] * 7 % 61
    inputs = {"tokens": tokens, "positions": torch.arange(length)[None]}
    buffers = {s.name: s.allocate(B=1, C=length) for s in program.state}
    extra = {"slots": torch.zeros(1, dtype=torch.long), "rows": torch.arange(length)[None]}
    got = program.run("step", {**inputs, **extra, **buffers})["logits"]
    want = module_logits(model, tokens)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1))


def rewritten(model, longest=LONGEST):
    program = capture(model, max_context=longest)
    run(program, pipeline(), NumericCheck(program))
    return program


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_rotation_below_and_beyond_the_original_length(kind):
    model = llama(rope_type=kind, **SCALED[kind])
    program = rewritten(model)
    assert program.facts.max_context == LONGEST and len(ropes(program)) == 2
    for length in (ORIGINAL - 3, ORIGINAL + 3, LONGEST):
        assert worst(program, model, length) < 1e-5


def test_the_scale_is_seen():
    """Negative control: the numbers of one scaling are not those of another."""
    program = rewritten(llama(rope_type="linear", **SCALED["linear"]))
    assert worst(program, llama(rope_type="default"), LONGEST) > 1e-2


def test_a_rotation_that_changes_with_the_length_ends_the_context():
    model = phi3()
    with accel.optimize(model, max_context=LONGEST, max_batch=3) as compiled:
        assert compiled.facts.max_context == ORIGINAL
        (note,) = [n for n in compiled.report["notes"] if "rotary" in n]
        assert note.startswith(f"max_context is {ORIGINAL}: ") and "set short_factor to" in note
        tokens = torch.arange(ORIGINAL)[None] * 7 % 61
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        assert float((got - module_logits(model, tokens)).abs().max()) < 1e-4
        with pytest.raises(accel.AccelError, match=f"max_context is {ORIGINAL}"):
            compiled.logits([[3] * (ORIGINAL + 1)])
    assert model.model.rotary_emb.rope_type == "longrope", "the module is as it was"


def test_past_the_limit_the_module_does_compute_otherwise():
    """Negative control of the limit: one token more, and held rotations are wrong."""
    model = phi3()
    held = copy.deepcopy(model)
    held.model.rotary_emb.rope_type = "default"
    for length, differs in ((ORIGINAL, False), (ORIGINAL + 1, True)):
        tokens = torch.arange(length)[None] % 61
        off = (module_logits(model, tokens) - module_logits(held, tokens)).abs().max()
        assert (float(off) > 1e-3) is differs


def test_factors_that_agree_set_no_limit():
    model = phi3(long_factor=1.0)
    program = rewritten(model)
    assert program.facts.max_context == LONGEST
    assert worst(program, model, LONGEST) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(("longer", "ends"), [(1.5, ORIGINAL), (1.2, LONGEST)])
def test_a_scale_that_changes_with_the_length_is_held_too(longer, ends):
    """Phi-3.5-MoE takes a scale by the length of each call, and in some versions its frequencies too."""
    model = models.random(
        "phimoe",
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, num_local_experts=4, rope_parameters={
            "rope_theta": 100.0, "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 2.5],
            "short_mscale": 1.2, "long_mscale": longer, "factor": 4.0},
    )  # fmt: skip
    rotary = model.model.rotary_emb
    before = dict(vars(rotary))
    program = rewritten(model)
    assert program.facts.max_context == ends and vars(rotary) == before
    for length in (1, ends - 1, ends):
        assert worst(program, model, length) < 1e-5


def test_dynamic_scaling_ends_where_it_sets_in():
    model = llama(longest=40, rope_type="dynamic", factor=2.0)
    (rotary,) = [m for m in model.modules() if hasattr(m, "rope_type")]
    assert steady._rotary_limit(rotary, 200)[0] == 40
    program = rewritten(model)
    assert program.facts.max_context == 40
    assert worst(program, model, 40) < 1e-5


@pytest.mark.long
def test_a_sparse_choice_of_keys_is_exact_while_it_takes_all():
    model = models.random(
        "glm_moe_dsa", "sparse",
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=14, kv_lora_rank=10, qk_rope_head_dim=6, qk_nope_head_dim=8,
        v_head_dim=7, max_position_embeddings=LONGEST, first_k_dense_replace=1, index_topk=20,
        index_head_dim=10, index_n_heads=2, mlp_layer_types=["dense"], pad_token_id=None,
    )  # fmt: skip
    program = rewritten(model)
    assert program.facts.max_context == 20 and "sparse attention" in program.facts.notes[-1]
    assert [s.shape for s in program.state[1:]] == [("B", 1, "C", 16)]
    model.set_attn_implementation("eager")  # as sdpa, transformers 5.2 shows later tokens
    assert worst(program, model, 20) < 1e-5


class Turning(nn.Module):
    """A decoder of one attention, its queries and keys turned by `turn(x [B,T,H,D], model)`."""

    def __init__(self, turn, vocab=61, heads=3, width=8):
        super().__init__()
        self.turn, self.heads, self.width = turn, heads, width
        self.embed = nn.Embedding(vocab, heads * width)
        self.q, self.k, self.v = (nn.Linear(heads * width, heads * width) for _ in range(3))
        self.head = nn.Linear(heads * width, vocab)
        self.register_buffer("speed", 30.0 ** -torch.linspace(0, 1, width // 2))
        angle = torch.arange(200)[:, None] * self.speed
        self.register_buffer("sincos", torch.cat([angle.sin(), angle.cos()], -1))

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (
            f(x).view(*x.shape[:2], self.heads, self.width) for f in (self.q, self.k, self.v)
        )
        q, k = (self.turn(t, self).transpose(1, 2) for t in (q, k))
        out = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))


def angles(x, m):
    return torch.arange(x.shape[1])[:, None] * m.speed  # [T,D/2]: no batch axis


def halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def no_batch_axis(x, m):
    angle = angles(x, m)
    return halves(x, angle.cos()[:, None], angle.sin()[:, None])


def gathered(x, m):
    """One buffer of sines and cosines, cut in two and repeated, as GPT-J has it."""
    sin, cos = m.sincos[: x.shape[1]].chunk(2, -1)
    sin, cos = (t.repeat_interleave(2, -1)[None, :, None] for t in (sin, cos))
    other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + other * sin


def put_apart(x, m):
    """Neighbours turn together and come out as halves, as DeepSeek's do."""
    angle = angles(x, m)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def before_the_heads(x, m):
    """Turned while the heads are still joined."""
    flat = x.flatten(2).unflatten(-1, (-1, 2))  # [B,T,H·D/2,2]
    angle = angles(x, m).repeat(1, m.heads)
    cos, sin = angle.cos(), angle.sin()
    a, b = flat.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).view_as(x)


def by_matrix(x, m):
    """A 2 x 2 matrix per pair and position."""
    angle = angles(x, m)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    pairs = x.unflatten(-1, (-1, 2, 1))
    return (turn.view(1, -1, 1, m.width // 2, 2, 2) @ pairs).flatten(-3)


def last_channels(x, m):
    """Only the last half turns, and a norm follows."""
    angle = angles(x, m)[:, : m.width // 4]
    still, turned = x.split(m.width // 2, -1)
    turned = halves(turned, angle.cos()[:, None], angle.sin()[:, None])
    return nn.functional.rms_norm(torch.cat([still, turned], -1), (m.width,))


def longer_otherwise(x, m):
    """Past 50 tokens every position turns half as fast."""
    slower = torch.where(torch.tensor(x.shape[1]) > 50, 0.5, 1.0)
    angle = angles(x, m) * slower
    return halves(x, angle.cos()[:, None], angle.sin()[:, None])


def by_length(x, m):
    angle = angles(x, m) / x.shape[1]
    return halves(x, angle.cos()[:, None], angle.sin()[:, None])


WRITTEN = {
    no_batch_axis: True, gathered: True, put_apart: True, last_channels: True, before_the_heads: True,
    by_matrix: False,  # right, but left as they are written
}  # fmt: skip


def turning(turn):
    return randomise(Turning(turn), "turning")


@pytest.mark.few(2)
@pytest.mark.parametrize("turn", WRITTEN, ids=lambda f: f.__name__)
def test_a_rotation_written_by_hand(turn):
    model = turning(turn)
    program = rewritten(model)
    assert len(ropes(program)) == (2 if WRITTEN[turn] else 0)
    tokens = torch.arange(90)[None] * 7 % 61
    with torch.no_grad():
        want = model(tokens)
    buffers = {s.name: s.allocate(B=1, C=90) for s in program.state}
    for part in (slice(0, 40), slice(40, 41), slice(41, 90)):
        length = part.stop - part.start
        out = program.run("step", {
            "tokens": tokens[:, part], "positions": torch.arange(90)[None, part], **buffers,
            "slots": torch.tensor([part.start]), "rows": torch.arange(length)[None]})  # fmt: skip
        buffers = {n: out[f"{n}.next"] for n in buffers}
        assert float((out["logits"] - want[:, part]).abs().max()) < 1e-4


def test_what_changes_with_the_length_ends_the_context_too():
    program = rewritten(turning(longer_otherwise))
    assert program.facts.max_context == 50
    assert any(
        "max_context is 50: " in n and "changes with the length" in n for n in program.facts.notes
    )
    with pytest.raises(PassError, match="changes with the length of the sequence"):
        rewritten(turning(by_length))
