"""Attention over sequences that lie on several devices, against its definition for the whole sequence in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import Sizes, case
from cases import Case
from common import ATTENTION_IMPLEMENTATIONS, on_gpu, same_bits, served, slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, each_axis_type, needs_devices

import jaxsoft

pytestmark = needs_devices
LAYOUTS = ("contiguous", "striped", "zigzag")
METHODS = ("ring", "all_gather", "all_to_all")
# Limits by position decide what each layout does in its steps.
LIMITS = ((), ("causal",), ("window",), ("causal", "window to the left"))
OTHERS = ("sinks", "cap", "segments", "scale")
MOST = min(DEVICES, 8)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def mesh_of(kind=AxisType.Auto, **axes):
    """A mesh of some of the devices."""
    shape = tuple(axes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def in_layout(devices, layout, method="ring", specs=None):
    """`ring_attention` of tokens in their order, which are brought into the layout and back.

    With the specs of (B, T, N, D) and of the others' first two dimensions it is called inside shard_map.
    """

    def function(query, key, value, **given):
        order = jaxsoft.ring_order(query.shape[1], devices, layout)
        tokens = [query, key, value, *(given.pop(name) for name in list(given) if "segment" in name)]
        names = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids")
        moving = {name: given.pop(name) for name in ("sinks", "scale") if name in given}

        def call(tokens, moving):
            named = dict(zip(names, tokens, strict=False))
            return jaxsoft.ring_attention(**named, **moving, **given, axis_name="s", layout=layout, method=method)

        if specs is not None:
            of_tokens = [specs if x.ndim == 4 else P(*specs[:2]) for x in tokens]
            of_results = specs, P(*specs[:3])
            call = jax.shard_map(call, in_specs=(of_tokens, P()), out_specs=of_results)
        laid = [x[:, order] for x in tokens]
        return tuple(y[:, np.argsort(order)] for y in call(laid, moving))

    return function


def sizes_of(tokens, **others):
    return Sizes(**{"b": 2, "t": tokens, "s": tokens, "n": 8, "k": 2, "h": 8, "d": 8} | others)


def checked(call, names=("grad",), mesh=None):
    """Values and derivatives in one compiled program."""
    with jax.set_mesh(mesh):
        Case.together(call.what, [call, *(functools.reduce(Case.through, name, call) for name in names)]).check()


@each_layout
@pytest.mark.parametrize("limits", LIMITS, ids="+".join)
@pytest.mark.parametrize(
    ("devices", "inside"),
    [(2, True), pytest.param(MOST, False, marks=()), pytest.param(2, False, marks=slow), pytest.param(4, True, marks=slow)],
)
def test_ring(layout, limits, devices, inside):
    """Values and gradients, inside shard_map and under jit."""
    if devices > DEVICES:
        pytest.skip("needs more devices")
    function = in_layout(devices, layout, specs=P(None, "s") if inside else None)
    call = case((*limits, "sinks"), sizes_of(6 * devices), np.float32, function=function)
    checked(call, [["grad"]], mesh_of(s=devices))
