"""Draws the speed of softmax by row length, as a fraction of a copy's, from what speed.py wrote.

python benchmarks/plot.py FILE.json OUT.svg
"""

import json
import pathlib
import sys

PANELS = (("forward", "float32"), ("forward", "bfloat16"), ("backward", "float32"), ("backward", "bfloat16"))
COLOURS = {"jaxsoft": "#1b6ca8", "jax.nn": "#d1495b", "pallas": "#edae49", "triton": "#66a182"}


def draw(result: dict, path: pathlib.Path) -> None:
    """One panel a direction and dtype, one line an implementation. matplotlib is only needed here."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, sharey=True, layout="constrained")
    names = {}
    for panel, (direction, dtype) in zip(axes.flat, PANELS, strict=True):
        points: dict[str, list[tuple[int, float]]] = {}
        for record in result["records"]:
            if record["group"] not in ("short", "rows") or "fraction" not in record:
                continue
            if (record["op"], record["direction"], record["dtype"]) == ("softmax", direction, dtype):
                points.setdefault(record["implementation"], []).append((record["n"], record["fraction"]))
        for name, line in points.items():
            n, fraction = zip(*sorted(line), strict=True)
            (names[name],) = panel.plot(n, fraction, marker="o", markersize=3.5, color=COLOURS.get(name), label=name)
        panel.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        panel.set_title(f"{direction}, {dtype}", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.grid(color="0.92", zorder=0)
    axes[0, 0].set_ylim(bottom=0)
    figure.supxlabel("row length", fontsize=10)
    figure.supylabel("fraction of the speed of a copy of the same bytes", fontsize=10)
    figure.suptitle(f"softmax, {result['header']['device']}, jax {result['header']['versions']['jax']}", fontsize=11)
    if names:
        axes[1, 1].legend(names.values(), names.keys(), loc="lower left", fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2]))
