"""What benchmarks/scaling.py compiles, and the formulas of what devices send each other there.

The formulas are of the bytes that one device sends, by the kind of operation. Those of attention over a sequence are in
benchmarks/transfers.py. The numbers of an array have 16 bits, and those of a row and the sums of gradients have 32.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from collectives import sent
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transfers import ELEMENT, METHODS, WIDE, Call, Sent

import jaxsoft

AXIS = "devices"
DTYPE = jnp.float16


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a call.

    Attributes:
      shape: of the whole array.
      spec: how it is sharded, over one axis; None for not at all.
      dtype: of its numbers.
    """

    shape: tuple[int, ...]
    spec: P | None = None
    dtype: jax.typing.DTypeLike = DTYPE

    def on(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The array over a mesh, as a type: nothing here is computed."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, self.spec or P()))


@dataclasses.dataclass(frozen=True)
class Case:
    """A call over some devices.

    Attributes:
      group: "rows", "head", "attention" or "sequence".
      what: the function.
      where: what is sharded, or the method and the layout.
      gradients: whether these are computed too.
      devices: how many.
      function: of the operands.
      operands: of the function.
      moving: which of them gradients are taken by.
      cotangent: of the result; None where there are no gradients.
      expected: what a device sends.
      sizes: of the operands, in words.
    """

    group: str
    what: str
    where: str
    gradients: bool
    devices: int
    function: Callable = dataclasses.field(repr=False)
    operands: tuple[Operand, ...] = dataclasses.field(repr=False)
    moving: tuple[int, ...] = dataclasses.field(repr=False)
    cotangent: Operand | None = dataclasses.field(repr=False)
    expected: Sent = dataclasses.field(repr=False)
    sizes: str = ""

    def __str__(self) -> str:
        """The case in words."""
        what = "with gradients" if self.gradients else "forward"
        return f"{self.what}, {self.where}, {self.sizes}, {what}, {self.devices} devices"

    def lowered(self) -> jax.stages.Lowered:
        """The call as a program for the first devices, along one axis, not compiled yet."""
        devices = jax.devices("cpu")[: self.devices]
        mesh = jax.make_mesh((self.devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
        with jax.set_mesh(mesh):
            given = [operand.on(mesh) for operand in self.operands]
            if not self.gradients:
                return jax.jit(self.function).lower(*given)
            assert self.cotangent is not None
            return jax.jit(self._with_gradients).lower(self.cotangent.on(mesh), *given)

    def _with_gradients(self, cotangent, *operands):
        def of_moving(*moving):
            all_ = list(operands)
            for place, x in zip(self.moving, moving, strict=True):
                all_[place] = x
            return self.function(*all_)

        y, pull = jax.vjp(of_moving, *(operands[place] for place in self.moving))
        return y, *pull(cotangent)


# Functions of rows. A device sends nothing where rows are sharded.
ROWS, CLASSES, K = 1024, 16384, 64
# The devices tell each other a few numbers a row. Few devices do so by one all-gather, if the numbers are few, and else
# by all-reduces of maxima and of sums (jaxsoft/_core/mesh.py).
FEW_DEVICES, FEW_BYTES = 16, 2**22


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How many numbers of each row devices tell each other.

    Attributes:
      gathered: by an all-gather, forward.
      reduced: by all-reduces, forward.
      backward: by an all-reduce, for gradients.
    """

    gathered: int
    reduced: int
    backward: int = 0

    def sent(self, rows: int, devices: int, gradients: bool) -> Sent:
        """What a device sends."""
        of_each = rows * WIDE
        found = {"all-gather": 0.0, "all-reduce": 0.0}
        if devices <= FEW_DEVICES and devices * self.gathered * of_each <= FEW_BYTES:
            found["all-gather"] = sent("all-gather", devices * self.gathered * of_each, devices)
        else:
            found["all-reduce"] = sent("all-reduce", self.reduced * of_each, devices)
        found["all-reduce"] += sent("all-reduce", gradients * self.backward * of_each, devices)
        return found


# The state (m, s) of a row, and for a loss the label's score beside it.
NUMBERS = {
    "softmax": Numbers(2, 2, 1),
    "log_softmax": Numbers(2, 2, 1),
    "logsumexp": Numbers(2, 2),
    "cross_entropy": Numbers(3, 4),
}


def _rows(devices: int) -> list[Case]:
    """Functions of logits (ROWS, CLASSES)."""
    found = []
    for spec, where in ((P(AXIS, None), "rows sharded"), (P(None, AXIS), "classes sharded")):
        x = Operand((ROWS, CLASSES), spec)
        labels, of_row = (Operand((ROWS,), P(spec[0]), dtype) for dtype in (jnp.int32, jnp.float32))
        functions: dict[str, tuple[Callable, tuple[Operand, ...], Operand]] = {
            "softmax": (jaxsoft.softmax, (x,), x),
            "log_softmax": (jaxsoft.log_softmax, (x,), x),
            "logsumexp": (_logsumexp, (x,), dataclasses.replace(of_row, dtype=DTYPE)),
            "cross_entropy": (jaxsoft.softmax_cross_entropy_with_integer_labels, (x, labels), of_row),
        }
        sizes = f"{ROWS} x {CLASSES}"
        for what, (f, operands, cotangent) in functions.items():
            for gradients in (False, True):
                expected = NUMBERS[what].sent(ROWS, devices, gradients) if spec[1] else {}
                case = Case("rows", what, where, gradients, devices, f, operands, (0,), cotangent, expected, sizes)
                found.append(case)
        # The k largest of each part and, for a row that has no softmax, its first k elements, two in a word, as they
        # have 16 bits; the places of the former; and the state.
        words = devices * ROWS * (2 * K + 2) * WIDE
        gathered = {"all-gather": sent("all-gather", words, devices)} if spec[1] else {}
        found.append(
            Case("rows", "top_k_softmax", where, False, devices, _top_k, (x,), (), None, gathered, f"{sizes}, k = {K}")
        )
    return found


def _logsumexp(x):
    return jaxsoft.logsumexp(x, axis=-1)


def _top_k(x):
    return jaxsoft.top_k_softmax(x, K)


# The loss of a linear layer.
DEPTH = 512
SCALARS = 3  # of a mean: the sum, the weights' sum, and that of what counts


def _head(devices: int) -> list[Case]:
    found = []
    for rows_sharded in (True, False):
        rows, classes = (AXIS, None) if rows_sharded else (None, AXIS)
        operands = (
            Operand((ROWS, DEPTH), P(rows, None)),
            Operand((DEPTH, CLASSES), P(None, classes)),
            Operand((ROWS,), P(rows), jnp.int32),
        )
        where, sizes = "rows sharded" if rows_sharded else "classes sharded", f"{ROWS} x {DEPTH} x {CLASSES}"
        for mean in (False, True):
            what, f = ("linear, mean", _mean) if mean else ("linear", jaxsoft.linear_softmax_cross_entropy)
            cotangent = Operand((), dtype=jnp.float32) if mean else Operand((ROWS,), P(rows), jnp.float32)
            for gradients in (False, True):
                expected = _of_head(devices, rows_sharded, mean, gradients)
                found.append(
                    Case("head", what, where, gradients, devices, f, operands, (0, 1), cotangent, expected, sizes)
                )
    return found


def _mean(hidden, weight, labels):
    return jaxsoft.linear_softmax_cross_entropy(hidden, weight, labels, reduction="mean")


def _of_head(devices: int, rows_sharded: bool, mean: bool, gradients: bool) -> Sent:
    """What the loss of a linear layer sends.

    Where rows are sharded, the gradient of the weight is summed in its own dtype. Where classes are, that of the hidden
    states is summed in f32, and the devices tell each other (m, s) and the label's score.
    """
    if rows_sharded:
        of_weight = gradients * DEPTH * CLASSES * ELEMENT
        return {"all-reduce": sent("all-reduce", of_weight + mean * SCALARS * WIDE, devices)}
    found = Numbers(3, 3).sent(ROWS, devices, False)
    found["all-reduce"] += sent("all-reduce", gradients * ROWS * DEPTH * WIDE, devices)
    return found


# Attention whose batch or heads are sharded, which sends nothing.
LENGTH, SIZE = 256, 128


def _attention(devices: int) -> list[Case]:
    found = []
    for where, spec in (("batch sharded", P(AXIS)), ("heads sharded", P(None, None, AXIS))):
        shape = (devices, LENGTH, 4, SIZE) if spec[0] else (1, LENGTH, devices, SIZE)
        x = Operand(shape, P(*spec))
        for gradients in (False, True):
            sizes = f"{LENGTH} tokens, heads of {SIZE}"
            found.append(
                Case(
                    "attention", "dot_product_attention", where, gradients, devices, _causal, (x, x, x), (0, 1, 2), x,
                    {}, sizes,
                )
            )  # fmt: skip
    return found


def _causal(query, key, value):
    return jaxsoft.dot_product_attention(query, key, value, is_causal=True)


def sequence(method: str, layout: str, devices: int, tokens: int, heads: int, key_heads: int, gradients: bool) -> Case:
    """A call of `jaxsoft.ring_attention` under a causal rule."""
    query, key = (Operand((1, tokens * devices, n, SIZE), P(None, AXIS)) for n in (heads, key_heads))

    def call(query, key, value):
        return jaxsoft.ring_attention(query, key, value, axis_name=AXIS, layout=layout, method=method, is_causal=True)

    expected = Call(devices, tokens, heads, key_heads, SIZE).sent(method, gradients)
    sizes = f"{tokens} tokens a device, heads {heads}/{key_heads} of {SIZE}"
    return Case(
        "sequence", method, layout, gradients, devices, call, (query, key, key), (0, 1, 2), query,
        expected, sizes,
    )  # fmt: skip


TOKENS = 256  # of a device: what is sent grows in proportion, and compiling takes the longer the more they are
LONG_TOKENS = 2**17  # of each of 8 devices: a million
MANY_HEADS = 64, 64  # which 64 devices can exchange
FEWER_KEYS = 32, 8
LAYOUTS = ("contiguous", "striped")  # beside "zigzag", over few devices: a layout does not change what is sent


def _sequence(devices: int) -> list[Case]:
    """All methods, and the ring with fewer heads of keys, in other layouts too."""
    found = []
    for gradients in (False, True):
        found += [sequence(method, "zigzag", devices, TOKENS, *MANY_HEADS, gradients) for method in METHODS]
        for layout in ("zigzag", *LAYOUTS) if devices <= FEW_DEVICES else ("zigzag",):
            found.append(sequence("ring", layout, devices, TOKENS, *FEWER_KEYS, gradients))
    return found


def long() -> list[Case]:
    """A million tokens over 8 devices, as a group of its own."""
    found = []
    for heads in ((16, 16), FEWER_KEYS):
        for gradients in (False, True):
            case = sequence("ring", "zigzag", 8, LONG_TOKENS, *heads, gradients)
            found.append(dataclasses.replace(case, group="long"))
    return found


def cases(devices: int) -> list[Case]:
    """What is compiled for so many devices."""
    return [*_rows(devices), *_head(devices), *_attention(devices), *_sequence(devices)]


def quick() -> list[Case]:
    """What takes a few seconds to compile, over 8 devices: the gradients, which the results come with."""
    few = [case for case in (*_rows(8), *_head(8), *_attention(8)) if case.gradients or not case.moving]
    return few + [sequence(method, "zigzag", 8, TOKENS, *FEWER_KEYS, True) for method in METHODS]
