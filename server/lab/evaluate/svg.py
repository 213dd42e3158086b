"""Small plots as inline SVG: no script, no font, no file beside the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 30, 44
COLOURS = (
    "#2563eb",
    "#d97706",
    "#059669",
    "#db2777",
    "#7c3aed",
    "#0891b2",
    "#65a30d",
    "#dc2626",
    "#57534e",
    "#c026d3",
)

Points = Sequence[tuple[float, float]]


def lines(
    title: str,
    series: Mapping[str, Points],
    *,
    xs: Sequence[str],
    x: str,
    line: float | None = None,
) -> str:
    """Values over the places 0 .. len(xs) - 1, which are named `xs`; `line`: a level to compare
    with. Axes begin at 0."""
    values = [value for points in series.values() for _, value in points] + [line or 0.0]
    top = _ceiling(max(values, default=1.0))
    body = [*_frame(title, xs, x, top)]
    if line is not None:
        y = _y(line, top)
        body.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="level"/>'
        )
    for colour, (name, points) in zip(_colours(), series.items(), strict=False):
        path = " ".join(f"{_x(place, len(xs)):.1f},{_y(value, top):.1f}" for place, value in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for place, value in points:
            where = f'cx="{_x(place, len(xs)):.1f}" cy="{_y(value, top):.1f}"'
            hint = f"<title>{escape(name)}: {value:.2f}</title>"
            body.append(f'<circle {where} r="3" fill="{colour}">{hint}</circle>')
    return _wrap(title, body, list(series))


def bars(title: str, stacks: Mapping[str, Mapping[str, float]], *, x: str) -> str:
    """A bar of parts for each name, from the bottom; the same parts in each."""
    top = _ceiling(max((sum(parts.values()) for parts in stacks.values()), default=1.0))
    names = list(stacks)
    kinds = list(dict.fromkeys(kind for parts in stacks.values() for kind in parts))
    width = min(40.0, 0.7 * (WIDTH - LEFT - RIGHT) / max(len(names), 1))
    body = [*_frame(title, names, x, top)]
    for place, parts in enumerate(stacks.values()):
        base = 0.0
        for colour, kind in zip(_colours(), kinds, strict=False):
            value = max(parts.get(kind, 0.0), 0.0)
            y, left = _y(base + value, top), _x(place, len(names)) - width / 2
            box = f'x="{left:.1f}" y="{y:.1f}" width="{width:.1f}"'
            height = _y(base, top) - y
            hint = f"<title>{escape(kind)}: {value:.2f}</title>"
            body.append(f'<rect {box} height="{height:.1f}" fill="{colour}">{hint}</rect>')
            base += value
    return _wrap(title, body, kinds)


def _frame(title: str, xs: Sequence[str], x: str, top: float) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>'
    for i in range(5):
        value = top * i / 4
        y = _y(value, top)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    for place, name in enumerate(xs):
        left = _x(place, len(xs))
        yield (
            f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'


def _wrap(title: str, body: Sequence[str], names: Sequence[str]) -> str:
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for colour, name in zip(_colours(), names, strict=False)
    )
    drawn = "\n".join(body)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"\n{drawn}\n</svg><figcaption>{keys}</figcaption></figure>"
    )


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _x(place: float, count: int) -> float:
    """Places in the middle of equal parts of the axis."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / max(count, 1)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value, top) / top)


def _ceiling(value: float) -> float:
    """A round number not below it."""
    if not (math.isfinite(value) and value > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return float(
        next(
            step * power
            for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
            if step * power >= value
        )
    )
