"""Selection by features: what one early layer reads says for all later layers which tokens matter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.select import SPARSE, Sizes
from accel.passes.kv.select._build import Build, Named
from accel.passes.kv.select._pages import Pages, listed
from accel.passes.trained import ALL, Fitted, source

Append = Callable[[Tensor, Tensor, Tensor], Tensor]

_FEATURE = "feature"
_TRUNK = "trunk"


@dataclass(frozen=True)
class Features(Fitted, Pages):
    """Sparse attention over tokens that a trained part chooses beforehand, in the first layer with a cache.

    The part reads the hidden state [B,T,E] behind that layer's keys. Its `trunk` makes one value of it, which all
    layers share and which may depend on earlier tokens; `made` turns this into features of a layer, queries
    [B,T,H,F] and keys [B,G,T,F]. A token is worth the product of the two (`score`). So a layer's choice needs nothing
    of the layers between, and none of its own keys.

    State, of pages of one token: `pages.<layer>.feature [B,G,C/1,F]`, and `pages.<first>.trunk.<name>
    [B,N,C,W]` of what `kept` names. Both are written slot by slot, so rewinds are free. Beside eviction the trunk
    reads the recent tokens only.
    """

    page: int = field(default=1, init=False)  # features are of tokens

    breaks = SPARSE  # what is kept is not made of keys
    relies = Pages.relies | {Invariant.ALL_LAYERS_RUN, Invariant.UNIFORM_SLOTS}

    @abstractmethod
    def kept(self, heads: int, shared: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """What the trunk keeps of a token: name -> (N, W), of N heads of W numbers; the first layer has
        so many query `heads`.
        """

    @abstractmethod
    def trunk(
        self,
        x: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        append: Append = kv_append,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What all layers' features are made of [B,T,M], and what is kept [B,N,C,W] after the call.

        x: hidden [B,T,E], positions [B,T] of the call and k_pos [B,C] in the slots, the call's first slots [B].
        shared: the tensors of `shared`. append: what puts new entries into their slots; in training its reference,
        through which gradients go.
        """

    @abstractmethod
    def made(
        self, trunk: Tensor, positions: Tensor, groups: int, own: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """A layer's features of the trunk [B,T,M]: queries [B,T,H,F], keys [B,G,T,F]. own: the tensors of `sizes`."""

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
        held = build.held(Part.PAGES, layer, {_FEATURE: ("float32", shape)})

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
        kept = self.kept(heads, shared)
        build.letters["C"] = read.k_pos.meta["val"].shape[1]
        states = {
            f"{_TRUNK}.{n}": ("float32", ("B", many, "C", w)) for n, (many, w) in kept.items()
        }
        held = build.held(Part.PAGES, first, states)
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
