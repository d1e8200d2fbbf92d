"""A process of its own: what an import costs, and what it must have done for programs that another process made."""

import os
import pathlib
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from common import each_implementation, on_cpu, served
from jax.experimental import serialize_executable
from meshes import needs_devices

import jaxsoft

ROOT = pathlib.Path(__file__).parents[1]
X = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
LABELS = np.array([0, 1023, 5, 7])


def run(code: str, *arguments: str, cwd: pathlib.Path | None = None, **environment: str) -> str:
    """What another Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# In the clone's folder, as if nothing was installed.
UNBUILT = """
import importlib.metadata, runpy, sys
def not_installed(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.distribution = not_installed
import jaxsoft, jax, numpy as np
print(jaxsoft.__file__)
x = np.ones((2, 4), np.float32)
np.testing.assert_allclose(jaxsoft.softmax(x), x / 4)
np.testing.assert_allclose(jax.grad(lambda x: jaxsoft.dot_product_attention(x, x, x).sum())(x[:, None]), 1, rtol=1e-6)
runpy.run_module("jaxsoft", run_name="__main__")
"""


def test_import_of_the_sources():
    """A clone works without being installed or built, and says what is missing."""
    printed = run(UNBUILT, cwd=ROOT, PYTHONPATH="", JAX_PLATFORMS="cpu")
    assert printed.startswith(str(ROOT / "jaxsoft"))
    assert f"jaxsoft {jaxsoft.__version__}, jax {jax.__version__}, on cpu" in printed
    assert re.search("ffi +not available: libjaxsoft_cpu was not built; install jaxsoft from its source tree", printed)
    assert re.search("pallas +not available: Pallas Mosaic GPU kernels run on NVIDIA GPUs only", printed)
    assert re.search("xla +available", printed)


def test_import_of_the_sources_where_the_package_is_installed():
    """The clone's files are used, and the libraries that were built when it was installed."""
    code = "import jaxsoft; print(jaxsoft.__file__, jaxsoft._core.library.find('cpu'))"
    file, library = run(code, cwd=ROOT).split()
    assert file == str(ROOT / "jaxsoft/__init__.py")
    assert library == str(jaxsoft._core.library.find("cpu"))


def every_kernel(implementation):
    """A function whose program calls every kernel that an implementation has."""

    def f(x):
        def total(x):
            parts = [getattr(jaxsoft, op)(x, -1, implementation=implementation) for op in ("softmax", "log_softmax")]
            parts += [jaxsoft.logsumexp(x, -1, implementation=implementation)]
            for smoothing in (0.0, 0.1):
                parts.append(
                    jaxsoft.softmax_cross_entropy_with_integer_labels(
                        x, LABELS, label_smoothing=smoothing, implementation=implementation
                    )
                )
            parts.append(jaxsoft.top_k_softmax(x, 3, implementation=implementation)[1])
            return sum(jnp.sum(jnp.sin(v)) for v in parts)

        return jax.value_and_grad(total)(x)

    return f


# Nothing but an import stands between the start and the program.
EXPORTED = """
import sys, jax, numpy as np
import jaxsoft
value, gradient = jax.export.deserialize(open(sys.argv[1], "rb").read()).call(np.load(sys.argv[2]))
np.savez(sys.argv[3], value=value, gradient=gradient)
"""
EXECUTABLE = """
import pickle, sys, jax, numpy as np
import jaxsoft
from jax.experimental import serialize_executable
program = pickle.load(open(sys.argv[1], "rb"))
loaded = serialize_executable.deserialize_and_load(*program, execution_devices=jax.devices()[:1])
value, gradient = loaded(np.load(sys.argv[2]))
np.savez(sys.argv[3], value=value, gradient=gradient)
"""


def check(code, program, folder, expected):
    """Runs a program in another process, and compares with what it gave in this one."""
    (folder / "program").write_bytes(program)
    np.save(folder / "x.npy", X)
    run(code, *(str(folder / name) for name in ("program", "x.npy", "results.npz")))
    results = np.load(folder / "results.npz")
    value, gradient = expected
    np.testing.assert_allclose(results["value"], value, rtol=1e-6)
    np.testing.assert_allclose(results["gradient"], gradient, rtol=1e-5, atol=1e-6)


@each_implementation
def test_an_exported_program(implementation, tmp_path):
    with served(implementation):
        targets = [
            *(f"jaxsoft_{name}" for name in jaxsoft._core.library.operations("cpu")),
            "mosaic_gpu_v2",
            "triton_kernel_call",
        ]
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
        exported = jax.export.export(jax.jit(every_kernel(implementation)), disabled_checks=checks)(X)
        check(EXPORTED, exported.serialize(), tmp_path, jax.jit(every_kernel(implementation))(X))


@each_implementation
def test_a_compiled_program(implementation, tmp_path):
    with served(implementation):
        compiled = jax.jit(every_kernel(implementation)).lower(X).compile()
        check(EXECUTABLE, pickle.dumps(serialize_executable.serialize(compiled)), tmp_path, compiled(X))


# The caps make programs that differ in nothing but what Python does when a call is split.
OVER_A_MESH = """
import sys, jax, jax.numpy as jnp, numpy as np
import jaxsoft
from jax.sharding import NamedSharding, PartitionSpec as P
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
place = lambda x, *spec: jax.device_put(np.asarray(x, np.float32), NamedSharding(mesh, P(*spec)))
x, labels = np.linspace(-50, 50, 16 * 64).reshape(16, 64), np.arange(16)
query = np.sin(x).reshape(8, 16, 1, 8)
results = {}
for cap in (5.0, 30.0):
    def loss(x):
        return jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, logits_soft_cap=cap)
    results[f"loss {cap}"] = jax.jit(loss)(place(x, None, "d"))
    def linear(x):
        return jaxsoft.linear_softmax_cross_entropy(x, place(np.eye(64), None, "d"), labels, logits_soft_cap=cap)
    results[f"linear {cap}"] = jax.jit(linear)(place(x))
    def attention(q):
        return jaxsoft.dot_product_attention(q, q, q, logits_soft_cap=cap, implementation="reference")
    results[f"attention {cap}"] = jax.jit(attention)(place(query, "d"))
np.savez(sys.argv[1], misses=events.count("cache_misses"), hits=events.count("cache_hits"), **results)
"""


@on_cpu
@needs_devices
def test_programs_over_a_mesh_are_found_again(tmp_path):
    """The persistent cache of compiled programs, where its keys leave Python's pointers out: none is another's."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for name in ("first.npz", "second.npz"):
        run(OVER_A_MESH, str(tmp_path / name), **cache)
    first, second = (dict(np.load(tmp_path / name)) for name in ("first.npz", "second.npz"))
    assert second.pop("misses") == 0 < first.pop("misses") and first.pop("hits") < second.pop("hits")
    x = np.linspace(-50, 50, 16 * 64, dtype=np.float32).reshape(16, 64)
    for cap in (5.0, 30.0):
        want = jaxsoft.softmax_cross_entropy_with_integer_labels(x, np.arange(16), logits_soft_cap=cap)
        for results in (first, second):
            np.testing.assert_allclose(results[f"loss {cap}"], want, rtol=1e-5)
            np.testing.assert_allclose(results[f"linear {cap}"], want, rtol=1e-5)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_import_is_quick():
    """It adds little to JAX's own: what Pallas and Triton take waits for a kernel. Of several, the quickest."""
    code = (
        "import sys, time; start = time.perf_counter(); import jax; middle = time.perf_counter(); import jaxsoft\n"
        "print(middle - start, time.perf_counter() - middle)\n"
        "late = {'jax.extend', 'jax.experimental.pallas', 'jax.experimental.mosaic.gpu', 'jax_triton', 'triton'}\n"
        "print(late & {*sys.modules})"
    )
    runs = [run(code, PYTHONDONTWRITEBYTECODE="").splitlines() for _ in range(3)]  # the first may have to compile
    times, modules = zip(*runs, strict=True)
    assert modules[0] == "set()"
    jaxs, ours = (min(v) for v in zip(*(map(float, t.split()) for t in times), strict=True))
    assert ours < 0.1 * jaxs


@on_cpu
def test_nothing_is_compiled_twice():
    """Neither what calls jaxsoft first, nor what was compiled before: JAX's caches stay as they are."""
    code = (
        "import jax, jaxsoft\n"
        "x, q = jax.numpy.ones((2, 3)), jax.numpy.ones((1, 4, 1, 8))\n"
        "traced = []\n"
        "before = jax.jit(lambda x: traced.append('before') or x + 1)\n"
        "def losses(x):\n"
        "    traced.append('losses')\n"
        "    labels = jax.numpy.zeros(2, int)\n"
        "    y = jaxsoft.softmax(x).sum() + jaxsoft.linear_softmax_cross_entropy(x, x.T, labels).sum()\n"
        "    return y + jaxsoft.dot_product_attention(q * y, q, q).sum()\n"
        "grad = jax.jit(jax.grad(losses))\n"
        "for _ in range(2): before(x), grad(x)\n"
        "print(traced)"
    )
    assert run(code).split() == ["['before',", "'losses']"]


@on_cpu
def test_disable_jit_in_the_environment():
    """As debuggers set it."""
    code = (
        "import jax, jaxsoft\n"
        "x = jax.numpy.ones((2, 3))\n"
        "print(jaxsoft.softmax(x)[0, 0], jax.grad(lambda x: jaxsoft.logsumexp(x))(x)[0, 0])"
    )
    p, dx = map(float, run(code, JAX_DISABLE_JIT="1").split())
    np.testing.assert_allclose([p, dx], [1 / 3, 1 / 6], rtol=1e-6)
