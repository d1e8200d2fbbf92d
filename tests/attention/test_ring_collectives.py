"""What devices send each other for attention over sequences that they share, and how much memory each takes.

With the right values a program may still gather all of the queries on every device, so it is read for what it sends.
"""

import collections

import jax
import numpy as np
import pytest
from common import needs_little_memory, on_cpu, slow, some
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_devices
from ring_calls import LAYOUTS

import jaxsoft

pytestmark = needs_devices
MOST = min(DEVICES, 4)
TOKENS = 6  # of a device
BATCH, HEADS, KEY_HEADS, SIZE = 2, 16, 8, 4
QUERY, KEY = (BATCH, TOKENS, HEADS, SIZE), (BATCH, TOKENS, KEY_HEADS, SIZE)
EACH_KEYS = (BATCH, MOST * TOKENS, KEY_HEADS, SIZE)
SEGMENTS, ALL_SEGMENTS = (BATCH, TOKENS), (BATCH, MOST * TOKENS)
BLOCK = (2, *KEY)  # keys and values in one array


def permutes(steps, derivative):
    """How many blocks a ring of so many steps sends, and how many segments.

    Backward the block that arrived last is there already, and gradients by the others' blocks go along.
    """
    blocks = steps - 1 + (derivative and steps > 1) * (steps - 2 + steps - 1)
    return {("collective-permute", BLOCK): blocks, ("collective-permute", SEGMENTS): (1 + derivative) * (steps - 1)}


def gathers(derivative):
    found = {("all-gather", EACH_KEYS): 2 * (1 + derivative), ("all-gather", ALL_SEGMENTS): 1 + derivative}
    return found | ({("reduce-scatter", KEY): 2} if derivative else {})


def as_moved(operations):
    """Operations by shapes as a program has them: for a GPU XLA merges dimensions, and what remains is the size."""
    found = collections.Counter()
    for (what, shape), count in operations.items():
        found[what, shape if jax.default_backend() == "cpu" else (int(np.prod(shape)),)] += count
    return found


def sent(method, layout, derivative, segments, inside=False, kind=AxisType.Auto, laid=True, **limits):
    """The collective operations of a program by how often they are in it. Its operands may not be `laid` out before."""
    x = np.zeros((BATCH, MOST * TOKENS, HEADS, SIZE), np.float32)
    ids = np.zeros(x.shape[:2], np.int32)
    spec = P(None, "s")

    def attend(query, key, value, *ids):
        given = dict(zip(("query_segment_ids", "key_value_segment_ids"), ids * 2, strict=True)) if ids else {}
        return jaxsoft.ring_attention(query, key, value, axis_name="s", layout=layout, method=method, **given, **limits)

    if inside:
        attend = jax.shard_map(attend, in_specs=spec, out_specs=spec)

    def pulled(*operands):
        y, pull = jax.vjp(lambda *v: attend(*v, *operands[3:]), *operands[:3])
        return y, pull(y)

    with jax.set_mesh(mesh_of(kind, s=MOST)):
        operands = [x, x[:, :, :KEY_HEADS], x[:, :, :KEY_HEADS], *([ids] if segments else [])]
        operands = [jax.device_put(v, spec) if laid else v for v in operands]
        return collections.Counter(collectives(jax.jit(pulled if derivative else attend).lower(*operands).compile()))


# A program for gradients sends what one for values does as well, so by default it may be there alone.
each_derivative = pytest.mark.parametrize("derivative", [True, False], ids=["gradients", "value"])
each_call = pytest.mark.parametrize(
    ("inside", "kind"),
    [
        (False, AxisType.Auto),
        (True, AxisType.Explicit),
        pytest.param(True, AxisType.Auto, marks=slow),
        pytest.param(False, AxisType.Explicit, marks=slow),
    ],
)


@pytest.mark.costly(1)
@each_derivative
@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring(layout, derivative, inside, kind):
    """One permute a step, and one of segments."""
    found = sent("ring", layout, derivative, True, inside, kind, is_causal=True)
    assert found == permutes(MOST, derivative)


@pytest.mark.costly(1)
@each_derivative
def test_operands_of_the_host(derivative):
    """Arrays that lie nowhere before are sharded along the sequence, as those are that lie so."""
    assert sent("ring", "zigzag", derivative, False, laid=False, is_causal=True) == +collections.Counter(
        {what: count for what, count in permutes(MOST, derivative).items() if what[1] == BLOCK}
    )


