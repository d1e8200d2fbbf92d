"""Records of measurements, as files of JSON lines, and the numbers that follow from what they hold.

The first line of a file is its header: the device, the versions, the commit and the date. Each other line is a case, a
JSON object. A table in it was measured, with a value for each implementation (or for each kind of operation); all
other fields together say which case it is.

  seconds  of a call, the median of its samples; beside the implementations it can have what they are compared with:
           "copy", the time of a copy that moves as many bytes as the call must, "products", that of the matrix products
           alone, "nothing", that of a step of a chain without the call, and "one device"
  spread   half of the range between the quartiles of these samples, as a fraction of their median
  errors   of the results, in units of what is allowed
  memory   bytes beside operands and results; of a program for many devices, its operands, results and what is beside
  read, written, kernels  the bytes that a GPU counted, and the kernels that it ran
  sent     the bytes that a device sends, by the kind of operation
  failed   why there is no time

Nothing is stored that other numbers give. Fractions, rates and speed-ups are computed when a record is read, by the
functions here and in benchmarks/columns.py. This file needs no JAX.
"""

import dataclasses
import functools
import json
import pathlib

RESULTS = pathlib.Path(__file__).parent / "results"
# Of a number of a dtype.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# What attention is compared with: its speed-ups are over the fastest of these that a case has.
FLASH_ATTENTION = ("FlashAttention-3", "FlashAttention-4", "FlashAttention-4, deterministic=True")
OF_ATTENTION = ("cudnn", "xla", *FLASH_ATTENTION)
# What jaxsoft is compared with: its other speed-ups are over the first of these that a case has.
PEERS = ("jax.nn", "optax", "optax, composed", "lax.top_k", "composed", *OF_ATTENTION)
# What else the times of jaxsoft stand beside, and is none of its kernels.
YARDSTICKS = ("copy", "warm", "nothing", "products", "products, logits twice", "lax.top_k(is_stable=False)")


@dataclasses.dataclass
class Record:
    """A header and cases. With a path each case is written when it is added, so a run that is cut short keeps them."""

    header: dict
    cases: list[dict] = dataclasses.field(default_factory=list)
    path: pathlib.Path | None = None

    def __post_init__(self) -> None:
        """Begins the file."""
        if self.path:
            self.path.write_text(json.dumps(self.header) + "\n")

    def add(self, case: dict) -> None:
        """Adds a case."""
        self.cases.append(case)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(case) + "\n")

    def of(self, *groups: str) -> list[dict]:
        """The cases of some groups."""
        return [case for case in self.cases if case["group"] in groups]


def read(path: pathlib.Path) -> Record:
    """A record from its file. Raises ValueError, with the line, for what is none."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from None
        wanted = {"group"} if lines else {"device", "versions"}
        if not isinstance(line, dict) or not wanted <= line.keys():
            kind = "case" if lines else "header"
            raise ValueError(f"{path}:{number}: not the {kind} of a record, which has {', '.join(sorted(wanted))}")
        lines.append(line)
    if not lines:
        raise ValueError(f"{path}: empty, without the header of a record")
    return Record(lines[0], lines[1:])


@functools.cache
def load(name: str) -> Record:
    """A record of the repository by its name."""
    return read(RESULTS / f"{name}.jsonl")


def key(case: dict) -> dict:
    """What says which case it is."""
    return {field: value for field, value in case.items() if not isinstance(value, dict)}


def floor(case: dict) -> float | None:
    """The time that the times of a case are compared with."""
    seconds = case["seconds"]
    if "one device" in seconds:
        return seconds["one device"] / case["devices"]
    return next((seconds[name] for name in ("nothing", "copy", "products") if name in seconds), None)


def net(case: dict) -> dict:
    """A case with the times beyond what a step of its chain takes without the call, if it was timed in a chain."""
    without = case["seconds"].get("nothing", 0)
    return case | {"seconds": {name: seconds - without for name, seconds in case["seconds"].items()}}


def peer(case: dict) -> str | None:
    """The peer of a case that has a time; of attention the fastest one."""
    found = [name for name in PEERS if name in case["seconds"]]
    if found and found[0] in OF_ATTENTION:
        return min(found, key=lambda name: case["seconds"][name])
    return next(iter(found), None)


def fraction(case: dict, name: str) -> float | None:
    """The floor over an implementation's time."""
    least = floor(case)
    return least / case["seconds"][name] if least and name in case["seconds"] else None


def faster(case: dict, name: str, than: str | None = None) -> float | None:
    """How many times as fast an implementation is as another, or as the peer."""
    seconds, than = case["seconds"], than or peer(case)
    return seconds[than] / seconds[name] if than in seconds and seconds.get(name, 0) > 0 else None


def products(size: int, value_size: int, gradients: bool) -> int:
    """Operations of attention a score, by the sizes of heads: of two products forward, and of five for gradients."""
    return 2 * (size + value_size) + gradients * 2 * (3 * size + 2 * value_size)


def operations(case: dict) -> int:
    """Operations of attention in a call: of the products over the scores that count."""
    size = case["shape"][3]
    of_score = products(size, case.get("value_size", size), case["direction"] != "forward")
    return of_score * case["shape"][2] * case["scores"]


def rate(case: dict, name: str) -> float | None:
    """Operations of attention a second."""
    return operations(case) / case["seconds"][name] if name in case["seconds"] else None
