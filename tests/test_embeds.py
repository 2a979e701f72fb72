"""Embeddings in place of tokens: what transformers makes of them."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import PassError
from accel.runtime.session import core

RECIPE = {"loop": {"use": "superposed"}}
TOKENS = np.array([[3, 5, 7, 11, 2], [9, 8, 4, 0, 0]])
COUNTS = [5, 3]


def build(module, target, recipe=RECIPE):
    return accel.optimize(module, recipe, target=target, max_context=32, max_batch=2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, target",
    [("llama", "eager"), ("llama", "onnx"), ("gpt2", "onnx"), ("gemma2", "onnx")],
)
def test_logits_are_those_of_transformers(name, target):
    torch.manual_seed(0)
    module = models.make(name, 2).eval()
    table = module.get_input_embeddings()
    given = np.random.default_rng(0).normal(size=(2, 5, table.weight.shape[1])).astype(np.float32)
    with build(module, target) as made, made.session(2) as session:
        rows = session.embed(TOKENS)
        with torch.no_grad():
            np.testing.assert_allclose(rows, table(torch.tensor(TOKENS)), rtol=1e-5, atol=1e-6)
        plain = session.run(TOKENS, COUNTS)
        session.rewind(0)
        np.testing.assert_array_equal(session.run(TOKENS * 0, COUNTS, embeds=rows), plain)
        session.rewind(0)
        found = session.run(TOKENS, COUNTS, embeds=given)
        assert np.abs(found - plain).max() > 1e-2
        after = session.run([[6], [6]])[:, 0]  # tokens again, behind embeddings
    for row, count in enumerate(COUNTS):
        stream = torch.tensor(given[row : row + 1, :count])
        with torch.no_grad():
            more = torch.cat([stream, table(torch.tensor([[6]]))], 1)
            wanted = module(inputs_embeds=more).logits[0]
        np.testing.assert_allclose(found[row, :count], wanted[:-1], atol=5e-5, rtol=1e-3)
        np.testing.assert_allclose(after[row], wanted[-1], atol=5e-5, rtol=1e-3)


def test_a_long_call_in_several_graph_calls_takes_its_rows(monkeypatch):
    module = models.make("llama", 2).eval()
    with build(module, "onnx") as made:
        with made.session() as session:
            rows = session.embed(TOKENS[:1])
            whole = session.run(TOKENS[:1], embeds=rows * 2)
        monkeypatch.setattr(core, "CHUNK", 2)
        with made.session() as session:
            cut = session.run(TOKENS[:1], embeds=rows * 2)
            assert session.stats["calls"] == 3
    np.testing.assert_allclose(cut, whole, atol=1e-5)


def test_what_is_wrong_is_refused():
    module = models.make("llama", 2).eval()
    with build(module, "onnx") as made, made.session() as session:
        rows = session.embed(TOKENS[:1])
        for wrong in (rows[:, :2], rows[0], rows[:, :, :5], rows.astype(np.int64)):
            with pytest.raises(accel.InputError, match=r"give floats \[1, 5, 48\]"):
                session.run(TOKENS[:1], embeds=wrong)
        with pytest.raises(accel.InputError, match="not finite"):
            session.run(TOKENS[:1], embeds=rows * np.nan)
        for wrong in ([[101]], [3, 5], 3, [[]]):
            with pytest.raises(accel.InputError, match="tokens"):
                session.embed(wrong)
        assert session.lengths[0] == 0
    with build(module, "onnx", "base") as made, made.session() as session:
        with pytest.raises(accel.InputError, match="takes tokens alone"):
            session.run(TOKENS[:1], embeds=rows)
        with pytest.raises(accel.InputError, match="embed"):
            session.embed(TOKENS[:1])


class Twice(torch.nn.Module):
    """A model that reads its tokens once more, behind the first layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.bias = torch.nn.Embedding(inner.config.vocab_size, inner.config.vocab_size)

    def forward(self, input_ids, **more):
        return self.inner(input_ids, **more).logits + self.bias(input_ids)


def test_a_model_that_reads_tokens_in_two_ways_is_refused():
    module = Twice(models.make("llama", 2)).eval()
    with pytest.raises(
        PassError, match=r"loop.superposed: this model reads its tokens in \d+ ways"
    ):
        build(module, "eager")
