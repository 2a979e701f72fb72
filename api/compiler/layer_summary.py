"""The layers of a model: what each carries, equal ones as runs, repeated patterns once; as rows and as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from accel.ir.sizes import grows, per_slot
from accel.ir.state import Writer, by_row, ragged_heads, writer_of

FILLS = ("#d8e8f3", "#fbe3c8", "#dcefd5", "#eadcf3", "#f8d9dc", "#e7e5d3")
_INK, _DIM, _LINE = "#1f2937", "#64748b", "#94a3b8"
_WIDE, _BOX, _HIGH, _GAP, _ROW = 940, 158, 78, 26, 128  # pixels; _ROW: from line to line


@dataclass(frozen=True)
class LayerSummary:
    """What one layer carries. Bytes of state are of one row: for each token, for each that eviction kept,
    fixed, and for each token that an encoder read. back: how many layers before it the one is whose keys and
    values it reads; 0: itself.
    """

    attention: str
    window: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    per_token: int = 0
    per_kept_token: int = 0
    fixed: int = 0
    cross: int = 0
    back: int = 0

    @property
    def name(self) -> str:
        """What it attends to, as "window 512"."""
        return f"{self.attention} {self.window}" if self.window else self.attention

    def state(self) -> str:
        """What its state takes, as "2.05 kB/token + 512 B"; whose it reads, or "no state", for none."""
        parts = [
            f"{bytes_text(count)}{unit}"
            for count, unit in (
                (self.per_token, "/token"), (self.per_kept_token, "/kept"), (self.fixed, " fixed"),
                (self.cross, "/input token"),
            ) if count
        ]  # fmt: skip
        none = f"cache of {self.back} before" if self.back else "no state"
        return " + ".join(parts) or none


@dataclass(frozen=True)
class Group:
    """Layers `first` to `last`: a pattern of runs (a layer and how many there are of it), `times` over."""

    first: int
    last: int
    times: int
    runs: tuple[tuple[LayerSummary, int], ...]

    @property
    def which(self) -> str:
        """Its layers, as "0-23" or "7"."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


_WRITTEN = {Writer.ENCODE: "cross", Writer.COMPRESS: "kept", Writer.SESSION: "kept"}


def summaries(
    layers: Sequence[Mapping[str, Any]], state: Sequence[Mapping[str, Any]]
) -> list[LayerSummary]:
    """One summary per layer, out of the facts of layers and the state layout of a report or manifest."""
    import numpy as np

    sizes: dict[tuple[Any, str], float] = {}
    heads = ragged_heads(state)
    for value in state:
        shape, role = value["shape"], str(value.get("role", ""))
        what = "per_token" if grows(shape) else "fixed"
        what = what if by_row(role) else _WRITTEN.get(writer_of(role), what)
        if (
            what == "cross"
        ):  # [B,G,X,D]: of one position of the encoder's input, however many there are
            shape = [d for axis, d in enumerate(shape) if axis != 2]
        size = per_slot(shape) * np.dtype(value["dtype"]).itemsize
        if what == "kept":
            size *= heads.get(value["layer"], 1)
        key = (value["layer"], what)
        sizes[key] = sizes.get(key, 0) + size
    return [
        LayerSummary(
            str(layer.get("attention", "")),
            int(layer.get("window") or 0),
            heads=int(layer.get("num_heads") or 0),
            kv_heads=int(layer.get("num_kv_heads") or 0),
            head_dim=int(layer.get("head_dim") or 0),
            per_token=math.ceil(sizes.get((index, "per_token"), 0)),
            per_kept_token=int(sizes.get((index, "kept"), 0)),
            fixed=int(sizes.get((index, "fixed"), 0)),
            cross=int(sizes.get((index, "cross"), 0)),
            back=index - layer["shares"] if layer.get("shares") is not None else 0,
        )
        for index, layer in enumerate(layers)
    ]


