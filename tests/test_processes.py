"""A process of its own: what an import costs, and what it must have done for programs that another process made."""

import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from common import each_implementation, on_cpu, served
from jax.experimental import serialize_executable

import jaxsoft

X = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
LABELS = np.array([0, 1023, 5, 7])


def run(code: str, *arguments: str, **environment: str) -> str:
    """What another Python prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_of_the_sources():
    """In the folder of a clone, `import jaxsoft` finds what is not built. The error says what to do."""
    folder = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-c", "import jaxsoft"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "install it (pip install .), and start Python with -P" in done.stderr


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


def check(code, program, folder, implementation):
    """Runs a program in another process, and compares with this one."""
    (folder / "program").write_bytes(program)
    np.save(folder / "x.npy", X)
    run(code, *(str(folder / name) for name in ("program", "x.npy", "results.npz")))
    results = np.load(folder / "results.npz")
    value, gradient = jax.jit(every_kernel(implementation))(X)
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
        check(EXPORTED, exported.serialize(), tmp_path, implementation)


@each_implementation
def test_a_compiled_program(implementation, tmp_path):
    with served(implementation):
        compiled = jax.jit(every_kernel(implementation)).lower(X).compile()
        check(EXECUTABLE, pickle.dumps(serialize_executable.serialize(compiled)), tmp_path, implementation)


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
def test_disable_jit_in_the_environment():
    """As debuggers set it."""
    code = (
        "import jax, jaxsoft\n"
        "x = jax.numpy.ones((2, 3))\n"
        "print(jaxsoft.softmax(x)[0, 0], jax.grad(lambda x: jaxsoft.logsumexp(x))(x)[0, 0])"
    )
    p, dx = map(float, run(code, JAX_DISABLE_JIT="1").split())
    np.testing.assert_allclose([p, dx], [1 / 3, 1 / 6], rtol=1e-6)
