"""A plot as an SVG, without a plotting library: panels of grouped bars, with a mark above each."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

_COLORS = ("#1b6ca8", "#7fb2d9", "#d1495b", "#edae9b", "#3c7a3c", "#a9cfa4")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 170, 60, 46, 34


class Bar(NamedTuple):
    """One bar."""

    value: float
    mark: float | None = None
    """A line above it, such as a high percentile."""


class Panel(NamedTuple):
    """One plot of the grid."""

    title: str
    groups: Mapping[str, Mapping[str, Bar]]
    """Label on the x-axis -> name of the series -> its bar."""


def draw(rows: Sequence[Sequence[Panel]], series: Sequence[str], title: str) -> str:
    """Return the SVG of a grid of panels, all with the same series."""
    width = _LEFT + max(map(len, rows)) * (_WIDTH + _LEFT)
    height = _TOP + len(rows) * (_HEIGHT + 2 * _GAP) + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 18, title, size=14),
    ]
    for number, name in enumerate(series):
        x = _LEFT + number * 170
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{_color(number)}"/>')
        parts.append(_text(x + 15, 37, name))
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            x = _LEFT + column * (_WIDTH + _LEFT)
            parts += _panel(panel, series, x, _TOP + _GAP + row * (_HEIGHT + 2 * _GAP))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, series: Sequence[str], left: float, top: float) -> list[str]:
    bars = [bar for group in panel.groups.values() for bar in group.values()]
    highest = max((max(bar.value, bar.mark or 0) for bar in bars), default=0) or 1.0
    scale = _HEIGHT / highest
    bottom = top + _HEIGHT
    parts = [_text(left, top - 8, panel.title, size=12)]
    for share in (0, 0.5, 1):
        y = bottom - share * _HEIGHT
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(_text(left - 5, y + 4, f"{share * highest:.3g}", anchor="end"))
    step = _WIDTH / max(1, len(panel.groups))
    width = 0.8 * step / max(1, len(series))
    for place, (label, group) in enumerate(panel.groups.items()):
        middle = left + (place + 0.5) * step
        parts.append(_text(middle, bottom + 15, label, anchor="middle"))
        for number, name in enumerate(series):
            if name in group:
                x = middle - 0.4 * step + number * width
                parts += _bar(group[name], x, bottom, width, scale, _color(number))
    return parts


def _bar(bar: Bar, x: float, bottom: float, width: float, scale: float, color: str) -> list[str]:
    height = bar.value * scale
    parts = [
        f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{0.9 * width:.1f}" '
        f'height="{height:.1f}" fill="{color}"/>'
    ]
    if bar.mark is not None:
        y, middle = bottom - bar.mark * scale, x + 0.45 * width
        parts.append(
            f'<path d="M{middle:.1f} {bottom - height:.1f}V{y:.1f}m{-0.3 * width:.1f} 0'
            f'h{0.6 * width:.1f}" stroke="#333" fill="none"/>'
        )
    return parts


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]
