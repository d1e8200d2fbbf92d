"""The door of attention: the arguments of its public functions as one record, what they must be, and the call."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxsoft import fold
from jaxsoft._attention import xla
from jaxsoft._attention.form import BASE, AttentionForm, Extra, SequenceShards
from jaxsoft._core.implementations import Implementation, Names, as_names
from jaxsoft._core.mesh import sharded_like, varying_alike, varying_over, whole_along, with_axis, with_batch_of
from jaxsoft._core.numbers import as_array, as_mask
from jaxsoft._core.operation import Function
from jaxsoft._ops.arguments import (
    as_kernel_scores,
    as_scale,
    broadcastable,
    check_dtype,
    check_flag,
    known_integer,
    known_number,
)
from jaxsoft.fold import AttentionState, accumulator

# What signatures say.
type Array = ArrayLike
type Mask = ArrayLike
type Lengths = ArrayLike
type SegmentIds = ArrayLike
type Window = int | tuple[int | None, int | None] | None
type Dtype = DTypeLike

# A window or an offset further than that reaches all keys: positions stay in 32 bits.
_FURTHEST = 2**30


class Arrays(NamedTuple):
    """Query, key and value with a batch, and whether they were given without one."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    no_batch: bool

    @classmethod
    def of(cls, query: ArrayLike, key: ArrayLike, value: ArrayLike, sequence_whole: bool = True) -> "Arrays":
        """The arguments, after checking that they fit each other.

        Over explicit axes of a mesh, only the batch and the heads may be sharded, and unless it must be whole on each
        device, the sequence.
        """
        named = {"query": query, "key": key, "value": value}
        arrays = {name: as_kernel_scores(name, x) for name, x in named.items()}
        query, key, value = arrays.values()
        ndim = query.ndim
        letters = {"query": "BTNH", "key": "BSKH", "value": "BSKD"}
        for name, x in arrays.items():
            if x.ndim not in (3, 4) or x.ndim != ndim:
                shape = ", ".join(letters[name])
                beside = "" if name == "query" else f" beside a query of shape {query.shape}"
                raise ValueError(
                    f"{name} must have the shape ({shape}), or ({shape[3:]}) if query, key and value are all without "
                    f"a batch; got shape {x.shape}{beside}"
                )
            if x.dtype != query.dtype:
                raise TypeError(f"{name} must have the dtype of query, {query.dtype.name}; got {x.dtype.name}")
        *batch, _, _, size = query.shape
        if (*key.shape[:-3], key.shape[-1]) != (*batch, size):
            what = f"the batch and the head size of query, {batch[0]} and" if batch else "the head size of query,"
            raise ValueError(f"key must have {what} {size}; got shape {key.shape}")
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(f"value must have the shape {key.shape[:-1]} and a head size; got shape {value.shape}")
        check_heads(query, "key", key)
        query, key, value = (x[None] if ndim == 3 else x for x in (query, key, value))
        whole = (1, 3) if sequence_whole else (3,)
        query, key, value = (with_batch_of(query, whole_along(x, whole)) for x in (query, key, value))
        return cls(query, key, value, ndim == 3)


