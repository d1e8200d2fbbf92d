"""`jaxsoft.explain`, the logger and the metadata of programs: what serves each operation, and why what comes before it
does not.

GPUs are lowered for that are not here, with a library that is pretended to be there. What attention says of its kernels
is tested in test_attention_choice and test_cuda_plans.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import on_cpu, pallas_is_tested, target
from common import pretend as pretend_rows
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices

import jaxsoft
from jaxsoft import pallas_kernels
from jaxsoft._attention.ffi import TARGETS
from jaxsoft._core import library
from jaxsoft._core.implementations import PREFERENCE, REGISTERED, collected

H100 = "NVIDIA H100 80GB HBM3"
needs_cpu_library = pytest.mark.skipif(
    library.unavailable("cpu") is not None, reason="libjaxsoft_cpu says what the plans are"
)


def types(*shapes, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def found(f, *operands):
    """The choices by the operation's name."""
    choices = jaxsoft.explain(f, *operands).choices
    for choice in choices:
        before = list(choice.reasons)
        assert choice.implementation not in before and all(choice.reasons.values()), choice
        assert "\n" not in f"{choice}{choice.kernel}"
    return {choice.operation: choice for choice in choices}


@pytest.fixture
def on_h100(monkeypatch):
    """Lowers for an H100 whose library has every kernel."""
    pretend_rows(monkeypatch, None)
    others = {"sample", "weight_gradient_in_place", *(of_attention.name for of_attention in TARGETS)}
    names = library.operations("cpu") | others
    monkeypatch.setattr(library, "operations", lambda platform: names)
    find = library.find
    monkeypatch.setattr(library, "find", lambda platform: find("cpu"))
    with target(H100):
        yield


def training_step(hidden, weight, teacher, labels):
    """The gradients of a loss of distillation."""

    def loss(hidden, weight):
        logits = jaxsoft.softmax(hidden)[..., :1] + hidden @ weight
        of_labels = jaxsoft.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(of_labels + jaxsoft.softmax_kl_divergence(jax.lax.stop_gradient(teacher), logits, scale=0.5))

    return jax.grad(loss, (0, 1))(hidden, weight)


def decode_step(query, keys, logits):
    attended = jaxsoft.dot_product_attention(query, keys, keys)
    return attended, jaxsoft.top_k_softmax(logits, 50), jaxsoft.random.sample(jax.random.key(0), logits, top_p=0.9)


STEP = [*types((64, 128), (128, 256), (64, 256)), jax.ShapeDtypeStruct((64,), jnp.int32)]
DECODE = types((2, 1, 4, 64), (2, 256, 4, 64), (2, 32000))


def test_a_training_step_here():
    """Each operation is named once, in the order of the program, with an implementation that is available."""
    step = found(training_step, *STEP)
    expected = ["softmax", "label_state", "kl_divergence", "kl_divergence_vjp_other", "label_state_vjp", "softmax_vjp"]
    assert sorted(step) == sorted(expected)
    for choice in step.values():
        assert jaxsoft.implementations()[choice.implementation] is None
    text = str(jaxsoft.explain(training_step, *STEP))
    assert len(text.splitlines()) >= len(step) and "kl_divergence_vjp_other" in text
    assert repr(jaxsoft.explain(lambda x: x + 1, np.ones(3, np.float32))) == "no operation of jaxsoft"


def test_what_is_compiled_already():
    f = jax.jit(lambda x: jaxsoft.softmax(x))
    x = jnp.ones((3, 40))
    f(x)
    assert [*found(f, x)] == ["softmax"] == [*found(f, x)]


