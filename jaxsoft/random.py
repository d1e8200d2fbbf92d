"""Tokens drawn from logits, in the style of `jax.random.categorical`: temperature, top-k, top-p and min-p."""

import fractions
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxsoft._core.implementations import Implementation, as_names
from jaxsoft._core.mesh import whole_along
from jaxsoft._core.numbers import as_array, as_float
from jaxsoft._ops.arguments import known_integer, of_rows
from jaxsoft.fold import accumulator

__all__ = ["sample"]


def sample(
    key: jax.Array,
    logits: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Draws one token a row from softmax(logits / temperature), or from those of its tokens that the filters leave.

    .. math::
      P(i) = \frac{[i \in K] \, e^{z_i}}{\sum_{j \in K} e^{z_j}}, \qquad z = logits / temperature

    K is the set of tokens that the filters leave. They are applied in this order, each to the probabilities among the
    tokens that the one before it left, as in Hugging Face transformers:

    - top_k keeps the k most probable tokens. Unlike there, ties do not make it more: the lower index comes first.
    - top_p keeps the fewest of the most probable tokens that together have a probability of at least top_p, at least
      one (nucleus sampling: Holtzman et al., arXiv:1904.09751).
    - min_p keeps the tokens that have at least min_p times the probability of the most probable one (Nguyen et al.,
      arXiv:2407.01082).

    Args:
      key: a key of `jax.random`. The draws of the rows are independent. As for every function of `jax.random`, they
        depend on the key and the shape of the batch; under vmap over keys each row has a key of its own. One key gives
        other draws on a GPU, where a kernel draws, than on a CPU or by "xla", from the same distribution.
      logits: of shape (..., n), of any real dtype. -inf is never drawn.
      temperature: a finite number of at least 0; or one for each row, in an array of the shape of the rows, (...), or
        broadcastable to logits with length 1 along the tokens, as the scale of `jaxsoft.softmax`. 0 takes the first of
        the largest logits. Others below 1e-25 count as 1e-25.
      top_k: an integer of at least 1 that is not traced, as kernels are compiled for it; None for all.
      top_p: a number above 0 and at most 1, or one for each row likewise; None or 1 for all.
      min_p: a number from 0 to 1, or one for each row likewise; None or 0 for all.
      implementation: None for the fastest that serves the call, or one of "ffi", "pallas", "triton", "xla" and
        "reference"; see `jaxsoft.implementations`.

    Returns:
      The tokens, in int32 of shape (...), and P of each, in f32 (f64 for f64), of the same shape: 1 where the
      temperature is 0. A row that has no distribution, because it holds NaN or +inf or nothing but -inf, has the
      probability NaN, and any token. So has a row whose temperature is below 0 and not known when the function is
      traced; top_p and min_p that are out of range then leave at least one token. To derivatives, tokens and
      probabilities are constants.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, or out of range as far as that is known when the function
        is traced, or the named implementation cannot serve the call.

    On a GPU one CUDA kernel does all of it, for f16, bf16 and f32 with up to 2^22 tokens a row, unless there are more
    than 4096 rows of at most 16384 tokens, or of at most 512 with top_p and without top_k. It goes over a row twice
    where it has to put at most about a hundred tokens in order, as with a small top_k or for a peaked distribution, or
    without top_k and top_p, and else three times, or four if too many tokens are about as large as the last of a small
    top_k. With top_p and without top_k, many long rows of bf16 are read once, and an eighth of them again. What it has
    read it finds in shared memory, if there are few rows, or else mostly in the cache. It does not draw tokens that are
    less than 2^-40 times as probable as the most probable one. Options that are one number for all rows, Python's or a
    traced one, take no launch of their own. Where the tokens of a row are sharded, the devices exchange the k largest
    of top_k, and whole rows without it.

    Elsewhere, with top_k, or without top_p and min_p, the logits are read once; with min_p three times; with top_p
    once, and once more for another temperature than the Python number 1. If top_p keeps more than 256 tokens of some
    row of the batch, the batch is read about 35 times more (65 in f64), to find the least probable of them. To draw
    from whole rows whose n is no multiple of 256, these are copied. Over explicit axes of a mesh, rows whose tokens are
    sharded are gathered first, unless top_k is given. Comparisons with top_p and min_p are made in f32 (f64 for f64),
    so rounding may decide about a token at the border.

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]))
    >>> token, probability = sample(jax.random.key(0), logits, temperature=0.7, top_k=3, top_p=0.9)
    >>> token.shape, probability.shape
    ((2,), (2,))

    One temperature and top_p for each request of a batch:

    >>> options = {"temperature": jnp.array([0.0, 1.0]), "top_p": jnp.array([1.0, 0.4])}
    >>> sample(jax.random.key(0), logits, **options)
    (Array([0, 3], dtype=int32), Array([1., 1.], dtype=float32))
    """
    implementation = as_names(implementation)
    _check_key(key)
    x = _check_logits(logits)
    k = _check_top_k(top_k, x.shape[-1])
    options = (
        _option("temperature", temperature, 1, "at least 0, finite", lambda v: (v >= 0) & (v < np.inf), x),
        _option("top_p", top_p, 1, "above 0 and at most 1, or None", lambda v: (v > 0) & (v <= 1), x),
        _option("min_p", min_p, 0, "between 0 and 1, or None", lambda v: (v >= 0) & (v <= 1), x),
    )
    # Over explicit axes JAX neither cuts nor reduces what is sharded. The k largest are found where they lie.
    x = whole_along(x, [x.ndim - 1]) if k is None else x
    from jaxsoft._ops.sampling import draw_tokens  # only now, so that an import of jaxsoft is quick

    return draw_tokens(key, *jax.lax.stop_gradient((x, *options)), k, implementation)


def _check_key(key: jax.Array) -> None:
    """Raises unless this is one key of `jax.random`, of either kind."""
    try:
        jax.random.key_impl(key)
    except TypeError as error:
        raise TypeError(f"key must be a key of jax.random; got {key!r}") from error
    if key.ndim != (0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1):
        raise ValueError(f"key must be one key, where vmap takes many; got keys of shape {key.shape}")


def _check_logits(logits: ArrayLike) -> jax.Array:
    """The logits as an array of a dtype that has kernels, after checking that there is something to draw."""
    x = as_float("logits", logits)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"logits must hold real numbers; got dtype {x.dtype.name}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"logits must have at least one token along their last axis; got shape {x.shape}")
    if not isinstance(x.shape[-1], int):
        raise ValueError(f"logits must have a known number of tokens along their last axis; got shape {x.shape}")
    return x if x.dtype.itemsize > 1 else x.astype(accumulator(x.dtype))  # there are no kernels for 8-bit numbers


def _check_top_k(top_k: int | None, n: int) -> int | None:
    """How many of n tokens top_k keeps; None for all."""
    if top_k is None:
        return None
    top_k = known_integer("top_k", top_k, "None or an integer")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None; got {top_k}")
    return None if top_k >= n else top_k


def _option(
    name: str,
    value: ArrayLike | None,
    off: float,
    allowed: str,
    fits: Callable[[np.ndarray], np.ndarray],
    x: jax.Array,
) -> jax.Array | None:
    """The option after checking it: a number for all rows, or one for each; None for what changes nothing.

    A number stays one, as filling an array with it would take a launch of its own on a GPU.

    Args:
      name, value: of the option, as it is given.
      off: the Python number that changes nothing.
      allowed: the values that it may have, in words.
      fits: tells which numbers of an array are such values.
      x: the logits.
    """
    if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool) and value == off):
        return None
    value = float(value) if isinstance(value, fractions.Fraction) else value
    given = np.asarray(value) if _is_known(value) else as_array(name, value)
    if not (jnp.issubdtype(given.dtype, jnp.floating) or jnp.issubdtype(given.dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers; got dtype {given.dtype.name}")
    if isinstance(given, np.ndarray) and not np.all(fits(given)):
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
    number = jnp.asarray(given, accumulator(x.dtype))
    if number.ndim == 0:
        return number
    return jnp.broadcast_to(of_rows(name, number, x.shape, (x.ndim - 1,), "logits")[..., 0], x.shape[:-1])


def _is_known(value: ArrayLike) -> bool:
    """Whether this is a number, an array of NumPy, or a list of such, so that its range can be checked while tracing.

    All else, as an array that is traced, or what only `__jax_array__` makes one of, is for JAX to convert.
    """
    if isinstance(value, list | tuple):
        return all(map(_is_known, value))
    return isinstance(value, numbers.Number | np.generic | np.ndarray)
