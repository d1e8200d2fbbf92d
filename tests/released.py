"""Uses jaxsoft where it was installed from a wheel, without any compiler: make check-wheel runs it.

    released.py                      expects the library for CPUs and none for CUDA
    released.py --cuda all           expects one for CUDA, with code for every GPU of jaxsoft/_core/gpus.py
    released.py --cuda 90a-virtual   expects one for CUDA, which was built for that

Not a test of pytest's: it wants an environment of its own, in which nothing could be built. It needs no GPU; a library
for CUDA is loaded and its kernels are registered all the same.
"""

import argparse
import ctypes
import importlib.metadata
import pathlib
import re
import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoft
from jaxsoft._core import gpus, library


def main() -> None:
    """Ends with an error if something that the wheel should have does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", metavar="ARCHITECTURES")
    cuda = parser.parse_args().cuda
    compilers = [name for name in ("cc", "gcc", "g++", "clang", "nvcc", "ptxas", "ninja") if shutil.which(name)]
    if compilers:
        sys.exit(f"released.py: the PATH has {', '.join(compilers)}, which a user need not have")
    if not pathlib.Path(jaxsoft.__file__).is_relative_to(sys.prefix):
        sys.exit(f"released.py: jaxsoft is not the installed one, but {jaxsoft.__file__}")

    for platform in ("cpu", "cuda") if cuda else ("cpu",):
        if reason := library.unavailable(platform):
            sys.exit(f"released.py: no compiled kernels for {platform}: {reason}")
        path = library.find(platform)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    if cuda:
        check_architectures(ctypes.CDLL(str(library.find("cuda"))), cuda)
    elif library.find("cuda"):
        sys.exit("released.py: the wheel has a library for CUDA, which it was to be built without")

    check_results()
    runpy.run_module("jaxsoft", run_name="__main__")
    print(f"jaxsoft {importlib.metadata.version('jaxsoft')} works on {jax.default_backend()} with Python {sys.version}")


def check_architectures(built: ctypes.CDLL, expected: str) -> None:
    """Compares what the library was built for with what was to be built."""
    built.jaxsoft_cuda_architectures.restype = ctypes.c_char_p
    text = built.jaxsoft_cuda_architectures().decode()
    major, minor = divmod(built.jaxsoft_cuda_runtime() // 10, 100)
    print(f"built by CUDA {major}.{minor} for {text}")
    if expected == "all":
        capabilities = sorted({gpu.capability for gpu in gpus.GPUS})
        if missing := [capability for capability in capabilities if not serves(text.split(), capability)]:
            sys.exit(f"released.py: the library for CUDA has no code for sm_{', sm_'.join(map(str, missing))}")
    elif text.split() != re.split("[; ]", expected):
        sys.exit(f"released.py: the library for CUDA was to be built for {expected}")
    if "90a" in text and "attention_forward" not in library.operations("cuda"):
        sys.exit("released.py: the library for CUDA has no attention")


def serves(architectures: list[str], capability: int) -> bool:
    """Whether a GPU can run the code for any of some architectures, which have CMake's names."""
    for name in architectures:
        number, _, kind = name.partition("-")
        architecture = int(number.rstrip("a"))
        # PTX runs on every later GPU, and machine code on those of the same major version, but neither of 90a.
        later = architecture < capability and not number.endswith("a")
        if architecture == capability or (later and (kind != "real" or architecture // 10 == capability // 10)):
            return True
    return False


def check_results() -> None:
    """Compares the kernels for CPUs with jax.nn."""
    x = jax.random.normal(jax.random.key(0), (64, 1000))
    labels = jnp.arange(64)

    def loss(x):
        losses = jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, implementation="ffi")
        return jnp.mean(losses) + jnp.sum(jaxsoft.softmax(x, implementation="ffi") ** 2)

    def expected(x):
        return -jnp.mean(jax.nn.log_softmax(x)[labels, labels]) + jnp.sum(jax.nn.softmax(x) ** 2)

    for got, want in zip(jax.jit(jax.value_and_grad(loss))(x), jax.value_and_grad(expected)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
