"""A layer as one <svg>: ranks from top to bottom, arrows around boxes, what is new in another colour."""

from __future__ import annotations

from html import escape

from accel.compiler.explain.layer import FLAG, STATE, STREAM, Layer

_INK, _DIM, _LINE, _NEW = "#1f2937", "#64748b", "#94a3b8", "#c2410c"
_FILLS = {STREAM: "#f1f5f9", STATE: "#fbe3c8", FLAG: "#eadcf3"}
_OTHER, _FRESH = "#d8e8f3", "#fde2d3"
_CHAR, _HIGH, _ROW, _GAP, _THIN = (
    6.1,
    34,
    58,
    14,
    10,
)  # pixels; _THIN: a place where an arrow passes a rank
_ROUNDS = 8

Place = tuple[int, int]  # a box (number, -1), or an arrow that passes (its number, rank)


def picture(layer: Layer) -> str:
    """Boxes by rank: state and what comes from nowhere stands just above who reads it first."""
    rank = _ranks(layer)
    rows, links = _places(layer, rank)
    widths = {p: _width(layer, p) for row in rows for p in row}
    x = _spread(rows, links, widths)
    left = min(x[p] - widths[p] / 2 for p in x) - 8
    wide = max(x[p] + widths[p] / 2 for p in x) - left + 8
    at = {p: (x[p] - left, 12 + _ROW * r) for r, row in enumerate(rows) for p in row}
    parts = [_arrow(at[a], at[b], a[1] >= 0, b[1] >= 0) for a, b in links]
    for number, _ in enumerate(layer.boxes):
        parts.append(_box(layer, number, at[number, -1], widths[number, -1]))
    high = 12 + _ROW * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" '
        f'font-family="system-ui, DejaVu Sans, sans-serif" role="img"><title>{escape(layer.name)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _ranks(layer: Layer) -> list[int]:
    """Longest way from above; what nothing precedes, as low as it can be."""
    rank = [0] * len(layer.boxes)
    for a, b in layer.arrows:  # sources come before who reads them
        rank[b] = max(rank[b], rank[a] + 1)
    fed = {b for _, b in layer.arrows}
    for number in range(len(layer.boxes)):
        readers = [rank[b] for a, b in layer.arrows if a == number]
        if number not in fed and readers and layer.boxes[number].kind != STREAM:
            rank[number] = min(readers) - 1
    return rank


def _places(layer: Layer, rank: list[int]) -> tuple[list[list[Place]], list[tuple[Place, Place]]]:
    """What stands in each rank, and the links from rank to rank."""
    rows: list[list[Place]] = [[] for _ in range(max(rank) + 1)]
    for number, r in enumerate(rank):
        rows[r].append((number, -1))
    links: list[tuple[Place, Place]] = []
    for index, (a, b) in enumerate(layer.arrows):
        before: Place = (a, -1)
        for r in range(rank[a] + 1, rank[b]):
            rows[r].append((index, r))
            links.append((before, (index, r)))
            before = (index, r)
        links.append((before, (b, -1)))
    return rows, links


def _width(layer: Layer, place: Place) -> float:
    if place[1] >= 0:
        return _THIN
    return max(70.0, 12 + _CHAR * max(len(line) for line in _lines(layer, place[0])))


def _lines(layer: Layer, number: int) -> list[str]:
    box = layer.boxes[number]
    under = ", ".join(box.weights) or box.detail
    return [line if len(line) <= 46 else line[:45] + "…" for line in (box.label, under) if line]


def _spread(
    rows: list[list[Place]], links: list[tuple[Place, Place]], widths: dict[Place, float]
) -> dict[Place, float]:
    """The middle of each place: ordered by the means of its neighbours, pushed apart where boxes would touch."""
    above: dict[Place, list[Place]] = {}
    below: dict[Place, list[Place]] = {}
    for a, b in links:
        above.setdefault(b, []).append(a)
        below.setdefault(a, []).append(b)
    x: dict[Place, float] = {}
    for row in rows:
        _line_up(row, {p: float(i) for i, p in enumerate(row)}, widths, x)
    for turn in range(2 * _ROUNDS):
        near, order = (above, rows) if turn % 2 == 0 else (below, rows[::-1])
        for row in order:
            wish = {
                p: sum(x[n] for n in near[p]) / len(near[p]) if p in near else x[p] for p in row
            }
            row.sort(key=wish.__getitem__)
            _line_up(row, wish, widths, x)
    return x


def _line_up(
    row: list[Place], wish: dict[Place, float], widths: dict[Place, float], x: dict[Place, float]
) -> None:
    """As near to the wishes as fits: from the left, and the row then moved back by the mean of the pushes."""
    edge = float("-inf")
    for place in row:
        x[place] = max(wish[place], edge + widths[place] / 2)
        edge = x[place] + widths[place] / 2 + _GAP
    if row:
        pushed = sum(x[p] - wish[p] for p in row) / len(row)
        for place in row:
            x[place] -= pushed


def _arrow(
    start: tuple[float, float], end: tuple[float, float], passes: bool, goes_on: bool
) -> str:
    (x, y), (u, v) = start, end
    y += _HIGH
    lead = f"M{x:.1f} {y - _HIGH} V{y} " if passes else f"M{x:.1f} {y} "
    tip = (
        ""
        if goes_on
        else f'<path d="M{u - 3:.1f} {v - 6} L{u:.1f} {v} L{u + 3:.1f} {v - 6}" fill="none" stroke="{_LINE}"/>'
    )
    mid = (y + v) / 2
    return f'<path d="{lead}C{x:.1f} {mid} {u:.1f} {mid} {u:.1f} {v}" fill="none" stroke="{_LINE}"/>{tip}'


def _box(layer: Layer, number: int, at: tuple[float, float], width: float) -> str:
    box, new = layer.boxes[number], number in layer.new
    x, y = at
    fill = _FRESH if new and box.kind not in _FILLS else _FILLS.get(box.kind, _OTHER)
    edge = f'stroke="{_NEW}" stroke-width="2"' if new else f'stroke="{_LINE}"'
    round_ = 16 if box.kind == STREAM else 5
    lines = _lines(layer, number)
    text = "".join(
        f'<text x="{x:.1f}" y="{y + (14 + 14 * i if len(lines) > 1 else 21)}" font-size="{10 if i else 12}" '
        f'fill="{_DIM if i else _INK}" text-anchor="middle">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    full = escape(" ".join((box.text, "(new)" if new else "")))
    return (
        f'<g><title>{full}</title><rect x="{x - width / 2:.1f}" y="{y}" width="{width:.1f}" height="{_HIGH}" '
        f'rx="{round_}" fill="{fill}" {edge}/>{text}</g>'
    )
