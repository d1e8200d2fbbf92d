"""Draws the speed of softmax by row length, as a fraction of a copy's, from what speed.py wrote; or that of attention,
in TFLOP/s, from what attention.py wrote.

python benchmarks/plot.py FILE.jsonl OUT.svg

The picture is an SVG by matplotlib: the same record gives the same file, its text can be read by a search, and it
follows the reader's choice of light or dark.
"""

import dataclasses
import importlib.util
import io
import math
import pathlib
import re
import sys

from columns import length
from records import Record, fraction, rate, read

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
    "FlashAttention-3": ("#c2571a", "#f0a06a"),
    "FlashAttention-4": ("#a8327d", "#ec8cc4"),
    "FlashAttention-4, deterministic=True": ("#75751f", "#c6c65a"),
    "ring": ("#1b6ca8", "#6bb5ee"),
    "all_gather": ("#c8324b", "#f2798b"),
    "all_to_all": ("#3d7a58", "#83c7a0"),
}
LEGEND = 7  # names that a legend has on one line; more of them, some long, are four a line
INK, PAPER = ("#24292f", "#d7dde3"), ("#ffffff", "#16191d")
INKED = ("axes.labelcolor", "grid.color", "text.color", "xtick.color", "ytick.color")
STYLE = dict.fromkeys(INKED, INK[0]) | {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jaxsoft",  # the same names of markers in every run
    "font.sans-serif": ["DejaVu Sans"],  # or the reader's sans-serif
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.labelsize": 9,
    "figure.titlesize": 11,
    "grid.alpha": 0.2,
    "lines.markersize": 4.5,
    "lines.markeredgewidth": 0,
    "legend.frameon": False,
}


@dataclasses.dataclass
class Panel:
    """One pair of axes: the points (x, y) of each line, by its name."""

    title: str
    lines: dict[str, list[tuple[float, float]]]


def why_not(path: pathlib.Path) -> str | None:
    """Why no picture can be written there; None where it can."""
    if path.suffix != ".svg":
        return f"the picture is an SVG, so its name must end in .svg; got {path}"
    if importlib.util.find_spec("matplotlib") is None:  # which is needed for plots alone
        return "plots are drawn by matplotlib, which is not installed: pip install matplotlib"
    return None


def chart(panels: list[Panel], title: str, x_label: str, y_label: str, mark: float | None = None) -> str:
    """An SVG of panels, two in a row, that share their axes: x logarithmic to base 2, y from 0.

    Args:
      panels: what is drawn.
      title, x_label, y_label: in words.
      mark: where there is a heavier line.
    """
    import matplotlib
    from matplotlib.figure import Figure

    names = [name for name in COLOURS if any(name in panel.lines for panel in panels)]
    xs = sorted({x for panel in panels for points in panel.lines.values() for x, _ in points})
    powers = [2**k for k in range(math.ceil(math.log2(xs[0])), math.floor(math.log2(xs[-1])) + 1)]
    rows, lines = math.ceil(len(panels) / 2), 1 if len(names) <= LEGEND else math.ceil(len(names) / 4)
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(8.5, 2.2 * rows + 1.3 + 0.2 * (lines - 1)))
        axes = list(drawn.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat)
        height = drawn.get_figheight()
        drawn.subplots_adjust(0.075, 0.5 / height, 0.985, 1 - (0.6 + 0.2 * lines) / height, 0.06, 0.5 / 2.2)
        for panel, axis in zip(panels, axes, strict=False):
            axis.set_title(panel.title)
            axis.grid()
            axis.set_frame_on(False)
            axis.tick_params(length=0)
            for name in reversed(names):  # the first one over the others
                points = sorted(panel.lines.get(name, []))
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[name][0], gid=f"{panel.title}: {name}")
            if mark is not None:
                axis.axhline(mark, color=INK[0], linewidth=0.8, alpha=0.6, zorder=1)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        axis = axes[0]
        axis.set_xscale("log", base=2)
        axis.set_xticks([x for x in powers if len(powers) < 9 or math.log2(x) % 4 == 0], minor=False)
        axis.set_xticks([], minor=True)
        axis.xaxis.set_major_formatter(lambda x, _: length(round(x)))
        axis.set_ylim(bottom=0, top=1.1 if mark and axis.get_ylim()[1] < 1.1 else None)
        handles = [matplotlib.lines.Line2D([], [], marker="o", color=COLOURS[name][0], label=name) for name in names]
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - 0.27 / height)}
        drawn.legend(handles=handles, **place, ncols=math.ceil(len(names) / lines))
        drawn.suptitle(title, y=1 - 0.08 / height)
        drawn.supxlabel(x_label, y=0.07 / height)
        drawn.supylabel(y_label, x=0.005)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawn.savefig(file, format="svg", transparent=True, metadata=nothing | {"Title": title})
    return _by_scheme(file.getvalue(), [INK, PAPER, *(COLOURS[name] for name in names)])


