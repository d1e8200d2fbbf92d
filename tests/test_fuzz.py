"""Calls that are drawn at random: every public function, with any options, taken through two transformations.

The operands have any shape and dtype; the calls are compiled, run operation by operation, or run under
`jax.disable_jit`; on one device, or over a mesh of eight. All of it is compared with the definitions in float64. By
default a few are drawn, the same in every run; `pytest tests/test_fuzz.py --hypothesis-profile=fuzz` draws thousands of
others, and with `--hypothesis-show-statistics` says how many had what random numbers seldom have.
"""

import dataclasses
import functools

import attention_calls
import calls
import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import pytest
from cases import TRANSFORMATIONS, Case
from common import ATTENTION_IMPLEMENTATIONS, IMPLEMENTATIONS, PAGED_IMPLEMENTATIONS, served, slow
from definitions import ROW_FUNCTIONS
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, MESH, mesh_of
from truth import wide

OF_RING = ("causal", "window", "wide window", "window to the left", "sinks", "scale", "cap", "segments")
LENGTHS = [1, 2, 3, 5, 8, 17, 33, 64, 130, 300]


def array(draw, shape, dtypes):
    """Normal numbers, some spread out or offset, of a dtype that is drawn."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    x = rng.standard_normal(shape) * draw(st.sampled_from([1, 1, 4])) + draw(st.sampled_from([0, 0, 10, -10]))
    return x.astype(draw(st.sampled_from(dtypes)))


def part_of(draw, shape):
    """A shape that broadcasts to this one."""
    return tuple(1 if draw(st.booleans()) else d for d in shape)[draw(st.integers(0, len(shape))) :]


def mask(draw, shape):
    return np.random.default_rng(draw(st.integers(0, 99))).random(shape) < 0.7


def with_minus_inf(draw, x):
    """Perhaps with one element of -inf, in a row of at least two."""
    if x.shape and x.shape[-1] > 1 and x.size and draw(st.booleans()):
        x.flat[draw(st.integers(0, x.size - 1))] = -np.inf
    return x


# No powers of two, products with which are exact.
SCALES = [0.7, -0.3, 1.3]


def with_rows_of_one_large_number(draw, x, axes=(-1,)):
    """x with such rows along some axes, as where a whole row is padding; None if none is drawn.

    Their derivatives do not depend on how a product with a scale is rounded, so long as all that is computed of the
    product reads the same number.
    """
    if not draw(st.sampled_from([True, False, False])):
        return None
    event("rows of one large number")
    kept = tuple(1 if a in [axis % x.ndim for axis in axes] else d for a, d in enumerate(x.shape))
    chosen = np.random.default_rng(draw(st.integers(0, 99))).random(kept) < 0.6
    large = draw(st.sampled_from([-1e9, 1e9, -3e8, -1e6]))
    # In range; and so that the definitions, which take differences of logsumexps, keep the digits that are compared.
    most = {np.dtype(np.float16): 3e4, np.dtype(np.float64): 1e5}.get(x.dtype, np.inf)
    large = np.clip(large, -most, most)
    return np.where(chosen, large, x).astype(x.dtype)


def of_product(draw, pair):
    """The functions of their first operand, or of its product with a number, which the same program computes."""
    scale = draw(st.sampled_from([None, *SCALES]))
    if scale is None:
        return pair
    event("a product before the call")
    return tuple(lambda x, *v, f=f: f(x * jnp.asarray(scale, x.dtype), *v) for f in pair)


def shapes(draw, least=0, n=None):
    leading = draw(st.lists(st.sampled_from([1, 2, 3, 3, 4]), min_size=least, max_size=2))
    return *leading, n or draw(st.sampled_from(LENGTHS))


def row_operation(draw, dtypes, implementation):
    """softmax, log_softmax, logsumexp, by jaxsoft's options."""
    op, shape = draw(st.sampled_from([*ROW_FUNCTIONS])), shapes(draw)
    ndim, fixed, moving = len(shape), {}, {}
    axis = draw(st.one_of(st.integers(-ndim, ndim - 1), st.lists(st.integers(0, ndim - 1), unique=True).map(tuple)))
    axes = tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    if axes == (ndim - 1,) and ndim > 1 and draw(st.booleans()):
        fixed["is_causal"] = True
    if draw(st.booleans()):
        fixed["where"] = mask(draw, part_of(draw, shape))
    x = array(draw, shape, dtypes)
    large = with_rows_of_one_large_number(draw, x, axes)
    if large is not None:
        x = large
        if draw(st.booleans()):
            fixed["scale"] = draw(st.sampled_from(SCALES))
    elif draw(st.booleans()):
        one = tuple(1 if a in axes else d for a, d in enumerate(shape))
        moving["scale"] = array(draw, part_of(draw, one), dtypes) / 4
    if large is None and draw(st.booleans()):
        moving["bias"] = array(draw, part_of(draw, shape), dtypes)
    if not fixed and not moving and large is None and axes == (ndim - 1,):
        x = with_minus_inf(draw, x)

    what = f"{op}(axis={axis}, {fixed}, {list(moving)}, large={large is not None})"
    pair = calls.row_function(implementation, op, tuple(moving), axis, **fixed)
    return Case(what, *(pair if large is None else of_product(draw, pair)), [x, *moving.values()])


