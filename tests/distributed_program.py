"""One of several processes that compute together, over a mesh of the devices of all of them, by `jax.distributed`.

    for i in 0 1; do python tests/distributed_program.py --processes 2 --process $i & done; wait

takes a GPU for each process, the one that has its number, or makes two devices of the CPU in each, as it does wherever
the environment has JAX_PLATFORMS=cpu. Rows, parts of rows, classes, heads, keys and whole
sequences lie over the devices of a process and over the processes, under `jax.jit` with Auto and with Explicit axes,
and in `jax.shard_map`. Each process compares the parts of the results that it holds with the definitions in float64,
which it computes alone. What one process can find is tested elsewhere, so this has few of the ways in which arrays may
lie. test_distributed.py runs it.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import definitions
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoft
from jaxsoft import fold

ROWS, CLASSES, WIDTH, IGNORED = 16, 64, 8, -100
RNG = np.random.default_rng(0)
X = 3 * RNG.standard_normal((ROWS, CLASSES), np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS, np.int32)
LABELS[3] = IGNORED
HIDDEN, WEIGHT = RNG.standard_normal((ROWS, WIDTH), np.float32), RNG.standard_normal((WIDTH, CLASSES), np.float32)
QUERY = RNG.standard_normal((8, 24, 16, 8), np.float32)
KEY, VALUE = RNG.standard_normal((2, 8, 32, 4, 8), np.float32)
QUERIES = RNG.standard_normal((8, 32, 16, 8), np.float32)  # as many as there are keys
Y = X + RNG.standard_normal(X.shape, np.float32)

TOLERANCE = 2e-5  # relative to the largest number of an array

SMOOTH = {"ignore_index": IGNORED, "label_smoothing": 0.1, "z_loss": 0.01}
MEAN = {"ignore_index": IGNORED, "reduction": "mean"}
LAST = {"is_causal": True, "query_offset": KEY.shape[1] - QUERY.shape[1]}

# The axes of the mesh: the processes, and the devices of each.
ACROSS, WITHIN = AXES = ("process", "device")


class Call(NamedTuple):
    """A function, its definition, and what both are called with: arrays that gradients are taken by, and labels."""

    ours: Callable
    theirs: Callable
    arrays: Sequence[np.ndarray]
    labels: Sequence[np.ndarray] = ()


def ring(method: str) -> Callable:
    """Causal attention of sequences that lie over the processes, in the zigzag layout."""
    return functools.partial(jaxsoft.ring_attention, axis_name=ACROSS, layout="zigzag", method=method, is_causal=True)


def laid_out(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The definition of what `ring` gives."""
    order = jaxsoft.ring_order(query.shape[1], jax.process_count(), "zigzag")
    in_order = (x[:, np.argsort(order)] for x in (query, key, value))
    return definitions.attention(*in_order, is_causal=True)[0][:, order]


CALLS = {
    "rows": Call(
        lambda x: [getattr(jaxsoft, name)(x, -1) for name in definitions.ROW_FUNCTIONS],
        lambda x: [f(x) for f in definitions.ROW_FUNCTIONS.values()],
        [X],
    ),
    "divergence": Call(jaxsoft.softmax_kl_divergence, definitions.kl_divergence, [X, Y]),
    "integer labels": Call(
        lambda x, labels: jaxsoft.softmax_cross_entropy_with_integer_labels(x, labels, **SMOOTH),
        lambda x, labels: definitions.integer_cross_entropy(x, None, labels, **SMOOTH)[0],
        [X],
        [LABELS],
    ),
    "top-k": Call(  # the gradient tells the indices
        lambda x: jaxsoft.top_k_softmax(x, 5)[:2],
        lambda x: definitions.top_k_softmax(x, 5),
        [X],
    ),
    "linear": Call(
        lambda h, w, labels: jaxsoft.linear_softmax_cross_entropy(h, w, labels, **MEAN),
        lambda h, w, labels: definitions.linear_cross_entropy(h, w, None, None, None, labels, **MEAN)[0],
        [HIDDEN, WEIGHT],
        [LABELS],
    ),
    "attention": Call(
        lambda *qkv: jaxsoft.dot_product_attention(*qkv, **LAST),
        lambda *qkv: definitions.attention(*qkv, **LAST)[0],
        [QUERY, KEY, VALUE],
    ),
    "ring attention": Call(ring("ring"), laid_out, [QUERIES, KEY, VALUE]),
}

# How arrays and labels of each call lie over them.
OF_ROWS = [P(WITHIN, ACROSS), P(None, AXES)]
OF_HEADS = [P(ACROSS, None, WITHIN, None), P(WITHIN, None, ACROSS, None)]
OF_TOKENS = [P(None, ACROSS, WITHIN, None), P(WITHIN, ACROSS, None, None)]
PLACES = {
    "rows": [[spec] for spec in OF_ROWS],
    "divergence": [[spec] * 2 for spec in OF_ROWS],
    "integer labels": [[spec, P(spec[0])] for spec in OF_ROWS],
    "top-k": [[spec] for spec in OF_ROWS],
    "linear": [[P(spec[0], None), P(None, spec[1]), P(spec[0])] for spec in OF_ROWS],
    "attention": [[spec] * 3 for spec in OF_HEADS],
    "ring attention": [[spec] * 3 for spec in OF_TOKENS],
}


