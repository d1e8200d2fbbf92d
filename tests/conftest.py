"""Prepares the process that the tests run in: eight virtual devices on a CPU, and hypothesis without deadlines.

On a CPU most of the time goes into compiling what runs once, so LLVM is told not to optimise XLA's code. What XLA
itself makes of a program, and the C++ kernels, stay the same. Tracing makes many objects that live on in JAX's caches,
so Python looks for garbage seldom: that took a tenth of the time.

A run takes a quarter of the cases of a test, unless it asks for all by `-m ""`.

A first call compiles, so a deadline would measure XLA; and examples are drawn the same way in every run, so that a
failure can be run again.
"""

import collections
import gc
import os
import zlib

# Read when JAX first looks for devices; it means nothing to a GPU.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

if not os.path.exists("/dev/nvidiactl"):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# Several workers of pytest-xdist may share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

# What the strictest user of JAX sets: no dtype and no rank is promoted that the code does not promote by name.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if os.path.exists("/dev/nvidiactl"):  # where the operands of products would be rounded to 11 bits
    jax.config.update("jax_default_matmul_precision", "float32")

hypothesis.settings.register_profile("jaxsoft", deadline=None, max_examples=15, derandomize=True, database=None)
hypothesis.settings.register_profile(
    "fuzz", deadline=None, max_examples=10_000, print_blob=True, phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("jaxsoft")


# Files whose cases are not products of dtypes, operations, implementations and shapes: each is another thing, or they
# are picked already, as what is not slow.
EACH = ("test_arguments", "test_doctest", "test_documents", "test_every_function", "test_examples", "test_fuzz")
EACH += ("test_disable_jit", "test_higher_orders", "test_ring_arguments", "test_ring_attention")


@pytest.fixture
def interpreter(monkeypatch):
    """Has Pallas interpret the kernels of several warp groups, and look for races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxsoft.pallas_kernels import blocks

    monkeypatch.setattr(blocks, "INTERPRET", plgpu.InterpretGPUParams(detect_races=True))


def pytest_collection_modifyitems(config, items):
    """Keeps a quarter of a test's cases, and at least two: those that the checksum of their names picks.

    Cases are products, of which a checksum leaves some of each factor, the same in every run. A test that is named, and
    a run of all marks, keep all.
    """
    if config.option.markexpr != "not slow" or config.option.keyword or any("::" in arg for arg in config.args):
        return
    items_of = collections.defaultdict(list)
    for item in items:
        if item.path.stem not in EACH and not item.get_closest_marker("slow"):
            items_of[item.nodeid.split("[")[0]].append(item)
    left_out = set()
    for cases in items_of.values():
        ordered = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left_out.update(ordered[max(2, -(-len(cases) // 4)) :])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Leaves what was imported out of every search for garbage."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