def loss_options(draw, labels=None):
    """Those of the losses that are numbers, and perhaps whether the entropy is a result, too."""
    options = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 0.0, 1e-3])),
        "logits_soft_cap": draw(st.sampled_from([None, None, 5.0])),
        "entropy": draw(st.booleans()),
    }
    if labels is not None:
        options["ignore_index"] = draw(st.sampled_from([None, None, 0, -100, 255]))
        if options["ignore_index"] == -100 and labels.dtype == np.int32 and labels.size:
            labels.flat[0] = -100
    return options


def where_of(draw, shape):
    """Nothing, or a mask of classes or of rows, and what it counts in full."""
    if draw(st.booleans()):
        return {}
    if draw(st.booleans()):
        where = mask(draw, tuple(1 if draw(st.booleans()) else d for d in shape))
        return {"where": where, "counts": np.broadcast_to(where, shape)}
    where = mask(draw, shape[:-1])
    return {"where": where if len(shape) > 1 else where[None], "counts": where[..., None]}


def labels_of(draw, rows, n):
    dtype = draw(st.sampled_from([np.int32, np.int32, np.int8, np.uint8, np.int16, np.uint16, np.uint32]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.integers(0, min(n, np.iinfo(dtype).max), rows).astype(dtype)


def out_of_range(draw, labels, rows, n):
    """Puts labels that are none of n classes into some rows, if their dtype has any."""
    info = np.iinfo(labels.dtype)
    if others := [v for v in (-1, info.min, n, info.max) if info.min <= v <= info.max and not 0 <= v < n]:
        labels[rows] = draw(st.sampled_from(others))
        if np.any(rows):
            event("labels out of range in rows that do not count")


def integer_cross_entropy(draw, dtypes, implementation):
    """With a mask, class weights, and the logsumexp as a second result; any label where nothing counts."""
    shape = shapes(draw)
    labels = labels_of(draw, shape[:-1], shape[-1])
    options, where = loss_options(draw, labels), where_of(draw, shape)
    if where and draw(st.booleans()):
        out_of_range(draw, labels, ~where["counts"].any(axis=-1).reshape(labels.shape), shape[-1])
    operands = [with_minus_inf(draw, array(draw, shape, dtypes))]
    at = np.clip(labels.astype(np.int64), 0, shape[-1] - 1)[..., None]
    if not np.isfinite(np.take_along_axis(wide(operands[0]), at, -1)).all():
        operands[0][~np.isfinite(wide(operands[0]))] = 0  # infinite losses have no derivatives to compare
    if draw(st.booleans()):
        operands.append(np.abs(array(draw, shape[-1:], dtypes)) / 4)

    pair = calls.integer(implementation, labels, **where, **options)
    if (large := with_rows_of_one_large_number(draw, operands[0])) is not None:
        operands[0], pair = np.where(np.isinf(large), 0, large).astype(large.dtype), of_product(draw, pair)
    what = f"integer cross-entropy({labels.dtype}, {where}, {options}, large={large is not None})"
    return Case(what, *pair, operands)


def cross_entropy(draw, dtypes, implementation):
    """Labels that broadcast with the logits."""
    shape = shapes(draw)
    options, where = loss_options(draw), where_of(draw, shape)
    operands = [array(draw, shape, dtypes), np.abs(array(draw, part_of(draw, shape), dtypes)) / (4 * shape[-1])]
    if draw(st.booleans()):
        operands.append(np.abs(array(draw, shape[-1:], dtypes)) / 4)

    pair = calls.dense(implementation, **where, **options)
    if (large := with_rows_of_one_large_number(draw, operands[0])) is not None:
        operands[0], pair = large, of_product(draw, pair)
    what = f"cross-entropy({where}, {options}, labels {operands[1].shape}, large={large is not None})"
    return Case(what, *pair, operands)


def kl_divergence(draw, dtypes, implementation):
    """Of logits of any two shapes that broadcast, near each other or not, over any axes."""
    shape, fixed, moving = shapes(draw), {}, {}
    axis = draw(st.one_of(st.integers(-len(shape), len(shape) - 1), st.none()))
    if draw(st.booleans()):
        fixed["where"] = mask(draw, part_of(draw, shape))
    x, y = array(draw, shape, dtypes), array(draw, part_of(draw, shape), dtypes)
    if draw(st.booleans()):
        y = (np.asarray(x, np.float64) + 1e-3 * np.asarray(y, np.float64)).astype(y.dtype)
    if draw(st.booleans()):
        one = tuple(1 if axis in (None, a, a - len(shape)) else d for a, d in enumerate(shape))
        moving["scale"] = array(draw, part_of(draw, one), dtypes) / 4
    elif not fixed and axis == -1 and y.shape == shape:
        x, y = with_minus_inf(draw, x), with_minus_inf(draw, y)
    what = f"KL(axis={axis}, {fixed}, {list(moving)}, q_logits {y.shape})"
    return Case(what, *calls.kl_divergence(implementation, tuple(moving), axis=axis, **fixed), [x, y, *moving.values()])


def linear_cross_entropy(draw, dtypes, implementation):
    """With chunks of any size; operands of one dtype, as strict promotion asks for; any label beside a weight of 0."""
    del implementation
    dtype, classes = draw(st.sampled_from(dtypes)), draw(st.sampled_from([1, 2, 7, 33, 64]))
    *rows, width = shapes(draw, n=draw(st.sampled_from([1, 3, 8])))
    labels = labels_of(draw, rows, classes)
    options = loss_options(draw, labels)
    names = [name for name in ("bias", "class_weights") if draw(st.booleans())]
    given = {"chunk_size": draw(st.sampled_from([None, 1, 5, 64])), "recompute": draw(st.booleans())}
    operands = [array(draw, (*rows, width), [dtype]) / 4, array(draw, (width, classes), [dtype]) / 4]
    operands += [np.abs(array(draw, (classes,), dtypes)) / 4 for _ in names]
    given |= {"reduction": draw(st.sampled_from([None, "mean", "sum"])), "scale": draw(st.sampled_from([1.0, -0.7]))}
    given["lse"] = draw(st.booleans())
    if draw(st.booleans()):
        u = (0.25 + np.abs(array(draw, part_of(draw, rows), [dtype])) % 2).astype(dtype)
        u = np.where(mask(draw, u.shape), u, 0).astype(dtype) if draw(st.booleans()) else u
        names.append("row_weights")
        operands.append(u)
        out_of_range(draw, labels, np.broadcast_to(u == 0, labels.shape), classes)
    if "bias" in names and draw(st.booleans()):
        with_offset(draw, operands, given, options)

    what = f"linear cross-entropy({labels.dtype}, {names}, {given}, {options})"
    return Case(what, *calls.linear(labels, names, **given, **options), operands)


def with_offset(draw, operands, given, options):
    """Adds a number to all logits of a linear layer, which are then multiples of what f32 tells apart beside it.

    What would round such logits is left out, and a term beside which no other one shows.
    """
    event("a number in common to all logits")
    offset = draw(st.sampled_from([1e5, -1e6, 1e7, 1e9, -1e9]))
    unit = float(np.spacing(np.float32(2 * abs(offset))))
    rng, (hidden, weight, bias, *_) = np.random.default_rng(draw(st.integers(0, 99))), operands
    wide = np.float64 if hidden.dtype == np.float64 else np.float32
    operands[:] = [v.astype(wide) for v in operands]
    operands[0] = rng.integers(0, 2, hidden.shape).astype(wide)
    operands[1] = (unit * rng.integers(-1, 2, weight.shape)).astype(wide)
    operands[2] = (unit * (np.round(offset / unit) + rng.integers(0, 2, bias.shape))).astype(wide)
    given |= {"scale": draw(st.sampled_from([1.0, -0.5])), "reduction": draw(st.sampled_from([None, None, "mean"]))}
    options |= {"z_loss": 0.0, "logits_soft_cap": None}


def top_k(draw, dtypes, implementation):
    """Values and probabilities, of scores that differ."""
    shape = shapes(draw)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    steps = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
    x = (steps / 16 - 2).astype(draw(st.sampled_from(dtypes)))
    k = draw(st.integers(1, shape[-1]))
    return Case(f"top_k(k={k})", *calls.top_k(implementation, k), [x])


def attention(draw, dtypes, implementation):
    """Any options that do not set the same argument, among few keys or many, and any heads."""
    implementation = implementation if implementation in ATTENTION_IMPLEMENTATIONS else None
    options = draw(st.lists(st.sampled_from(attention_calls.OPTIONS), unique=True, max_size=5))
    assume(not attention_calls.conflict(options))
    k = draw(st.sampled_from([1, 2, 3]))
    sizes = attention_calls.Sizes(
        b=draw(st.sampled_from([1, 2, 3])),
        t=draw(st.sampled_from([1, 2, 5, 33])),
        s=draw(st.sampled_from([*LENGTHS, 1100] if implementation != "reference" else LENGTHS[:6])),
        n=k * draw(st.sampled_from([1, 2, 3])),
        k=k,
        h=draw(st.sampled_from([1, 4, 8, 64])),
        d=draw(st.sampled_from([1, 5, 8, 64])),
    )
    more = {"return_max_logits": True} if draw(st.booleans()) else {}
    return attention_calls.case(
        options, sizes, draw(st.sampled_from(dtypes)), implementation, draw(st.integers(0, 2**16)), more=more
    )


def attention_of_little_weight(draw, dtypes, implementation):
    """Keys beside others that have nearly all the weight: of many queries their small shares add up."""
    implementation = implementation if implementation in ATTENTION_IMPLEMENTATIONS else None
    given = ("bias", "one bias", "sinks", "scale", "causal", "wide window", "segments", "mask of keys", "cap")
    options = draw(st.lists(st.sampled_from(given), unique=True, max_size=3))
    assume(not attention_calls.conflict(options))
    k = draw(st.sampled_from([1, 2]))
    sizes = attention_calls.Sizes(
        b=draw(st.sampled_from([1, 3])),
        t=draw(st.sampled_from([130, 200])),
        s=draw(st.sampled_from([1, 5, 33])),
        n=k * draw(st.sampled_from([1, 3])),
        k=k,
        h=draw(st.sampled_from([1, 8])),
        d=draw(st.sampled_from([1, 5])),
    )
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16))
    options.append("state of nearly all weight")
    event("parts of the keys with little weight")
    return attention_calls.magnified(attention_calls.case(options, sizes, dtype, implementation, seed))


