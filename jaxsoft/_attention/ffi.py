"""`implementation="ffi"`: the CUDA kernels of ffi/cuda/attention, for Hopper GPUs, called through the JAX FFI.

There is one for many queries and one for few, as when decoding, which also takes keys and values in pages, and one for
the gradients.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention import stacked
from jaxsoft._attention.form import BASE, STATE, Extra, Form
from jaxsoft._attention.operation import Forward, Operation, Pullback
from jaxsoft._attention.pages import contiguous, contiguous_form
from jaxsoft._attention.xla import Function
from jaxsoft._core import gpus, library

GENERATIONS = (gpus.Generation.HOPPER,)  # those whose instructions the kernels have
_DTYPES = (jnp.float16, jnp.bfloat16)
# The limits of ffi/cuda/attention/checks.h: head sizes are multiples of _SIZES.
_SIZES, _LARGEST_SIZE = 8, 256
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 1e30
_LARGEST_CAP = 1000
_SMALLEST_PAGE, _LARGEST_PAGE = 16, 256
_PAGES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
# So many queries of all heads are too many for its counters; those of a head count as a tile at least.
_MOST_QUERIES, _TILE = 2**30, 128
_MOST_KEYS = 2**30
# Calls of up to so many queries of a key head, and so many keys for each query of a sequence, go to the kernel for few
# queries, where both kernels serve them. On an H100 (November 2026, heads of 128, 32 of queries and 8 of keys), with 64
# of them it takes .19 to .87 of the time of the other, and with 128 .27 to 1.15, for 2048 keys of 8 sequences to 131072
# of one. With 256 it takes .55 of that for one sequence, and 1.4 times as long for 16.
_FEW, _KEYS = 128, 16
# The most queries of a key head that the kernel for few queries is given.
_MOST = 256

type Operands = Sequence[jax.core.ShapedArray]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a kernel takes, as ffi/cuda/attention/targets.h has it.

    Attributes:
      name: of the FFI target, after "jaxsoft_".
      what: the kernel in words.
      operands: that always are there.
      extras: that may follow them.
      after: operands that follow the extras.
      results: that every call has, beside the workspace.
      more: results that a call may ask for.
    """

    name: str
    what: str
    extras: tuple[str, ...]
    operands: tuple[str, ...] = ("query", "key", "value")
    after: tuple[str, ...] = ()
    results: tuple[str, ...] = ("output", "lse")
    more: tuple[str, ...] = ("rest", "output_rest")


_SCALARS = ("query_lengths", "key_lengths", "offset", "sinks")
_ALL = ("bias", "mask", "query_segments", "key_segments", *_SCALARS)
FORWARD = Target(
    "attention_forward",
    "its kernel for attention of many queries",
    ("query_segments", "key_segments", "query_begins", *_SCALARS, *(extra.value for extra in STATE)),
    more=("output_rest",),
)
FORWARD_OF_BLOCK = dataclasses.replace(FORWARD, name="attention_forward_of_block", operands=("query", "block"))
DECODE = Target("attention_decode", "its kernel for attention of few queries", _ALL)
PAGED = Target(
    "paged_attention",
    "its kernel for attention of pages",
    (*_ALL, "key_scale", "value_scale"),
    operands=("query", "key_pages", "value_pages", "page_table"),
)
BACKWARD = Target(
    "attention_backward",
    "its kernel for gradients of attention",
    ("query_begins", *_SCALARS, "query_sum", "key_sum", "value_sum"),
    after=("lse", "delta", "cotangent"),
    results=("query", "key", "value"),
    more=(),
)
BACKWARD_OF_BLOCK = dataclasses.replace(
    BACKWARD, name="attention_backward_of_block", operands=("query", "block"), results=("query", "block")
)
_FORWARD, _BACKWARD = (FORWARD, FORWARD_OF_BLOCK), (BACKWARD, BACKWARD_OF_BLOCK)
TARGETS = (*_FORWARD, *_BACKWARD, DECODE, PAGED)


def unavailable(platform: str) -> str | None:
    """None, or why there are no kernels for attention on a platform."""
    if platform != "cuda":
        return "its kernels for attention are for NVIDIA GPUs"
    if FORWARD.name not in library.operations(platform):
        return "the library was built without its kernels for attention, which need sm_90a"
    if gpus.generation() not in GENERATIONS:
        return "its kernels for attention are for Hopper (compute capability 9.0)"
    return None