def _by_scheme(svg: str, colours: list[tuple[str, str]]) -> str:
    """The picture with variables for its colours, which the reader's choice of light or dark sets.

    A file of its own follows the browser's preference, and on a page of the site the page's scheme decides.
    """
    for light, _ in colours:
        svg = svg.replace(light, f"var(--c{light[1:]})")
    light, dark = ("".join(f"--c{pair[0][1:]}:{pair[scheme]};" for pair in colours) for scheme in (0, 1))
    style = (
        f"<style>svg.chart{{{light}background:var(--c{PAPER[0][1:]})}}\n"
        f"@media (prefers-color-scheme:dark){{svg.chart{{{dark}}}}}\n"
        f"[data-md-color-scheme=default] svg.chart{{{light}background:none}}\n"
        f"[data-md-color-scheme=slate] svg.chart{{{dark}background:none}}</style>"
    )
    svg = re.sub(r"(?<![\d.])\d+\.\d{2,}(?![\d.])", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg).replace("*{stroke", "svg.chart *{stroke")
    svg = svg[svg.index("<svg") :].replace("<svg", '<svg class="chart" role="img"', 1)
    return svg.replace(">", f">\n{style}", 1)


def figure(svg: str) -> str:
    """A picture as a part of a page, where an empty line would end it."""
    return f'<figure class="wide">\n{svg}</figure>'


def softmax_by_length(record: Record, op: str = "softmax") -> str:
    """The picture of one operation: a panel a direction and dtype, of many rows."""
    panels = []
    for direction, dtype in PANELS:
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in record.of("short", "rows"):
            if (case["op"], case["direction"], case["dtype"]) == (op, direction, dtype):
                for name in case["errors"]:
                    if (part := fraction(case, name)) is not None:
                        lines.setdefault(name, []).append((case["shape"][-1], part))
        if lines:
            panels.append(Panel(f"{direction}, {dtype}", lines))
    if not panels:
        raise ValueError(f"the record has no {op} by row length")
    title = f"{op}, {record.header['device']}, jax {record.header['versions']['jax']}"
    return chart(panels, title, "row length", "fraction of a copy's speed", mark=1)


def attention_by_length(record: Record, size: int) -> str:
    """The picture of attention with heads of a size: a panel a rule and direction."""
    panels: dict[str, Panel] = {}
    unit = unit_of_rate(record)
    for case in record.of("lengths", "cpu"):
        if case["shape"][3] == size and case["dtype"] == "bfloat16":
            title = f"{case['direction']}{', causal' * case['causal']}"
            panel = panels.setdefault(title, Panel(title, {}))
            for name in case["seconds"]:
                panel.lines.setdefault(name, []).append((case["shape"][1], rate(case, name) / UNITS[unit]))
    if not panels:
        raise ValueError(f"the record has no attention by length with heads of {size}")
    drawn = [panels[title] for title in sorted(panels, key=lambda title: (title.startswith("with"), title))]
    versions = f"{record.header['device']}, jax {record.header['versions']['jax']}"
    return chart(drawn, f"attention, heads of {size}, bfloat16, {versions}", "queries, and keys", unit)


UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}


def unit_of_rate(record: Record) -> str:
    """In which unit a device's operations a second are given."""
    return "TFLOP/s" if record.header["device"].startswith("NVIDIA") else "GFLOP/s"


def draw(record: Record, path: pathlib.Path) -> None:
    """Writes the picture of softmax, or of attention with heads of 128, or of the first size there is, as SVG."""
    if any("scores" in case for case in record.cases):  # which attention.py wrote
        sizes = [case["shape"][3] for case in record.of("lengths", "cpu")]
        path.write_text(attention_by_length(record, 128 if 128 in sizes or not sizes else sizes[0]))
    else:
        path.write_text(softmax_by_length(record))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if reason := why_not(pathlib.Path(sys.argv[2])):
        sys.exit(reason)
    draw(read(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))
