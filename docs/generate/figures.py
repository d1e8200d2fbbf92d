"""The drawings of the pages: boxes, arrows and words as SVG in the page, in the colours of its scheme (site.css)."""

import html


class Drawing:
    """An SVG that grows by calls. Coordinates are in units of the drawing; `kind` names a class of site.css."""

    def __init__(self, width: int, height: int, title: str):
        """title: what a reader who cannot see the drawing is told."""
        self.size, self.title, self.parts = (width, height), title, []

    def box(self, x, y, width, height, *lines, kind="plain", small=False):
        """A box with lines of text in its middle."""
        self.parts.append(f'<rect class="box {kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        step = 14 if small else 17
        top = y + height / 2 - step * (len(lines) - 1) / 2 + (4 if small else 4.5)
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + i * step, line, "small" if small else "")
        return self

    def text(self, x, y, words, kind="", anchor="middle"):
        """One line of text; what is between backticks is set as code."""
        spans = []
        for i, part in enumerate(words.split("`")):
            spans.append(f'<tspan class="code">{html.escape(part)}</tspan>' if i % 2 else html.escape(part))
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y:.1f}" text-anchor="{anchor}">{"".join(spans)}</text>')
        return self

    def arrow(self, *points, kind=""):
        """A line through points that ends in a head."""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="arrow {kind}" d="{path}" marker-end="url(#head)"/>')
        return self

    def __str__(self) -> str:
        """The drawing as a part of a page. An empty line would end it for Markdown."""
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        return (
            f'<figure class="drawing">\n<svg viewBox="0 0 {width} {height}" role="img">\n'
            f"<title>{html.escape(self.title)}</title>\n{head}\n" + "\n".join(self.parts) + "\n</svg>\n</figure>"
        )


def fold() -> Drawing:
    """A row in parts, the state of each, and how they combine."""
    d = Drawing(720, 270, "Four parts of a row are reduced to states, which combine in pairs to the state of the row")
    for i in range(4):
        for j in range(4):
            d.box(20 + i * 175 + j * 38, 20, 34, 26, f"x{4 * i + j}", kind="data", small=True)
        x = 20 + i * 175 + 74
        d.arrow((x, 50), (x, 82)).box(x - 42, 86, 84, 32, f"(m{i}, s{i})", kind="state")
    for i in range(2):
        left, right = 94 + 2 * i * 175, 94 + (2 * i + 1) * 175
        middle = (left + right) / 2
        d.arrow((left, 118), (middle - 20, 154)).arrow((right, 118), (middle + 20, 154))
        d.box(middle - 52, 158, 104, 32, "combine", kind="step")
    d.arrow((181, 190), (300, 226)).arrow((531, 190), (420, 226))
    d.box(260, 226, 200, 34, "(m, s) of the whole row", kind="state")
    return d


def register_row() -> Drawing:
    """A row in registers: read once, reduced, written once."""
    d = Drawing(720, 170, "A row is read into registers once, reduced there, and written once")
    d.box(20, 60, 130, 46, "row in memory", kind="data").arrow((150, 83), (206, 83)).text(178, 74, "read", "small")
    d.box(210, 20, 300, 126, kind="chip").text(360, 38, "registers of a warp or a block", "small")
    d.box(226, 52, 128, 76, "the row", "x0 … xn", kind="data")
    d.arrow((354, 72), (394, 72)).box(398, 52, 98, 34, "(m, s)", kind="state")
    d.arrow((446, 86), (446, 104), (360, 104)).text(450, 122, "exp(x - m) / s", "small")
    d.arrow((510, 83), (566, 83)).text(538, 74, "write", "small").box(570, 60, 130, 46, "result", kind="data")
    return d