class AttentionOptions(TypedDict, total=False):
    """The options that all overloads have."""

    scale: Array | None
    is_causal: bool
    local_window_size: Window
    implementation: Implementation
    logits_soft_cap: float | None
    sinks: Array | None
    dtype: Dtype | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionArguments:
    """The options of a public function as they were given, each as `jaxsoft.dot_product_attention` has it.

    Attributes:
      shards: how sequences lie over the devices of a mesh; None for sequences that are whole on each.
    """

    scale: Array | None
    is_causal: bool
    local_window_size: Window
    implementation: Implementation
    return_residual: bool
    logits_soft_cap: float | None
    sinks: Array | None
    dtype: Dtype | None
    bias: Array | None = None
    mask: Mask | None = None
    query_seq_lengths: Lengths | None = None
    key_value_seq_lengths: Lengths | None = None
    query_segment_ids: SegmentIds | None = None
    key_value_segment_ids: SegmentIds | None = None
    query_offset: Lengths = 0
    state: AttentionState | None = None
    return_state: bool = False
    return_max_logits: bool = False
    deterministic: bool | None = None
    dropout_rate: float = 0.0
    shards: SequenceShards | None = None

    def __post_init__(self):
        """Raises where dropout would act. Flax's layers pass its rate, and `deterministic` to say that it does not."""
        deterministic = self.deterministic
        rate = known_number("dropout_rate", self.dropout_rate, "0, or from 0 to 1 beside deterministic=True", 0, 1)
        if rate != 0 and (deterministic is None or not deterministic):
            raise ValueError(
                "dropout_rate must be 0, unless deterministic=True says that no dropout acts, as weights are not in "
                f"memory and cannot be dropped; got {rate} beside deterministic={deterministic}"
            )

    def limits(self) -> tuple[int | None, int | None]:
        """How far to the left and to the right of its position a query attends; None for no limit."""
        left, right = _window_limits(self.local_window_size)
        return left, 0 if self.is_causal else right

    def operands(self, given: Arrays, keys: int | None = None) -> dict[Extra, jax.Array]:
        """The operands of a call after query, key and value, in their order, after checking them.

        `keys` is how many keys each sequence has, where those are in pages.
        """
        query, no_batch = given.query, given.no_batch
        keys = given.key.shape[1] if keys is None else keys
        batch, length, heads, _ = query.shape
        extras: dict[Extra, jax.Array] = {}

        def full(name: str, x: ArrayLike) -> jax.Array:
            x = whole_along(broadcastable(name, x, (batch, heads, length, keys)), (2, 3))
            return with_batch_of(query, x) if x.shape[0] == batch else x

        def segments(name: str, x: ArrayLike, length: int) -> jax.Array:
            # Over a mesh they are whole along the sequence, unless that lies over devices.
            x = check_integers(name, x, (batch, length), no_batch, sequence_whole=self.shards is None)
            return with_batch_of(query, x)

        if self.bias is not None:
            extras[Extra.BIAS] = as_kernel_scores("bias", full("bias", self.bias))
        if self.mask is not None:
            extras[Extra.MASK] = as_mask("mask", full("mask", self.mask))
        if (self.query_segment_ids is None) != (self.key_value_segment_ids is None):
            raise ValueError("query_segment_ids and key_value_segment_ids must be given together; got one of them")
        if self.query_segment_ids is not None and self.key_value_segment_ids is not None:
            extras[Extra.QUERY_SEGMENTS], extras[Extra.KEY_SEGMENTS] = _same_ids(
                segments("query_segment_ids", self.query_segment_ids, length),
                segments("key_value_segment_ids", self.key_value_segment_ids, keys),
                self.shards.axis if self.shards is not None and self.shards.inside else None,
            )
        for extra, name in ((Extra.QUERY_LENGTHS, "query_seq_lengths"), (Extra.KEY_LENGTHS, "key_value_seq_lengths")):
            if (lengths := getattr(self, name)) is not None:
                extras[extra] = as_position(check_integers(name, lengths, (batch,), False))
        offset = self.query_offset
        if type(offset) is not int or offset != 0:
            extras[Extra.OFFSET] = as_offset(offset, batch, "a number")
        if self.sinks is not None:
            sinks = as_kernel_scores("sinks", self.sinks)
            if sinks.shape != (heads,):
                raise ValueError(f"sinks must have the shape ({heads},), one number a head; got shape {sinks.shape}")
            extras[Extra.SINKS] = sinks.astype(accumulator(query.dtype))[None]
        return extras


def attend(
    attention: Callable[[AttentionForm, Names], Function],
    given: Arrays,
    extras: dict[Extra, jax.Array],
    arguments: AttentionArguments,
) -> Any:
    """The results of a public function, where `attention` gives the function of query, key, value and extras for a form
    and an implementation.
    """
    names = as_names(arguments.implementation)
    deterministic = True if arguments.deterministic is None else arguments.deterministic
    check_flag("is_causal", arguments.is_causal)
    return_residual = check_flag("return_residual", arguments.return_residual)
    return_state = check_flag("return_state", arguments.return_state)
    return_max_logits = check_flag("return_max_logits", arguments.return_max_logits)
    deterministic = check_flag("deterministic", deterministic)
    left, right = arguments.limits()
    query, scale = _scaled(given.query, arguments.scale)
    result = check_dtype(arguments.dtype, query)
    merges = arguments.state is not None or return_state
    if left is None and right is None:  # then nothing depends on positions
        extras = {extra: x for extra, x in extras.items() if extra is not Extra.OFFSET}
    wide = np.dtype(accumulator(query.dtype))
    form = AttentionForm(
        dtype=wide if merges else result,
        scale=scale,
        left=left,
        right=right,
        cap=_cap(arguments.logits_soft_cap, wide),
        extras=tuple(extras),
        returns_lse=return_residual or merges,
        returns_max_logits=return_max_logits,
        deterministic=deterministic,
        precision=jax.config.jax_default_matmul_precision,
        rounded=not merges and jnp.finfo(result).nmant < jnp.finfo(wide).nmant,
        shards=arguments.shards,
        own_key_counts=arguments.query_segment_ids is not None
        and arguments.query_segment_ids is arguments.key_value_segment_ids,
    )
    before = None if arguments.state is None else _check_state(arguments.state, given)
    operands = query, given.key, given.value, *extras.values()
    results = _attend(attention, form, names, result, (return_residual, return_state), operands, before)
    if given.no_batch:
        results = jax.tree.map(lambda v: v[0], results)
    return results if len(results) > 1 else results[0]