@on_cpu
@needs_cpu_library
@pallas_is_tested
def test_a_training_step_on_a_gpu(on_h100):
    """The kernels' names and plans; nothing comes before the fastest."""
    step = found(training_step, *STEP)
    assert step["softmax"].kernel == "register_row: rows in registers, 2 packs of 16 bytes a thread"
    assert step["kl_divergence"].kernel.startswith("kl_divergence: one read")
    for choice in step.values():
        assert choice.kernel and choice.implementation == "ffi", choice
    x = types((4096, 128256))
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)
    long = found(jax.grad(lambda x, y: jaxsoft.softmax_cross_entropy_with_integer_labels(x, y).sum()), *x, labels)
    assert long["label_state"].kernel.startswith("jaxsoft_state_tiled: ")
    assert long["label_state"].implementation == "pallas" and not long["label_state"].reasons


@on_cpu
@needs_cpu_library
@pytest.mark.parametrize(
    ("dtype", "n", "cap", "packs"),
    [("bfloat16", 12288, None, 8), ("bfloat16", 12288, 30.0, 4), ("float32", 600, 30.0, 8)],
)
def test_losses_with_a_mask_and_a_cap_on_a_gpu(on_h100, dtype, n, cap, packs):
    """The kernels' table knows calls with a cap from those with other extras."""

    def loss(x, labels, where):
        return jaxsoft.softmax_cross_entropy_with_integer_labels(
            x, labels, where=where, logits_soft_cap=cap, implementation="ffi"
        )

    operands = *types((4096, n), dtype=dtype), *types((4096,), dtype=jnp.int32), *types((4096, n), dtype=bool)
    kernel = found(loss, *operands)["label_state"].kernel
    assert kernel == f"register_row: rows in registers, {packs} packs of 16 bytes a thread"


@on_cpu
@needs_cpu_library
def test_a_decode_step_on_a_gpu(on_h100):
    step = found(decode_step, *DECODE)
    assert step["attention"].kernel.startswith("decode_few_rows: ")
    assert step["top_k"].kernel.startswith("top_k_by_")
    assert step["sample"].implementation == "ffi" and step["sample"].kernel


@on_cpu
@needs_cpu_library
def test_rows_that_are_composed(on_h100):
    """A kernel that takes one dtype gets scores that are converted before, and the table says so."""
    x, (y,) = *types((64, 300)), types((64, 300), dtype=jnp.float32)
    kernel = found(jaxsoft.softmax_kl_divergence, x, y)["kl_divergence"].kernel
    assert kernel == "kl_divergence: one read of all arrays, of scores that XLA writes before"


@on_cpu
@needs_cpu_library
def test_plans_follow_the_gpu(on_h100):
    """Of rows, for a GPU with fewer multiprocessors."""
    x = jax.ShapeDtypeStruct((2, 1 << 22), jnp.float32)
    plans = set()
    for kind, number in ((H100, 132), ("NVIDIA H20", 78)):
        with target(kind, number):
            plans.add(found(lambda x: jaxsoft.entropy(x, implementation="ffi"), x)["entropy"].kernel)
    assert len(plans) == 2, plans


@on_cpu
@needs_cpu_library
@pallas_is_tested
def test_reasons(on_h100, monkeypatch):
    """Why an implementation does not serve, in terms of the call."""
    (x,) = types((64, 32000))
    names = library.operations("cuda")
    choice = found(lambda x: jaxsoft.top_k_softmax(x, 300), x)["top_k"]
    assert choice.reasons["ffi"] == "it finds up to 256 elements of a row, not 300"
    assert choice.reasons["pallas"] == "it has no kernel for top_k"
    monkeypatch.setattr(library, "operations", lambda platform: names - {"entropy", "softmax"})
    assert found(jaxsoft.entropy, x)["entropy"].reasons == {
        "ffi": "it has no kernel for entropy in its library for cuda",
        "pallas": "it has no kernel for entropy",
        "triton": jaxsoft.implementations("cuda")["triton"],
    }
    odd = jax.ShapeDtypeStruct((64, 128257), jnp.bfloat16)
    assert found(jaxsoft.softmax, odd)["softmax"].reasons["pallas"] == (
        "long rows must be a multiple of 16 bytes, the alignment of bulk copies; got n=128257 of bfloat16"
    )
    strided = found(lambda x: jaxsoft.softmax(x, 0), x)["softmax"]
    assert strided.reasons["pallas"] == "its kernel for softmax does not take rows with an axis that is not the last"
    pretend_rows(monkeypatch, "libjaxsoft_cuda was not built; build it")
    assert found(jaxsoft.softmax, x)["softmax"].reasons == {"ffi": "libjaxsoft_cuda was not built; build it"}


