"""Tokens that a score did not choose, in forms of fewer bits: what attention reads of them, how they get there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import Mask
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.ir.trace import trace
from accel.passes.kv._shared.named import call
from accel.passes.state.recurrent import buffer

_FAR = 1 << 40  # after every position
_LOW, _CAME = 67, 211  # example sizes while shapes are worked out
CAME = "came"  # detail: at which eviction a token came into its form, where its form stores something for all of them
_BYTES = 3  # of that number
_ROLES = {"k": "keys", "v": "values"}


Parts = dict[str, tuple[str, int]]  # name -> (dtype, numbers)


class Keep(Protocol):
    """What a keep that demotes has of `passes.kv.keep.Base`."""

    tier: Callable[..., Tensor]

    @property
    def tiers(self) -> Mapping[str, Any]:
        """Name -> form."""


@dataclass(frozen=True)
class Form:
    """One form of a keep's tokens, and what is stored of them in a layer. `number`: among the keep's."""

    keep: Keep
    name: str
    number: int

    @property
    def tier(self) -> Any:
        """What encodes and decodes."""
        return self.keep.tiers[self.name]

    def parts(self, role: str, width: int) -> Parts:
        """Of a token."""
        found: Parts = call(self.tier.parts, {"role": role, "width": width})
        return found

    def whole(self, role: str, width: int) -> Parts:
        """Of all tokens that came in at one eviction."""
        there = getattr(self.tier, "whole", None)  # a keep that is its own form has none
        found: Parts = call(there, {"role": role, "width": width}) if there else {}
        return found

    def detail(self, part: str = "") -> str:
        """What tells a part from the others of its role in the layer."""
        return ".".join(word for word in (self.name, part) if word)

    def states(self, layer: int, heads: int, widths: Mapping[str, int]) -> dict[str, State]:
        """The state of a layer whose KV heads have keys and values ("k", "v") of so many numbers; by what a site's
        `kept_values` call it.
        """
        more = f"_{self.number}" if self.number else ""
        slots, times = f"Q{layer}{more}", f"E{layer}{more}"

        def state(part: Part, detail: str, dtype: str, *shape: int | str, fill: int = 0) -> State:
            return State(part, layer, dtype, ("B", heads, *shape), fill, CacheRegion.LOW, detail)

        found = []
        for role, width in widths.items():
            for name, (dtype, count) in self.parts(role, width).items():
                found.append(state(Part(role), self.detail(name), dtype, slots, count))
            for name, (dtype, count) in self.whole(role, width).items():
                found.append(state(Part(role), self.detail(name), dtype, times, count))
        if any(self.whole(role, width) for role, width in widths.items()):
            found.append(state(Part.KEYS, self.detail(CAME), "uint8", slots, _BYTES))
        found.append(state(Part.POSITIONS, self.detail(), "int64", slots, fill=-1))
        return {_name(s.part, s.detail): s for s in found}

    def reads(self, role: str, width: int) -> list[str]:
        """What `decode` asks for, by the names of `states`."""
        whole = self.whole(role, width)
        names = [_name(role, self.detail(n)) for n in (*self.parts(role, width), *whole)]
        return [*names, *([_name(Part.KEYS, self.detail(CAME))] if whole else [])]

    def decode(self, role: str, width: int, parts: Mapping[str, Tensor]) -> Tensor:
        """Keys or values [B,G,Q,D], of what `states` names."""
        own = {n: parts[_name(role, self.detail(n))] for n in self.parts(role, width)}
        if whole := self.whole(role, width):
            at = _number(parts[_name(Part.KEYS, self.detail(CAME))])[..., None]  # [B,G,Q,1]
            for name in whole:
                each = parts[_name(role, self.detail(name))]
                own[name] = each.gather(2, at.expand(-1, -1, -1, each.shape[3]))
        found: Tensor = call(self.tier.decode, {"role": role, "parts": own, "width": width})
        return found


def forms(keep: Keep) -> list[Form]:
    """Those of a keep that demotes, in its order."""
    return [Form(keep, name, i) for i, name in enumerate(keep.tiers)]


def read(
    program: Program,
    editor: Editor,
    keep: Keep,
    node: fx.Node,
    kept_operands: dict[str, fx.Node],
    kept_values: dict[str, fx.Node],
) -> dict[str, fx.Node]:
    """State `low.<layer>.…` [B,G,Q,…] of a layer's attention, each head its own tokens, noted in `kept_values`; and
    what attention is to read as kept: these, decoded, before what was.
    """
    layer, batch = int(node.meta["layer"]), kept_operands["kept_pos"].meta["val"].shape[0]
    heads = int(sizes(kept_operands["kept_pos"])[1])
    roles = (
        (Part.KEYS,)
        if kept_operands["kept_k"] is kept_operands["kept_v"]
        else (Part.KEYS, Part.VALUES)
    )
    widths = {str(role): int(sizes(kept_operands[f"kept_{role}"])[3]) for role in roles}
    own: dict[str, fx.Node] = {}
    for form in forms(keep):
        states, letters = form.states(layer, heads, widths), {"B": batch}
        for i, letter in enumerate(dict.fromkeys(str(s.shape[2]) for s in states.values())):
            example = (_LOW, _CAME)[i] + layer + 17 * form.number
            letters[letter] = editor.symbol(letter, example)
        own |= {name: buffer(program, editor, state, letters) for name, state in states.items()}
    kept_values |= own
    operands: dict[str, Any] = {}
    for role, width in widths.items():
        names = [name for form in forms(keep) for name in form.reads(role, width)]

        def joined(
            high: Tensor, *parts: Tensor, role: str = role, width: int = width, names: Any = names
        ) -> Tensor:
            given = dict(zip(names, parts, strict=True))
            low = [form.decode(role, width, given) for form in forms(keep)]
            return torch.cat((*low, high), dim=2)

        with editor.graph.inserting_before(node):
            operands[f"kept_{role}"] = trace(
                editor,
                f"low.{layer}",
                joined,
                kept_operands[f"kept_{role}"],
                *(own[name] for name in names),
                like=node,
                key=("low", keep, role, width),
            )
    where = [own[_name(Part.POSITIONS, form.detail())] for form in forms(keep)]
    with editor.graph.inserting_before(node):
        operands["kept_pos"] = editor.call(
            torch.ops.aten.cat.default, [*where, kept_operands["kept_pos"]], 2, like=node
        )
    return {"kept_v": operands["kept_k"], **operands}


def demoted(
    keep: Keep, named: Mapping[str, Any], x: Mapping[str, Tensor], mask: Mask
) -> dict[str, Tensor]:
    """What is held in fewer bits from now on: that of before, but what no later query sees, and the real
    slots that were not chosen; in the order of their positions, -1 behind the last.
    """
    where: Tensor = named["positions"]
    stays = torch.zeros_like(where).scatter(2, named["chosen"], named["real"].long())
    gone, kinds, out = (where >= 0) & (stays == 0), forms(keep), dict[str, Tensor]()
    number = call(keep.tier, {**named, "gone": gone}) if len(kinds) > 1 else None
    for form in kinds:
        joins = gone if number is None else gone & (number == form.number)
        held = _name(Part.POSITIONS, form.detail())
        before = x[f"kept_{held}"]
        lost = ~mask.visible(x["seen"][:, None, None], before)
        places = torch.cat((before.masked_fill(lost, -1), torch.where(joins, where, -1)), dim=2)
        order = places.masked_fill(places < 0, _FAR).sort(dim=2, stable=True).indices[..., None]
        out[held] = places.gather(2, order[..., 0])
        for role, name in _ROLES.items():
            if f"kept_{role}" not in x:
                continue  # a latent, which keys and values share
            width = int(named[name].shape[3])
            given = {"role": role, "x": named[name], "joins": joins}
            new, whole = call(form.tier.encode, given), form.whole(role, width)
            came = _name(Part.KEYS, form.detail(CAME))
            for part, found in new.items():
                one = _name(role, form.detail(part))
                both = torch.cat((x[f"kept_{one}"], found), dim=2)
                out[one] = (
                    both
                    if part in whole
                    else both.gather(2, order.expand(-1, -1, -1, both.shape[3]))
                )
                if part in whole and came not in out:
                    times = torch.ones_like(x[f"kept_{one}"][..., 0], dtype=torch.int64).sum(2)
                    now = _in_bytes(times[..., None].expand_as(where))
                    both = torch.cat((x[f"kept_{came}"], now), dim=2)
                    out[came] = both.gather(2, order.expand(-1, -1, -1, _BYTES))
    return out


def _name(part: str, detail: str) -> str:
    """Of a state value among what a site holds."""
    return f"low.{part}.{detail}" if detail else f"low.{part}"


def _in_bytes(number: Tensor) -> Tensor:
    """A whole number [...] as bytes [...,3], the lowest first."""
    return torch.stack([number // 256**i % 256 for i in range(_BYTES)], dim=-1).to(torch.uint8)


def _number(raw_bytes: Tensor) -> Tensor:
    """The number [...] of bytes [...,3]."""
    found = raw_bytes[..., 0].long()
    for i in range(1, _BYTES):
        found = found + raw_bytes[..., i].long() * 256**i
    return found
