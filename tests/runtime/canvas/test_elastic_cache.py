"""elastic-cache: what attention has drifted from is computed anew, from that layer on; no cache where each call is."""

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import accel
from accel.ir.axis import Axis
from accel.ir.errors import PassError
from accel.runtime.canvas.elastic_cache import ElasticCache
from accel.runtime.loop.dllm_threshold import DllmThreshold

from ...diffusion_case import (
    BLOCK,
    MASK,
    NEW,
    Fed,
    Slots,
    eager,
    official,
    prompts,
    surest,
    with_loop,
    with_steps,
)
from ..canvas_case import followed

AXIS = Axis("canvas", "accel.runtime.canvas")


class Window:
    """The first `window` masks (`near`), and what else a call computes (`rows`); `fresh`: all."""

    def __init__(self, window, threshold, refresh):
        self.window, self.threshold, self.refresh = window, threshold, refresh
        self.masks, self.call = None, 0

    def __call__(self, before):
        newest = [] if self.masks is None else np.flatnonzero(self.masks & ~before.open).tolist()
        self.masks = before.open.copy()
        self.near = np.flatnonzero(before.open)[: self.window].tolist()
        self.rows = {*newest, *self.near, *(i - before.shift for i in self.near)}
        self.fresh = self.refresh > 0 and self.call % self.refresh == 0
        self.call += 1
        return np.ones(before.open.size, np.bool_)


def attended(q, k, scale):
    """What queries [N,H,D] give to keys [T,H,D]: [H,N,T]."""
    return (q.transpose(0, 1) @ k.permute(1, 2, 0) * scale).softmax(-1)


class Layers:
    """One call of one row, layer by layer, as the paper has it: which rows each layer computes.

    `held`: of each layer, what it had of every slot: the stream behind it, queries, keys, values. `tracked`: of the
    call before, without duplicates. `switched`: by call, the layer whose attention had drifted, or none.
    """

    def __init__(self, count, threshold):
        self.held = [None] * count
        self.threshold, self.tracked, self.switched = threshold, [], []

    def run(self, x, rows, near, known, fresh, layer):
        """x [T,E]; layer(index, x) -> q, k, v [T,H,D], scale, and the rest of the layer as a function of attention."""
        size = len(x)
        self.tracked = [t for t in self.tracked if t < size]
        rows = sorted({*rows, *self.tracked} & {*range(size)})
        near = [i for i in near if i < size]
        fresh = fresh or self.held[0] is None or len(self.held[0][0]) < size
        self.switched.append(-1 if fresh else None)
        chosen = []
        for index in range(len(self.held)):
            q, k, v, scale, rest = layer(index, x)
            old = self.held[index]
            mine = list(range(size)) if fresh else rows
            if old is None or len(old[0]) < size:
                old = [torch.zeros(size, *y.shape[1:]) for y in (x, q, k, v)]
            y, queries, keys, values = new = [part.clone() for part in old]
            queries[mine], keys[mine], values[mine] = q[mine], k[mine], v[mine]
            mixed = attended(q, keys, scale) @ values.transpose(0, 1)
            y[mine] = rest(mixed.transpose(0, 1).flatten(1))[mine]
            self.held[index], x = new, y
            if self.tracked and not fresh and self.drifted(old, new, scale):
                fresh, self.switched[-1] = True, index
            drawn = attended(queries[near], keys, scale).sum((0, 1))
            drawn[~known] = 0
            if drawn.max() > 0:
                chosen.append(int(drawn.argmax()))
        self.tracked = sorted({*chosen})
        return x

    def drifted(self, old, new, scale):
        before, after = (attended(part[1][self.tracked], part[2], scale) for part in (old, new))
        return self.like(before, after) < self.threshold

    def like(self, before, after):
        """Over the keys; of tracked tokens and heads the mean."""
        return float(F.cosine_similarity(before, after, dim=-1).mean())


