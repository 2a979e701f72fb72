"""TokenButler (arXiv:2503.07518): a predictor in the first layer foretells the attention logits of all later ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.ir.tables import Rows
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.select import LEAST, SPARSE, Sizes
from accel.passes.kv.select._build import Build, Named
from accel.passes.kv.select._pages import Pages, listed
from accel.passes.trained import ALL, Fitted, Parts, source

Append = Callable[[Tensor, Tensor, Tensor], Tensor]

_FEATURE, _TRUNK = "feature", "trunk"
_FEATURES = 16  # of a head, where it is trained
_BASE = 10000.0  # of rotations


@dataclass(frozen=True)
class TokenButler(Fitted, Pages):
    """Attend to the `tokens_read` tokens with the highest foretold logits, and to the first `sinks`.

    The predictor: the hidden state is projected to an eighth, goes through one causal self-attention of H heads with
    rotations, a norm and two linear layers back to its width, and is added to itself. Two more give each layer's
    queries and keys of 16 numbers a head, which are rotated. Their product is trained to be the attention's logit (mean
    squared error); the model stays as it is.

    The query heads of a group share a list, by the most that one of them foretells, and features of keys are of KV
    heads: in the paper they are of query heads, and each has a list. The paper reads a share of the tokens, and
    only its first layer is dense.

    What the first layer computes (`trunk`) is shared by all: a layer's choice needs nothing of the layers between, and
    none of its own keys. State: `pages.<layer>.feature [B,G,C/1,F]`, 16 numbers a token and KV head, and
    `pages.<first>.trunk.<name> [B,N,C,W]` of what `kept` names. Both are written slot by slot, so rewinds are free. The
    predictor's attention is computed whole, T · C scores a head in each call; beside eviction it reads the recent
    tokens only.
    """

    tokens_read: int = 1024
    page: int = field(default=1, init=False)  # features are of tokens
    sinks: int = option(4, least=0)

    key: ClassVar[str] = "tokenbutler"
    breaks = SPARSE  # what is kept is not made of keys
    relies = Pages.relies | {Invariant.ALL_LAYERS_RUN, Invariant.UNIFORM_SLOTS}
    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 7, "dense_layers": 0, "sinks": 2}

    @property
    def count(self) -> int:
        return max(LEAST, self.tokens_read + self.sinks)

    def shared(self, width: int) -> dict[str, tuple[int, ...]]:
        """inner: a multiple of the heads; `out_*` and what follows have a width of their own."""
        attends = {"down": (-1, width), "qkv": (-1, -1), "out": (-1, -1)}
        norm = {"norm": (-1,), "shift": (-1,)}
        mixes = {"up": (-1, -1), "up_bias": (-1,), "back": (width, -1), "back_bias": (width,)}
        heads = {f"{n}_in": (-1, width) for n in "qk"} | {f"{n}_in_bias": (-1,) for n in "qk"}
        return {**attends, **norm, **mixes, **heads}

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"q": (-1, -1), "q_bias": (-1,), "k": (-1, -1), "k_bias": (-1,)}

    def trunk_state(self, heads: int, shared: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """What the trunk keeps of a token: name -> (N, W), of N heads of W numbers; the first layer has so many query
        `heads`.
        """
        size = heads, shared["out"].shape[1] // heads
        return {"k": size, "v": size}

    def trunk(
        self,
        x: Mapping[str, Tensor],
        cache: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        append: Append = kv_append,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What all layers' features are made of [B,T,M], and what is kept [B,N,C,W] after the call.

        x: hidden [B,T,E], positions [B,T] of the call and k_pos [B,C] in the slots, the call's first slots [B].
        append: what puts new entries into their slots; in training its reference, through which gradients go.
        """
        w, hidden, at = shared, x["hidden"], x["positions"]
        heads, width = cache["k"].shape[1], cache["k"].shape[3]
        small = F.linear(F.linear(hidden, w["down"]), w["qkv"])
        q, k, v = (t.unflatten(2, (heads, width)).transpose(1, 2) for t in small.chunk(3, dim=2))
        after = {
            "k": append(cache["k"], turned(k, at), x["slots"]),
            "v": append(cache["v"], v.contiguous(), x["slots"]),
        }
        where = x["k_pos"][:, None, None]  # [B,1,1,C]
        values = after["v"].masked_fill((where < 0).transpose(2, 3), 0.0)
        logits = turned(q, at) @ after["k"].transpose(-1, -2) / math.sqrt(width)
        seen = (where >= 0) & (where <= at[:, None, :, None])
        lowest = torch.finfo(logits.dtype).min  # finite: a row of padding sees nothing
        mixed = logits.masked_fill(~seen, lowest).softmax(-1) @ values
        mixed = F.linear(mixed.transpose(1, 2).flatten(2), w["out"])
        normal = F.layer_norm(mixed, mixed.shape[2:], w["norm"], w["shift"])
        wide = F.linear(F.gelu(F.linear(normal, w["up"], w["up_bias"])), w["back"], w["back_bias"])
        state = hidden + wide
        both = [F.silu(F.linear(state, w[f"{n}_in"], w[f"{n}_in_bias"])) for n in "qk"]
        return torch.cat(both, dim=2), after

    def made(
        self, trunk: Tensor, positions: Tensor, groups: int, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """A layer's features of the trunk [B,T,M]: queries [B,T,H,F], keys [B,G,T,F]. weights: those of `sizes`."""
        half = trunk.shape[2] // 2
        width = weights["k"].shape[0] // groups
        queries = F.linear(trunk[..., :half], weights["q"], weights["q_bias"])
        keys = F.linear(trunk[..., half:], weights["k"], weights["k_bias"])
        q, k = (
            turned(t.unflatten(2, (-1, width)).transpose(1, 2), positions) for t in (queries, keys)
        )
        scaled: Tensor = q.transpose(1, 2) / math.sqrt(width)
        return scaled, k

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """The first `sinks` slots are worth most."""
        worth = super().vote(scores, seen)
        first = torch.arange(worth.shape[3], device=worth.device) < self.sinks
        forced: Tensor = worth.masked_fill(first, math.inf)
        return forced

    # Its lists

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        """Of features of F = `width` numbers."""
        return {_FEATURE: ("float32", (width,))}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        return {_FEATURE: keys.squeeze(3)}

    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return queries @ parts[_FEATURE].transpose(-1, -2)

    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        x = operands_of(node)
        layer, heads, groups = node.meta["layer"], int(sizes(x.q)[1]), int(sizes(x.k)[1])
        if "trunk" not in build.shared:
            build.shared["trunk"] = self._trunk(build)
        own, step = build.trained[layer], build.program.step
        with step.graph.inserting_before(node):
            given = {n: build.editor.param(f"feature.{layer}.{n}", t) for n, t in own.items()}

        def made(x: Named) -> tuple[Tensor, Tensor]:
            return self.made(x["trunk"], x["positions"], groups, {n: x[n] for n in own})

        asked = {"trunk": build.shared["trunk"], "positions": step.input("positions")}
        queries, keys = build.made(
            node, f"feature.{layer}", made, asked | given, ("features", self, groups)
        )
        if int(sizes(queries)[2]) != heads:
            raise PassError(
                f"{self.key}: layer {layer} has {heads} query heads, the trained part foretells "
                f"{int(sizes(queries)[2])}; train it again for this model"
            )
        shape = ("B", groups, build.every(self.page), int(sizes(keys)[3]))
        held = build.declare(Part.PAGES, layer, {_FEATURE: ("float32", shape)})

        def appended_(x: Named) -> Named:
            new = self.summary(x["keys"][:, :, :, None])
            return {_FEATURE: kv_append(x[_FEATURE], new[_FEATURE], x["slots"])}

        written = {**held, "keys": keys, "slots": step.input("slots")}
        stored = build.made(node, f"pages.{layer}", appended_, written, ("feature", self))
        return listed(self, build, node, stored, queries)

    def _trunk(self, build: Build) -> fx.Node:
        """What all features are made of [B,T,M], in the first layer."""
        program = build.program
        nodes = attentions(program)
        first = min(nodes)
        read, shared = operands_of(nodes[first]), build.trained[ALL]
        heads = int(sizes(read.q)[1])
        kept = self.trunk_state(heads, shared)
        build.letters["C"] = read.k_pos.meta["val"].shape[1]
        states = {
            f"{_TRUNK}.{n}": ("float32", ("B", many, "C", w)) for n, (many, w) in kept.items()
        }
        held = build.declare(Part.PAGES, first, states)
        x = {
            "hidden": source(appended(nodes[first])),
            "positions": program.step.input("positions"),
            "k_pos": read.k_pos,
            "slots": program.step.input("slots"),
        }
        with program.step.graph.inserting_before(nodes[first]):
            given = {n: build.editor.param(f"feature.{n}", t) for n, t in shared.items()}

        def trunk(x: Named) -> tuple[Tensor, Named]:
            old = {name: x[f"{_TRUNK}.{name}"] for name in kept}
            hidden = {**x, "hidden": x["hidden"].float()}
            made, after = self.trunk(hidden, old, {n: x[f"all.{n}"] for n in shared})
            return made, {f"{_TRUNK}.{name}": after[name] for name in kept}

        given = {f"all.{n}": node for n, node in given.items()}
        made, after = build.made(
            nodes[first], "feature", trunk, x | held | given, ("trunk", self, heads)
        )
        build.becomes(Part.PAGES, first, after)
        found: fx.Node = made
        return found

    # Training (api/compiler/train)

    def start(self, rows: Rows, inner: int, generator: torch.Generator) -> Parts:
        def linear(out: int, size: int) -> Tensor:
            made: Tensor = torch.randn(out, size, generator=generator) * size**-0.5
            return made

        first = rows.layers[min(rows.layers)]
        width, heads = rows.hidden.shape[2], first.queries.shape[1]
        small = heads * 2 * max(1, width // 8 // heads // 2)
        middle = max(1, width // 4)
        parts: Parts = {
            ALL: {
                "down": linear(small, width), "qkv": linear(3 * small, small),
                "out": linear(small, small), "norm": torch.ones(small), "shift": torch.zeros(small),
                "up": linear(middle, small), "up_bias": torch.zeros(middle),
                "back": linear(width, middle) * 0.1, "back_bias": torch.zeros(width),
            }
        }  # fmt: skip
        for name in "qk":
            parts[ALL] |= {
                f"{name}_in": linear(inner, width),
                f"{name}_in_bias": torch.zeros(inner),
            }
        for layer, x in rows.layers.items():
            outs = {"q": x.queries.shape[1] * _FEATURES, "k": x.keys.shape[1] * _FEATURES}
            parts[layer] = {n: linear(out, inner) for n, out in outs.items()}
            parts[layer] |= {f"{n}_bias": torch.zeros(out) for n, out in outs.items()}
        return parts

    def loss(self, parts: Parts, rows: Rows, progress: float) -> Tensor:
        """The mean squared error of logits that a causal mask shows, a mean over the layers but the first."""
        hidden, shared = rows.hidden.float(), parts[ALL]
        batch, tokens, _ = hidden.shape
        at = torch.arange(tokens).expand(batch, -1)
        x = {"hidden": hidden, "positions": at, "k_pos": at, "slots": torch.zeros_like(at[:, 0])}
        kept = self.trunk_state(rows.layers[min(rows.layers)].queries.shape[1], shared)
        held = {name: hidden.new_zeros(batch, n, tokens, w) for name, (n, w) in kept.items()}
        trunk, _ = self.trunk(x, held, shared, kv_append.reference)
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        wrong = []
        for layer, told in rows.layers.items():
            if layer == min(rows.layers):
                continue
            groups = told.keys.shape[1]
            queries, keys = self.made(trunk, at, groups, parts[layer])
            repeat = told.queries.shape[1] // groups
            foretold = queries.transpose(1, 2) @ keys.repeat_interleave(repeat, 1).transpose(-1, -2)
            logits = told.queries @ told.keys.repeat_interleave(repeat, 1).transpose(-1, -2)
            wrong.append((foretold - told.form.logits(logits))[..., seen].square().mean())
        return torch.stack(wrong).mean()


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [B,H,T,R] at positions [B,T], rotated in pairs (i, i + R/2)."""
    half = x.shape[3] // 2
    pace = _BASE ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, :, None].clamp(min=0) * pace
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=3)