def ring() -> Drawing:
    """A row through a ring of slots in shared memory."""
    d = Drawing(720, 250, "Tiles of a row pass through a ring of slots in shared memory, filled by asynchronous copies")
    d.text(85, 24, "row in memory", "small")
    for i in range(6):
        d.box(30, 34 + i * 33, 110, 28, f"tile {i}", kind="data", small=True)
    d.arrow((140, 115), (226, 115)).text(184, 100, "asynchronous", "small").text(184, 134, "copies", "small")
    d.box(230, 20, 170, 212, kind="chip").text(315, 38, "ring in shared memory", "small")
    for i, state in enumerate(("full: being reduced", "full: waits", "being filled", "empty")):
        d.box(244, 50 + i * 44, 142, 34, f"slot {i}", state, kind="data" if i < 2 else "plain", small=True)
    d.arrow((400, 66), (466, 66)).box(470, 46, 110, 40, "(m, s)", kind="state")
    d.text(433, 57, "read", "small")
    d.arrow((525, 86), (525, 130)).box(470, 134, 230, 44, "exp(x - m) / s, tile by tile", kind="step")
    d.arrow((400, 200), (584, 200), (584, 182)).text(492, 216, "tiles that are still there", "small")
    d.arrow((640, 178), (640, 204)).box(580, 208, 120, 30, "result", kind="data")
    return d


def split() -> Drawing:
    """A few long rows over many blocks, in two launches."""
    d = Drawing(720, 240, "Parts of a row are reduced by several blocks in a first launch and written in a second one")
    for i in range(4):
        y = 30 + i * 48
        d.box(20, y, 120, 34, f"part {i} of the row", kind="data", small=True).arrow((140, y + 17), (176, y + 17))
        d.box(180, y, 120, 34, f"block {i}", kind="step").arrow((300, y + 17), (352, 117))
        d.arrow((446, 117), (496, y + 17)).box(500, y, 100, 34, f"block {i}", kind="step")
        d.arrow((600, y + 17), (636, y + 17)).box(640, y, 60, 34, f"part {i}", kind="data", small=True)
    d.box(356, 84, 90, 66, "states", "(m, s)", kind="state")
    d.text(240, 18, "first launch: reduce", "small").text(550, 18, "second launch: read again, write", "small")
    return d


def cluster() -> Drawing:
    """A long row over the blocks of a cluster, which exchange their states."""
    d = Drawing(720, 230, "Each block of a cluster keeps a part of the row in shared memory and sends its state to all")
    d.box(150, 10, 430, 210, kind="chip").text(365, 28, "cluster of blocks", "small")
    for i in range(4):
        y = 38 + i * 45
        d.box(16, y, 104, 34, f"part {i}", kind="data").arrow((120, y + 17), (166, y + 17))
        d.box(170, y, 160, 34, "shared memory", f"of block {i}", kind="data", small=True)
        d.arrow((330, y + 17), (366, y + 17)).box(370, y, 70, 34, f"(m{i}, s{i})", kind="state", small=True)
        d.arrow((440, y + 17), (476, 122))
        d.arrow((580, y + 17), (616, y + 17)).box(620, y, 84, 34, f"result {i}", kind="data", small=True)
    d.box(480, 90, 90, 64, "(m, s)", "in every block", kind="state", small=True)
    return d


def columns() -> Drawing:
    """An axis before the last: a tile of columns, whose rows are read where they lie."""
    d = Drawing(
        720, 230, "A block takes a tile of neighbouring columns, and reduces each column over its lanes and warps"
    )
    for r in range(6):
        for c in range(8):
            inside = 2 <= c < 6
            d.box(30 + c * 34, 34 + r * 29, 30, 25, kind="data" if inside else "plain")
    d.text(166, 24, "last axis: neighbours in memory", "small")
    d.parts.append('<text class="small" transform="translate(18 120) rotate(-90)" text-anchor="middle">reduced</text>')
    d.arrow((306, 122), (376, 122)).text(340, 112, "words", "small").text(340, 140, "of 16 bytes", "small")
    d.box(380, 56, 130, 130, kind="chip").text(445, 76, "block", "small")
    d.box(394, 86, 102, 40, "a state for", "each column", kind="state", small=True)
    d.box(394, 134, 102, 40, "combined over", "its warps", kind="step", small=True)
    d.arrow((510, 122), (556, 122)).box(560, 96, 140, 52, "written where", "it was read", kind="data", small=True)
    return d


