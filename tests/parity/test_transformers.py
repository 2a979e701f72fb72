"""Each architecture, compiled to ONNX, against its own module: logits, greedy tokens, cut calls."""

import models
import numpy as np
import parity
import pytest
import torch

from accel.runtime.session import core as runtime_session

FEW = "llama", "gpt2", "gemma2", "gpt_neox", "qwen3", "plain_latent"  # the others are long


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(n, marks=() if n in FEW else pytest.mark.long) for n in models.ARCHITECTURES
    ],
)
def built(request, build):
    """One build per architecture."""
    return build(request.param)


def tokens_of(built, *shape, seed=5):
    rng = np.random.default_rng(seed)
    return rng.integers(0, built.compiled.facts.vocab_size, shape)


def assert_close(got, want, tolerance=1e-4):
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance


@pytest.mark.few(2)
def test_logits_are_the_modules(built):
    row = parity.Row(built.name)
    parity.logit_error(row, built.model, built.compiled)
    assert 0 < row.error <= parity.LOGITS


@pytest.mark.few(3)
def test_greedy_tokens_are_the_references(built):
    row = parity.measure(built.name, built.model, built.compiled, count=5, length=24)
    assert (row.prompts, row.different) == (5, 0)
    assert row.equal >= 5 * 24 - 24 * row.excused and row.excused <= 1


@pytest.mark.few(3)
def test_greedy_decoding_does_not_stall(built):
    """Tokens that never change would compare nothing."""
    out = built.compiled.generate([[5], [3, 1, 4], [2, 7]], max_new_tokens=24, eos=[])
    assert len({t for row in out.tokens for t in row}) > 10


def test_a_wrong_token_is_counted():
    row = parity.Row("control")
    parity.compare(row, ([5, 6, 7], [1.0, 1.0, 1.0]), [5, 9, 7])
    assert (row.tokens, row.equal, row.excused, row.different) == (2, 1, 0, 1)
    parity.compare(row, ([5, 6, 7], [1.0, 1e-5, 1.0]), [5, 9, 7])
    assert (row.tokens, row.equal, row.excused, row.different) == (4, 2, 1, 1)


@pytest.mark.few(1)
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(built):
    asked = [tokens_of(built, n, seed=n).tolist() for n in (3, 21, 10)]
    together = built.compiled.generate(asked, max_new_tokens=12, eos=[]).tokens
    alone = [built.compiled.generate(p, max_new_tokens=12, eos=[]).tokens[0] for p in asked]
    assert together == alone
    width = max(map(len, asked))
    padded = np.array([p + [0] * (width - len(p)) for p in asked])
    with built.compiled.session(3) as session:
        got = session.run(padded, [len(p) for p in asked])
    for row, prompt in zip(got, asked, strict=True):
        assert_close(row[: len(prompt)], built.compiled.logits([prompt])[0])


@pytest.mark.few(3)
def test_tokens_after_a_rewind_see_nothing_of_what_was_forgotten(built):
    tokens, other = tokens_of(built, 2, 24), tokens_of(built, 2, 5, seed=9)
    want = built.compiled.logits(np.concatenate([tokens[:, :11], other], axis=1))
    with built.compiled.session(2) as session:
        session.run(tokens)
        session.rewind(11)
        assert_close(session.run(other), want[:, 11:])
        session.rewind([14, 12])  # rows of different lengths; row 1 repeats two of its tokens
        again = session.run(np.stack([other[0, 3:4], other[1, 1:2]]), [1, 1])
        assert_close(again, np.stack([want[0, 14:15], want[1, 12:13]]))


def test_a_prompt_in_chunks_equals_one_call(built, monkeypatch):
    tokens = tokens_of(built, 2, 37)
    whole = built.compiled.logits(tokens)
    with built.compiled.session(2) as session:
        parts = [session.run(tokens[:, a:b]) for a, b in ((0, 1), (1, 8), (8, 9), (9, 37))]
    assert_close(np.concatenate(parts, axis=1), whole)
    monkeypatch.setattr(runtime_session, "CHUNK", 6)
    with built.compiled.session(2) as session:
        assert_close(session.run(tokens), whole)
        assert session.stats["calls"] == 7
        session.rewind(0)
        assert_close(session.run(tokens, last_only=True), whole[:, -1:])


def test_what_the_build_says_of_the_model(built):
    facts, report = built.compiled.facts, built.compiled.report
    config = getattr(built.model, "config", None)
    assert facts.num_layers == getattr(config, "num_hidden_layers", models.LAYERS)
    some = torch.zeros(1, 1, dtype=torch.long)
    assert facts.vocab_size == parity.logits(built.model, some).shape[-1]
    unique = {p.data_ptr(): p.numel() for p in built.model.parameters()}
    assert facts.parameters == sum(unique.values())
    assert report["grade"] == "lossless" and report["errors"]["onnx"] <= 1e-4
