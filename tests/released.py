"""Uses jaxsoft where it was installed from a wheel, without any compiler: make check-wheel runs it.

Not a test of pytest's: it wants an environment of its own, in which nothing could be built.
"""

import ctypes
import importlib.metadata
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoft


def main() -> None:
    """Ends with an error if something that the wheel should have does not work."""
    compilers = [name for name in ("cc", "gcc", "g++", "clang", "nvcc", "ptxas", "ninja") if shutil.which(name)]
    if compilers:
        sys.exit(f"released.py: the PATH has {', '.join(compilers)}, which a user need not have")
    library = pathlib.Path(jaxsoft.__file__).parent / "lib"
    for platform in ("cpu", "cuda"):
        path = library / f"libjaxsoft_{platform}.so"
        ctypes.CDLL(str(path))
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    if (reason := jaxsoft.implementations()["ffi"]) is not None:
        sys.exit(f"released.py: no compiled kernels: {reason}")
    x = jax.random.normal(jax.random.key(0), (64, 1000))
    labels = jnp.arange(64)

    def loss(x):
        losses = jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, implementation="ffi")
        return jnp.mean(losses) + jnp.sum(jaxsoft.softmax(x, implementation="ffi") ** 2)

    def expected(x):
        return -jnp.mean(jax.nn.log_softmax(x)[labels, labels]) + jnp.sum(jax.nn.softmax(x) ** 2)

    for got, want in zip(jax.jit(jax.value_and_grad(loss))(x), jax.value_and_grad(expected)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    print(f"jaxsoft {importlib.metadata.version('jaxsoft')} works on {jax.default_backend()} with Python {sys.version}")


if __name__ == "__main__":
    main()
