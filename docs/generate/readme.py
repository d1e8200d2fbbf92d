"""The table of operations in the README, with their speed: `python docs/generate/readme.py` writes it anew.

What is typed here says what an operation replaces and which kernels it has. Every number is from a record in
benchmarks/results: how many times as fast as what it replaces an operation is, over all cases that a record has of it.
"""

import dataclasses
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable

import public

sys.path.insert(0, str(public.ROOT / "benchmarks"))

import attention_report
import columns
import records

README = public.ROOT / "README.md"
BEGIN, END = "<!-- speed: made by docs/generate/readme.py -->\n", "<!-- end of speed -->\n"
NOTHING = "\N{EN DASH}"
_ROWS = "Ampere and newer: f16, bf16, f32"
_ATTENTION = "Hopper: f16, bf16"


def has_gradients(case: dict) -> bool:
    """Whether gradients were computed."""
    words = case.get("direction", case.get("what", ""))
    return "gradient" in words or words == "backward"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      operation, replaces, kernels: the first columns.
      name: of the record; empty if the operation is in none.
      peers: what is replaced, by the record's names for it. The fastest of them counts.
      counts: which cases.
      ours: jaxsoft's name in the record.
      gradients: whether its cases have gradients, where the record does not say.
    """

    operation: str
    replaces: str
    kernels: str
    name: str = ""
    peers: tuple[str, ...] = ()
    counts: Callable[[dict], bool] = lambda case: True
    ours: str = "jaxsoft"
    gradients: bool | None = None

    def instead_of(self) -> str:
        """What it replaces, and what of another library it is compared with besides."""
        others = records.FLASH_ATTENTION[:2] if records.FLASH_ATTENTION[0] in self.peers else ()
        found = columns.among(others, records.load(self.name).cases) if others else ()
        return "; ".join([self.replaces, *found])

    def gains(self, gradients: bool) -> list[float]:
        """How many times as fast as the peers it is, in all cases with gradients or without."""
        found = []
        for case in records.load(self.name).cases if self.name else ():
            seconds = records.net(case)["seconds"]
            peers = [seconds[peer] for peer in self.peers if peer in seconds]
            known = has_gradients(case) if self.gradients is None else self.gradients
            if known == gradients and peers and self.ours in seconds and self.counts(case):
                found.append(min(peers) / seconds[self.ours])
        return found


def of_group(*groups: str) -> Callable[[dict], bool]:
    """Whether a case is of one of these groups."""
    return lambda case: case["group"] in groups


def paged(case: dict) -> bool:
    """Whether a case of decoding has its keys in pages."""
    return bool(case["page"])


ROWS = (
    Row(
        "`softmax`, `log_softmax`, `logsumexp`",
        "those of `jax.nn`",
        f"{_ROWS}, f64",
        "h200",
        ("jax.nn",),
    ),
    Row(
        "`softmax_cross_entropy_with_integer_labels`",
        "optax's",
        f"{_ROWS}, f64",
        "h200_losses",
        ("optax",),
        of_group("cross_entropy"),
    ),
    Row(
        "the same with `return_entropy`",
        "optax's, and the entropy by `jax.nn.log_softmax`",
        f"{_ROWS}, f64",
        "h200_losses",
        ("optax, composed",),
        of_group("entropy"),
    ),
    Row("`softmax_cross_entropy`, `softmax_kl_divergence`, `entropy`", "optax's, and formulas", f"{_ROWS}, f64"),
    Row(
        "`linear_softmax_cross_entropy`",
        "a linear layer and optax's loss",
        "XLA's products; on Hopper more: f16, bf16",
        "h200_losses",
        ("optax",),
        of_group("linear"),
        ours="mean",
        gradients=True,
    ),
    Row(
        "`top_k_softmax`",
        "`jax.lax.top_k` of `jax.nn.softmax`",
        _ROWS,
        "h200_losses",
        ("lax.top_k", "lax.top_k(is_stable=False)"),
        of_group("top_k", "few"),
        gradients=False,
    ),
    Row(
        "`random.sample`",
        "`jax.random.categorical` after filters",
        _ROWS,
        "h200_losses",
        ("composed",),
        of_group("sample"),
        gradients=False,
    ),
    Row(
        "`dot_product_attention`",
        "that of `jax.nn`, by cuDNN or XLA",
        _ATTENTION,
        "h200_attention",
        records.OF_ATTENTION,
    ),
    Row(
        "the same for few queries, as in decoding",
        "that of `jax.nn`, by cuDNN or XLA",
        _ATTENTION,
        "h200_decode",
        ("cudnn", "xla"),
        lambda case: not paged(case),
        gradients=False,
    ),
    Row(
        "`paged_attention`, with `write_pages`",
        "gathered pages, and `jax.nn` by cuDNN",
        f"{_ATTENTION}; pages also of 8 bits",
        "h200_decode",
        ("cudnn",),
        paged,
        gradients=False,
    ),
    Row(
        "`ring_attention`",
        "attention that XLA partitions",
        _ATTENTION,
        "h200x2_ring",
        ("jax.nn",),
        ours="ring",
    ),
)


def gain(values: Iterable[float]) -> str:
    """The median of some gains, and the smallest and the largest of them."""
    values = sorted(values)
    if not values:
        return NOTHING
    middle, low, high = map(columns.number, (statistics.median(values), values[0], values[-1]))
    return middle if len(values) == 1 else f"{middle} ({low}{NOTHING}{high})"


def memory() -> str:
    """What the loss of a linear layer takes in memory, of what optax's takes with stored logits, in per cent."""
    some = [case["memory"] for case in records.load("h200_losses").of("linear")]
    return columns.spread(100 * taken["mean"] / taken["optax"] for taken in some)


def circumstances() -> str:
    """What was measured where, as a paragraph."""
    found = {row.operation: records.load(row.name) for row in ROWS if row.name}
    headers = [record.header for record in found.values()]
    places = sorted({f"{header['device']} with JAX {header['versions']['jax']}" for header in headers})
    several = [name for name, record in found.items() if record.cases[0].get("devices", 1) > 1]
    return (
        "*Forward* and *gradients* say how many times as fast as what it replaces an operation is: the median of the "
        f"recorded cases (worst{NOTHING}best), on an {' and '.join(places)}, and {', '.join(several)} on two. "
        "Gradients are the backward pass alone in the first line, and both passes in the others. "
        f"{attention_report.standing('h200_attention')} "
        f"`linear_softmax_cross_entropy` is there for its memory, {memory()} % of that of stored logits. "
        "[Performance](docs/performance.md) has every case, slower ones too."
    )


def table() -> str:
    """The table, and what it says, as they are in the README."""
    # And whether they are aligned to the left.
    heads = dict.fromkeys(("operation", "in place of", "GPUs and dtypes with kernels"), True)
    heads |= dict.fromkeys(("forward", "gradients"), False)
    rows = [[r.operation, r.instead_of(), r.kernels, *(gain(r.gains(v)) for v in (False, True))] for r in ROWS]
    words = textwrap.fill(circumstances(), 120, break_long_words=False, break_on_hyphens=False)
    return f"\n{columns.markdown(heads.items(), rows)}\n\n{words}\n\n"


def filled(text: str) -> str:
    """The README with the table made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
