"""Loads and stores between memory and registers.

By default JAX refuses loads and stores whose accesses are not whole sectors of memory. Rows lie where they lie, so here
it is told that they need not be.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import versions


def load_as_is(ref: Any, layout: Any = None) -> jax.Array:
    """Loads what a reference to shared or global memory holds."""
    return versions.load(ref, layout=layout, optimized=False)


def load(ref: Any, layout: Any = None) -> jax.Array:
    """Loads it in f32."""
    return load_as_is(ref, layout).astype(jnp.float32)


def load_in_every_warp(ref: Any) -> jax.Array:
    """Loads 64 numbers, or a multiple of 128, in f32, so that every warp has all of them."""
    vector = 4 if ref.size % 128 == 0 else 2
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((32 * vector,), (vector,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )
    return load(ref, layout)


def store(ref: Any, value: jax.Array) -> None:
    """Stores f32 in global memory, in the dtype of the reference."""
    versions.store(ref, value.astype(ref.dtype))