def attention() -> Drawing:
    """A block of attention: tiles of keys and values through a ring, and two warp groups that fold them."""
    d = Drawing(760, 250, "One warp group copies tiles of keys and values; two others multiply and fold them in turns")
    for i in range(4):
        d.box(16, 20 + i * 52, 120, 40, "keys, values", f"of tile {i}", kind="data", small=True)
    d.arrow((136, 124), (186, 124)).text(161, 114, "copies", "small")
    d.box(190, 10, 400, 228, kind="chip").text(390, 28, "block of queries of one head", "small")
    d.box(206, 44, 110, 74, "slot 0", "keys, values", kind="data", small=True)
    d.box(206, 130, 110, 74, "slot 1", "keys, values", kind="data", small=True)
    d.text(261, 226, "filled by a third", "small")
    for i in range(2):
        y = 44 + i * 86
        d.arrow((316, 81), (356, y + 37)).arrow((316, 167), (356, y + 37))
        d.box(360, y, 214, 74, f"warp group {i}: 64 queries", "products, exponentials", "(m, s, o)", kind="state")
        d.arrow((574, y + 37), (636, y + 37)).box(640, y + 10, 104, 54, "o / s", "m + log s", kind="data", small=True)
    d.text(467, 226, "one multiplies, the other exponentiates", "small")
    return d


def way() -> Drawing:
    """From a call to a kernel."""
    d = Drawing(760, 490, "The way of a call of softmax through the package, from the public function to a kernel")
    steps = [
        ("`jaxsoft.softmax(x, ...)`", "arguments are checked; what comes beside x becomes a form", "`_ops/`"),
        (
            "`differentiable`",
            "what JAX differentiates: the value, and the linear map of its tangents",
            "`_rows/`",
        ),
        ("`RowOperation`", "one primitive in the jaxpr; under vmap a mapped dimension is more rows", "`_rows/`"),
        ("`partition`", "over a mesh rows stay on their devices; a sharded row is a fold over shards", "`_rows/`"),
        ("`choose`, when lowered", "the fastest implementation that serves these operands there, and why", "`_rows/`"),
    ]
    for i, (title, what, room) in enumerate(steps):
        y = 14 + i * 70
        d.box(20, y, 640, 50, title, what, kind="step" if i else "state")
        d.text(676, y + 30, room, "", "start")
        if i < len(steps) - 1:
            d.arrow((340, y + 50), (340, y + 66))
    names = ("ffi, CPU", "ffi, CUDA", "pallas", "triton", "xla", "reference")
    for i, name in enumerate(names):
        x = 20 + i * 108
        d.arrow((340, 344), (x + 50, 398)).box(x, 402, 100, 34, name, kind="data")
    files = ("`ffi/cpu`", "`ffi/cuda`", "`pallas_kernels`", "`triton_kernels`", "`_rows`", "`_rows`")
    for i, name in enumerate(files):
        d.text(70 + i * 108, 456, name, "small")
    d.text(
        340, 480, "when it is traced: the steps above the line of implementations; when it runs: one kernel", "small"
    )
    return d


def derivative() -> Drawing:
    """The value, its derivative as a linear map, and what each mode makes of it."""
    d = Drawing(740, 250, "Forward mode evaluates the linear map of tangents by a formula, reverse mode runs a kernel")
    d.box(20, 96, 150, 56, "softmax(x)", "kernel → y", kind="step").arrow((170, 124), (226, 124))
    d.text(198, 114, "keeps y", "small")
    d.box(230, 82, 210, 84, "linear operation of t:", "y (t - ⟨y, t⟩)", kind="state")
    d.arrow((440, 104), (516, 60)).box(520, 30, 200, 56, "forward mode:", "the formula, by XLA", kind="data")
    d.arrow((440, 144), (516, 188)).box(
        520, 160, 200, 56, "reverse mode: transposed,", "the pullback's kernel", kind="data"
    )
    d.text(335, 200, "its own derivative is that of its formula,", "small")
    d.text(335, 218, "so every order exists in both modes", "small")
    return d


def mesh() -> Drawing:
    """A row over shards: one exchange of a few numbers a row."""
    d = Drawing(720, 250, "Each device reduces its part of the rows; one exchange of a few numbers a row combines them")
    for i in range(4):
        y = 20 + i * 54
        d.box(20, y, 150, 40, f"device {i}", "its part of the rows", kind="data", small=True)
        d.arrow((170, y + 20), (216, y + 20)).box(220, y, 100, 40, f"(m{i}, s{i})", kind="state")
        d.arrow((320, y + 20), (376, 122)).arrow((500, 122), (556, y + 20))
        d.box(560, y, 140, 40, f"device {i}", "its part of the result", kind="data", small=True)
    d.box(380, 86, 120, 74, "all-gather of", "all states; each", "device folds them", kind="step", small=True)
    return d
