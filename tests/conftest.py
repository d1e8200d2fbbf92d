"""Prepares the process that the tests run in: eight virtual devices on a CPU, and hypothesis without deadlines.

On a CPU most of the time goes into compiling what runs once, so LLVM is told not to optimise XLA's code. What XLA
itself makes of a program, and the C++ kernels, stay the same. Tracing makes many objects that live on in JAX's caches,
so Python looks for garbage seldom: that took a tenth of the time.

A run takes all cases but those that are marked slow, of a test that is marked `cover` those that cover its parameters,
and of one that is marked `costly` two, or as many as the mark says; `-m ""` asks for all.

A first call compiles, so a deadline would measure XLA; and examples are drawn the same way in every run, so that a
failure can be run again.
"""

import collections
import gc
import os

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
from covering import covering

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


@pytest.fixture
def interpreter(monkeypatch):
    """Has Pallas interpret the kernels of several warp groups, and look for races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxsoft.pallas_kernels import blocks

    monkeypatch.setattr(blocks, "INTERPRET", plgpu.InterpretGPUParams(detect_races=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow the cases of a test with the mark `cover` or `costly` that `covering` leaves out."""
    cases = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_test in cases.values():
        cover, costly = map(of_test[0].get_closest_marker, ("cover", "costly"))
        if cover or costly:
            names = cover.args if cover else ()
            limit = None if costly is None else costly.args[0] if costly.args else 2
            kept = covering([item.callspec.params for item in of_test], names, limit)
            for i, item in enumerate(of_test):
                if i not in kept:
                    item.add_marker("slow")


def pytest_collection_finish():
    """Leaves what was imported out of every search for garbage."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
