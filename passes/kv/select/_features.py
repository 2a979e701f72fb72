"""Selection by features: what one early layer reads says for all later layers which tokens matter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, State
from accel.ir.region import sizes
from accel.ir.state import Part, output_of
from accel.ir.trace import trace
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.select import Base, Sizes
from accel.passes.kv.select._build import Build
from accel.passes.state.recurrent import buffer
from accel.passes.trained import ALL, Fitted, Parts, source

Append = Callable[[Tensor, Tensor, Tensor], Tensor]

_FEATURE = "feature"
_TRUNK = "trunk"


@dataclass(frozen=True)
class Features(Fitted, Base):
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

    relies = Base.relies | {Invariant.ALL_LAYERS_RUN, Invariant.UNIFORM_SLOTS}

    @property
    def breaks(self) -> frozenset[Invariant]:
        """What is kept is not made of keys."""
        return super().breaks - {Invariant.PLAIN_KEYS}

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

    def _asked(self, build: Build, node: fx.Node) -> fx.Node:
        queries: fx.Node = self._features(build, node)[0]
        return queries

    def _stored(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The features of all tokens, as they are after the call."""
        keys = self._features(build, node)[1]
        layer, (_, groups, _, width) = node.meta["layer"], sizes(keys)
        declared = self.parts(int(width))
        (held,) = self._held(build, layer, int(groups), declared, self.page)
        step = build.program.step

        def appended_(*x: Tensor) -> dict[str, Tensor]:
            return self.append({_FEATURE: x[0]}, x[1], x[2])

        editor = Editor(build.program, step.graph)
        with step.graph.inserting_before(node):
            stored: dict[str, fx.Node] = trace(
                editor, f"pages.{layer}", appended_, held, keys, step.input("slots"),
                like=node, key=("feature", self),
            )  # fmt: skip
        return stored

    def append(self, held: dict[str, Tensor], keys: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """Parts [B,G,C,…] with those of new features [B,G,T,F] in the slots from `slots` [B] on."""
        new = self.summary(keys[:, :, :, None])
        return {name: kv_append(old, new[name], slots) for name, old in held.items()}

    def _features(self, build: Build, node: fx.Node) -> Any:
        """Queries [B,T,H,F] and keys [B,G,T,F] of a layer."""
        layer = node.meta["layer"]
        known = build.shared.setdefault("features", {})
        if layer in known:
            return known[layer]
        if "trunk" not in build.shared:
            build.shared["trunk"] = self._trunk(build)
        trunk, parts = build.shared["trunk"]
        program = build.program
        editor = Editor(program, program.step.graph)
        x = operands_of(node)
        heads, groups = int(sizes(x.q)[1]), int(sizes(x.k)[1])
        own: dict[str, Tensor] = parts[layer]
        names = list(own)

        def made(trunk: Tensor, positions: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            return self.made(trunk, positions, groups, dict(zip(names, values, strict=True)))

        with program.step.graph.inserting_before(node):
            given = [editor.param(f"feature.{layer}.{n}", t) for n, t in own.items()]
            found = trace(
                editor, f"feature.{layer}", made, trunk, program.step.input("positions"), *given,
                like=node, key=("features", self, groups),
            )  # fmt: skip
        if int(sizes(found[0])[2]) != heads:
            raise PassError(
                f"{self.key}: layer {layer} has {heads} query heads, the trained part foretells "
                f"{int(sizes(found[0])[2])}; train it again for this model"
            )
        known[layer] = found
        return found

    def _trunk(self, build: Build) -> tuple[fx.Node, Parts]:
        """What all features are made of [B,T,M], in the first layer, and the trained tensors."""
        program = build.program
        step, editor = program.step, Editor(program, program.step.graph)
        nodes = attentions(program)
        keys = {layer: appended(node) for layer, node in nodes.items()}
        parts = self.tensors(program, keys)
        first = min(nodes)
        read = operands_of(nodes[first])
        heads = int(sizes(read.q)[1])
        shared = parts[ALL]
        kept = self.kept(heads, shared)
        states = [
            State(Part.PAGES, first, "float32", ("B", n, "C", w), detail=f"{_TRUNK}.{name}")
            for name, (n, w) in kept.items()
        ]
        letters = {**build.letters, "C": read.k_pos.meta["val"].shape[1]}
        held = [buffer(program, editor, state, letters) for state in states]
        x = {
            "hidden": source(keys[first]),
            "positions": step.input("positions"),
            "k_pos": read.k_pos,
            "slots": step.input("slots"),
        }
        names, count = (list(x), list(kept), list(shared)), len(x)

        def trunk(*values: Tensor) -> Any:
            cut = count, count + len(held)
            given = values[: cut[0]], values[cut[0] : cut[1]], values[cut[1] :]
            a, b, c = (dict(zip(n, v, strict=True)) for n, v in zip(names, given, strict=True))
            made, after = self.trunk({**a, "hidden": a["hidden"].float()}, b, c)
            return made, *(after[name] for name in kept)

        with step.graph.inserting_before(nodes[first]):
            given = [editor.param(f"feature.{n}", t) for n, t in shared.items()]
            made, *after = trace(
                editor, "feature", trunk, *x.values(), *held, *given,
                like=nodes[first], key=("trunk", self, heads),
            )  # fmt: skip
        build.outputs |= {output_of(s.name): new for s, new in zip(states, after, strict=True)}
        return made, parts
