"""`implementation="ffi"`: the CUDA kernels of ffi/cuda/attention, for Hopper GPUs, called through the JAX FFI.

There is one for many queries and one for few, as when decoding, which also takes keys and values in pages, and one for
the gradients. Which calls they take, their workspaces and their plans the library says itself (ffi/cuda/answers.cc).
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoft._attention import packed
from jaxsoft._attention.form import BASE, STATE, AttentionForm, Extra
from jaxsoft._attention.pages import contiguous, contiguous_form
from jaxsoft._attention.spec import AttentionForward, AttentionPullback, AttentionSpec
from jaxsoft._core import gpus, library
from jaxsoft._core.operation import Function

GENERATIONS = (gpus.Generation.HOPPER,)  # those whose instructions the kernels have
_DTYPES = (jnp.float16, jnp.bfloat16)
_PAGES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
# The most queries of a key head, and the fewest keys for each query of a sequence, with which calls go to the kernel
# for few queries, where both kernels serve them. On an H100 (November 2026, heads of 128, 32 of queries and 8 of keys),
# with 64 of them it takes .19 to .87 of the time of the other, and with 128 .27 to 1.15, for 2048 keys of 8 sequences
# to 131072 of one. With 256 it takes .55 of that for one sequence, and 1.4 times as long for 16.
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
      any_values: whether heads of values may have another size than those of keys.
    """

    name: str
    what: str
    extras: tuple[str, ...]
    operands: tuple[str, ...] = ("query", "key", "value")
    after: tuple[str, ...] = ()
    results: tuple[str, ...] = ("output", "lse")
    more: tuple[str, ...] = ("lse_residual", "output_residual")
    any_values: bool = False


_SCALARS = ("query_lengths", "key_lengths", "offset", "sinks")
_ALL = ("bias", "mask", "query_segments", "key_segments", *_SCALARS)
FORWARD = Target(
    "attention_forward",
    "its kernel for attention of many queries",
    ("query_segments", "key_segments", "query_begins", *_SCALARS, *(extra.value for extra in STATE)),
    more=("max_logits", "output_residual"),
    any_values=True,
)
FORWARD_OF_BLOCK = dataclasses.replace(
    FORWARD,
    name="attention_forward_of_block",
    operands=("query", "block"),
    more=("output_residual",),
    any_values=False,
)
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
    ("query_segments", "key_segments", "query_begins", *_SCALARS, "query_sum", "key_sum", "value_sum"),
    after=("lse", "delta", "cotangent"),
    results=("query", "key", "value"),
    more=(),
    any_values=True,
)
BACKWARD_OF_BLOCK = dataclasses.replace(
    BACKWARD,
    name="attention_backward_of_block",
    operands=("query", "block"),
    results=("query", "block"),
    any_values=False,
)
# From so many keys on, gradients are faster where blocks of keys add in any order: by 7 % with heads of 256, by up to
# 1 % with others. Up to 8192 they are not, and with heads of 256 at 512 they take 7 % longer. (H200, both passes;
# `deterministic=False` beside `jaxsoft` in benchmarks/results/h200_attention.jsonl of 095373d, which had no limit.)
_ANY_ORDER_FROM = 32768
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


def unsupported(operation: AttentionSpec, operands: Operands) -> str | None:
    """None, or why the kernels cannot serve an operation with such operands."""
    form = operation.form
    if library.unavailable("cpu"):  # it says what the kernels take
        return library.unavailable("cuda")
    if not _are_known(operands):
        return "its kernels for attention are called with shapes that are known"
    if _is_gathered(operation, operands):
        reason = unsupported(*_gathered(operation, operands))
        return reason and f"{PAGED.what} takes up to {_MOST} queries of a key head, so pages are gathered, and {reason}"
    target = _target(operation, operands)
    reason = _of_arrays(form, target, operands) or _of_numbers(form)
    if reason:
        return reason
    lacking = [extra.value for extra in form.extras if extra.value not in (*target.operands, *target.extras)]
    if lacking:
        which = target.what
        if form.returns_max_logits:
            which += ", which alone gives the largest scores,"
        elif target in _FORWARD:
            which += f", more than {_MOST} of a key head,"
        return f"{which} takes no {' and no '.join(lacking)}"
    if isinstance(operation, AttentionPullback) and "bias" in operation.wrt:
        return f"{target.what} gives none of a bias"
    return None


def _are_known(operands: Operands) -> bool:
    """Whether the shapes are known when a call is compiled."""
    return all(isinstance(length, int) for operand in operands for length in operand.shape)