def ring_attention(draw, dtypes, implementation):
    """Any options, layout and method, of as many tokens as each layout can cut."""
    implementation = implementation if implementation in ATTENTION_IMPLEMENTATIONS else None
    layout = draw(st.sampled_from(["contiguous", "striped", "zigzag"]))
    method = draw(st.sampled_from(["ring", "ring", "all_gather", "all_to_all"]))
    options = draw(st.lists(st.sampled_from(OF_RING), unique=True, max_size=4))
    limited = any(name == "causal" or "window" in name for name in options)
    assume(not attention_calls.conflict(options) and not (method == "all_gather" and layout == "striped" and limited))
    tokens = 2 * MESH[0] * draw(st.sampled_from([1, 2, 5, 40]))
    k = MESH[0] * draw(st.sampled_from([1, 2])) if method == "all_to_all" else draw(st.sampled_from([1, 2, 3]))
    sizes = attention_calls.Sizes(
        b=draw(st.sampled_from([1, 2])),
        t=tokens,
        s=tokens,
        n=k * draw(st.sampled_from([1, 2])),
        k=k,
        h=draw(st.sampled_from([1, 8, 64])),
        d=draw(st.sampled_from([1, 5, 64])),
    )
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16))
    case = attention_calls.case(options, sizes, dtype, implementation, seed, function=calls.in_layout(layout, method))
    return dataclasses.replace(case, what=f"{case.what}, {layout}, {method}")