@pytest.mark.costly(1)
@each_derivative
@pytest.mark.skipif(DEVICES < 8, reason="needs three axes")
def test_axes_that_are_not_manual(derivative):
    """Inside shard_map over the sequence alone, batch and heads stay sharded over other axes: a ring sends blocks."""
    x = np.zeros((BATCH, 2 * TOKENS, HEADS, SIZE), np.float32)

    def attend(*operands):
        return jaxsoft.ring_attention(*operands, axis_name="s", layout="zigzag", method="ring", is_causal=True)

    def pulled(*operands):
        y, pull = jax.vjp(along, *operands)
        return y, pull(y)

    along = jax.shard_map(attend, in_specs=P(None, "s"), out_specs=P(None, "s"), axis_names={"s"})
    with jax.set_mesh(mesh_of(b=2, s=2, n=2)):
        operands = [jax.device_put(v, P("b", "s", "n")) for v in (x, x[:, :, :KEY_HEADS], x[:, :, :KEY_HEADS])]
        program = jax.jit(pulled if derivative else along).lower(*operands).compile()
    assert {what for what, _ in collectives(program)} == {"collective-permute"}


@pytest.mark.costly(1)
@each_derivative
@pytest.mark.parametrize(
    ("left", "steps"), [(TOKENS + 1, 3), (TOKENS, 2), (0, 1), (1, 2), (99, MOST)], ids=lambda v: str(v)
)
def test_windows(left, steps, derivative):
    """A ring of parts of the sequence has as many steps as the window reaches."""
    found = sent("ring", "contiguous", derivative, True, local_window_size=(left, 0))
    assert found == +collections.Counter(permutes(min(steps, MOST), derivative))


@pytest.mark.costly(1)
@each_derivative
@each_call
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_all_gather(layout, derivative, inside, kind):
    """Keys, values and segments to all, and each device's part of the gradients' sums.

    Inside shard_map XLA may find that backward they are the same ones, and keep them.
    """
    found = as_moved(sent("all_gather", layout, derivative, True, inside, kind, is_causal=True))
    kept = gathers(False) | {what: count for what, count in gathers(derivative).items() if what[0] == "reduce-scatter"}
    assert found == as_moved(gathers(derivative)) or (inside and found == as_moved(kept))


@pytest.mark.costly(1)
@each_derivative
@each_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_to_all(layout, derivative, inside, kind):
    """Heads for tokens; only segments are gathered."""
    found = sent("all_to_all", layout, derivative, True, inside, kind, is_causal=True)
    assert {what for what, _ in found} == {"all-to-all", "all-gather"}
    gathered = {what: count for what, count in found.items() if what[0] == "all-gather"}
    assert as_moved(gathered).keys() == as_moved({("all-gather", ALL_SEGMENTS): 1}).keys()
    without = sent("all_to_all", layout, derivative, False, inside, kind, is_causal=True)
    assert {what for what, _ in without} == {"all-to-all"}
    # Each device's part of an array is one result for each device.
    numbers = sum(count * int(np.prod(shape)) for (_, shape), count in without.items())
    of_tokens = 2 * int(np.prod(QUERY)) + 2 * int(np.prod(KEY))  # query, output, key and value
    rows = int(np.prod(QUERY[:3]))
    assert numbers <= (of_tokens + 2 * rows if not derivative else 3 * of_tokens + 6 * rows)


@on_cpu
@needs_little_memory
@pytest.mark.skipif(DEVICES < 8, reason="compares two, four and eight devices")
@pytest.mark.parametrize("numbers", some([(2, 4, 8), (2, 6)], [(2, 6)]), ids=str)
@pytest.mark.parametrize("layout", ["zigzag", *(pytest.param(name, marks=slow) for name in LAYOUTS[:2])])
def test_memory(layout, numbers):
    """With as many tokens a device, a device's memory does not grow with the number of devices.

    XLA finds places for arrays more or less well. Were the blocks of all steps there at once, eight devices would take
    nearly four times as much as two. A device has no more keys than plain XLA takes at once: it would set up the sums
    of a loop over them for all steps at the start.
    """

    def gradients(query, key, value):
        def attend(*v):
            return jaxsoft.ring_attention(*v, axis_name="s", layout=layout, method="ring", is_causal=True)

        y, pull = jax.vjp(attend, query, key, value)
        return pull(y)

    taken = {}
    for devices in numbers:
        with jax.set_mesh(mesh_of(s=devices)):
            x = jax.device_put(np.zeros((1, 128 * devices, 2, 32), np.float32), P(None, "s"))
            taken[devices] = jax.jit(gradients).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert max(taken.values()) <= 1.2 * min(taken.values()), taken