@functools.cache
def _limits() -> dict[str, float]:
    """The limits of the kernels by name, as ffi/cuda/attention/bounds.h has them."""
    lines = library.text("attention_bounds").splitlines()
    return {name: float(number) for name, number in (line.split("=") for line in lines)}


def _power(name: str) -> str:
    """A limit that is a power of 2, in words."""
    return f"2^{int(_limits()[name]).bit_length() - 1}"


def _of_arrays(form: AttentionForm, target: Target, operands: Operands) -> str | None:
    """None, or why the kernels cannot take query, key and value."""
    limits = {name: int(number) for name, number in _limits().items()}
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
    if size != of_value and not target.any_values:
        return f"{target.what} takes head sizes that are equal; got {size} and {of_value}"
    if any(n % limits["size_multiple"] or n > limits["largest_size"] for n in (size, of_value)):
        return (
            f"its kernels for attention take head sizes that are multiples of {limits['size_multiple']} up to "
            f"{limits['largest_size']}; got {size} and {of_value}"
        )
    if key.dtype.itemsize == 1 and size % limits["narrow_size_multiple"]:
        multiple = limits["narrow_size_multiple"]
        return (
            f"its kernels for attention take pages in 8 bits of head sizes that are multiples of {multiple}; got {size}"
        )
    batch, queries, heads, _ = query.shape
    if batch * heads * max(queries, limits["tile"]) >= limits["all_queries"]:
        return (
            f"its kernels for attention take fewer than {_power('all_queries')} queries of all heads; got {query.shape}"
        )
    if form.keys(operands) >= limits["keys"]:
        return (
            f"its kernels for attention take fewer than {_power('keys')} keys of a sequence; got {form.keys(operands)}"
        )
    page, smallest, largest = key.shape[1], limits["smallest_page"], limits["largest_page"]
    if kept and (page & (page - 1) or not smallest <= page <= largest):
        return f"its kernels for attention take pages of a power of 2 of keys, from {smallest} to {largest}; got {page}"
    return None


def _of_numbers(form: AttentionForm) -> str | None:
    """None, or why the kernels cannot take the numbers of a form."""
    smallest, largest, cap = (_limits()[name] for name in ("smallest_scale", "largest_scale", "largest_cap"))
    if not smallest <= form.scale <= largest:
        return f"its kernels for attention take a scale from {smallest} to {largest}; got {form.scale}"
    if form.cap is not None and form.cap > cap:
        return f"its kernels for attention take a soft cap up to {cap:g}; got {form.cap}"
    return None


