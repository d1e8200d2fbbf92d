"""From a tile of products of queries and keys to the scores of form.py: what all kernels of attention share.

The kernels take a block of queries and loop over tiles of keys, or the other way round. Which tiles matter is in
ranges.py. Here is what is done with a tile: scale, cap, bias, and the masked scores. Nothing of what a form
does not have is traced.

A tile has queries along its rows and keys along its columns (`queries_axis` 0), or the other way round (1). Arrays over
queries and keys always have queries along their rows, and are turned as they are loaded (`load_tile`). `prepare` pads
them to whole tiles in XLA, if they are not, for loads do not stop at the end of an array.

Scores come as values and a unit: the score in base 2 is values * unit, and so exp2(values * unit - m) is one
fused multiplication and addition, and exp2, for each score. A bias may be so large that nothing is left of the scores
beside it once it has been multiplied, or infinity: -1e9 or the least number of f32, for all keys of a query. So with
one, maxima and log-sum-exps are natural, and it is exp2((values - m) * unit), which takes one operation more.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoft._attention.form import AttentionForm, Extra

from .. import versions
from ..rows.memory import load_as_is
from .ranges import Shape, masks

LOG2E = math.log2(math.e)
# The types in which a bias is read. Others are converted to f32 before.
_BIAS_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def has_residual(form: AttentionForm) -> bool:
    """Whether the log-sum-exp has a residual (see form.py) that matters: with a bias, which can be of any size."""
    return Extra.BIAS in form.extras


def prepare(form: AttentionForm, extras: Mapping[Extra, jax.Array], shape: Shape) -> dict[Extra, jax.Array]:
    """The extras as kernels read them: masks as bytes, sinks like maxima, and what has tiles in whole ones.

    To be called outside of the kernel. A bias in whole tiles is not copied.
    """
    result = dict(extras)
    for name in (Extra.BIAS, Extra.MASK):
        if name in extras:
            array = extras[name]
            if name is Extra.MASK:
                array = array.astype(jnp.int8)
            elif array.dtype not in _BIAS_DTYPES:
                array = array.astype(jnp.float32)
            array = _whole_tiles(array, 2, shape.query_tile)
            result[name] = _whole_tiles(array, 3, shape.key_tile)
    if Extra.SINKS in extras:
        # In base 2 already here: in a kernel the product would not be rounded before a maximum is subtracted from it.
        result[Extra.SINKS] = extras[Extra.SINKS].astype(jnp.float32) * (1.0 if has_residual(form) else LOG2E)
    for name, tile in ((Extra.QUERY_SEGMENTS, shape.query_tile), (Extra.KEY_SEGMENTS, shape.key_tile)):
        if name in extras:
            segments = extras[name]
            length = shape.queries if name is Extra.QUERY_SEGMENTS else shape.keys
            result[name] = jnp.pad(segments, ((0, 0), (0, -length % tile)), mode="edge")
    return result


def _whole_tiles(array: jax.Array, axis: int, tile: int) -> jax.Array:
    """An array padded along an axis to a multiple of the tile, unless it is the same all along the axis."""
    missing = -array.shape[axis] % tile
    if array.shape[axis] == 1 or not missing:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing)
    return jnp.pad(array, widths)


@dataclasses.dataclass(frozen=True)
class Queries:
    """What is known of the queries of a tile, one number a query, in the layout of the tile reduced over keys.

    Attributes:
      first: the first valid key; None if it is 0 for all.
      end: one more than the last valid key; None if all are, one number if it is the same for all.
      segments: their segments, if there are any.
    """

    first: jax.Array | None
    end: jax.Array | int | None
    segments: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Tile:
    """Scores: values * unit in base 2.

    Attributes:
      values: f32, -inf where a score is masked.
      slope: how much a score grows with the scaled product, where there is a cap and it was asked for.
    """

    values: jax.Array
    slope: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """How tiles of products become scores.

    Attributes:
      form: the call's.
      shape: the numbers of queries and keys, and of those in a tile.
      refs: references to the extras, prepared.
      queries_axis: 0 if queries lie along a tile's rows, 1 if along its columns.
    """

    form: AttentionForm
    shape: Shape
    refs: Mapping[Extra, Any]
    queries_axis: int = 0

    @property
    def unit(self) -> float:
        """The unit of all tiles."""
        plain = self.form.cap is None and not self.natural and self.form.scale > 0
        return self.form.scale * LOG2E if plain else LOG2E

    @property
    def natural(self) -> bool:
        """Whether maxima and log-sum-exps are natural: with a bias. Then values are scores."""
        return has_residual(self.form)

    def maximum(self, largest: jax.Array) -> jax.Array:
        """The maximum of scores, given that of values."""
        return largest if self.natural else largest * self.unit

    def weight(self, m: jax.Array, reference: jax.Array) -> jax.Array:
        """exp(m - reference) for maxima."""
        return jnp.exp2((m - reference) * LOG2E if self.natural else m - reference)

    def exp(self, values: jax.Array, reference: jax.Array, lse_residual: jax.Array | None = None) -> jax.Array:
        """exp(score - reference), or exp(score - reference - residual), for that of a natural log-sum-exp in base 2."""
        if not self.natural:
            return jnp.exp2(values * self.unit - reference)
        exponents = (values - reference) * self.unit
        return jnp.exp2(exponents if lse_residual is None else exponents - lse_residual)

    def queries(self, batch: jax.Array, begin: jax.Array) -> Queries:
        """What tiles of the queries that begin here need, to be loaded once for all their tiles."""
        layout = plgpu.Layout.WGMMA.reduce(1 - self.queries_axis)
        count = self.shape.query_tile
        query = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + begin
        rules = masks(self.form, self.shape, self.refs, batch)
        # Where results are summed over queries, those past the last must be masked.
        past_last = self.queries_axis == 1 and bool(self.shape.queries % count)
        first, end = rules.keys_of(query, bool(self.shape.keys % self.shape.key_tile), past_last)
        segments = None
        if Extra.QUERY_SEGMENTS in self.refs:
            ref = self.refs[Extra.QUERY_SEGMENTS]
            begin_of_load = jnp.minimum(begin, ref.shape[1] - count)
            segments = load_as_is(ref.at[index_into(ref, 0, batch), pl.ds(begin_of_load, count)], layout)
        return Queries(first, end, segments)

    def tile(
        self,
        products: jax.Array,
        query_begin: jax.Array,
        key_begin: jax.Array,
        batch: jax.Array,
        head: jax.Array,
        masked: jax.Array | bool,
        queries: Queries | None = None,
        with_slope: bool = False,
        loaded: Mapping[Extra, jax.Array] = MappingProxyType({}),
    ) -> Tile:
        """The scores of a tile.

        Args:
          products: the products of queries and keys, f32, in the layout of a wgmma accumulator.
          query_begin, key_begin: the indices of its first query and key.
          batch, head: the indices of the batch's entry and of the query head.
          masked: False for a tile of the interior (see ranges.py), where limits, lengths and segments exclude nothing.
            Where that is not known when the kernel is compiled, it takes a branch.
          queries: what is known of its queries; None to find it out where it is needed.
          with_slope: whether the slope is needed.
          loaded: its bias and mask, as far as they are loaded; the others are loaded here.
        """
        form, slope = self.form, None
        loaded = {**loaded, **self.load(query_begin, key_begin, batch, head, without=loaded)}
        if form.cap is not None:
            # The hardware's approximate tanh errs by 5e-4 of the cap, which is 2 % of exp(score) at a cap of 50. A
            # quotient of polynomials, with one special-function operation less, was slower by 14 % at heads of 128 and
            # 16 % at 64 (H100, JAX 0.11.2). rsqrt is fast, and where exp2 overflows, its square is 0.
            root = lax.rsqrt(1 + jnp.exp2(products * (2 * LOG2E * form.scale / form.cap)))
            below = root * root  # (1 - tanh) / 2
            values = form.cap - (2 * form.cap) * below
            slope = 4 * (below - below * below) if with_slope else None
        elif Extra.BIAS in form.extras or form.scale <= 0:
            values = products * form.scale
        else:
            values = products
        if Extra.BIAS in form.extras:
            values += loaded[Extra.BIAS].astype(jnp.float32)
        if Extra.MASK in form.extras:
            values = jnp.where(loaded[Extra.MASK].astype(jnp.int32) != 0, values, -jnp.inf)
        if masked is not False:

            def limited(values: jax.Array) -> jax.Array:
                valid = self._valid_keys(queries or self.queries(batch, query_begin), key_begin, batch)
                return values if valid is None else jnp.where(valid, values, -jnp.inf)

            values = limited(values) if masked is True else lax.cond(masked, limited, lambda values: values, values)
        return Tile(values, slope)

    def load(
        self,
        query_begin: jax.Array,
        key_begin: jax.Array,
        batch: jax.Array,
        head: jax.Array,
        without: Collection[Extra] = (),
    ) -> dict[Extra, jax.Array]:
        """The bias and mask of a tile, as far as there are any, from global memory. They arrive while products are
        computed, if it is called before.

        Args:
          query_begin, key_begin, batch, head: those of `tile`.
          without: what is not wanted.
        """
        names = [name for name in (Extra.BIAS, Extra.MASK) if name in self.form.extras and name not in without]
        return {name: self._load(name, batch, head, query_begin, key_begin) for name in names}

    def _valid_keys(self, queries: Queries, key_begin: jax.Array, batch: jax.Array) -> jax.Array | None:
        """Where the scores of a tile count, by limits, lengths and segments; None for everywhere."""
        valid = None
        if queries.first is not None or queries.end is not None:
            key = plgpu.broadcasted_iota(jnp.int32, self._tile_shape, 1 - self.queries_axis, layout=plgpu.Layout.WGMMA)
            if queries.first is not None:
                valid = key >= self._broadcast(queries.first - key_begin, self.queries_axis)
            if queries.end is not None:
                before = key < self._broadcast(queries.end - key_begin, self.queries_axis)
                valid = before if valid is None else valid & before
        if queries.segments is not None:
            ref, keys_axis = self.refs[Extra.KEY_SEGMENTS], 1 - self.queries_axis
            # A warp group may have keys beyond the last tile, as in `_load`.
            keys = pl.ds(jnp.minimum(key_begin, ref.shape[1] - self.shape.key_tile), self.shape.key_tile)
            segments = load_as_is(ref.at[index_into(ref, 0, batch), keys], plgpu.Layout.WGMMA.reduce(self.queries_axis))
            same = self._broadcast(queries.segments, self.queries_axis) == self._broadcast(segments, keys_axis)
            valid = same if valid is None else valid & same
        return valid

    @property
    def _tile_shape(self) -> tuple[int, int]:
        shape = self.shape.query_tile, self.shape.key_tile
        return shape if self.queries_axis == 0 else shape[::-1]

    def _broadcast(self, numbers: jax.Array, axis: int) -> jax.Array:
        """Numbers along an axis of the tile, for all of the tile."""
        return lax.broadcast_in_dim(numbers, self._tile_shape, [axis] if jnp.ndim(numbers) else [])

    def _load(self, name: Extra, batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        """The part of a bias or mask that belongs to a tile, in the tile's layout."""
        ref = self.refs[name]
        index: list[Any] = [index_into(ref, 0, batch), index_into(ref, 1, head)]
        for length, begin, size in zip(
            ref.shape[2:], (query, key), (self.shape.query_tile, self.shape.key_tile), strict=True
        ):
            # A warp group may have rows beyond the last tile of the array: it then loads what is there.
            index.append(0 if length == 1 else pl.ds(jnp.minimum(begin, length - size), size))
        along = [axis for axis in (0, 1) if ref.shape[2 + axis] > 1]
        if not along:
            return lax.broadcast_in_dim(ref[tuple(index)], self._tile_shape, [])
        if len(along) == 2:
            return load_tile(ref.at[tuple(index)], self.queries_axis)
        axis = along[0] ^ self.queries_axis
        return self._broadcast(load_as_is(ref.at[tuple(index)], plgpu.Layout.WGMMA.reduce(1 - axis)), axis)