def paged_attention(draw, dtypes, implementation):
    """Any options that do not set the same argument, of pages of any size."""
    implementation = implementation if implementation in PAGED_IMPLEMENTATIONS else None
    options = draw(st.lists(st.sampled_from(paged_calls.OPTIONS), unique=True, max_size=5))
    assume(not paged_calls.conflict(options))
    if {"past the table", "lengths"} & {*options}:
        event("lengths past the table")
    k = draw(st.sampled_from([1, 2, 3]))
    sizes = paged_calls.Sizes(
        b=draw(st.sampled_from([1, 2, 4])),
        t=draw(st.sampled_from([1, 2, 5, 33])),
        n=k * draw(st.sampled_from([1, 2, 3])),
        k=k,
        h=draw(st.sampled_from([1, 4, 8, 64])),
        d=draw(st.sampled_from([1, 5, 8, 64])),
        number=draw(st.sampled_from([1, 2, 5] if implementation == "reference" else [1, 2, 5, 80])),
        size=draw(st.sampled_from([1, 3, 16])),
        pages=draw(st.sampled_from([1, 7, 50])),
    )
    dtype = draw(st.sampled_from(dtypes))
    return paged_calls.case(options, sizes, dtype, implementation, draw(st.integers(0, 2**16)))


def write_pages(draw, dtypes, implementation):
    """New tokens of sequences of any lengths, in pages of any size."""
    del implementation
    sizes = paged_calls.Sizes(
        b=draw(st.sampled_from([1, 2, 4])),
        t=draw(st.sampled_from([1, 2, 5])),
        k=draw(st.sampled_from([1, 2])),
        number=draw(st.sampled_from([1, 2, 5])),
        size=draw(st.sampled_from([1, 3, 16])),
        pages=draw(st.sampled_from([1, 7, 50])),
    )
    how = {name: draw(st.booleans()) for name in ("scales", "holes", "past")}
    if how["past"]:
        event("lengths past the table")
    return paged_calls.writing(sizes, draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16)), **how)