def mean_over_devices(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean of the losses of all rows, given a device's."""
    count = jnp.sum(labels != IGNORED).astype(hidden.dtype)
    mean = jaxsoft.linear_softmax_cross_entropy(hidden, weight, labels, **MEAN)
    return jax.lax.psum(mean * count, AXES) / jax.lax.psum(count, AXES)


def keys_over_processes(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention to the keys of all processes, by their states."""
    before = jax.lax.axis_index(ACROSS) * key.shape[1]
    options = {**LAST, "query_offset": LAST["query_offset"] - before}
    _, st = jaxsoft.dot_product_attention(query, key, value, **options, return_state=True)
    m = jax.lax.pmax(jax.lax.stop_gradient(st.m), ACROSS)
    weight = fold.weight(st.m, m)
    s, o = jax.lax.psum((st.s * weight, st.o * weight[..., None]), ACROSS)
    return fold.output(fold.AttentionState(m, s, o))


# What each device computes of its own parts: the call that this amounts to, and how operands and results lie.
_BY_ROW, _BY_HEAD = P(AXES), P(None, None, WITHIN, None)
MAPPED = [
    ("rows", CALLS["rows"].ours, [_BY_ROW], _BY_ROW),
    ("divergence", CALLS["divergence"].ours, [_BY_ROW] * 2, _BY_ROW),
    ("integer labels", CALLS["integer labels"].ours, [_BY_ROW, _BY_ROW], _BY_ROW),
    ("top-k", CALLS["top-k"].ours, [_BY_ROW], _BY_ROW),
    ("linear", mean_over_devices, [_BY_ROW, P(), _BY_ROW], P()),
    ("attention", CALLS["attention"].ours, OF_HEADS[:1] * 3, OF_HEADS[0]),
    ("attention", keys_over_processes, [_BY_HEAD, *OF_TOKENS[:1] * 2], _BY_HEAD),
    *(
        ("ring attention", ring(method), OF_TOKENS[1:] * 3, OF_TOKENS[1])
        for method in ("ring", "all_gather", "all_to_all")
    ),
]


def with_gradients(f: Callable, count: int) -> Callable:
    """The gradients of a scalar of f's results by its first operands, and the results."""

    def total(*operands):
        results = f(*operands)
        return sum(jnp.sum(jnp.sin(y) + jnp.sin(2 * y) / 2) for y in jax.tree.leaves(results)), results

    return jax.grad(total, tuple(range(count)), has_aux=True)


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """What a call should give, in float64, on a device of this process."""
    call = CALLS[name]
    with jax.enable_x64(True):
        results = jax.jit(with_gradients(call.theirs, len(call.arrays)))(
            *(v.astype(np.float64) for v in call.arrays), *call.labels
        )
    return [np.asarray(v) for v in jax.tree.leaves(results)]


def check(name: str, ours: Callable, specs: Sequence[P], mesh: Mesh, how: str) -> None:
    """Compares the parts of a call's results and gradients that are on devices of this process."""
    call, start = CALLS[name], time.perf_counter()
    operands = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda part, x=x: x[part])
        for x, spec in zip((*call.arrays, *call.labels), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        results = jax.jit(with_gradients(ours, len(call.arrays)))(*operands)
    errors = []
    for a, e in zip(jax.tree.leaves(results), expected(name), strict=True):
        assert a.shape == e.shape, (a.shape, e.shape)
        errors += [
            np.abs(np.asarray(s.data, np.float64) - e[s.index]).max() / np.abs(e).max() for s in a.addressable_shards
        ]
    error = np.max(errors)
    print(f"{time.perf_counter() - start:5.2f} s, errors up to {error:.0e}: {name}, {how}, {specs}", flush=True)
    assert error < TOLERANCE


def main() -> None:
    """Ends with an error if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="how many there are (default: %(default)s)")
    parser.add_argument("--process", type=int, required=True, help="the number of this one, from 0")
    parser.add_argument("--address", default="localhost:12355", help="of process 0 (default: %(default)s)")
    parser.add_argument("--few", action="store_true", help="each call in one way, which take turns")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_default_matmul_precision", "float32")
    jax.distributed.initialize(args.address, args.processes, args.process, local_device_ids=[args.process])

    shape = (jax.process_count(), jax.local_device_count())
    auto, explicit = (
        jax.make_mesh(shape, AXES, axis_types=(kind, kind)) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    for i, (name, places) in enumerate(PLACES.items()):
        ways = [
            (jax.shard_map(f, mesh=auto, in_specs=tuple(specs), out_specs=result), specs, auto, "in shard_map")
            for mapped, f, specs, result in MAPPED
            if mapped == name
        ]
        ways += [(CALLS[name].ours, specs, auto, "Auto axes") for specs in places]
        ways += [(CALLS[name].ours, places[0], explicit, "Explicit axes")]
        for way in [ways[i % len(ways)]] if args.few else ways:
            check(name, *way)
    print(f"process {args.process} of {args.processes}, with {shape[1]} of {jax.device_count()} devices: all is right")


if __name__ == "__main__":
    main()
