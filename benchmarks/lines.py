"""A plot as an SVG, without a plotting library: panels of lines over one time axis."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

_COLORS = ("#1b6ca8", "#d1495b", "#3c7a3c", "#e09f3e", "#6a4c93", "#7fb2d9")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 150, 64, 40, 40
_LEGEND = 14

Points = Sequence[tuple[float, float]]
"""(time, value)"""


class LinePanel(NamedTuple):
    """One plot of the grid; its y-axis begins at 0."""

    title: str
    lines: Mapping[str, Points]
    """By the name of the series."""


def draw_lines(
    rows: Sequence[Sequence[LinePanel]],
    title: str,
    *,
    unit: str,
    marks: Sequence[float] = (),
) -> str:
    """Return the SVG of a grid of panels.

    Args:
        rows: Of panels.
        title: Above all of them.
        unit: Of the time, below each panel.
        marks: Times at which every panel gets a vertical line.
    """
    width = _LEFT + max(map(len, rows)) * (_WIDTH + _LEFT)
    height = _TOP + len(rows) * (_HEIGHT + _LEGEND + 2 * _GAP)
    longest = max((point[0] for row in rows for one in row for point in _points(one)), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 20, title, size=14),
    ]
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            left = _LEFT + column * (_WIDTH + _LEFT)
            top = _TOP + _GAP + row * (_HEIGHT + _LEGEND + 2 * _GAP)
            parts += _panel(panel, left, top, longest or 1.0, unit, marks)
    return "\n".join([*parts, "</svg>\n"])


def _points(panel: LinePanel) -> list[tuple[float, float]]:
    return [point for line in panel.lines.values() for point in line]


def _panel(
    panel: LinePanel, left: float, top: float, longest: float, unit: str, marks: Sequence[float]
) -> list[str]:
    highest = _round_up(max((value for _, value in _points(panel)), default=0.0))
    bottom = top + _HEIGHT
    parts = [_text(left, top - 8 - _LEGEND, panel.title, size=12)]
    for share in (0, 0.5, 1):
        y = bottom - share * _HEIGHT
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(_text(left - 5, y + 4, f"{share * highest:.4g}", anchor="end"))
        x = left + share * _WIDTH
        label = f"{share * longest:.3g}" + (f" {unit}" if share == 1 else "")
        parts.append(_text(x, bottom + 14, label, anchor="middle"))
    for mark in marks:
        x = left + mark / longest * _WIDTH
        parts.append(f'<path d="M{x:.1f} {top}v{_HEIGHT}" stroke="#999" stroke-dasharray="2 3"/>')
    x = left
    for number, (name, line) in enumerate(panel.lines.items()):
        color = _COLORS[number % len(_COLORS)]
        parts.append(f'<rect x="{x:.1f}" y="{top - 16:.1f}" width="8" height="8" fill="{color}"/>')
        parts.append(_text(x + 11, top - 8, name))
        x += 22 + 6.2 * len(name)
        path = " ".join(
            f"{left + at / longest * _WIDTH:.1f},{bottom - value / highest * _HEIGHT:.1f}"
            for at, value in line
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.2"/>')
    return parts


def _round_up(value: float) -> float:
    """Return the next number of two digits, for the y-axis' end."""
    if value <= 0:
        return 1.0
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / step) * step


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
