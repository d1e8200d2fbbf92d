"""Draws the speed of softmax by row length, as a fraction of a copy's, from what speed.py wrote; or that of attention,
in TFLOP/s, from what attention.py wrote.

python benchmarks/plot.py FILE.json OUT.svg

The picture is SVG, written here without any plotting library: the same record gives the same file, its text can be
read by a search, and it follows the reader's choice of light or dark.
"""

import dataclasses
import html
import json
import math
import pathlib
import sys
from collections.abc import Sequence

PANELS = (("forward", "float32"), ("forward", "bfloat16"), ("backward", "float32"), ("backward", "bfloat16"))
# In the order of the legend, each with its colour on a light and on a dark ground.
COLOURS = {
    "jaxsoft": ("#1b6ca8", "#6bb5ee"),
    "jax.nn": ("#c8324b", "#f2798b"),
    "pallas": ("#b57a00", "#edbd5b"),
    "triton": ("#3d7a58", "#83c7a0"),
    "cudnn": ("#3d7a58", "#83c7a0"),
    "xla": ("#c8324b", "#f2798b"),
    "deterministic=False": ("#7b4fa3", "#bd9be0"),
    "ffi": ("#0f7f86", "#62c5cb"),
    "ffi, deterministic=False": ("#8a5a3c", "#d0a282"),
    "ring": ("#1b6ca8", "#6bb5ee"),
    "all_gather": ("#c8324b", "#f2798b"),
    "all_to_all": ("#3d7a58", "#83c7a0"),
}
ROWS = ("jaxsoft", "jax.nn", "pallas", "triton")  # whose colours a picture of row operations has
# A picture of its own follows the browser's preference; within a page of the site, its style sheet says the rest.
STYLE = """
svg.chart { color: #24292f; background: #ffffff; }
@media (prefers-color-scheme: dark) { svg.chart { color: #d7dde3; background: #16191d; } }
"""

PANEL_WIDTH, PANEL_HEIGHT = 380, 200  # of the area that the lines are in
LEFT, GAP, TOP, BOTTOM = 62, 34, 74, 62  # what is around and between the panels