def fold(draw, dtypes, implementation):
    """The functions of the fold, which put together a row that is cut in two."""
    del implementation
    shape = shapes(draw, n=draw(st.sampled_from(LENGTHS[:7])))  # scans compile slowly
    x, cut = array(draw, shape, dtypes), draw(st.integers(0, shape[-1]))

    return Case(f"fold(cut={cut})", *calls.folded(cut), [x])


KINDS = [
    row_operation,
    integer_cross_entropy,
    cross_entropy,
    kl_divergence,
    linear_cross_entropy,
    top_k,
    attention,
    pytest.param(ring_attention, marks=slow),  # XLA compiles its steps slowly
    paged_attention,
    write_pages,
    fold,
]


def eager(f):
    return f


def without_jit(f):
    def run(*operands):
        with jax.disable_jit():
            return f(*operands)

    return run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=settings.default.max_examples // 7)  # the first example is the simplest
@given(data=st.data())
def test_two_transformations(kind, data):
    draw = data.draw
    x64 = draw(st.booleans())
    dtypes = [jnp.float64] if x64 and draw(st.booleans()) else [jnp.float32, jnp.float16, jnp.bfloat16]
    names = [draw(st.sampled_from([*TRANSFORMATIONS])) for _ in range(draw(st.integers(1, 2)))]
    run = draw(st.sampled_from([jax.jit, jax.jit, eager, without_jit]))
    implementation = draw(st.sampled_from(IMPLEMENTATIONS))
    with jax.enable_x64(x64):
        case = kind(draw, dtypes, implementation)
        with served(implementation):
            functools.reduce(Case.through, names, case).check(run)


