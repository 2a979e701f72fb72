"""dllm-featcache: rows whose values changed most are computed, layer by layer; no cache where each call refreshes."""

import dataclasses

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import accel
from accel.ir.axis import Axis
from accel.ir.errors import InputError, PassError
from accel.runtime.canvas.dllm_featcache import DllmFeatcache
from accel.runtime.loop.dllm_threshold import DllmThreshold

from ...diffusion_case import (
    BLOCK,
    NEW,
    Fed,
    Slots,
    decoded,
    eager,
    official,
    prompts,
    surest,
    with_loop,
    with_steps,
)
from ..canvas_case import followed

AXIS = Axis("canvas", "accel.runtime.canvas")


class Intervals:
    """Which slots a call is given; `adapts`, whether the answer is not refreshed; `start`, its first slot."""

    def __init__(self, prompt, answer, share):
        self.prompt, self.answer, self.share = prompt, answer, share
        self.call, self.start = 0, 0

    def __call__(self, before):
        if not self.call:
            self.start = before.first - before.shift
        answers = np.arange(before.open.size) >= self.start
        self.adapts = self.call % self.answer > 0
        fed = answers | (self.call % self.prompt == 0)
        self.call += 1
        return fed


def least_like(new, old, named, count):
    """The rows that are `named`, and the `count` others whose values are least like the old ones; all [T,..]."""
    near = F.cosine_similarity(new.flatten(1), old.flatten(1), dim=1)
    others = [i for i in range(len(new)) if i not in named]
    return sorted([*named, *sorted(others, key=lambda i: float(near[i]))[:count]])


