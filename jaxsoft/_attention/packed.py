"""A block of keys and values as one array, as it goes from device to device: one message instead of two.

Kernels that take such an array as it is find keys and values in it by themselves. For others it is cut into two.
"""

import jax
import jax.numpy as jnp

from jaxsoft._core.operation import Function


def pack(key: jax.Array, value: jax.Array) -> jax.Array:
    """Keys (B, S, K, H) and values (B, S, K, D), or gradients by them, as one array (2, B, S, K, H or D)."""
    key, value = _of_one_size(key, value)
    # Two copies into one array. XLA would make one program of them, which took twice as long on an H200.
    block = jax.lax.optimization_barrier(jax.lax.empty((2, *key.shape), key.dtype).at[0].set(key))
    return block.at[1].set(value)


def pack_type(key: jax.Array, value: jax.Array) -> jax.Array:
    """An array of the type of `pack`, over explicit axes of a mesh as well."""
    return jnp.stack(_of_one_size(key, value))


def _of_one_size(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the larger head size of both."""
    size = max(key.shape[-1], value.shape[-1])
    key, value = (jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),)) for x in (key, value))
    return key, value


def unpack(block: jax.Array, sizes: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Keys and values of such an array, of these head sizes."""
    return block[0, ..., : sizes[0]], block[1, ..., : sizes[1]]


def flat(block: jax.Array) -> jax.Array:
    """A block (2, B, S, K, H) as keys and values of a form that says `packed`: (2 B, S, K, H)."""
    return block.reshape(-1, *block.shape[2:])


def served(gives_gradients: bool, function: Function) -> Function:
    """A function of keys and values that are packed, given the one of separate keys and values.

    Args:
      gives_gradients: whether its results are gradients, of which those by key and value are the last.
      function: of query, key, value and others.
    """

    def call(query: jax.Array, key: jax.Array, value: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        batch = key.shape[0] // 2
        found = function(query, key[:batch], value[batch:], *others)
        if not gives_gradients:
            return found
        *before, of_key, of_value = found
        return *before, jnp.concatenate([of_key, of_value])

    return call