@functools.partial(jax.jit, static_argnames=("attention", "form", "implementation", "dtype", "asked"))
def _attend(attention, form, implementation, dtype, asked, operands, before):
    """The output, and then the log-sum-exp, the state and the largest scores, where they are asked for. What is not is
    no result: where no key is valid it is infinite, at which `jax_debug_infs` would stop.
    """
    if form.shards is not None and not form.shards.inside:
        operands = [*(with_axis(x, 1, form.shards.axis) for x in operands[:BASE]), *operands[BASE:]]
    operands = varying_alike(*operands)
    output, lse, lse_residual, *largest = attention(form, implementation)(*operands)
    lse = jnp.moveaxis(lse, 1, 2)
    return_residual, return_state = asked
    if before is None and not return_state:
        return output, *([lse] if return_residual else []), *largest
    st = xla.with_residual(fold.of_output(output, lse), jnp.moveaxis(lse_residual, 1, 2))
    if before is not None:
        st = fold.combine(before, st)
    more = [(return_residual, lambda: fold.lse(st)), (return_state, lambda: st)]
    return fold.output(st, dtype), *(found() for wanted, found in more if wanted), *largest


def check_heads(query: jax.Array, name: str, key: jax.Array) -> None:
    """Raises unless each head of the keys, which the argument of this name has, serves as many heads of queries."""
    heads, groups = query.shape[-2], key.shape[-2]
    if heads != groups and (groups == 0 or heads % groups):
        raise ValueError(
            f"query must have a multiple of the number of heads of {name}, {groups}; got {heads} in shape {query.shape}"
        )


def check_integers(
    name: str, x: ArrayLike, shape: tuple[int, ...], no_batch: bool, sequence_whole: bool = True
) -> jax.Array:
    """Lengths or segments, after checking the dtype and the shape."""
    x = of_integers(name, x)
    if no_batch and x.shape == shape[1:]:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape {shape[1:] if no_batch else shape}; got shape {x.shape}")
    return whole_along(x, range(1, x.ndim)) if sequence_whole else x


def of_integers(name: str, x: ArrayLike) -> jax.Array:
    """An array of integers, after checking that it is one, and that JAX will not cut their digits."""
    if isinstance(x, int | np.integer | np.ndarray) and np.issubdtype(np.asarray(x).dtype, np.integer):
        given = np.asarray(x)
        limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(given.dtype))
        for number in (given.min(initial=0), given.max(initial=0)):
            if not limits.min <= number <= limits.max:
                raise ValueError(
                    f"{name} must hold integers from {limits.min} to {limits.max}, unless jax_enable_x64 is set; got "
                    f"{number}"
                )
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers; got dtype {x.dtype.name}")
    return x


def as_offset(offset: ArrayLike, batch: int, allowed: str) -> jax.Array:
    """The argument query_offset as positions (B,) or (1,), after checking it. `allowed` says what else it may be."""
    number = of_integers("query_offset", offset)
    number = number[None] if number.ndim == 0 else number
    if number.shape not in ((batch,), (1,)):
        raise ValueError(f"query_offset must be {allowed} or have the shape ({batch},); got shape {number.shape}")
    return as_position(number)


def as_position(x: jax.Array) -> jax.Array:
    """Lengths or offsets as int32. Those that are too far from 0 become the nearest ones that are not."""
    limits = jnp.iinfo(x.dtype)
    if limits.max > _FURTHEST:
        x = jnp.clip(x, max(-_FURTHEST, limits.min), _FURTHEST)
    return x.astype(jnp.int32)