def unsupported(operation: Operation, operands: Operands) -> str | None:
    """None, or why the kernels cannot serve an operation with such operands."""
    form = operation.form
    if not _are_known(operands):
        return "its kernels for attention are called with shapes that are known"
    if _is_gathered(operation, operands):
        reason = unsupported(*_gathered(operation, operands))
        return reason and f"{PAGED.what} takes up to {_MOST} queries of a key head, so pages are gathered, and {reason}"
    reason = _of_arrays(form, operands) or _of_numbers(form)
    if reason:
        return reason
    target = _target(operation, operands)
    lacking = [extra.value for extra in form.extras if extra.value not in (*target.operands, *target.extras)]
    if lacking:
        which = target.what if target not in _FORWARD else f"{target.what}, more than {_MOST} of a key head,"
        return f"{which} takes no {' and no '.join(lacking)}"
    if isinstance(operation, Pullback) and "bias" in operation.moving:
        return f"{target.what} gives none of a bias"
    return None


def _are_known(operands: Operands) -> bool:
    """Whether the shapes are known when a call is compiled."""
    return all(isinstance(length, int) for operand in operands for length in operand.shape)


def _of_arrays(form: Form, operands: Operands) -> str | None:
    """None, or why the kernels cannot take query, key and value."""
    query, key, value = operands[:BASE]
    names = sorted({operand.dtype.name for operand in (query, key, value)})
    kept = _PAGES if form.paged else ()
    same = key.dtype == value.dtype and key.dtype in (query.dtype, *kept)
    if query.dtype not in _DTYPES or not same:
        also = ", or pages in float8_e4m3fn or float8_e5m2" if kept else ""
        return (
            f"its kernels for attention take queries, keys and values in float16 or in bfloat16{also}, not "
            f"{' and '.join(names)}"
        )
    if form.dtype not in (query.dtype, jnp.float32):
        return f"its kernels for attention return {query.dtype.name} or float32 here, not {form.dtype.name}"
    size, of_value = query.shape[3], value.shape[3]
    if size != of_value or size % _SIZES or size > _LARGEST_SIZE:
        return (
            f"its kernels for attention take head sizes that are equal, and multiples of {_SIZES} up to "
            f"{_LARGEST_SIZE}; got {size} and {of_value}"
        )
    if key.dtype.itemsize == 1 and size % (2 * _SIZES):
        return f"its kernels for attention take pages in 8 bits of head sizes that are multiples of 16; got {size}"
    batch, queries, heads, _ = query.shape
    if batch * heads * max(queries, _TILE) >= _MOST_QUERIES:
        return f"its kernels for attention take fewer than 2^30 queries of all heads; got {query.shape}"
    if form.keys(operands) >= _MOST_KEYS:
        return f"its kernels for attention take fewer than 2^30 keys of a sequence; got {form.keys(operands)}"
    page = key.shape[1]
    if kept and (page & (page - 1) or not _SMALLEST_PAGE <= page <= _LARGEST_PAGE):
        return (
            f"its kernels for attention take pages of a power of 2 of keys, from {_SMALLEST_PAGE} to {_LARGEST_PAGE}; "
            f"got {page}"
        )
    return None


def _of_numbers(form: Form) -> str | None:
    """None, or why the kernels cannot take the numbers of a form."""
    if not _SMALLEST_SCALE <= form.scale <= _LARGEST_SCALE:
        return f"its kernels for attention take a scale from {_SMALLEST_SCALE} to {_LARGEST_SCALE}; got {form.scale}"
    if form.cap is not None and form.cap > _LARGEST_CAP:
        return f"its kernels for attention take a soft cap up to {_LARGEST_CAP}; got {form.cap}"
    return None


