"""How `jaxsoft.random.sample` draws: by a kernel on a GPU, and composed of operations on rows elsewhere.

`jaxsoft._ops.sampling_kernel` has the kernel; this file has the composition, which draws other tokens for the same
random numbers, from the same distribution. It draws from a whole row in one read: the first random number draws one of
the row's chunks, with the weight that the chunk's state (m, s) gives it, and the second a token of that chunk, where
the Gumbel-max method, as of `jax.random.categorical`, takes a random number for each token. top-k and
top-p keep the first tokens in descending order, and mostly few, which one read for the largest of a row finds. Where
top-p keeps more, the other tokens are masked and the whole row is drawn from. Nothing is sorted.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsoft._core.implementations import Names, accepts
from jaxsoft._core.operation import Operation, bdims_at_front, zero_tangent
from jaxsoft._core.rounding import stored
from jaxsoft._ops import sampling_kernel
from jaxsoft._ops.top_k import top_k_softmax
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.formulas import positions
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.logsumexp import STATE
from jaxsoft._rows.spec import RowExtra
from jaxsoft.fold import accumulator, weight

# How many of the largest logits top_p looks at first: the most that the kernels find in one read.
_FIRST = 256
# The lowest temperature above 0 that is told from lower ones: logits that differ by more than 1e-23, as all do in f32
# whose magnitude is above 1e-16, are as far apart as can be.
_COLDEST = 1e-25
# How many tokens a chunk has. A row of up to 2^16 tokens then has no more chunks than a chunk has tokens.
_CHUNK = 256


class _Rows(NamedTuple):
    """The rows that are drawn from.

    Attributes:
      uniform: two random numbers from 0 to 1 for each row, (..., 2).
      logits: (..., n).
      scale: 1 / temperature of each row, (...); 1 where the temperature is 0.
      greedy: whether the temperature is 0, (...).
    """

    uniform: jax.Array
    logits: jax.Array
    scale: jax.Array
    greedy: jax.Array


@functools.partial(jax.jit, static_argnames=("top_k", "implementation"))
def draw_tokens(key, x, temperature, top_p, min_p, top_k, implementation):
    """A token of each row of logits x, and its probability. The options are those of `jaxsoft.random.sample`, checked.

    temperature, top_p and min_p are one number a row or one for all, and top_k a Python integer. None stands for what
    changes nothing.
    """
    (x,) = stored(x)
    uniform = jax.random.uniform(key, (*x.shape[:-1], 2), accumulator(x.dtype))
    options = (temperature, top_p, min_p)
    composed = functools.partial(_draw_composed, top_k, implementation)
    of_all = top_k is None and top_p is not None
    if not accepts(implementation, "ffi") or not sampling_kernel.may_take(x, of_all):
        return composed(uniform, x, *options)
    sampling = sampling_kernel.Sampling(top_k, _draw_on_one_device)

    def by_kernel(uniform, x, *options):
        given = (jnp.float32(off) if v is None else v for v, off in zip(options, (1, 1, 0), strict=True))
        return sampling(uniform, x, *given)

    return jax.lax.platform_dependent(uniform, x, *options, cuda=by_kernel, default=composed)


def _draw_on_one_device(top_k, *operands):
    """`_draw_composed` in plain JAX, for the platforms for which the sampling kernel is lowered and does not exist."""
    return _draw_composed(top_k, "xla", *operands)


def _draw_composed(top_k, implementation, uniform, x, temperature, top_p, min_p):
    """`draw_tokens` from random numbers, composed of operations on rows.

    The first random number of a row draws its chunk, and the second the token in it, or one of the first few.
    """
    scaled, by_row = temperature is not None, uniform.shape[:-1]
    temperature, top_p, min_p = (v if v is None else jnp.broadcast_to(v, by_row) for v in (temperature, top_p, min_p))
    temperature = temperature if scaled else jnp.ones_like(uniform[..., 0])
    # A temperature below 0 or of NaN makes everything NaN. The scale is finite, and so far above 0 that it is normal.
    inverse = jnp.maximum(1 / jnp.maximum(temperature, _COLDEST), jnp.finfo(temperature.dtype).tiny)
    scale = jnp.where(temperature > 0, inverse, jnp.where(temperature == 0, 1, jnp.nan))
    rows = _Rows(uniform, x, scale, temperature == 0)
    if top_k is not None:
        return _from_first(rows, top_p, min_p, top_k, None, implementation)[:2]
    if top_p is None:
        return _from_row(rows, min_p, scaled, implementation)
    min_p = jnp.zeros_like(top_p) if min_p is None else min_p
    return _FromNucleus(scaled, implementation)(*rows, top_p, min_p)


def _from_row(rows, min_p, scaled, implementation):
    """A token of the whole row, and its probability: first one of its chunks is drawn, then a token of that chunk."""
    u, x, scale, greedy = rows
    if min_p is not None:
        x = jnp.where(_weights(x, scale) < jnp.minimum(min_p, 1)[..., None], -jnp.inf, x)  # NaN stays
    size = min(x.shape[-1], _CHUNK)
    count = -(-x.shape[-1] // size)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
    chunks = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], count, size)
    m, s = _states(chunks, scale if scaled else None, implementation)
    top = jnp.max(m, axis=-1)
    weights = s * weight(m, top[..., None])
    undefined = ~(jnp.isfinite(top) & jnp.isfinite(jnp.sum(weights, axis=-1)))
    largest = greedy | undefined
    chunk = jnp.where(largest, jnp.argmax(m, axis=-1), _draw(u[..., 0], weights))
    tokens = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
    weights_in_it = _weights(tokens, scale)
    index = jnp.where(largest, jnp.argmax(tokens, axis=-1), _draw(u[..., 1], weights_in_it))
    probability = _share(weights, chunk) * _share(weights_in_it, index)
    probability = jnp.where(undefined, jnp.nan, jnp.where(greedy, 1, probability))
    return (chunk * size + index).astype(jnp.int32), probability


def _from_first(rows, top_p, min_p, k, total, implementation):
    """A token of a row's k largest, of which the filters leave some, and its probability.

    Args:
      rows: what is drawn from.
      top_p, min_p: one number a row; None where there is no such filter.
      k: how many of the largest are looked at.
      total: (probability of the largest) -> the sum that top_p is a part of, in units of the largest's weight; None
        for that of the k largest.
      implementation: None, or the name of one.

    Returns:
      The token, its probability, and whether the filters leave no token beyond the k largest.
    """
    values, p, indices = top_k_softmax(rows.logits, k, dtype=rows.scale.dtype, implementation=implementation)
    weights = jnp.where(jnp.isnan(p[..., :1]), jnp.nan, _weights(values, rows.scale))
    left = jnp.ones_like(weights, bool)
    if top_p is not None:
        until = jnp.cumsum(weights, axis=-1)
        before = jnp.pad(until[..., :-1], [(0, 0)] * (until.ndim - 1) + [(1, 0)])
        mass = until[..., -1] if total is None else total(p[..., 0])
        left &= (before < (top_p * mass)[..., None]) | (top_p >= 1)[..., None]
    if min_p is not None:
        left &= weights >= min_p[..., None]
    left = (left & ~rows.greedy[..., None]) | (positions(left) == 0)
    weights = jnp.where(left, weights, 0)
    index = _draw(rows.uniform[..., 1], weights)
    return _take(indices, index), _share(weights, index), ~(weights[..., -1] > 0)


@dataclasses.dataclass(frozen=True)
class _FromNucleus(Operation):
    """A token of the fewest that reach top_p, and its probability.

    The operands are the fields of `_Rows`, top_p and min_p. A mapped dimension is more rows of the one batch: of a
    condition that is mapped, both branches would run for every row.
    """

    scaled: bool
    implementation: Names

    def apply(self, operands):
        """Draws from the largest, and where these are too few for a row, from all."""
        *rows_, top_p, min_p = operands
        rows = _Rows(*rows_)
        x, scale = rows.logits, rows.scale

        def total(largest):
            return _states(x[..., None, :], scale, self.implementation)[1][..., 0] if self.scaled else 1 / largest

        def nucleus():
            left = _most_probable(x, scale, top_p)
            of_nucleus = rows._replace(logits=jnp.where(left, x, -jnp.inf))
            return _from_row(of_nucleus, min_p, self.scaled, self.implementation)

        k = min(x.shape[-1], _FIRST)
        token, probability, complete = _from_first(rows, top_p, min_p, k, total, self.implementation)
        if x.shape[-1] <= _FIRST:
            return token, probability
        # A row's draw may not depend on whether another one needs more.
        return jax.lax.cond(
            jnp.all(complete),
            lambda: (token, probability),
            lambda: jax.tree.map(functools.partial(jnp.where, complete), (token, probability), nucleus()),
        )

    def jvp(self, primals, tangents):
        """What is drawn counts as constant."""
        del tangents
        results = self(*primals)
        return results, tuple(map(zero_tangent, results))

    def tangents(self, primals, tangents):
        """Those of `along`."""
        return self.jvp(primals, tangents)[1]

    def batch(self, operands, dims):
        """More rows."""
        return self(*bdims_at_front(operands, dims, len(operands)))


def _most_probable(x, scale, top_p):
    """Which tokens are the fewest that reach top_p. The weight of the least probable of them is found bit by bit."""
    weights = _weights(x, scale)
    bits = jax.lax.bitcast_convert_type(weights, jnp.uint64 if scale.dtype == jnp.float64 else jnp.uint32)
    enough = top_p * jnp.sum(weights, axis=-1)

    def mass(valid):
        return jnp.sum(jnp.where(valid, weights, 0), axis=-1)

    def step(_, state):
        least, bit = state
        reached = mass(bits >= (least | bit)[..., None]) >= enough
        return jnp.where(reached, least | bit, least), bit >> 1

    # Numbers that are not negative have the order of their bits, and in those below 2 the first two bits are 0.
    count = jnp.iinfo(bits.dtype).bits - 2
    first = jnp.asarray(1 << (count - 1), bits.dtype)
    least, _ = jax.lax.fori_loop(0, count, step, (jnp.zeros_like(bits[..., 0]), first))
    above, ties = bits > least[..., None], bits == least[..., None]
    place = (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) - 1).astype(scale.dtype)
    before = mass(above)[..., None] + place * jnp.where(ties, weights, 0)
    return above | (ties & (before < enough[..., None])) | (top_p >= 1)[..., None]


def _states(chunks, scale, implementation):
    """The states (m, s) of x * scale, of each chunk of the rows x, (..., count, size), given the scale of each, (...).

    A row whose largest x * scale is out of range, or nearly, is read again, with a scale for which it is not. Its
    largest x is then above 2^37 in magnitude, and above 2^65 in f64, so that with either scale every other x but its
    equals has the weight 0. The C++ and CUDA kernels read nothing of rows that are wholly masked.
    """
    if scale is None:
        return _state(chunks, {}, implementation)
    m, s = _state(chunks, {RowExtra.SCALE: scale[..., None]}, implementation)
    far = (jnp.abs(jnp.max(m, axis=-1)) > jnp.finfo(m.dtype).max / 100)[..., None]
    again = {
        RowExtra.SCALE: jnp.full_like(scale, 1 / 4)[..., None],
        RowExtra.LIMIT: jnp.where(far, jnp.int32(chunks.shape[-1]), 0),
    }
    near = _state(chunks, again, implementation)
    return jnp.where(far, near[0], m), jnp.where(far, near[1], s)


def _state(x, extras, implementation):
    """The state (m, s) of x along the last axis, with these extras."""
    return RowOperation(STATE, RowForm(x.dtype, tuple(extras)), implementation)(x, *extras.values())


def _draw(u, weights):
    """An index into weights (..., n), drawn with the probability weight / sum.

    It is the first index at which the cumulative sum exceeds the part u (...) of the whole sum.
    """
    # A cumulative sum that is taken in parallel may decrease, so indices whose weight is 0 are excluded explicitly.
    until = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0)
    return jnp.argmax(until > (u * jnp.max(until, axis=-1))[..., None], axis=-1)


def _weights(x, scale):
    """exp(x * scale), in units of the largest of its row."""
    x = x.astype(scale.dtype)
    return jnp.exp((x - jnp.max(x, axis=-1, keepdims=True)) * scale[..., None])


def _share(weights, index):
    """The weight at an index over the sum of all."""
    return _take(weights, index) / jnp.sum(weights, axis=-1)


def _take(x, index):
    """The element of each row at its index."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