def groups(layers: Sequence[LayerSummary]) -> list[Group]:
    """The layers in order: from each layer on the pattern that covers most by repeating, else one layer."""
    found: list[Group] = []
    start = 0
    while start < len(layers):
        period, times = 1, 1
        for length in range(1, (len(layers) - start) // 2 + 1):
            again = _repeats(layers, start, length)
            if again > 1 and again * length > period * times:
                period, times = length, again
        pattern = layers[start : start + period]
        runs = tuple((layer, len(list(same))) for layer, same in groupby(pattern))
        if period == 1:
            runs, times, period = ((pattern[0], times),), 1, times
        found.append(Group(start, start + period * times - 1, times, runs))
        start += period * times
    return found


def _repeats(layers: Sequence[LayerSummary], start: int, length: int) -> int:
    """How often the `length` layers from `start` on follow each other."""
    times, pattern = 1, layers[start : start + length]
    while layers[start + times * length : start + (times + 1) * length] == pattern:
        times += 1
    return times


def why_not(report: Mapping[str, Any]) -> str:
    """Why a build outlined no layers, out of its report; "" where it did."""
    for step in report.get("steps", []):
        if step.get("name") == "Layers" and not step.get("changed"):
            return "; ".join(dict.fromkeys(step.get("refused", []))) or "no layer boundary found"
    return ""


def picture(
    layers: Sequence[Mapping[str, Any]],
    state: Sequence[Mapping[str, Any]],
    refused: str = "",
) -> str:
    """The layers as one <svg>: a box for each run, a frame around a pattern that repeats.

    Where the layers were `refused` the boxes are dashed: they stand for attentions, not for layers.
    """
    drawn = _Drawing(dashed=bool(refused))
    drawn.pill("tokens")
    colours: dict[LayerSummary, str] = {}
    for group in groups(summaries(layers, state)):
        drawn.group(group, colours)
    drawn.pill("logits")
    if refused:
        drawn.line(f"not split into layers: {refused}")
    return drawn.svg()


class _Drawing:
    """Boxes from left to right, in lines like words."""

    def __init__(self, dashed: bool):
        self.dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts: list[str] = []
        self.x, self.y = 8, 26

    def pill(self, text: str) -> None:
        """The start or the end of the chain."""
        self._room(70)
        self._arrow()
        middle = self.y + _HIGH // 2
        self.parts.append(
            f'<rect x="{self.x}" y="{middle - 15}" width="70" height="30" rx="15" fill="#fff" stroke="{_LINE}"/>'
        )
        self._text(self.x + 35, middle + 4, text, 12, _INK)
        self.x += 70

    def group(self, group: Group, colours: dict[LayerSummary, str]) -> None:
        """The boxes of a pattern; framed, where they fit into one line, when it repeats."""
        wide = len(group.runs) * (_BOX + _GAP) - _GAP
        repeats = len(group.runs) > 1
        framed = repeats and wide + _GAP + 36 <= _WIDE
        if framed:
            self._room(wide + 20)
        first = group.first
        for index, (layer, count) in enumerate(group.runs):
            self._room(_BOX)
            self._arrow()
            if framed and not index:
                self._frame(wide)
            fill = colours.setdefault(layer, FILLS[len(colours) % len(FILLS)])
            over = f"{group.times} times, layers {group.which}" if index == 0 else ""
            self._box(layer, count, fill, over if repeats else _range(first, count))
            first += count
        self.x += 10 if framed else 0

    def line(self, text: str) -> None:
        """Words below the layers, cut where they are too long for it; all of them as a title."""
        shown = text if len(text) <= 150 else text[:149] + "…"
        self.y += _ROW - 16
        self.parts.append(
            f'<text x="8" y="{self.y}" font-size="12" fill="{_DIM}"><title>{escape(text)}</title>{escape(shown)}</text>'
        )
        self.y -= _HIGH - 12

    def svg(self) -> str:
        """All of it."""
        high = self.y + _HIGH + 20
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {high}" width="{_WIDE}" '
            f'font-family="system-ui, DejaVu Sans, sans-serif" role="img">{"".join(self.parts)}</svg>'
        )

    def _room(self, width: int) -> None:
        """Go on in the next line where this one has no room for the arrow and what follows it."""
        if self.x + _GAP + width > _WIDE - 8:
            self.x, self.y = 8, self.y + _ROW

    def _arrow(self) -> None:
        """From what is on the left, or from the line above, to here."""
        middle = self.y + _HIGH // 2
        if self.x == 8 and not self.parts:
            return
        start, self.x = self.x, self.x + _GAP
        self.parts.append(
            f'<path d="M{start + 3} {middle} H{self.x - 4} m-5 -4 l5 4 l-5 4" fill="none" stroke="{_LINE}"/>'
        )

    def _frame(self, wide: int) -> None:
        self.x += 10
        self.parts.append(
            f'<rect x="{self.x - 8}" y="{self.y - 18}" width="{wide + 16}" height="{_HIGH + 28}" rx="8" fill="none" '
            f'stroke="{_LINE}"/>'
        )

    def _box(self, layer: LayerSummary, count: int, fill: str, which: str) -> None:
        self.parts.append(
            f'<rect x="{self.x}" y="{self.y}" width="{_BOX}" height="{_HIGH}" rx="6" fill="{fill}" stroke="{_LINE}"'
            f"{self.dash}/>"
        )
        middle = self.x + _BOX // 2
        if which:
            self._text(self.x, self.y - 5, which, 11, _DIM, "start")
        title = f"{count} × {layer.name}" if count > 1 else layer.name
        self._text(middle, self.y + 22, title, 14, _INK)
        heads = (
            f"{layer.heads} heads over {layer.kv_heads} × {layer.head_dim}" if layer.heads else ""
        )
        self._text(middle, self.y + 42, heads or "no attention", 11, _INK)
        self._text(middle, self.y + 62, layer.state(), 11, _DIM)
        self.x += _BOX

    def _text(
        self, x: int, y: int, text: str, size: int, fill: str, anchor: str = "middle"
    ) -> None:
        long = len(text) > 27 and anchor == "middle"
        fit = f' textLength="{_BOX - 12}" lengthAdjust="spacingAndGlyphs"' if long else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{fit}>{escape(text)}</text>'
        )


def _range(first: int, count: int) -> str:
    return f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"


def bytes_text(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
