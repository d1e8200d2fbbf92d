"""The Pallas kernels of attention's gradients without a GPU: interpreted on a CPU, and lowered for a GPU elsewhere.

NPROC=8 in the environment lets the interpreter run on a machine of few cores (`common.interpreted` says why).
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import interpreted, target

from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft.pallas_kernels.attention import backward

SEGMENTS = (Extra.QUERY_SEGMENTS, Extra.KEY_SEGMENTS)
LENGTHS = (Extra.QUERY_LENGTHS, Extra.KEY_LENGTHS, Extra.OFFSET)
HEADS = [(64, 64), (128, 128), (256, 256), (32, 32), (96, 96), (192, 128), (40, 72), (160, 160)]


def form_of(extras=(), **limits):
    return AttentionForm(np.dtype(jnp.bfloat16), 0.2, extras=extras, **limits)


def operands_of(form, queries, keys, head=32, value=32, mask_queries=1, bias_dtype=np.float32, offset=0.0):
    """Two entries of the batch, two query heads and a key head. The offset is added to the bias."""
    rng, dtype = np.random.default_rng(queries), jnp.bfloat16
    number = {Extra.QUERY_LENGTHS: queries, Extra.KEY_LENGTHS: keys, Extra.OFFSET: 9}
    shapes = {Extra.BIAS: (1, 2, queries, keys), Extra.MASK: (2, 1, mask_queries, keys)}
    operands = [
        rng.standard_normal((2, n, heads, size)).astype(dtype)
        for n, heads, size in ((queries, 2, head), (keys, 1, head), (keys, 1, value))
    ]
    for extra in form.extras:
        if extra is Extra.BIAS:
            operands.append((rng.standard_normal(shapes[extra]) + offset).astype(bias_dtype))
        elif extra is Extra.MASK:
            operands.append(rng.random(shapes[extra]) < 0.7)
        elif extra in SEGMENTS:
            length = queries if extra is Extra.QUERY_SEGMENTS else keys
            operands.append(np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32))
        else:
            operands.append(np.array([number[extra], number[extra] // 2], np.int32))
    return operands, rng.standard_normal((2, queries, 2, value)).astype(dtype)


def exact(form, operands, cotangent):
    """lse, its residual, delta and the gradients in float64, of scores that are rounded to f32."""
    query, key, value = (np.asarray(x, np.float64) for x in operands[:3])
    extras, g = dict(zip(form.extras, operands[3:], strict=True)), np.asarray(cotangent, np.float64)
    key, value = (np.repeat(x, 2, axis=2) for x in (key, value))
    z, slope = np.einsum("btnh,bsnh->bnts", query, key) * form.scale, 1.0
    if form.cap is not None:
        bent = np.tanh(z / form.cap)
        z, slope = form.cap * bent, 1 - bent * bent
    z = (z + extras.get(Extra.BIAS, 0.0)).astype(np.float32).astype(np.float64)
    i, j = np.ogrid[: z.shape[2], : z.shape[3]]
    per_batch = {name: x.reshape(-1, 1, 1, 1) for name, x in extras.items() if x.ndim == 1}
    position = i + per_batch.get(Extra.OFFSET, 0)
    counts = np.broadcast_to(extras.get(Extra.MASK, True), z.shape).copy()
    if form.left is not None:
        counts &= j >= position - form.left
    if form.right is not None:
        counts &= j <= position + form.right
    counts &= (i < per_batch.get(Extra.QUERY_LENGTHS, z.shape[2])) & (j < per_batch.get(Extra.KEY_LENGTHS, z.shape[3]))
    if SEGMENTS[0] in extras:
        counts &= (extras[SEGMENTS[0]][:, :, None] == extras[SEGMENTS[1]][:, None, :])[:, None]
    m = np.where(counts, z, -np.inf).max(axis=-1, keepdims=True)
    m = np.where(np.isinf(m), 0, m)
    e = np.where(counts, np.exp(z - m), 0)
    s = e.sum(axis=-1, keepdims=True)
    p = e / np.where(s == 0, 1, s)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(s))[..., 0]
    delta = np.einsum("btnd,btnd->bnt", np.einsum("bnts,bsnd->btnd", p, value), g)
    dz = p * (np.einsum("btnd,bsnd->bnts", g, value) - delta[..., None])
    gradients = {
        "query": np.einsum("bnts,bsnh->btnh", dz * slope, key) * form.scale,
        "key": np.einsum("bnts,btnh->bsh", dz * slope, query)[:, :, None] * form.scale,
        "value": np.einsum("bnts,btnd->bsd", p, g)[:, :, None],
    }
    if Extra.BIAS in extras:
        gradients["bias"] = dz.sum(axis=0, keepdims=True)
    with np.errstate(invalid="ignore"):
        rest = np.where(np.isinf(lse), 0, lse - lse.astype(np.float32))
    return *(x.astype(np.float32) for x in (lse, rest, delta)), gradients


@interpreted
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (form_of(right=0), (72, 131)),
        (form_of(SEGMENTS, cap=2.0), (70, 72)),
        (form_of((Extra.BIAS, *SEGMENTS)), (64, 64, 32, 32, 1)),
        (form_of(LENGTHS, left=20, right=3), (80, 72)),
        (form_of((Extra.BIAS, Extra.MASK)), (66, 72)),
        (form_of((Extra.BIAS, Extra.MASK), right=0), (150, 140, 32, 32, 150, jnp.bfloat16)),
        (form_of((Extra.BIAS,), right=0), (70, 72, 32, 32, 1, np.float32, -1e9)),
        (form_of((Extra.BIAS,)), (66, 72, 160, 256, 1, np.float32, 3e5)),
        (form_of(right=0), (64, 64, 160, 256)),
        (form_of((Extra.MASK,), left=30, right=3), (70, 72, 160, 256, 70)),
    ],
    ids=[
        "causal",
        "segments",
        "segments of half a block",
        "lengths",
        "bias",
        "bias and mask",
        "large bias",
        "large bias of wide",
        "wide",
        "mask of wide",
    ],
)
def test_values(capfd, form, shape):
    operands, cotangent = operands_of(form, *shape)
    *numbers, expected = exact(form, operands, cotangent)
    moving = tuple(expected)
    kernel = backward.backward(form, operands, moving)
    for name, actual in zip(moving, kernel(*map(jnp.asarray, (*operands, *numbers, cotangent))), strict=True):
        chex.assert_shape(actual, expected[name].shape)
        error = np.asarray(actual, np.float64) - expected[name]
        assert np.linalg.norm(error) <= 5e-3 * np.linalg.norm(expected[name]), name
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.costly(1)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("extras", [(Extra.BIAS, Extra.MASK), (), SEGMENTS, LENGTHS], ids=len)
def test_lowers_for_hopper(heads, extras):
    form = form_of(extras, right=0 if extras else None, cap=3.0 if extras == SEGMENTS else None)
    operands, cotangent = operands_of(form, 136, 200, *heads, mask_queries=136)
    moving = ("query", "key", "value", *(("bias",) if Extra.BIAS in extras else ()))
    numbers = np.zeros((2, 2, 136), np.float32)
    with target("NVIDIA H100 80GB HBM3"):
        kernel = jax.jit(backward.backward(form, operands, moving))
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*operands, *[numbers] * 3, cotangent)]
        text = kernel.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text  # of a bias or mask, say
