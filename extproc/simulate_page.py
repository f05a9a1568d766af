"""One HTML page for the results of `simulate`: table, TTFT and hit ratio over time. No script, no external resource."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Protocol


class ResultLike(Protocol):
    """What the page shows of a result; `extproc.simulate.Result` is one."""

    @property
    def policy(self) -> str: ...
    @property
    def hit_ratio(self) -> float: ...
    @property
    def ttft_mean_s(self) -> float: ...
    @property
    def ttft_p50_s(self) -> float: ...
    @property
    def ttft_p90_s(self) -> float: ...
    @property
    def ttft_p99_s(self) -> float: ...
    @property
    def imbalance(self) -> float: ...
    @property
    def series(self) -> Sequence[tuple[float, float, float]]: ...


WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 300, 56, 34, 12
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5cf6", "#6b7280", "#b91c1c", "#4d7c0f")
"""Told apart with colour-blindness too; lines past the first eight are dashed."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #d0d7de; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #3d444d; --paper: #0d1117 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 900px; padding: 0 1em }
table { border-collapse: collapse }
th, td { padding: .2em .8em; border-bottom: 1px solid var(--soft); text-align: right }
th:first-child, td:first-child { text-align: left } td { font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } svg text { fill: var(--ink); font-size: 12px }
.grid { stroke: var(--soft) } .key { display: inline-block; width: 1.4em; height: .35em; margin-right: .5em }
""".strip()

COLUMNS: tuple[tuple[str, Callable[[ResultLike], float], bool], ...] = (
    ("hit ratio", lambda r: r.hit_ratio, True),
    ("TTFT mean s", lambda r: r.ttft_mean_s, False),
    ("p50", lambda r: r.ttft_p50_s, False),
    ("p90", lambda r: r.ttft_p90_s, False),
    ("p99", lambda r: r.ttft_p99_s, False),
    ("imbalance", lambda r: r.imbalance, False),
)
"""Heading, value, whether high is good; the best of each column is set in bold."""


def page(trace: str, results: Sequence[ResultLike]) -> str:
    """The whole page as text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("policy", *(name for name, _, _ in COLUMNS)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(trace)}: scorers compared</title><style>{STYLE}</style></head><body>"
        f"<h1>Scorers on {escape(trace)}</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{_rows(results)}</tbody></table>"
        f"<h2>Mean time to first token, seconds</h2>{_chart(results, 1)}"
        f"<h2>Hit ratio</h2>{_chart(results, 2)}"
        "</body></html>\n"
    )


def _rows(results: Sequence[ResultLike]) -> str:
    best = [(max if high else min)(map(value, results), default=0.0) for _, value, high in COLUMNS]
    rows = []
    for i, result in enumerate(results):
        key = f'<span class="key" style="background:{COLOURS[i % len(COLOURS)]}"></span>'
        cells = [f"<td>{key}{escape(result.policy)}</td>"]
        for (_, value, _), top in zip(COLUMNS, best, strict=True):
            text = f"{value(result):.3f}"
            cells.append(f"<td><b>{text}</b></td>" if value(result) == top else f"<td>{text}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return "".join(rows)


def _chart(results: Sequence[ResultLike], part: int) -> str:
    """Lines of one part of the series over minutes since the first request."""
    points = [point for result in results for point in result.series]
    if not points:
        return "<p>no data</p>"
    start, end = min(p[0] for p in points), max(p[0] for p in points)
    top = _round_up(max(p[part] for p in points))
    across, down = max(end - start, 1e-9), HEIGHT - BOTTOM - TOP

    def x(at: float) -> float:
        return LEFT + (at - start) / across * (WIDTH - LEFT - 10)

    def y(value: float) -> float:
        return TOP + down * (1 - value / top)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for i in range(5):
        value, at = top * i / 4, start + across * i / 4
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        out.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{(at - start) / 60:.3g} min</text>')
    for i, result in enumerate(results):
        path = " ".join(f"{x(p[0]):.1f},{y(p[part]):.1f}" for p in result.series)
        dash = ' stroke-dasharray="6 3"' if i >= 8 else ""
        colour = COLOURS[i % len(COLOURS)]
        out.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6"{dash} points="{path}">'
            f"<title>{escape(result.policy)}</title></polyline>"
        )
    return "".join(out) + "</svg>"


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = 1.0
    while scale * 10 <= value:
        scale *= 10
    while scale > value:
        scale /= 10
    return next(step * scale for step in (1, 2, 2.5, 5, 10) if step * scale >= value)