class Features(Slots):
    """Keys, values and what attention gave, by slot."""

    def __init__(self, module, rule):
        super().__init__(module)
        self.rule = rule
        self.gave = [{} for _ in module.qkv]

    def rows(self, index, places, v):
        """Those that a layer computes of slots at these places, whose values are v [T,H,D]."""
        every = list(range(len(places)))
        if not index or not self.rule.adapts:
            return every
        held = self.kept[index]
        named = [i for i in every if places[i] < self.rule.start or int(places[i]) not in held]
        old = torch.stack(
            [held[int(p)][1] if int(p) in held else v[i] for i, p in enumerate(places)]
        )
        answers = sum(int(p) >= self.rule.start for p in places)
        return least_like(v, old, named, int(self.rule.share * answers))

    @torch.no_grad()
    def write(self, tokens, places):
        x = self.module.tokens(torch.tensor(tokens)) + self.module.places(torch.tensor(places))
        for index, (qkv, out) in enumerate(zip(self.module.qkv, self.module.out, strict=True)):
            kept, gave = self.kept[index], self.gave[index]
            q, k, v = qkv(x).unflatten(1, (3, self.module.heads, -1)).unbind(1)  # [T,H,D]
            rows = self.rows(index, places, v)
            for i, p in enumerate(map(int, places)):
                kept[p] = (k[i] if i in rows else kept[p][0], v[i])
            keys, values = (torch.stack(part, 1) for part in zip(*kept.values(), strict=True))
            weights = (q.transpose(0, 1) @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
            mixed = out((weights @ values).transpose(0, 1).flatten(1))
            gave.update({int(places[i]): mixed[i] for i in rows})
            x = x + torch.stack([gave[int(p)] for p in places])
        return self.module.head(x).numpy()


def case(prompt, answer, share):
    options = {"prompt": prompt, "answer": answer, "share": share}
    return Fed(options, lambda: Intervals(prompt, answer, share), Features)


CASES = [case(5, 2, 0.25), case(4, 3, 0.5)]


class MostLike(Features):
    """A broken variant: the rows whose values changed least are computed."""

    def rows(self, index, places, v):
        return super().rows(index, places, -v)


class Late(Intervals):
    """A broken variant: the answer is refreshed one call too late."""

    def __call__(self, before):
        fed = super().__call__(before)
        self.adapts = self.call > 1 and (self.call - 2) % self.answer > 0
        return fed


@pytest.mark.parametrize("slots, rule", [(MostLike, Intervals), (Features, Late)])
def test_other_rows_and_intervals_are_seen(slots, rule):
    """The reference by which the law of loops judges the method, broken."""
    module, compiled = eager(False)
    given, options = prompts(0, (5, 11)), (5, 3, 0.25)

    def plain(slots, rule):
        made = [
            official(module, p, NEW, NEW, surest(1), lambda: rule(*options), slots=slots)
            for p in given
        ]
        return [tokens for tokens, _ in made]

    table = {"use": "dllm-featcache", **case(*options).options}
    tokens, *_ = decoded(compiled, "dllm-lowconf", given, canvas=table, block=NEW)
    assert tokens == plain(Features, Intervals) != plain(slots, rule)


class Plain:
    """The paper's decoding of one row, one token per call, over a Llama or a Qwen2 of transformers."""

    def __init__(self, module, prompt, answer, share):
        self.module, self.every = module, (prompt, answer)
        self.share, self.config = share, module.config
        self.store = [{} for _ in module.model.layers]  # of a layer by name, [P+N,..]
        self.computed = []  # by call, rows of each layer

    def layer(self, index, x, fed, start, adapts):
        """The stream behind a layer, x [P+N,E]; `fed` [T] are the slots of the call."""
        layer, store = self.module.model.layers[index], self.store[index]
        a = layer.self_attn
        heads = lambda y: y.unflatten(1, (-1, a.head_dim))  # noqa: E731
        normed = layer.input_layernorm(x)
        rows = fed
        v = heads(a.v_proj(normed))
        if index and adapts:
            mine = [p for p in fed if p >= start]
            count = int(self.share * len(mine))
            near = least_like(v[mine], store["v"][mine], [], count)
            rows = sorted([p for p in fed if p < start] + [mine[i] for i in near])
        cos, sin = self.module.model.rotary_emb(x[None], torch.arange(len(x))[None])
        q, k = (heads(p(normed)).transpose(0, 1)[None] for p in (a.q_proj, a.k_proj))
        q, k = (y[0].transpose(0, 1) for y in apply_rotary_pos_emb(q, k, cos, sin))
        if not store:
            store.update(
                {n: torch.zeros_like(y) for n, y in (("k", k), ("v", v), ("attn", x), ("mlp", x))}
            )
        store["v"][fed], store["k"][rows] = v[fed], k[rows]
        many = a.num_key_value_groups
        keys, values = (store[n].repeat_interleave(many, 1).transpose(0, 1) for n in "kv")
        weights = (q[rows].transpose(0, 1) @ keys.mT * a.scaling).softmax(-1)
        store["attn"][rows] = a.o_proj((weights @ values).transpose(0, 1).flatten(1))
        x = x + store["attn"]
        store["mlp"][rows] = layer.mlp(layer.post_attention_layernorm(x))[rows]
        self.computed[-1].append(len(rows))
        return x + store["mlp"]

    @torch.no_grad()
    def decode(self, prompt, new):
        shift = int(bool(getattr(self.config, "logit_shift", False)))
        mask, start = self.config.mask_token_id, len(prompt) - shift
        ids = torch.tensor([*prompt, *[mask] * new])
        for call in range(new):
            whole = call % self.every[0] == 0
            fed = list(range(0 if whole else start, len(ids)))
            x = self.module.model.embed_tokens(ids)
            self.computed.append([])
            for index in range(len(self.store)):
                x = self.layer(index, x, fed, start, call % self.every[1] > 0)
            logits = self.module.lm_head(self.module.model.norm(x))
            open_ = [i for i in range(len(prompt), len(ids)) if ids[i] == mask]
            scores = logits[[i - shift for i in open_]]
            scores[:, mask] = -torch.inf
            best = scores.softmax(-1).max(-1)
            surest = int(best.values.argmax())
            ids[open_[surest]] = best.indices[surest]
        return ids[len(prompt) :].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("target", [pytest.param("eager", marks=pytest.mark.long), "onnx"])
@pytest.mark.parametrize("name", models.FILLERS)
def test_tokens_of_published_shapes_are_those_of_the_papers_loop(name, target):
    """Two rows together, and the control: other options give other tokens."""
    module = models.FILLERS[name]().eval()
    given, new = [[5, 6, 7, 8, 9, 4], [1, 2, 3]], 14
    canvas = {"use": "dllm-featcache", "prompt": 6, "answer": 3, "share": 0.3}
    recipe = {"loop": {"use": "dllm-lowconf", "block": new}, "canvas": canvas}
    with accel.optimize(module, recipe, target=target, max_context=64, max_batch=2) as made:
        found = made.generate(given, new, eos=[]).tokens
    assert found == [Plain(module, 6, 3, 0.3).decode(p, new) for p in given]
    assert found != [Plain(module, 6, 9, 0.1).decode(p, new) for p in given]


def test_fewer_rows_are_computed():
    """Of a layer above the first: all of the canvas, then a share of the answer."""
    plain = Plain(models.dream().eval(), 100, 4, 0.25)
    plain.decode(list(range(20)), 16)
    first, second = zip(*plain.computed, strict=True)
    assert first[:5] == (36, 17, 17, 17, 17) and second[:5] == (36, 4, 4, 4, 17)


# Limits


def logits_of(canvas, shift, given):
    return followed(DllmThreshold(block=BLOCK, threshold=0.5), canvas, shift, given).logits


def near(whole, other, tolerance):
    pairs = zip(whole, other, strict=True)
    return all(a.shape == b.shape and np.abs(a - b).max() <= tolerance for a, b in pairs)


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_a_refresh_in_every_call_is_no_cache(shift):
    """Bit for bit: the logits of every call, of rows in a batch. A share of 1 is it up to rounding; the control, one
    that is less is not.
    """
    given = prompts(0, (5, 11, 7))
    whole = logits_of(None, shift, given)
    assert len(whole) > 3
    assert near(whole, logits_of(DllmFeatcache(prompt=1, answer=1), shift, given), 0)
    alone = logits_of(None, shift, given[:1])
    part = DllmFeatcache(prompt=1, answer=9, share=1.0)
    assert near(alone, logits_of(part, shift, given[:1]), 1e-4)
    part = dataclasses.replace(part, share=0.25)
    assert not near(alone[:2], logits_of(part, shift, given[:1])[:2], 1e-2)


def test_without_a_share_values_alone_change():
    """Of the layer above the first."""
    _, compiled = eager(False)
    with with_loop(compiled, "dllm-lowconf", "dllm-featcache") as made, made.session() as session:
        tokens = np.array([[3, 4, 5, 6]])
        session.write(tokens, 0)
        before = {n: a.copy() for n, a in session._core.backend.buffers().items()}
        session.write(tokens + 7, [[0, 1, 2, 3]], picks=[[-2]])
        after = session._core.backend.buffers()
        changed = {n for n, a in after.items() if not np.array_equal(a, before[n])}
        assert {n for n in changed if ".1." in n} == {"kv.1.v"}


# Bad input


def test_picks_that_no_call_has_are_refused():
    _, compiled = eager(False)
    with with_loop(compiled, "dllm-lowconf") as made, made.session() as session:
        with pytest.raises(InputError, match="leave picks out, or build with"):
            session.write([[3, 4]], 0, picks=[[0]])
    with with_loop(compiled, "dllm-lowconf", "dllm-featcache") as made, made.session() as session:
        session.write([[3, 4, 5]], 0)
        for picks, why in (
            ([[3]], "must be some of its 3 columns"),
            ([[1, 1]], "each once"),
            ([[0, -1]], "must be -1, then columns, then -2"),
            ([[-1, -1, -1, -1]], "must be some of its 3 columns"),
            ([0], "have shape"),
        ):
            with pytest.raises(InputError, match=why):
                session.write([[6, 7, 8]], 0, picks=picks)
        with pytest.raises(
            InputError, match="token 3 of row 0 is new, and must be among its picks"
        ):
            session.write([[6, 7, 8, 9]], 0, picks=[[0]])
        assert session.lengths.tolist() == [3]


@pytest.mark.parametrize(
    "recipe", [{"kv.codec": {"use": "kv-int8"}}, {"depth": {"use": "by-call"}}]
)
def test_what_changes_the_cache_or_its_layers_is_refused(recipe):
    tables = {"loop": {"use": "dllm-lowconf"}, "canvas": {"use": "dllm-featcache"}, **recipe}
    with pytest.raises(accel.RecipeError, match="canvas"):
        accel.optimize(models.llada(), tables, target="eager")


@pytest.mark.parametrize("name", ["yoco", pytest.param("plain_latent", marks=pytest.mark.long)])
def test_layers_whose_rows_cannot_be_apart_are_named(name):
    """Layers that share a cache, and such as write one value for keys and values."""
    with accel.optimize(getattr(models, name)(), target="eager", max_context=32) as made:
        with pytest.raises(PassError, match=r"layer \d .*choose another method of canvas"):
            with_steps(made.program, DllmFeatcache())


def test_options_out_of_range_are_refused():
    for options in ({"prompt": 0}, {"answer": 0}, {"share": 1.5}, {"share": float("nan")}):
        with pytest.raises(accel.RecipeError, match=next(iter(options))):
            AXIS.build("dllm-featcache", **options)