def load_tile(ref: Any, queries_axis: int, in_shared_memory: bool = False) -> jax.Array:
    """Loads a part of an array over queries and keys, in the layout of scores.

    Args:
      ref: the reference to it, with queries along its rows.
      queries_axis: the axis that queries are to have.
      in_shared_memory: whether it refers to shared memory, as `blocks.tiled` has it, or to global memory.
    """
    layout, bits = plgpu.Layout.WGMMA, 8 * jnp.dtype(ref.dtype).itemsize
    if queries_axis == 0:
        return versions.load(ref, layout=layout, optimized=in_shared_memory)
    turned = ref.transpose((1, 0))
    if in_shared_memory and bits == 16:  # by ldmatrix, which turns 16 bits
        return versions.load(turned, layout=layout)
    # Threads load pairs that lie side by side, and exchange halves of them. For bytes a transposed copy in memory had
    # been somewhat faster: a mask of all scores, with gradients, had 426 TFLOP/s where it has 414 at heads of 128, and
    # 320 where it has 309 at 64 (H100, 8K long, JAX 0.11.2). Exchanged as 16 bits, it had 406 and 296.
    loaded = versions.load(turned, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=in_shared_memory)
    return plgpu.layout_cast(loaded.astype(jnp.int32) if bits == 8 else loaded, layout)


def index_into(ref: Any, axis: int, index: jax.Array) -> jax.Array | int:
    """An index into an axis, which may have length 1 and is then the same for all."""
    return index if ref.shape[axis] > 1 else 0