class Elastic(Slots):
    """What `Layers` keep of a `Filler`."""

    layers = Layers

    def __init__(self, module, rule):
        super().__init__(module)
        self.rule = rule
        self.run = self.layers(len(module.qkv), rule.threshold).run

    def says(self, masks):
        return masks & np.isin(np.arange(masks.size), self.rule.near)

    def layer(self, index, x):
        heads = self.module.qkv[index](x).unflatten(1, (3, self.module.heads, -1)).unbind(1)
        return *heads, heads[0].shape[-1] ** -0.5, lambda a: x + self.module.out[index](a)

    @torch.no_grad()
    def write(self, tokens, places):
        x = self.module.tokens(torch.tensor(tokens)) + self.module.places(torch.tensor(places))
        rule, known = self.rule, torch.tensor(~self.rule.masks[: len(tokens)])
        return self.module.head(
            self.run(x, rule.rows, rule.near, known, rule.fresh, self.layer)
        ).numpy()


def case(window, threshold, refresh=0):
    options = {"window": window, "threshold": threshold, "refresh": refresh}
    return Fed(options, lambda: Window(window, threshold, refresh), Elastic)


CASES = [case(BLOCK, 0.97), case(4, -1.0, 7)]


# Broken variants, which the reference has to tell from the method


class OverFeatures(Layers):
    """The cosine along the wrong axis, which a public transcription has."""

    def like(self, before, after):
        return float(F.cosine_similarity(before, after, dim=0).mean())


class OneLayerLate(Layers):
    """The layer behind the one that drifted still reads the cache."""

    def drifted(self, old, new, scale):
        index = next(i for i, held in enumerate(self.held) if held is new)
        found = getattr(self, "late", None) == (len(self.switched), index - 1)
        if super().drifted(old, new, scale):
            self.late = len(self.switched), index
        return found


class MostOfAll(Layers):
    """A mask may be tracked."""

    def run(self, x, rows, near, known, *more):
        return super().run(x, rows, near, torch.ones_like(known), *more)


class WithoutNewest(Window):
    """What the call before filled is not computed again."""

    def __call__(self, before):
        self.masks = None
        return super().__call__(before)


def test_a_window_without_the_newest_is_seen():
    """By the reference by which the law of loops judges the method."""
    module, compiled = eager(False)
    (prompt,), options = prompts(0, (5,)), CASES[0].options

    def plain(rule):
        every = lambda: rule(**options)  # noqa: E731
        return official(module, prompt, NEW, NEW, surest(1), every, slots=Elastic)[0]

    table = {"use": "elastic-cache", **options}
    with with_loop(compiled, "dllm-lowconf", table, block=NEW) as made:
        (found,) = made.generate([prompt], NEW, eos=[]).tokens
    assert found == plain(Window) != plain(WithoutNewest)


# The paper's decoding of published shapes


