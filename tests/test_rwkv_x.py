"""RWKV-X: captured like any model; its recurrence, its shifts and its chunks token by token in NumPy."""

from functools import cache

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.facts_json import kv_bytes
from accel.ir.capture.arch.rwkv_x import RwkvX, RwkvXConfig

TOKENS = np.random.default_rng(0).integers(0, 97, (2, 34))
PROMPT = 26
CHUNKS = {"kv.select": {"use": "rwkv-x", "page": 4, "tokens_read": 16}}


@cache
def module():
    return models.rwkv_x().eval()


@cache
def logits():
    with torch.no_grad():
        return module()(torch.from_numpy(TOKENS)).numpy()


@cache
def weights():
    return {n: p.double().numpy() for n, p in module().state_dict().items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normed(x, name, epsilon=1e-5):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return x.reshape(-1) * weights()[f"{name}weight"] + weights()[f"{name}bias"]


class Loop:
    """One row, a token at a time. `chunk` and `most`: a token reads the newest chunk and so many others; 0: all.
    `late`: the control, that erases what the state has forgotten already.
    """

    def __init__(self, chunk=0, most=0, late=False):
        self.w, self.chunk, self.most, self.late = weights(), chunk, most, late
        self.shifts, self.states, self.keys, self.length = {}, {}, {}, 0

    def logits(self, tokens):
        return np.stack([self.token(int(t)) for t in tokens])

    def token(self, token):
        self.first = None
        x = normed(self.w["embed.weight"][token], "start.")
        for n, layer in enumerate(module().layers):
            at = f"layers.{n}."
            mix = self.attention if hasattr(layer.mixer, "q") else self.time
            x = x + mix(f"{at}mixer.", normed(x, f"{at}before."))
            x = x + self.channels(f"{at}channels.", normed(x, f"{at}between."))
        self.length += 1
        return self.w["head.weight"] @ normed(x, "norm.")

    def before(self, at, x):
        old, self.shifts[at] = self.shifts.get(at, np.zeros_like(x)), x
        return old

    def channels(self, at, x):
        x = x + (self.before(at, x) - x) * self.w[f"{at}mix"]
        return self.w[f"{at}down.weight"] @ np.maximum(self.w[f"{at}up.weight"] @ x, 0) ** 2

    def time(self, at, x):
        def low(name, x, act=lambda h: h):
            found = self.w[f"{at}{name}.up.weight"] @ act(self.w[f"{at}{name}.down.weight"] @ x)
            return found + self.w.get(f"{at}{name}.up.bias", 0)

        shifted = x + (self.before(at, x) - x) * self.w[f"{at}mix"]
        x_r, x_w, x_k, x_v, x_a, x_g = shifted
        r, k, v = (self.w[f"{at}{n}.weight"] @ y for n, y in (("r", x_r), ("k", x_k), ("v", x_v)))
        w = np.exp(-0.606531 * sigmoid(low("decay", x_w, np.tanh)))
        a, g = sigmoid(low("rate", x_a)), low("gate", x_g, sigmoid)
        if self.first is None:
            self.first = v
        else:
            v = v + (self.first - v) * sigmoid(low("residual.0", x_v))
        by_head = [y.reshape(4, 8) for y in (r, k, v, w, a, k * self.w[f"{at}k_k"])]
        r, k, v, w, a, kk = by_head
        kk = kk / np.linalg.norm(kk, axis=1, keepdims=True)
        k = k * (1 + (a - 1) * self.w[f"{at}k_a"].reshape(4, 8))
        y = []
        for h in range(4):
            s = self.states.get((at, h), np.zeros((8, 8)))
            found = (s * w[h] if self.late else s) @ -kk[h]
            s = s * w[h] + np.outer(found, kk[h] * a[h]) + np.outer(v[h], k[h])
            self.states[at, h] = s
            y.append(s @ r[h])
        here = (r * k * self.w[f"{at}r_k"]).sum(1, keepdims=True) * v
        out = normed(np.stack(y), at, 64e-5) + here.reshape(-1)
        return self.w[f"{at}out.weight"] @ (out * g)

    def attention(self, at, x):
        q, k, v = ((self.w[f"{at}{n}.weight"] @ x).reshape(4, 8) for n in "qkv")
        keys, values = self.keys.setdefault(at, ([], []))
        keys.append(k)
        values.append(v)
        read, full = list(range(len(keys))), self.length // self.chunk if self.chunk else 0
        if full > self.most:
            means = [
                np.mean(keys[c * self.chunk : (c + 1) * self.chunk], axis=0) for c in range(full)
            ]
            worth = [float((q * mean).sum()) for mean in means]
            best = np.argsort(worth)[-self.most :]
            read = [i for i in read if i // self.chunk == full or i // self.chunk in best]
        out = []
        for h in range(4):
            scores = np.array([q[h] @ keys[i][h] for i in read]) / 8**0.5
            shares = np.exp(scores - scores.max())
            out.append(shares / shares.sum() @ np.array([values[i][h] for i in read]))
        return self.w[f"{at}out.weight"] @ np.concatenate(out)


def in_parts(model):
    """A prompt, then tokens one by one."""
    with model.session(2) as session:
        parts = [session.run(TOKENS[:, :PROMPT])]
        parts += [session.run(TOKENS[:, n : n + 1]) for n in range(PROMPT, TOKENS.shape[1])]
    return np.concatenate(parts, 1)


def test_the_module_is_the_recurrence_token_by_token():
    np.testing.assert_allclose(Loop().logits(TOKENS[0]), logits()[0], atol=1e-4, rtol=1e-3)
    late = Loop(late=True).logits(TOKENS[0])
    assert np.abs(late - logits()[0]).max() > 1e-3, "the control"


@cache
def eager():
    return accel.optimize(module(), "base", target="eager", max_context=48)


def test_prompts_and_single_tokens_are_the_module():
    np.testing.assert_allclose(in_parts(eager()), logits(), atol=1e-4, rtol=1e-3)


@pytest.mark.long
def test_onnx_is_the_module(tmp_path):
    with accel.optimize(module(), "base", max_context=48, out=tmp_path / "out") as model:
        np.testing.assert_allclose(in_parts(model), logits(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("target", ["eager", pytest.param("onnx", marks=pytest.mark.long)])
def test_tokens_read_the_best_chunks(target, tmp_path):
    """Three and the newest, those of a call of few tokens, too."""
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with accel.optimize(module(), CHUNKS, target=target, max_context=48, **out) as model:
        got = in_parts(model)
    for row, tokens in zip(got, TOKENS, strict=True):
        want = Loop(chunk=4, most=3).logits(tokens)
        np.testing.assert_allclose(row, want, atol=1e-4, rtol=1e-3)
    assert np.abs(got - logits())[:, 16:].max() > 1e-3, "the others are not read"


def test_state_is_of_one_size_but_for_the_layers_with_attention():
    program = eager().program
    assert kv_bytes(program) == 2 * 32 * 4 + 8
    recurrent = 2 * (2 * 32 + 4 * 8 * 8) + 32  # two shifts and a matrix for each head; a shift
    assert sum(layer.state_bytes for layer in program.facts.layers) == 4 * recurrent


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((97, 30, 48, 4, 2, 8, 4), "hidden_size 30 must be a multiple of head_dim 8"),
        ((97, 32, 48, 4, 0, 8, 4), "num_sparse_layers 0 1 or more"),
        ((97, 32, 48, 5, 2, 8, 4), "num_rwkv_layers 5 must be a multiple of num_sparse_layers 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        RwkvXConfig(*sizes)


def test_a_model_has_the_layers_of_its_groups():
    kinds = [type(layer.mixer).__name__ for layer in RwkvX(RwkvXConfig(9, 8, 8, 4, 2, 4, 2)).layers]
    assert kinds == ["TimeMix", "TimeMix", "SparseMix"] * 2
