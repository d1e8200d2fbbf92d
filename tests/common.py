"""What the tests share: the operations, implementations and dtypes that they run over, and how they call them."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jaxsoft
from jaxsoft._attention.choice import KERNELS as OF_ATTENTION
from jaxsoft._attention.choice import PAGED, unavailable
from jaxsoft._core import library, operation
from jaxsoft._core.implementations import REGISTERED

OPS = ("softmax", "log_softmax", "logsumexp")
# By name whatever can run on the default device: on a GPU the list is longer.
AVAILABLE = tuple(name for name, reason in jaxsoft.implementations().items() if reason is None)
# None, and those of row operations; of attention; and of attention over pages.
IMPLEMENTATIONS = (None, *(name for name in AVAILABLE if REGISTERED[name].rows))
_PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
ATTENTION_IMPLEMENTATIONS = (None, *(name for name in OF_ATTENTION if unavailable(name, _PLATFORM) is None))
PAGED_IMPLEMENTATIONS = tuple(name for name in ATTENTION_IMPLEMENTATIONS if name is None or name in PAGED)
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)

each_op = pytest.mark.parametrize("op", OPS)
# Tests that compile much run some dtypes and implementations only when asked to: pytest -m "". Such implementations are
# None, which is one of the others (test_arguments shows it), the reference, whose scans XLA compiles slowly, and xla.
slow = pytest.mark.slow
# log_softmax's derivatives are logsumexp's and one subtraction.
each_op_in_turn = pytest.mark.parametrize("op", ["softmax", pytest.param("log_softmax", marks=slow), "logsumexp"])
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name in (None, "xla", "reference") else (), id=str(name))
        for name in IMPLEMENTATIONS
    ],
)
# Without None and the reference even then.
each_fast_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name == "xla" else ())
        for name in IMPLEMENTATIONS
        if name not in (None, "reference")
    ],
)
each_dtype_in_turn = pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=slow if d in (jnp.float16, jnp.float64) else (), id=d.__name__) for d in DTYPES],
)


def some(values: Iterable, by_default: Iterable) -> list:
    """Values of a parameter, of which all but those of `by_default` run only when asked to."""
    kept = list(by_default)
    assert all(value in list(values) for value in kept)
    return [value if value in kept else pytest.param(value, marks=slow) for value in values]


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="checks the CPU's kernels")
needs_library = pytest.mark.skipif(library.find("cuda") is None, reason="libjaxsoft_cuda was not built")
# With an older JAX those for rows may be out of reach of its Pallas, and no call takes any without naming them.
pallas_is_tested = pytest.mark.skipif(
    REGISTERED["pallas"].by_name_only is not None, reason="Pallas kernels were run with JAX 0.11.2 and later alone"
)
# XLA of JAX 0.10 copies arrays that are donated, and what it loops over.
needs_little_memory = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA's of JAX 0.10 takes more memory")
on_gpu = pytest.mark.skipif(jax.default_backend() == "cpu", reason="checks the strategies of a GPU's kernels")


def interpreted(test: Callable) -> Callable:
    """Marks a test of Pallas kernels of several warp groups in Pallas's interpreter on a CPU.

    Every warp group is a thread of XLA's pool, which must have more of them than a block has warp groups. NPROC says
    how many it has, before JAX starts; otherwise there is one for each core.
    """
    few = max(os.cpu_count() or 1, int(os.environ.get("NPROC", "0"))) < 4
    test = pytest.mark.skipif(few, reason="the interpreter would wait for ever")(test)
    early = jax.__version_info__ < (0, 12)
    test = pytest.mark.skipif(early, reason="JAX 0.11's interpreter wants all phases of all barriers waited for")(test)
    return on_cpu(pytest.mark.usefixtures("interpreter")(test))


def ours(op: str, implementation: str | None = None, **options) -> Callable[..., jax.Array]:
    """jaxsoft's operation, over the last axis unless told otherwise."""
    return functools.partial(getattr(jaxsoft, op), **{"axis": -1, "implementation": implementation, **options})


def theirs(op: str, **options) -> Callable[..., jax.Array]:
    """jax.nn's operation, likewise."""
    return functools.partial(getattr(jax.nn, op), **{"axis": -1, **options})


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """JAX's default promotion, for what is not jaxsoft's: the suite runs under the strictest (see conftest)."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def served(implementation: str | None) -> Iterator[None]:
    """Runs a block that a named kernel may refuse, for a dtype or a length that it does not take.

    A refusal ends the block, and must say why, and what else there is. The implementations that take everything may
    not refuse; of "ffi" these are the operations on rows.
    """
    try:
        yield
    except ValueError as error:
        if implementation in (None, "xla", "reference") or (implementation == "ffi" and "attention" not in str(error)):
            raise
        what = rf"implementation='{implementation}' cannot serve this call: \S.+implementation=None always works.+'xla'"
        if not re.search(what, str(error), re.DOTALL):
            raise


@contextlib.contextmanager
def precision(dtype) -> Iterator[None]:
    """JAX's 64-bit mode for float64, its default mode for the others.

    JAX 0.10 splits calls over a mesh without the caller's context, so there it is set for the process.
    """
    wide = jnp.dtype(dtype) == jnp.float64
    if jax.__version_info__ >= (0, 11):
        with jax.enable_x64(wide):
            yield
        return
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", wide)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def forget_heads() -> None:
    """Lets the linear layer's code for one device be made again: JAX keeps that for each function."""
    operation._partitioned.cache_clear()
    jax.clear_caches()


def target(kind: str, multiprocessors: int = 132) -> contextlib.AbstractContextManager:
    """Lowers for a GPU of this kind and so many multiprocessors, which need not be here."""
    platform = {"platform": "gpu"} if jax.__version_info__ > (0, 10, 0) else {}
    device = AbstractDevice(device_kind=kind, num_cores=multiprocessors, **platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def pretend(monkeypatch, reason: str | None) -> None:
    """Lets "ffi" be there for CUDA, or not be there, for the choice of a kernel that is not run."""
    without = dataclasses.replace(REGISTERED["ffi"], unavailable=lambda platform: reason)
    monkeypatch.setitem(REGISTERED, "ffi", without)
    names = frozenset() if reason else library.operations("cpu")
    monkeypatch.setattr(library, "operations", lambda platform: names)


def operand(shape, dtype) -> jax.core.ShapedArray:
    """The type of an operand."""
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def rows(n: int, dtype, seed: int = 0, count: int | None = None) -> np.ndarray:
    """Rows of n normal numbers in `dtype`: plain, spread out, offset by 1e4 and by -1e4; more of them if short."""
    rng = np.random.default_rng([n, seed])
    count = count or (3 if n > 100_000 else 4 if n > 2000 else 13)
    x = rng.standard_normal((count, n), np.float32)
    i = np.arange(count)[:, None] % 4
    x = x * np.where(i == 1, 10, 1) + np.where(i == 2, 1e4, 0) - np.where(i == 3, 1e4, 0)
    return x.astype(dtype)


def loss(f: Callable[..., jax.Array], **options) -> Callable[[jax.Array], jax.Array]:
    """A scalar function of f's result, of which no derivative vanishes."""

    def total(x):
        y = f(x, **options)
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7))

    return total


def same_bits(a, b) -> bool:
    """Whether two pytrees of arrays hold the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