def _rows(operands: Operands) -> int:
    """How many queries attend to the keys of a key head of a sequence."""
    query, key = operands[:2]
    return query.shape[1] * (query.shape[2] // key.shape[2])


def _target(operation: Operation, operands: Operands) -> Target:
    """The kernel for an operation."""
    form = operation.form
    if isinstance(operation, Pullback):
        return _BACKWARD[form.stacked]
    if form.stacked:
        return FORWARD_OF_BLOCK
    if form.paged:
        return PAGED
    if Extra.QUERY_BEGINS in form.extras:
        return FORWARD
    others = any(extra.value not in FORWARD.extras for extra in form.extras)
    return DECODE if _are_few(operands) or (others and _rows(operands) <= _MOST) else FORWARD


def _are_few(operands: Operands) -> bool:
    """Whether there are so few queries that the kernel for these is faster."""
    queries, keys = operands[0].shape[1], operands[1].shape[1]
    return _rows(operands) <= _FEW and (queries == 1 or keys >= _KEYS * queries)


def _is_gathered(operation: Operation, operands: Operands) -> bool:
    """Whether a call of keys and values in pages has too many queries for the kernel that reads these.

    The pages of each sequence are then gathered. Of so many queries, that is a small part of the work.
    """
    return operation.form.paged and _rows(operands) > _MOST


def _gathered(operation: Operation, operands: Operands) -> tuple[Operation, Operands]:
    """The operation over gathered pages, and the types of its operands."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    found = jax.eval_shape(lambda *operands: contiguous(operation.form, operands), *types)
    flat = Forward(contiguous_form(operation.form))
    return flat, [jax.core.ShapedArray(x.shape, x.dtype) for x in found]


def continues(operation: Operation, operands: Operands) -> bool:
    """Whether a kernel takes what came before, where it serves an operation."""
    return not _are_known(operands) or _target(operation, operands) in (*_FORWARD, *_BACKWARD)


def leads(operation: Operation, operands: Operands) -> bool:
    """Whether a forward operation has so few queries, or keys in pages, that a kernel here is the fastest."""
    return _are_known(operands[:2]) and (operation.form.paged or _are_few(operands))


def find(operation: Operation, operands: Operands) -> Function:
    """The function for an operation with such operands."""
    if _is_gathered(operation, operands):
        flat = find(*_gathered(operation, operands))
        return lambda *operands: flat(*contiguous(operation.form, operands))
    form, target = operation.form, _target(operation, operands)
    added_to = tuple(f"{name}_sum" for name in operation.sums) if isinstance(operation, Pullback) else ()
    extras = (*(extra.value for extra in form.extras if extra.value in target.extras), *added_to)
    asked = [(Extra.BIAS in form.extras, "rest"), (form.rounded, "output_rest")]
    more = [name for wanted, name in asked if wanted and name in target.more]
    workspace = jax.ShapeDtypeStruct((_workspace(target, form, operands),), jnp.uint8)
    attributes = {
        "extras": ",".join(extras),
        "results": ",".join(more),
        "scale": np.float64(form.scale),
        "cap": np.float64(form.cap or 0),
        "left": np.int64(-1 if form.left is None else form.left),
        "right": np.int64(-1 if form.right is None else form.right),
        "deterministic": np.bool_(form.deterministic),
    }

    def call(
        given: Sequence[jax.Array], types: dict[str, jax.ShapeDtypeStruct], replaced: dict[str, str]
    ) -> dict[str, jax.Array]:
        """The results by name. Some of them are `replaced`: extras of these names whose memory they take."""
        names = (*target.results, *more)
        places = {name: len(target.operands) + i for i, name in enumerate(extras)}
        run = jax.ffi.ffi_call(
            f"jaxsoft_{target.name}",
            [*(types[name] for name in names), workspace],
            input_output_aliases={places[extra]: names.index(name) for name, extra in replaced.items()},
        )
        return dict(zip(names, run(*given, **attributes), strict=False))

    def forward(*operands: jax.Array) -> tuple[jax.Array, ...]:
        query, _, value = operands[:BASE]
        given = [_narrowed(x) if name == "bias" else x for name, x in zip(form.names, operands, strict=True)]
        given = _as_block(given) if form.stacked else given
        shape = (*query.shape[:3], value.shape[3])
        numbers = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
        types = {
            "output": jax.ShapeDtypeStruct(shape, form.dtype),
            "lse": numbers,
            "rest": numbers,
            "output_rest": jax.ShapeDtypeStruct(shape, query.dtype),
        }
        replaced = {"lse": Extra.STATE_LSE.value} if form.has_state else {}
        if form.has_state and form.dtype == jnp.float32:
            replaced["output"] = Extra.STATE_OUTPUT.value
        found = call(given, types, replaced)
        rest = found["rest"] if "rest" in found else jnp.zeros_like(found["lse"])
        return found["output"], found["lse"], rest, *([found["output_rest"]] if form.rounded else [])

    def pullback(*operands: jax.Array) -> tuple[jax.Array, ...]:
        assert isinstance(operation, Pullback)
        count = len(form.names)
        given, others = list(operands[:count]), operands[count:]
        _, lse, _, delta, cotangent, *sums = others  # delta has what is needed of the output
        given = _as_block(given) if form.stacked else given
        names = (*target.operands, *form.names[BASE:])
        like = {
            name: jax.ShapeDtypeStruct(x.shape, jnp.float32 if operation.wide else x.dtype)
            for name, x in zip(names, given, strict=True)
        }
        replaced = {name: f"{name}_sum" for name in operation.sums}
        found = call([*given, *sums, lse, delta, cotangent], like, replaced)
        if form.stacked:
            return *([found["query"]] if "query" in operation.moving else []), stacked.flat(found["block"])
        return tuple(found[name] for name in operation.moving)

    return pullback if target in _BACKWARD else forward


def _as_block(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Operands of a call whose keys and values are stacked, as the kernels take them."""
    query, key, _, *others = operands
    return [query, key.reshape(2, -1, *key.shape[1:]), *others]


def _narrowed(bias: jax.Array) -> jax.Array:
    """A bias in a dtype that the kernels read."""
    return bias.astype(jnp.float32) if bias.dtype == jnp.float64 else bias


def _workspace(target: Target, form: Form, operands: Operands) -> int:
    """How many bytes a kernel needs beside its operands and results. Its launch function states and checks the same."""
    if target in _FORWARD:
        return _OF_FORWARD
    return _of_gradients(operands) if target in _BACKWARD else _of_few_queries(form, operands)


_OF_FORWARD = 8  # a counter

_COLUMNS = (64, 128, 256)  # the head sizes that kernels are compiled for; others are computed as the next larger one
_LARGEST_TILE, _SMALLEST_TILE = 128, 64  # of queries, and of keys, in the kernel for gradients


def _of_gradients(operands: Operands) -> int:
    """Sums of the query's gradient in f32, two numbers a query, for each block of keys and head of queries, which tiles
    it has, and two counters a key head; for tiles of any size that the kernel may have.
    """
    query, key, _ = operands[:BASE]
    batch, queries, heads, size = query.shape
    rows = batch * heads * (queries + _LARGEST_TILE - 1)
    blocks = batch * heads * _parts(key.shape[1], _SMALLEST_TILE)
    return rows * (4 * _columns(size) + 8) + 8 * blocks + 8 * batch * key.shape[2] + 512


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How the kernels for few queries take those of a key head.

    Attributes:
      most: up to how many queries there are.
      tile: how many of them are computed together.
      least: how many keys a chunk has at least, where there are more chunks than multiprocessors.
      longest: how many it has at most.
      ragged: the same, where sequences have lengths; and where these are `_CROWDED` or more.
    """

    most: float
    tile: int
    least: int
    longest: int
    ragged: tuple[int, int]


# As ffi/cuda/attention/decode/plan.cuh has them, like the numbers below. Of pages in 8 bits it has the first alone.
_ROWS = (
    _Rows(16, 16, 512, 8192, (1024, 4096)),
    _Rows(64, 64, 4096, 32768, (16384, 16384)),
    _Rows(math.inf, 128, 4096, 32768, (16384, 16384)),
)
_CROWDED, _UNITS, _MOST_CHUNKS = 264, 528, 256


def _of_few_queries(form: Form, operands: Operands) -> int:
    """The states of the chunks of keys, and a counter of those that are dealt."""
    query, key, _ = operands[:BASE]
    number, keys = _rows(operands), form.keys(operands)
    rows = _ROWS[0] if key.dtype.itemsize == 1 else next(rows for rows in _ROWS if number <= rows.most)
    if form.left is not None and form.right is not None:
        keys = min(keys, form.left + form.right + query.shape[1] + 64)
    items = query.shape[0] * key.shape[2] * _parts(number, rows.tile)
    longest = rows.longest
    if Extra.KEY_LENGTHS in form.extras and query.shape[0] > 1:
        longest = rows.ragged[items >= _CROWDED]
    chunks = min(_wave(items), _parts(keys, 128))
    if keys > _wave(items) * longest:
        least = max(rows.least, _multiple(_parts(keys * items * rows.tile // 16, 32768), 128))
        chunks = max(chunks, min(max(_parts(_UNITS, items), _parts(keys, longest)), _MOST_CHUNKS, _parts(keys, least)))
    states = items * chunks if chunks > 1 else 0
    room = min(number, rows.tile) if rows is _ROWS[0] else rows.tile
    return 256 + _multiple(8 * states * room, 256) + 4 * states * room * _columns(query.shape[3])


def _wave(items: int) -> int:
    """How many chunks each of so many items has, so that multiprocessors are busy for most of the time."""
    busy, wave = 94 if items < 132 else 85, 1
    while wave * items * 100 < busy * 132 * _parts(wave * items, 132):
        wave += 1
    return wave


def _columns(size: int) -> int:
    """The head size that a kernel computes for this one."""
    return min(each for each in _COLUMNS if size <= each)


def _parts(number: int, size: int) -> int:
    """How many parts of a size there are, the last of which may be smaller."""
    return -(-number // size)


def _multiple(number: int, of: int) -> int:
    """The least multiple that is not smaller."""
    return _parts(number, of) * of
