"""The table of GPUs, and that plans of kernels follow from it: a GPU with fewer multiprocessors has other plans."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import on_cpu, pallas_is_tested, target

import jaxsoft
from jaxsoft._core import gpus
from jaxsoft._core.gpus import Generation
from jaxsoft._rows.operations.softmax import SOFTMAX
from jaxsoft.pallas_kernels.attention import backward_plan
from jaxsoft.pallas_kernels.attention import plan as attention_plan
from jaxsoft.pallas_kernels.head import plan as head_plan
from jaxsoft.pallas_kernels.rows import plan as row_plan
from jaxsoft.pallas_kernels.rows import sizes

FEWER = {"NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114, "NVIDIA H20": 78}


@pytest.mark.parametrize(
    "kind, capability",
    [
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A10G", 86),
        ("NVIDIA RTX A6000", 86),
        ("NVIDIA L4", 89),
        ("NVIDIA L40S", 89),
        ("NVIDIA GeForce RTX 4090", 89),
        ("NVIDIA H100 PCIe", 90),
        ("NVIDIA H200", 90),
        ("NVIDIA GH200 480GB", 90),
        ("NVIDIA B200", 100),
        ("NVIDIA GeForce RTX 5090", 120),
        ("Tesla T4", None),
        ("Quadro RTX 5000", None),
        ("Quadro RTX 4000", None),
        ("Quadro RTX 3000", None),
        ("NVIDIA TITAN V", None),
    ],
)
@on_cpu
def test_compute_capabilities(kind, capability):
    with target(kind):
        [(found, gpu)] = gpus.targets().items()
        assert found == kind and (gpu and gpu.capability) == capability
        assert gpus.target() == gpu


@on_cpu
def test_multiprocessors():
    """As the device says, and as the table says where it does not."""
    for kind, number in FEWER.items():
        with target(kind, None):
            assert gpus.multiprocessors() == number
        with target(kind, 99):
            assert gpus.multiprocessors() == 99 and gpus.generation() is Generation.HOPPER
    assert gpus.target() is None and gpus.generation() is None
    assert gpus.assumed() == gpus.H200


def test_several_gpus(monkeypatch):
    """Of alike ones, that with the fewest multiprocessors is planned for."""
    few = dataclasses.replace(gpus.H200, multiprocessors=78)
    monkeypatch.setattr(gpus, "present", lambda: {"NVIDIA H200": gpus.H200, "NVIDIA H20": few})
    assert gpus.target() == few
    monkeypatch.setattr(gpus, "present", lambda: {"NVIDIA H200": gpus.H200, "NVIDIA L4": gpus.of_kind("NVIDIA L4")})
    assert gpus.target() is None


@on_cpu
def test_plans_follow_the_multiprocessors():
    """Clusters that take rows in turn, and chunks of classes."""
    clusters, chunks = set(), set()
    for kind, number in FEWER.items():
        with target(kind, number):
            found = row_plan.tiled(sizes.target(), SOFTMAX, 4096, 256 << 10, 4)
            assert found and found.clusters * found.cluster <= number
            clusters.add(found.clusters)
            chunks.add(head_plan.chunk_size(1024))
    assert len(clusters) == len(chunks) == len(FEWER)


@on_cpu
@pallas_is_tested
def test_programs_follow_the_multiprocessors():
    """Pallas's kernels of rows, attention and a linear layer, lowered for GPUs that are not here."""

    def text(function, *shapes, dtype=jnp.bfloat16):
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()

    def head(hidden, weight):
        labels = np.zeros(hidden.shape[0], np.int32)
        return jaxsoft.linear_softmax_cross_entropy(hidden, weight, labels)

    programs = (
        lambda: text(lambda x: jaxsoft.softmax(x, implementation="pallas"), (4096, 256 << 10), dtype=jnp.float32),
        lambda: text(
            lambda *qkv: jaxsoft.dot_product_attention(*qkv, is_causal=True, implementation="pallas"),
            *[(4, 2048, 16, 64)] * 3,
        ),
        lambda: text(head, (4096, 256), (256, 8192)),
    )
    for program in programs:
        found = set()
        for kind, number in FEWER.items():
            with target(kind, number):
                found.add(program())
        assert len(found) == len(FEWER)


def test_tables_have_sizes_that_fit():
    """Each generation that a table has is one whose blocks have the shared memory of its plans."""
    for generation, plans in attention_plan.FORWARD.items():
        gpu = next(gpu for gpu in gpus.GPUS if gpu.generation is generation)
        for size, plan in (plans | attention_plan.FORWARD_CAUSAL.get(generation, {})).items():
            assert plan.shared_bytes(size, size) <= gpu.shared_bytes
        for size, plan in backward_plan.QUERY_PLANS[generation].items():
            assert plan.shared_bytes(size, size) <= gpu.shared_bytes