@on_cpu
@needs_cpu_library
@pallas_is_tested
def test_linear_layers(on_h100):
    """Pallas keeps scores in registers, with reasons where it does not; the in-place product has a line of its own."""
    hidden, weight = types((4096, 256), (256, 8192))
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)

    def losses(h, w, y, **options):
        return jnp.sum(jaxsoft.linear_softmax_cross_entropy(h, w, y, **options))

    both = found(jax.grad(losses, (0, 1)), hidden, weight, labels)
    assert both["linear_statistics"].kernel.startswith("jaxsoft_head_statistics: tiles of 128 rows and 256 classes")
    assert both["linear_gradients"].kernel.startswith("jaxsoft_head_gradients: ")
    for options, of, reason in (
        ({"chunk_size": 512}, "linear_statistics", "chunk_size and recompute=False"),
        ({"reduction": "mean"}, "linear_loss", "by XLA's products"),
    ):
        choice = found(jax.grad(lambda h, w, y, o=options: losses(h, w, y, **o), (0, 1)), hidden, weight, labels)[of]
        assert choice.implementation == "xla" and reason in choice.reasons["pallas"]
    few = found(losses, hidden.update(shape=(16, 256)), weight, jax.ShapeDtypeStruct((16,), jnp.int32))
    assert "less than 17 rows" in few["linear_statistics"].reasons["pallas"]
    hidden, weight = types((4096, 4096), (4096, 128256))
    mean = found(jax.grad(lambda h, w, y: losses(h, w, y, reduction="mean"), (0, 1)), hidden, weight, labels)
    assert mean["weight_gradient"].implementation == "ffi" and mean["weight_gradient"].kernel


@on_cpu
@needs_cpu_library
def test_by_name_only(on_h100, monkeypatch):
    """Kernels that never ran with a version of JAX serve the calls that name them, and the others say why not."""
    never_run = dataclasses.replace(REGISTERED["pallas"], by_name_only="its kernels never ran")
    monkeypatch.setitem(REGISTERED, "pallas", never_run)
    monkeypatch.setattr(pallas_kernels, "BY_NAME_ONLY", never_run.by_name_only)
    pretend_rows(monkeypatch, "libjaxsoft_cuda was not built")
    q, (x,), (weight,) = types((1, 256, 2, 64))[0], types((64, 256)), types((256, 8192))

    def of_rows(x, implementation=None):
        return jaxsoft.softmax(x, implementation=implementation)

    def attention(q, implementation=None):
        return jaxsoft.dot_product_attention(q, q, q, is_causal=True, implementation=implementation)

    for f, operand in ((of_rows, x), (attention, q)):
        (choice,) = found(f, operand).values()
        assert choice.implementation != "pallas" and choice.reasons["pallas"] == "its kernels never ran"
        if f is attention or pallas_kernels.unsupported([x]) is None:
            for names in ("pallas", ("pallas", "triton")):
                (choice,) = found(functools.partial(f, implementation=names), operand).values()
                assert choice.implementation == "pallas"
    loss = found(lambda x, w: jaxsoft.linear_softmax_cross_entropy(x, w, np.zeros(64, int)), x, weight)
    assert loss["linear_statistics"].reasons == {"pallas": "its kernels never ran"}


