"""Calls of the CUDA kernels for attention as XLA makes them, without jaxsoft's functions around them."""

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, N, K, H = 2, 3, 40, 4, 2, 64
PAGES, PAGE, OF_SEQUENCE = 7, 16, 3
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
ARRAYS = {
    "query": ((B, T, N, H), BF16),
    "key": ((B, S, K, H), BF16),
    "value": ((B, S, K, H), BF16),
    "block": ((2, B, S, K, H), BF16),
    "key_pages": ((PAGES, PAGE, K, H), BF16),
    "value_pages": ((PAGES, PAGE, K, H), BF16),
    "page_table": ((B, OF_SEQUENCE), I32),
    "bias": ((B, N, T, S), F32),
    "mask": ((B, N, T, S), np.bool_),
    "query_segments": ((B, T), I32),
    "key_segments": ((B, S), I32),
    "query_begins": ((B,), I32),
    "query_lengths": ((B,), I32),
    "key_lengths": ((B,), I32),
    "offset": ((B,), I32),
    "sinks": ((B, N), F32),
    "key_scale": ((K,), F32),
    "value_scale": ((K,), F32),
    "state_output": ((B, T, N, H), F32),
    "state_lse": ((B, N, T), F32),
    "query_sum": ((B, T, N, H), F32),
    "key_sum": ((B, S, K, H), F32),
    "value_sum": ((B, S, K, H), F32),
    "lse": ((B, N, T), F32),
    "delta": ((B, N, T), F32),
    "cotangent": ((B, T, N, H), BF16),
    "output": ((B, T, N, H), BF16),
    "lse_residual": ((B, N, T), F32),
    "max_logits": ((B, N), F32),
    "output_residual": ((B, T, N, H), BF16),
    "workspace": ((1,), jnp.uint8),
}
ATTRIBUTES = {
    "extras": "",
    "results": "",
    "scale": np.float64(0.125),
    "cap": np.float64(0),
    "left": np.int64(-1),
    "right": np.int64(-1),
    "deterministic": np.bool_(True),
}


def call(target, operands, wanted, changed=None, **attributes):
    """Calls a target with zeros for the operands of these names, and results of these names.

    Args:
      target: the name of the target, after "jaxsoft_".
      operands: the names of the operands.
      wanted: the names of the results, without the workspace.
      changed: the shapes and dtypes of arrays that are not as in ARRAYS: by the name of an operand, and for a result by
        the name with a star.
      attributes: those that are not as in ATTRIBUTES.
    """
    types = ARRAYS | (changed or {})
    given = [jnp.zeros(*types[name]) for name in operands]
    results = [jax.ShapeDtypeStruct(*types.get(f"{name}*", ARRAYS[name])) for name in (*wanted, "workspace")]
    run = jax.ffi.ffi_call(f"jaxsoft_{target}", results)
    return jax.block_until_ready(run(*given, **ATTRIBUTES | attributes))
