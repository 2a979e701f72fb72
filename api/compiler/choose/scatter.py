"""Loss against speed, a circle per recipe whose area is its memory, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from accel.compiler.choose.summary import Line
from accel.compiler.layer_summary import bytes_text

_WIDE, _HIGH = 940, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 34, 54
_ZERO = 90  # width of the column of what loses nothing
_LARGEST, _SMALLEST = 24.0, 4.0  # radius
_INK, _DIM, _FAINT, _GRID = "#1f2937", "#64748b", "#cbd5e1", "#e2e8f0"
_LOSSLESS, _LOSSY = "#0f766e", "#2f6f9f"
_CHAR = 6.9  # width of a letter
Box = tuple[float, float, float, float]


def scatter(lines: Sequence[Line]) -> str:
    """An <svg>; the front coloured and numbered as in the table, the others pale."""
    axes = _Axes(lines)
    largest = max(line.memory for line in lines)
    places = {
        line.name: (*axes.place(line), max(_SMALLEST, _LARGEST * math.sqrt(line.memory / largest)))
        for line in lines
    }
    back = sorted((line for line in lines if not line.number), key=lambda line: -line.memory)
    leads = sorted((line for line in lines if line.number), key=lambda line: -line.memory)
    parts = [axes.drawn()]
    parts += [_circle(line, *places[line.name]) for line in back]
    for line in leads:
        x, ends = places[line.name][0], (axes.y(line.speed.least), axes.y(line.speed.most))
        parts.append(_line(x, ends[0], x, ends[1], _DIM))
        parts.append(_circle(line, *places[line.name]))
    taken: list[Box] = [_around(*places[line.name]) for line in leads]
    for line in sorted(leads, key=lambda line: line.number):
        parts.append(_label(line, *places[line.name], taken))
    parts.append(_legend(largest))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" '
        f'font-family="system-ui, DejaVu Sans, sans-serif" role="img">{"".join(parts)}</svg>'
    )


class _Axes:
    """Loss to the right, on a logarithmic scale after a column for 0; tokens per second upwards."""

    def __init__(self, lines: Sequence[Line]):
        lost = [line.kl for line in lines if line.kl > 0] or [1e-3]
        self.low = math.floor(math.log10(min(lost)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(lost))))
        self.most = 1.08 * max(
            line.speed.most if line.number else line.speed.median for line in lines
        )

    def x(self, kl: float) -> float:
        if kl <= 0:
            return _LEFT + _ZERO / 2
        share = (math.log10(kl) - self.low) / (self.high - self.low)
        return _LEFT + _ZERO + share * (_WIDE - _RIGHT - _LEFT - _ZERO)

    def y(self, speed: float) -> float:
        return _HIGH - _BOTTOM - speed / self.most * (_HIGH - _BOTTOM - _TOP)

    def place(self, line: Line) -> tuple[float, float]:
        return self.x(line.kl), self.y(line.speed.median)

    def drawn(self) -> str:
        floor, parts = _HIGH - _BOTTOM, []
        for speed in _ticks(self.most):
            y = self.y(speed)
            parts.append(_line(_LEFT, y, _WIDE - _RIGHT, y, _GRID))
            parts.append(_text(_LEFT - 8, y + 4, f"{speed:g}", "end"))
        for power in range(self.low, self.high + 1):
            x = self.x(10.0**power)
            parts.append(_line(x, _TOP, x, floor, _GRID))
            parts.append(_text(x, floor + 18, f"{10.0**power:g}", "middle"))
        parts.append(_line(_LEFT + _ZERO, _TOP, _LEFT + _ZERO, floor, _FAINT))
        parts.append(_text(self.x(0), floor + 18, "0", "middle"))
        parts.append(
            _text(
                (_LEFT + _WIDE - _RIGHT) / 2,
                floor + 40,
                "loss: KL from base, nats per token",
                "middle",
            )
        )
        parts.append(_text(_LEFT - 48, _TOP - 16, "tokens/s, prompt included", "start"))
        return "".join(parts)


def _ticks(most: float) -> list[float]:
    """From 0 up, about five."""
    rough = most / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    return [round(i * step, 10) for i in range(int(most / step) + 1)]


def _circle(line: Line, x: float, y: float, radius: float) -> str:
    said = f"{line.name}: {line.speed.median:.3g} tokens/s, KL {line.kl:.2g}, {bytes_text(line.memory)}"
    title = f"<title>{escape(said)}{'' if line.number else escape(f' ({line.standing})')}</title>"
    if not line.number:
        return (
            f'<g>{title}<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{_FAINT}" fill-opacity="0.35" '
            f'stroke="{_FAINT}"/></g>'
        )
    colour = _LOSSLESS if line.kl == 0 else _LOSSY
    return (
        f'<g>{title}<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.25" '
        f'stroke="{colour}" stroke-width="1.5"/></g>'
    )


def _label(line: Line, x: float, y: float, radius: float, taken: list[Box]) -> str:
    """The number and the name, where there is room for the name; else the number alone."""
    text = f"{line.number} {line.name}"
    wide = _CHAR * len(text)
    near = radius + 4
    tries = [
        (x + near, y + 4), (x - near - wide, y + 4), (x - wide / 2, y - near - 2), (x - wide / 2, y + near + 11),
        (x + near, y - 12), (x + near, y + 20), (x - near - wide, y - 12), (x - near - wide, y + 20),
    ]  # fmt: skip
    for left, foot in tries:
        box = (left, foot - 11, left + wide, foot + 3)
        inside = (
            box[0] > _LEFT and box[2] < _WIDE - 4 and box[1] > _TOP and box[3] < _HIGH - _BOTTOM
        )
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return _text(left, foot, text, "start", _INK, 12)
    return _text(x, y + 4, str(line.number), "middle", _INK, 12)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _legend(largest: int) -> str:
    x, parts = float(_WIDE - _RIGHT), list[str]()
    shown = (
        (f"area: memory, largest {bytes_text(largest)}", "none", _DIM),
        ("not on the front", _FAINT, _FAINT),
        ("front, with a loss", _LOSSY, _LOSSY),
        ("front, no loss", _LOSSLESS, _LOSSLESS),
    )
    for text, fill, edge in shown:
        x -= _CHAR * len(text)
        parts.append(_text(x, _TOP - 16, text, "start"))
        parts.append(
            f'<circle cx="{x - 9}" cy="{_TOP - 20}" r="5" fill="{fill}" fill-opacity="0.3" stroke="{edge}"/>'
        )
        x -= 30
    return "".join(parts)


def _line(x: float, y: float, u: float, v: float, colour: str) -> str:
    return f'<path d="M{x:.1f} {y:.1f} L{u:.1f} {v:.1f}" stroke="{colour}" fill="none"/>'


def _text(x: float, y: float, text: str, anchor: str, fill: str = _DIM, size: int = 11) -> str:
    style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