def test_the_tuple_form():
    """One of several has to serve, those that are preferred first; else the error has a reason for each."""
    x = jnp.ones((3, 40))
    for names in (("xla", "reference"), ["reference", "xla"], ("reference",)):
        (choice,) = found(lambda x, names=names: jaxsoft.softmax(x, implementation=names), x).values()
        assert choice.implementation == ("xla" if "xla" in names else "reference") and not choice.reasons
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    first = next(name for name in PREFERENCE[platform] if jaxsoft.implementations()[name] is None)
    (choice,) = found(lambda x: jaxsoft.softmax(x, implementation=("reference", first)), x).values()
    assert choice.implementation == first
    if platform == "cpu":
        with pytest.raises(
            ValueError, match=r"\('triton', 'pallas'\) cannot serve this call: .*triton: .+; pallas: .+"
        ):
            jaxsoft.softmax(x, implementation=("triton", "pallas"))
        (choice,) = found(lambda x: jaxsoft.softmax(x, implementation=("pallas", "xla")), x).values()
        assert choice.implementation == "xla"


def test_the_logger(caplog):
    """Each choice is a line of the logger "jaxsoft" at level DEBUG while a program is compiled."""
    x = np.ones((5, 41), np.float32)
    with caplog.at_level(logging.DEBUG, "jaxsoft"):
        jax.jit(lambda x: jaxsoft.entropy(x, implementation="xla") + 1)(x)
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxsoft"]
    assert lines == ["entropy: xla"]
    caplog.clear()
    jax.jit(lambda x: jaxsoft.entropy(x, implementation="xla") + 2)(x)
    assert not [record for record in caplog.records if record.name == "jaxsoft"]


def test_the_environment():
    """JAXSOFT_LOG=choice has the lines written to stderr, and nothing else is by default."""
    program = "import jax, jaxsoft; jaxsoft.softmax(jax.numpy.ones((3, 5)), implementation='xla')"
    package = str(pathlib.Path(jaxsoft.__file__).parents[1])
    for value in ("choice", ""):
        environment = {**os.environ, "PYTHONPATH": package, "JAX_PLATFORMS": "cpu", "JAXSOFT_LOG": value}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("DEBUG:jaxsoft:softmax: xla" in done.stderr) == bool(value), done.stderr


def test_static_arguments():
    """What is no array stays as it is: options, and what a function that is compiled already takes as static."""
    x, jitted = np.ones((4, 8), np.float32), jax.jit(jaxsoft.softmax, static_argnums=1)
    for explained in (
        jaxsoft.explain(jitted, x, -1),
        jaxsoft.explain(jaxsoft.softmax, x, axis=0, is_causal=False, implementation="xla"),
        jaxsoft.explain(lambda x, options: jaxsoft.softmax(x[0], **options), [x], {"axis": (0, 1), "where": None}),
    ):
        assert [choice.operation for choice in explained.choices] == ["softmax"]


def test_two_collect_at_once():
    with contextlib.ExitStack() as first:
        one = first.enter_context(collected())
        with collected() as other:
            first.close()  # both have found the same, which is nothing
            jax.jit(lambda x: jaxsoft.softmax(x)).lower(np.ones(3, np.float32))
    assert not one and len(other) == 1


def test_metadata():
    """Where a profiler shows it: the operation, the implementation, and the kernel's name."""
    x = np.ones((5, 43), np.float32)
    text = jax.jit(lambda x: jaxsoft.softmax(x)).lower(x).compile().as_text()
    (choice,) = found(jaxsoft.softmax, x).values()
    assert choice.scope.startswith(f"softmax.{choice.implementation}")
    assert f"/{choice.scope}/" in text


@on_cpu
@needs_cpu_library
def test_metadata_of_a_gpu(on_h100):
    lowered = jax.jit(jaxsoft.softmax).trace(*types((64, 1000))).lower(lowering_platforms=("cuda",))
    assert "softmax.ffi.register_row" in lowered.as_text(debug_info=True)


@needs_devices
@pytest.mark.parametrize("spec", [P("a"), P(None, "b")], ids=str)
def test_over_a_mesh(spec):
    """What each device does, which is known when the program is compiled."""
    mesh = mesh_of(AxisType.Auto)
    x = jax.device_put(np.ones((8, 64), np.float32), NamedSharding(mesh, spec))
    choices = found(jaxsoft.softmax, x)
    assert {*choices} == ({"softmax"} if spec == P("a") else {"state", "logsumexp_vjp"})