@dataclasses.dataclass
class Panel:
    """One pair of axes: the points (x, y) of each line, by its name."""

    title: str
    lines: dict[str, list[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Scale:
    """The axis of y: fractions of a copy's speed, as the defaults have it.

    Attributes:
      unit: the axis ends at a multiple of it.
      least: and not below this.
      step: from one number beside the axis to the next, in units.
      heavy: where there is a heavier line, in units; None for none.
      format: how a number is written.
    """

    unit: float = 0.1
    least: float = 1.1
    step: int = 2
    heavy: int | None = 10
    format: str = ".1f"


def chart(
    panels: list[Panel], title: str, x_label: str, y_label: str, alone: bool = True, scale: Scale = Scale()
) -> str:
    """An SVG of panels, two in a row, that share their axes: x logarithmic to base 2, y from 0.

    Args:
      panels: what is drawn.
      title, x_label, y_label: in words.
      alone: whether the picture is a file of its own, which has to bring its colours along.
      scale: the axis of y.
    """
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    names = [name for name in COLOURS if any(name in panel.lines for panel in panels)]
    rows = math.ceil(len(panels) / 2)
    width = LEFT + 2 * PANEL_WIDTH + GAP + 16
    height = TOP + rows * PANEL_HEIGHT + (rows - 1) * GAP + BOTTOM
    low, high = (f(math.log2(x) for x, _ in points) for f in (min, max))
    top = max(scale.least, math.ceil(max(y for _, y in points) * (1 / scale.unit)) * scale.unit)

    drawn = [f'<text x="{width / 2:.0f}" y="22" text-anchor="middle" font-size="15">{html.escape(title)}</text>']
    drawn += _legend(names, width / 2)
    for number, panel in enumerate(panels):
        row, column = divmod(number, 2)
        left, bottom = LEFT + column * (PANEL_WIDTH + GAP), TOP + row * (PANEL_HEIGHT + GAP) + PANEL_HEIGHT

        def place(x: float, y: float, left: float = left, bottom: float = bottom) -> tuple[float, float]:
            along = (math.log2(x) - low) / max(high - low, 1)
            return left + 8 + along * (PANEL_WIDTH - 16), bottom - y / top * PANEL_HEIGHT

        drawn += _axes(panel.title, left, bottom, low, high, top, scale, place, row == rows - 1 or len(panels) == 1)
        for name in reversed(names):  # the first one over the others
            drawn += _line(name, [place(*point) for point in sorted(panel.lines.get(name, []))])
    middle = TOP + (height - TOP - BOTTOM) / 2
    drawn.append(f'<text x="{width / 2:.0f}" y="{height - 14}" text-anchor="middle">{html.escape(x_label)}</text>')
    drawn.append(
        f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>'
    )
    style = f"<style>{_colours(ROWS if all(name in ROWS for name in names) else names, alone)}</style>"
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    return (
        f'<svg{namespace} class="chart" viewBox="0 0 {width} {height}" role="img" font-size="12"'
        f' font-family="system-ui, sans-serif" fill="currentColor">\n'
        f"<title>{html.escape(title)}</title>\n" + "\n".join([style, *drawn]) + "\n</svg>\n"
    )


def _colours(names: Sequence[str], alone: bool) -> str:
    """The rules for the lines' colours, by the page's scheme or by the browser's preference."""
    light = "".join(f".{_class(n)} {{ --line: {COLOURS[n][0]}; }}\n" for n in names)
    dark = "".join(f".{_class(n)} {{ --line: {COLOURS[n][1]}; }}\n" for n in names)
    if alone:
        return f"{STYLE}{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
    return light + dark.replace(".line", '[data-md-color-scheme="slate"] .line')


def _class(name: str) -> str:
    return "line-" + name.replace(", ", "-").replace(".", "-").replace("=", "-")


def _legend(names: list[str], middle: float) -> list[str]:
    """The names of the lines, in one row that is centred."""
    drawn, x = [], middle - 55 * len(names)
    for name in names:
        drawn.append(
            f'<g class="{_class(name)}"><path d="M{x:.0f} 44h26" stroke="var(--line)" stroke-width="2.5"/>'
            f'<circle cx="{x + 13:.0f}" cy="44" r="3.2" fill="var(--line)"/></g>'
            f'<text x="{x + 33:.0f}" y="48">{name}</text>'
        )
        x += 110
    return drawn


def _axes(title, left, bottom, low, high, top, scale, place, numbered) -> list[str]:
    """The grid of a panel, with the numbers beside it."""
    drawn = [f'<text x="{left + 8}" y="{bottom - PANEL_HEIGHT - 7}" font-weight="600">{html.escape(title)}</text>']
    for units in range(0, round(top / scale.unit) + 1, scale.step):
        y = place(2**low, units * scale.unit)[1]
        heavy = 'stroke-opacity=".55"' if units == scale.heavy else 'stroke-opacity=".13"'
        drawn.append(f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" stroke="currentColor" {heavy}/>')
        if left == LEFT:
            number = format(units * scale.unit, scale.format)
            drawn.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{number}</text>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = place(2**power, 0)[0]
        drawn.append(f'<path d="M{x:.1f} {bottom}v-{PANEL_HEIGHT}" stroke="currentColor" stroke-opacity=".07"/>')
        if numbered and (power % 4 == 0 or high - low < 8):
            drawn.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{length(2**power)}</text>')
    return drawn


def _line(name: str, points: list[tuple[float, float]]) -> list[str]:
    """One line, with a dot at each point."""
    if not points:
        return []
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>' for x, y in points)
    return [
        f'<g class="{_class(name)}" fill="var(--line)">'
        f'<path d="{path}" fill="none" stroke="var(--line)" stroke-width="2"/>{dots}</g>'
    ]


def scale_of(panels: list[Panel]) -> Scale:
    """The axis of numbers of any size: by powers of ten, up to the largest."""
    top = max(y for panel in panels for line in panel.lines.values() for _, y in line)
    unit = 10.0 ** math.floor(math.log10(top) - 0.3)
    return Scale(unit=unit, least=unit, step=1 if top < 6 * unit else 2, heavy=None, format="g")


def length(n: int) -> str:
    """A row length as it is usually said: 32K for 32768, and every digit where it is no multiple of 1024."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{name}"
    return str(n)


def softmax_by_length(result: dict, op: str = "softmax", alone: bool = True) -> str:
    """The picture of one operation: a panel a direction and dtype, of many rows."""
    panels = []
    for direction, dtype in PANELS:
        lines: dict[str, list[tuple[float, float]]] = {}
        for record in result["records"]:
            what = record["op"], record["direction"], record["dtype"]
            if record["group"] in ("short", "rows") and "fraction" in record and what == (op, direction, dtype):
                lines.setdefault(record["implementation"], []).append((record["n"], record["fraction"]))
        if lines:
            panels.append(Panel(f"{direction}, {dtype}", lines))
    header = result["header"]
    title = f"{op}, {header['device']}, jax {header['versions']['jax']}"
    return chart(panels, title, "row length", "fraction of a copy's speed", alone)


def attention_by_length(result: dict, size: int, alone: bool = True) -> str:
    """The picture of attention with heads of a size: a panel a rule and direction."""
    panels: dict[str, Panel] = {}
    unit_name, flops = unit_of_rate(result)
    for record in result["records"]:
        if record["group"] not in ("lengths", "cpu") or record["shape"][3] != size or record["dtype"] != "bfloat16":
            continue
        title = f"{record['direction']}{', causal' * record['causal']}"
        panel = panels.setdefault(title, Panel(title, {}))
        for name, seconds in record["seconds"].items():
            panel.lines.setdefault(name, []).append((record["shape"][1], record["flops"] / seconds / flops))
    if not panels:
        raise ValueError(f"the record has no attention by length with heads of {size}")
    drawn = [panels[title] for title in sorted(panels, key=lambda title: (title.startswith("with"), title))]
    header = result["header"]
    title = f"attention, heads of {size}, bfloat16, {header['device']}, jax {header['versions']['jax']}"
    return chart(drawn, title, "queries, and keys", unit_name, alone, scale_of(drawn))


def unit_of_rate(result: dict) -> tuple[str, float]:
    """In which unit a device's operations a second are given, and how many that is."""
    return ("TFLOP/s", 1e12) if result["header"]["device"].startswith("NVIDIA") else ("GFLOP/s", 1e9)


def draw(result: dict, path: pathlib.Path) -> None:
    """Writes the picture of softmax, or of attention with heads of 128, or of the first size there is, as SVG."""
    if path.suffix != ".svg":
        raise ValueError(f"the picture is an SVG, so its name must end in .svg; got {path}")
    if any("flops" in record for record in result["records"]):  # which attention.py wrote
        sizes = [r["shape"][3] for r in result["records"] if r["group"] in ("lengths", "cpu")]
        path.write_text(attention_by_length(result, 128 if 128 in sizes or not sizes else sizes[0]))
    else:
        path.write_text(softmax_by_length(result))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2]))