def _same_ids(query: jax.Array, key: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
    """Segments (B, T) and (B, S) as int32, two of which are equal where they are the same number, on all devices along
    an axis of the mesh, if there is one.
    """
    both = query, key
    wide = jnp.int64 if any(ids.dtype.itemsize == 8 for ids in both) else jnp.int32
    signed = [jnp.issubdtype(ids.dtype, jnp.signedinteger) for ids in both]
    if signed[0] != signed[1]:  # which have their numbers from 0 to the largest signed one in common
        query, key = (jnp.maximum(ids, -1) if s else _signed(ids, wide) for ids, s in zip(both, signed, strict=True))
    query, key = query.astype(wide), key.astype(wide)
    if wide == jnp.int32:
        return query, key
    ids = own = jnp.concatenate([query, key], axis=1)
    if axis_name is not None:
        (ids,) = varying_over(axis_name, ids)
        ids = jax.lax.all_gather(ids, axis_name, axis=1, tiled=True)
    places = jnp.cumsum(jnp.ones_like(ids, jnp.int32), axis=1)
    ids, places = jax.lax.sort((ids, places), dimension=1, num_keys=1)
    numbers = jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1, dtype=jnp.int32)
    _, numbers = jax.lax.sort((places, numbers), dimension=1, num_keys=1)
    if axis_name is not None:
        begin = jax.lax.axis_index(axis_name) * own.shape[1]
        numbers = jax.lax.dynamic_slice_in_dim(numbers, begin, own.shape[1], axis=1)
    return numbers[:, : query.shape[1]], numbers[:, query.shape[1] :]


def _signed(ids: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Unsigned integers in a signed dtype, and -2 for those that it does not hold."""
    largest = jnp.iinfo(dtype).max
    held = ids.astype(dtype)
    return jnp.where(ids > largest, -2, held) if jnp.iinfo(ids.dtype).max > largest else held


def _scaled(query: jax.Array, scale: ArrayLike | None) -> tuple[jax.Array, float]:
    """The query and the scale as a number. A traced scale is multiplied into the query."""
    if scale is None:
        size = query.shape[-1]
        if not isinstance(size, int):
            raise ValueError(f"scale must be given where the head size is not known; got None, and query {query.shape}")
        return query, 1 / math.sqrt(size) if size else 1.0
    wide = np.dtype(accumulator(query.dtype))
    number = as_scale(scale, wide)
    if isinstance(number, float):
        return query, number
    return (query.astype(wide) * number.astype(wide)).astype(query.dtype), 1.0


def _window_limits(size: Window) -> tuple[int | None, int | None]:
    """The limits to the left and to the right; None for none."""
    several = isinstance(size, tuple | list) or (isinstance(size, np.ndarray) and size.ndim)
    pair = tuple(size) if several else (size, size)  # type: ignore[arg-type]
    if len(pair) != 2:
        raise ValueError(f"local_window_size must be a number or a pair of numbers; got {size!r}")

    def limit(given: object) -> int | None:
        if given is None:
            return None
        number = known_integer("local_window_size", given, "None, an integer or a pair of these")
        if number < 0:
            # FlashAttention has -1 for no limit. It may as well be the length of an empty window, less one.
            meant = tuple(None if v == -1 else v for v in pair) if several else None
            advice = f". No limit is None, not -1: write {meant}" if number == -1 else ""
            raise ValueError(f"local_window_size must not be negative; got {size!r}{advice}")
        return number if number < _FURTHEST else None

    return limit(pair[0]), limit(pair[1])


def _cap(cap: float | None, dtype: jnp.dtype) -> float | None:
    """The cap, after checking that it is a number of the dtype in which it is computed with."""
    if cap is None:
        return None
    limits = jnp.finfo(dtype)
    most = float(limits.max) * 1e-8  # beyond, scores divided by it would be too small for the dtype
    allowed = f"None, or positive and at most {most:.1e} in {dtype.name}"
    return known_number("logits_soft_cap", cap, allowed, float(limits.tiny), most)


def _check_state(state: AttentionState, given: Arrays) -> AttentionState:
    """The state that a call goes on from, with a batch and in the accumulator's dtype."""
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be a jaxsoft.fold.AttentionState; got {type(state).__name__}")
    dtype = accumulator(given.query.dtype)
    rows = given.query.shape[1:3] if given.no_batch else given.query.shape[:3]
    shapes = {"m": rows, "s": rows, "o": (*rows, given.value.shape[-1])}
    parts = []
    for name, shape in shapes.items():
        part = as_kernel_scores(f"state.{name}", getattr(state, name))
        if part.shape != shape:
            raise ValueError(f"state.{name} must have the shape {shape}; got shape {part.shape}")
        parts.append(sharded_like((part[None] if given.no_batch else part).astype(dtype), given.query))
    return AttentionState(*parts)