def _rows(operands: Operands) -> int:
    """How many queries attend to the keys of a key head of a sequence."""
    query, key = operands[:2]
    return query.shape[1] * (query.shape[2] // key.shape[2])


def _target(operation: AttentionSpec, operands: Operands) -> Target:
    """The kernel for an operation."""
    form = operation.form
    if isinstance(operation, AttentionPullback):
        return _BACKWARD[form.packed]
    if form.packed:
        return FORWARD_OF_BLOCK
    if form.paged:
        return PAGED
    if Extra.QUERY_BEGINS in form.extras or form.returns_max_logits:
        return FORWARD
    others = any(extra.value not in FORWARD.extras for extra in form.extras)
    return DECODE if _are_few(operands) or (others and _rows(operands) <= _MOST) else FORWARD


def _are_few(operands: Operands) -> bool:
    """Whether there are so few queries that the kernel for these is faster, if it takes such heads."""
    query, key, value = operands[:BASE]
    queries, keys = query.shape[1], key.shape[1]
    alike = query.shape[3] == value.shape[3]
    return alike and _rows(operands) <= _FEW and (queries == 1 or keys >= _KEYS * queries)


def _is_gathered(operation: AttentionSpec, operands: Operands) -> bool:
    """Whether a call of keys and values in pages has too many queries for the kernel that reads these.

    The pages of each sequence are then gathered. Of so many queries, that is a small part of the work.
    """
    return operation.form.paged and _rows(operands) > _MOST


def _gathered(operation: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The operation over gathered pages, and the types of its operands."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    found = jax.eval_shape(lambda *operands: contiguous(operation.form, operands), *types)
    flat = AttentionForward(contiguous_form(operation.form))
    return flat, [jax.core.ShapedArray(x.shape, x.dtype) for x in found]


def continues(operation: AttentionSpec, operands: Operands) -> bool:
    """Whether a kernel takes what came before, where it serves an operation."""
    return not _are_known(operands) or _target(operation, operands) in (*_FORWARD, *_BACKWARD)


def leads(operation: AttentionSpec, operands: Operands) -> bool:
    """Whether a forward operation has so few queries, or keys in pages, that a kernel here is the fastest."""
    return _are_known(operands[:BASE]) and (operation.form.paged or _are_few(operands))


def find(operation: AttentionSpec, operands: Operands) -> Function:
    """The function for an operation with such operands."""
    if _is_gathered(operation, operands):
        flat = find(*_gathered(operation, operands))
        return lambda *operands: flat(*contiguous(operation.form, operands))
    form, target = operation.form, _target(operation, operands)
    added_to = tuple(f"{name}_sum" for name in operation.sums) if isinstance(operation, AttentionPullback) else ()
    extras = (*(extra.value for extra in form.extras if extra.value in target.extras), *added_to)
    asked = [
        (Extra.BIAS in form.extras, "lse_residual"),
        (form.returns_max_logits, "max_logits"),
        (form.rounded, "output_residual"),
    ]
    more = [name for wanted, name in asked if wanted and name in target.more]
    size = library.number("attention_workspace", *_sizes(target, form, operands))
    workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
    attributes = {
        "extras": ",".join(extras),
        "results": ",".join(more),
        "scale": np.float64(form.scale),
        "cap": np.float64(form.cap or 0),
        "left": np.int64(-1 if form.left is None else form.left),
        "right": np.int64(-1 if form.right is None else form.right),
        "deterministic": np.bool_(form.deterministic or form.keys(operands) < _ANY_ORDER_FROM),
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
        # They read no f64, which a bias may be in.
        given = [x.astype(jnp.float32) if x.dtype == jnp.float64 else x for x in operands]
        given = _as_block(given) if form.packed else given
        shape = (*query.shape[:3], value.shape[3])
        numbers = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
        types = {
            "output": jax.ShapeDtypeStruct(shape, form.dtype),
            "lse": numbers,
            "lse_residual": numbers,
            "max_logits": jax.ShapeDtypeStruct(numbers.shape[:2], jnp.float32),
            "output_residual": jax.ShapeDtypeStruct(shape, query.dtype),
        }
        replaced = {"lse": Extra.STATE_LSE.value} if form.has_state else {}
        if form.has_state and form.dtype == jnp.float32:
            replaced["output"] = Extra.STATE_OUTPUT.value
        found = call(given, types, replaced)
        residual = found["lse_residual"] if "lse_residual" in found else jnp.zeros_like(found["lse"])
        others = (found[name] for name in ("max_logits", "output_residual") if name in found)
        return found["output"], found["lse"], residual, *others

    def pullback(*operands: jax.Array) -> tuple[jax.Array, ...]:
        assert isinstance(operation, AttentionPullback)
        count = len(form.names)
        given, others = list(operands[:count]), operands[count:]
        _, lse, _, delta, cotangent, *sums = others  # delta has what is needed of the output
        given = _as_block(given) if form.packed else given
        names = (*target.operands, *form.names[BASE:])
        like = {
            name: jax.ShapeDtypeStruct(x.shape, jnp.float32 if operation.wide else x.dtype)
            for name, x in zip(names, given, strict=True)
        }
        replaced = {name: f"{name}_sum" for name in operation.sums}
        found = call([*given, *sums, lse, delta, cotangent], like, replaced)
        if form.packed:
            return *([found["query"]] if "query" in operation.wrt else []), packed.flat(found["block"])
        return tuple(found[name] for name in operation.wrt)

    return pullback if target in _BACKWARD else forward


def _as_block(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Operands of a call whose keys and values are packed, as the kernels take them."""
    query, key, _, *others = operands
    return [query, key.reshape(2, -1, *key.shape[1:]), *others]


def plan(operation: AttentionSpec, operands: Operands) -> str:
    """How the kernel computes an operation with such operands: its name, as a profiler shows it, and in words."""
    if _is_gathered(operation, operands):
        return plan(*_gathered(operation, operands))
    return library.text("attention_plan", *_sizes(_target(operation, operands), operation.form, operands))


def _sizes(target: Target, form: AttentionForm, operands: Operands) -> tuple[int | str, ...]:
    """What the workspace and the plan of a call depend on, as the library takes it."""
    query, key, value = operands[:BASE]
    batch, queries, heads, size = query.shape
    return (
        target.name,
        ",".join(extra.value for extra in form.extras),
        *(batch, queries, form.keys(operands), heads, key.shape[2], size, value.shape[3]),
        *(-1 if limit is None else limit for limit in (form.left, form.right)),
        form.cap is not None,
        key.dtype.itemsize,
        gpus.multiprocessors(),
    )
