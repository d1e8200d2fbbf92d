"""Every CUDA kernel once, for NVIDIA's compute-sanitizer: each operation, dtype and strategy, forward and backward.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

and likewise initcheck and synccheck. Not a test of pytest's: it needs a GPU, and the tool around it.
"""

import itertools

import jax
import jax.numpy as jnp

from jaxsoft._rows import row_operation

# (rows, n) by strategy: lanes of a warp, a block with 4 and with 8 packs a thread, tiled, split; n odd and even.
SHAPES = [(3, 5), (40, 33), (4, 128), (3, 1001), (2, 4096), (2, 20001), (2, 32768)]
SHAPES += [(280, 70001), (1, 100003), (2, 131072)]
DTYPES = ("float32", "bfloat16", "float16", "float64")


def main() -> None:
    """Runs them all. A wrong result is the test suite's to find; this only has to touch every kernel."""
    jax.config.update("jax_enable_x64", True)
    for (rows, n), dtype in itertools.product(SHAPES, DTYPES):
        x = jax.device_put(jnp.linspace(-4, 4, rows * n, dtype=dtype).reshape(rows, n))
        (y,) = row_operation("softmax", "ffi", x)
        _, m, s = row_operation("log_softmax", "ffi", x)
        row_operation("state", "ffi", x)
        row_operation("softmax_vjp", "ffi", y, x)
        row_operation("log_softmax_vjp", "ffi", x, m, s, y)
        jax.block_until_ready(row_operation("logsumexp_vjp", "ffi", x, m, s, s))
        print(rows, n, dtype, "ok", flush=True)
    print("all kernels ran")


if __name__ == "__main__":
    main()
