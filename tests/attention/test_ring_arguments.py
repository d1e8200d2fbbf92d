"""Arguments of ring_attention and ring_order: what is wrong is named when the call is traced; the order of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import on_cpu
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_devices
from ring_calls import LAYOUTS

from jaxsoft import ring_attention, ring_order

X = np.ones((2, 8, 4, 16), np.float32)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_order(layout, devices):
    """Every token once; which device has which follows from what the layouts are."""
    for chunk in (0, 1, 3, 4):
        length = 2 * devices * chunk
        order = ring_order(length, devices, layout)
        assert order.dtype == np.int32 and sorted(order) == list(range(length))
        for device, tokens in enumerate(order.reshape(devices, -1)):
            match layout:
                case "contiguous":
                    expected = np.arange(2 * chunk) + 2 * chunk * device
                case "striped":
                    expected = np.arange(2 * chunk) * devices + device
                case _:
                    first, last = chunk * device, length - chunk * (device + 1)
                    expected = np.r_[first : first + chunk, last : last + chunk]
            assert np.array_equal(tokens, expected)


def test_documented_orders():
    assert ring_order(8, 2, "zigzag").tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ring_order(8, 2, "striped").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize(("length", "devices"), [(48, 2), (48, 4), (160, 8)])
def test_balance(layout, length, devices):
    """Under a causal rule each device has as many pairs of tokens, to within what one token has."""
    pairs = (ring_order(length, devices, layout) + 1).reshape(devices, -1).sum(axis=1)
    assert np.ptp(pairs) <= length
    assert pairs.sum() == length * (length + 1) // 2
    assert np.ptp((ring_order(length, devices, "contiguous") + 1).reshape(devices, -1).sum(axis=1)) > length


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 2, "spiral"), "layout must be one of 'contiguous', 'striped', 'zigzag'; got 'spiral'"),
        ((9, 2, "contiguous"), "length must have a multiple of 2 tokens for layout='contiguous' over 2 devices; got 9"),
        ((9, 2, "striped"), "length must have a multiple of 2 tokens for layout='striped' over 2 devices; got 9"),
        ((6, 2, "zigzag"), "length must have a multiple of 4 tokens for layout='zigzag' over 2 devices; got 6"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_bad_orders(arguments, message):
    with pytest.raises(ValueError, match=message):
        ring_order(*arguments)


IDS = np.zeros((2, 8), np.int32)
SEGMENTS = {"query_segment_ids": IDS, "key_value_segment_ids": IDS}
CALLS = [
    (
        {"axis_name": "t"},
        ValueError,
        r"axis_name must be an axis of the mesh .*; got 't', and the mesh has \('s', 'o'\)",
    ),
    ({"layout": "spiral"}, ValueError, "layout must be one of 'contiguous', 'striped', 'zigzag'; got 'spiral'"),
    ({"method": "tree"}, ValueError, "method must be None or one of 'ring', 'all_gather', 'all_to_all'; got 'tree'"),
    ({"key": X[:, :4], "value": X[:, :4]}, ValueError, "key must have as many tokens as query, 8, .*; got 4"),
    ({"value": X[:, :4]}, ValueError, r"value must have the shape \(2, 8, 4\) and a head size; got shape \(2, 4"),
    ({"key": X[..., :8]}, ValueError, "key must have the batch and the head size of query, 2 and 16; got shape"),
    ({"key": X.astype(np.float16)}, TypeError, "key must have the dtype of query, float32; got float16"),
    (
        {"key": X[:, :, :1], "value": X[:, :, :1], "method": "all_to_all"},
        ValueError,
        "method='all_to_all' takes multiples of 2 heads, the size of axis 's'; got 1 of key",
    ),
    *(
        (
            {"method": "all_gather", "layout": "striped", **limits},
            ValueError,
            "method='all_gather' takes layout='contiguous' or 'zigzag' beside limits; got 'striped'",
        )
        for limits in ({"is_causal": True}, {"local_window_size": (3, None)})
    ),
    ({"implementation": "fast"}, ValueError, "implementation must be None or one of .*; got 'fast'"),
    ({"local_window_size": (-1, 0)}, ValueError, r"local_window_size must not be negative; got \(-1, 0\)"),
    ({"logits_soft_cap": 0}, ValueError, "logits_soft_cap must be None, or positive"),
    ({"sinks": np.ones(3, np.float32)}, ValueError, r"sinks must have the shape \(4,\), one number a head; got"),
    ({"query_segment_ids": IDS}, ValueError, "query_segment_ids and key_value_segment_ids must be given together"),
    (
        {**SEGMENTS, "key_value_segment_ids": IDS[:, :4]},
        ValueError,
        r"key_value_segment_ids must have the shape \(2, 8",
    ),
    ({"is_causal": 1}, TypeError, "is_causal must be "),
    ({"dtype": np.int32}, ValueError, "dtype must be None or one of float16, bfloat16, float32 and float64; got int32"),
]


@needs_devices
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("options", "error", "message"), CALLS, ids=range(len(CALLS)))
def test_bad_calls(options, error, message, inside):
    """Under jit and inside shard_map, with the length of a device's part: at trace time."""
    given = {"query": X, "key": X, "value": X, "axis_name": "s"} | options

    def call():
        return ring_attention(**given)

    if inside:
        call = jax.shard_map(call, in_specs=(), out_specs=P(None, "s"))
    with jax.set_mesh(mesh_of(s=2, o=1)), pytest.raises(error, match=message):
        jax.eval_shape(call)