class Plain:
    """One row, one token per call, over a Llama or a Qwen2 of transformers."""

    def __init__(self, module, window, threshold, layers=Layers):
        self.module, self.window, self.config = module, window, module.config
        self.layers = layers(len(module.model.layers), threshold)

    def layer(self, index, x):
        layer = self.module.model.layers[index]
        a, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (
            p(normed).unflatten(1, (-1, a.head_dim)).transpose(0, 1)[None]
            for p in (a.q_proj, a.k_proj, a.v_proj)
        )
        cos, sin = self.module.model.rotary_emb(x[None], torch.arange(len(x))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = (y.repeat_interleave(a.num_key_value_groups, 1) for y in (k, v))

        def rest(mixed):
            y = x + a.o_proj(mixed)
            return y + layer.mlp(layer.post_attention_layernorm(y))

        return *(y[0].transpose(0, 1) for y in (q, k, v)), a.scaling, rest

    @torch.no_grad()
    def decode(self, prompt, new):
        shift = int(bool(getattr(self.config, "logit_shift", False)))
        mask = self.config.mask_token_id
        ids = torch.tensor([*prompt, *[mask] * new])
        newest = []
        for _ in range(new):
            near = torch.nonzero(ids == mask)[: self.window, 0].tolist()
            rows = {*near, *(i - shift for i in near), *newest}
            x = self.module.model.embed_tokens(ids)
            x = self.layers.run(x, rows, near, ids != mask, False, self.layer)
            scores = self.module.lm_head(self.module.model.norm(x))[[i - shift for i in near]]
            scores[:, mask] = -torch.inf
            best = scores.softmax(-1).max(-1)
            surest = int(best.values.argmax())
            newest = [near[surest]]
            ids[newest] = best.indices[surest]
        return ids[len(prompt) :].tolist()


def deeper(name, layers=4):
    """The model of that name with more layers."""
    config = models.FILLERS[name]().config
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    return models.randomise(type(models.FILLERS[name]())(config), f"deeper {name}").eval()


GIVEN, LONG = [[5, 6, 7, 8, 9, 4], [1, 2, 3]], 14


@pytest.mark.long
@pytest.mark.parametrize("target", ["eager", "onnx"])
@pytest.mark.parametrize("name", models.FILLERS)
def test_tokens_of_published_shapes_are_those_of_the_papers_loop(name, target):
    """Two rows together, whose attention drifts in other calls and layers. The control: another threshold, and broken
    variants, give other tokens.
    """
    module, threshold = deeper(name), 0.7
    canvas = {"use": "elastic-cache", "window": 5, "threshold": threshold}
    recipe = {"loop": {"use": "dllm-lowconf", "block": LONG}, "canvas": canvas}

    def plain(*options):
        rows = [Plain(module, 5, *options) for _ in GIVEN]
        tokens = [row.decode(p, LONG) for row, p in zip(rows, GIVEN, strict=True)]
        return tokens, [row.layers.switched for row in rows]

    want, switched = plain(threshold)
    assert switched[0] != switched[1] and all({-1, None, 1, 2} <= {*own} for own in switched)
    with accel.optimize(module, recipe, target=target, max_context=64, max_batch=2) as made:
        assert made.generate(GIVEN, LONG, eos=[]).tokens == want
    assert want != plain(-1.0)[0]
    for layers in (OverFeatures, OneLayerLate, MostOfAll):
        assert want != plain(threshold, layers)[0]


# Limits


def logits_of(canvas, shift, given):
    return followed(DllmThreshold(block=BLOCK, threshold=0.5), canvas, shift, given).logits


@pytest.mark.few(1)
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_a_refresh_in_every_call_is_no_cache(shift):
    """Bit for bit: the logits of every call, of rows in a batch, whose window is the block. The control: a cache."""
    given = prompts(0, (5, 11, 7))
    whole = logits_of(None, shift, given)
    every, never = (
        logits_of(ElasticCache(window=BLOCK, threshold=0.97, refresh=n), shift, given)
        for n in (1, 0)
    )
    assert len(whole) == len(every) > 3
    assert all(map(np.array_equal, whole, every))
    assert not all(map(np.array_equal, whole[:3], never[:3]))


def test_layers_above_a_drift_alone_compute_all():
    """The others what is named, and the tokens that the call before found most attended."""
    text, table = [3, 4, 5, 6, 7, *[MASK] * 5], {"use": "elastic-cache", **CASES[0].options}
    with with_loop(eager(False)[1], "dllm-lowconf", table) as made, made.session() as session:
        session.write([text], 0)
        before = {n: a.copy() for n, a in session._core.backend.buffers().items()}
        session.write([[*text[:5], 8, 9, 8, *text[8:]]], [list(range(10))], picks=[[5, 6, 7]])
        after = session._core.backend.buffers()
        names = [f"outputs.{i}.stream" for i in (0, 1)]
        below, above = (
            np.flatnonzero((after[n] != before[n]).any((0, 1, 3))).tolist() for n in names
        )
    tracked = {*below} - {5, 6, 7}
    assert len(below) == 3 + len(tracked) and tracked and tracked < {0, 1, 2, 3, 4}
    assert above == list(range(10))


# Bad input


@pytest.mark.parametrize(
    "recipe",
    [
        {"kv.codec": {"use": "kv-int8"}},
        {"depth": {"use": "by-call"}},
        {"loop": {"use": "freedave"}},
    ],
)
def test_what_changes_the_cache_its_layers_or_its_calls_is_refused(recipe):
    tables = {"loop": {"use": "dllm-lowconf"}, "canvas": {"use": "elastic-cache"}, **recipe}
    with pytest.raises(accel.RecipeError, match="canvas"):
        accel.optimize(models.llada(), tables, target="eager")


def test_models_without_masks_are_named():
    program = eager(False)[1].program.copy()
    program.facts.diffusion = None
    with pytest.raises(PassError, match="no mask token"):
        with_steps(program, ElasticCache())


def test_options_out_of_range_are_refused():
    for options in ({"window": 0}, {"refresh": -1}, {"threshold": float("nan")}):
        with pytest.raises(accel.RecipeError, match=next(iter(options))):
            AXIS.build("elastic-cache", **options)