@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.data())
def test_gradients_of_little_weight(data):
    """One derivative: the cotangents of gradients that are magnified would be out of the range of f16.

    Values are mapped with their queries, as sums of gradients that were rounded to f16 are of these sizes again.
    """
    draw = data.draw
    names = [draw(st.sampled_from(["jit", "vmap", "checkpoint", "map"])), "grad"]
    implementation = draw(st.sampled_from(IMPLEMENTATIONS))
    case = attention_of_little_weight(draw, [jnp.float16, jnp.float16, jnp.bfloat16], implementation)
    with served(implementation):
        functools.reduce(Case.through, names, case).check(draw(st.sampled_from([jax.jit, eager])))


def over_a_mesh(draw, implementation):
    """A call on x of shape (8, 8, 64), or of its last dimensions; what comes beside x is made of x, shard by shard."""
    shape = (8, 8, 64)[draw(st.integers(0, 2)) :]
    x = array(draw, shape, [jnp.float32, jnp.bfloat16])
    x = x if (large := with_rows_of_one_large_number(draw, x)) is None else large

    def tops(x):
        """An integer a row, the same in every dtype."""
        return jnp.floor(jax.lax.stop_gradient(jnp.max(x, axis=-1)).astype(jnp.float32) * 1024).astype(jnp.int32)

    def numbers(x):
        """An integer an element, likewise."""
        return jnp.floor(jax.lax.stop_gradient(x).astype(jnp.float32) * 64).astype(jnp.int32)

    options, masked, scaled = loss_options(draw), draw(st.booleans()), draw(st.booleans())
    name = draw(st.sampled_from([*ROW_FUNCTIONS, "integer", "dense", "kl", "top_k"]))

    def functions(x):
        """Jaxsoft's function and the definition, of x."""
        where = (numbers(x) % 3 > 0) | (jnp.max(x, axis=-1, keepdims=True) == x) if masked else None
        if name == "top_k":
            return calls.top_k(implementation, 3)
        if name == "integer":
            return calls.integer(implementation, tops(x) % shape[-1], where=where, **options)
        if name == "dense":
            labels = (numbers(x) % 5).astype(x.dtype) / 8
            pair = calls.dense(implementation, where=where, **options)
            return tuple(lambda x, f=f: f(x, labels) for f in pair)
        if name == "kl":
            pair = calls.kl_divergence(implementation, where=where, scale=0.7 if scaled else None)
            return tuple(lambda x, f=f: f(x, jnp.cos(x)) for f in pair)
        return calls.row_function(implementation, name, where=where, scale=0.7 if scaled else None)

    what = f"{name}({options}, {masked}, {scaled})"
    return Case(what, lambda x: functions(x)[0](x), lambda x: functions(x)[1](x), [x])


@pytest.mark.skipif(DEVICES < 8, reason="needs eight devices, which a CPU can pretend to have")
@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.data())
def test_meshes(data):
    """Under jit, sharded anyhow over automatic or explicit axes; or inside shard_map, with whole rows."""
    draw = data.draw
    implementation = draw(st.sampled_from([name for name in IMPLEMENTATIONS if name != "reference"]))
    case = over_a_mesh(draw, implementation)
    ndim = case.operands[0].ndim
    inside = ndim > 1 and draw(st.booleans())
    dims = [()] * ndim
    for axis in ("a", "b"):
        place = draw(st.integers(0, ndim - 1 if inside else ndim))  # the last: over none
        if place < ndim - inside:
            dims[place] += (axis,)
    mesh, spec = mesh_of(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))), P(*dims)
    what = f"{case.what} of {case.operands[0].dtype} over {spec}, {mesh.axis_types}, inside {inside}"
    names = [draw(st.sampled_from(["grad", "jvp", "checkpoint"])) for _ in range(draw(st.integers(0, 2)))]
    with jax.set_mesh(mesh), served(implementation):
        ours = jax.shard_map(case.ours, in_specs=spec, out_specs=P(*dims[:-1])) if inside else case.ours
        case = functools.reduce(Case.through, names, Case(what, ours, case.theirs, case.operands))
        case.check(lambda f: lambda x: jax.jit(f)(jax.device_put(x, NamedSharding(mesh, spec))))