@needs_devices
@pytest.mark.parametrize("window", [None, (None, None), (2**40, None)])
def test_windows_without_limits(window):
    """They exclude no key, so gathered keys may be in any order."""
    with jax.set_mesh(mesh_of(s=2)):
        y = ring_attention(
            X, X, X, axis_name="s", layout="striped", method="all_gather", local_window_size=window, is_causal=False
        )
    order = ring_order(X.shape[1], 2, "striped")
    x = X[:, np.argsort(order)]
    expected = jax.nn.dot_product_attention(x, x, x)
    np.testing.assert_allclose(y, expected[:, order], rtol=1e-5, atol=1e-6)


@needs_devices
@pytest.mark.parametrize(
    ("length", "layout", "message"),
    [
        (
            7,
            "contiguous",
            "query must have a multiple of 2 tokens for layout='contiguous' over 2 devices; got 7. A shorter",
        ),
        (7, "striped", "query must have a multiple of 2 tokens for layout='striped' over 2 devices; got 7. A shorter"),
        (6, "zigzag", "query must have a multiple of 4 tokens for layout='zigzag' over 2 devices; got 6. A shorter"),
    ],
)
def test_lengths(length, layout, message):
    """What cannot be cut, of the whole sequence; inside shard_map only a zigzag's part of odd length cannot."""
    x = X[:, :length]
    with jax.set_mesh(mesh_of(s=2)):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda: ring_attention(x, x, x, axis_name="s", layout=layout))
        part = X[:, : length // 2]
        inside = jax.shard_map(
            lambda: ring_attention(part, part, part, axis_name="s", layout=layout), in_specs=(), out_specs=P(None, "s")
        )
        if layout != "zigzag":
            assert jax.eval_shape(inside).shape == (2, length - 1, 4, 16)
            return
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(inside)


def test_no_mesh():
    with pytest.raises(ValueError, match=r"axis_name must be .*; got 's', and there is no mesh"):
        ring_attention(X, X, X, axis_name="s")


@on_cpu
@needs_devices
@pytest.mark.parametrize("name", ["cudnn", "ffi", "pallas"])
def test_kernels_that_cannot_serve(name):
    """A kernel that is named and cannot serve says so and what else there is."""
    with jax.set_mesh(mesh_of(s=2)), pytest.raises(ValueError, match=f"'{name}'"):
        jax.eval_shape(lambda: ring_attention(X, X, X, axis_name="s", method="ring", implementation=name))


@needs_devices
def test_no_sequences():
    """An empty batch, and no tokens."""
    for shape in ((0, 8, 4, 16), (2, 0, 4, 16)):
        with jax.set_mesh(mesh_of(s=2)):
            for method in ("ring", "all_gather", "all_to_all"):
                x = jax.device_put(jnp.ones(shape), P(None, "s"))
                y = ring_attention(x, x, x, axis_name="s", method=method, is_causal=True)
                assert y.shape == shape
