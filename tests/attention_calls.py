"""Calls of attention with every option, beside their definition in float64."""

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from cases import Case
from definitions import attention
from truth import in_float64, wide

import jaxsoft
from jaxsoft.fold import AttentionState


class Sizes(NamedTuple):
    """The letters of the shapes, as in the docstring of jaxsoft.dot_product_attention."""

    b: int = 2
    t: int = 7
    s: int = 9
    n: int = 4
    k: int = 2
    h: int = 8
    d: int = 8


SMALL = Sizes()

# Operands that gradients are taken by, beside query, key and value, by the name of an option.
MOVING = {
    "bias": lambda rng, z: {"bias": rng.standard_normal((z.b, z.n, z.t, z.s))},
    "bias of a head": lambda rng, z: {"bias": rng.standard_normal((1, z.n, 1, z.s))},
    "bias of a query": lambda rng, z: {"bias": rng.standard_normal((z.b, 1, z.t, 1))},
    "bias of scores": lambda rng, z: {"bias": rng.standard_normal((z.t, z.s))},
    "one bias": lambda rng, z: {"bias": rng.standard_normal((1, 1, 1, 1))},
    "bias of -inf": lambda rng, z: {"bias": np.where(rng.random((z.b, z.n, z.t, z.s)) < 0.4, -np.inf, 0.5)},
    "sinks": lambda rng, z: {"sinks": rng.standard_normal(z.n)},
    "scale": lambda rng, z: {"scale": np.array(0.7)},
    "state": lambda rng, z: _state(rng, z, 0),
}


def _state(rng, z, most):
    """The parts of a state whose maxima are about this number."""
    rows = z.b, z.t, z.n
    m, s, o = rng.standard_normal(rows), rng.random(rows) + 1, rng.standard_normal((*rows, z.d))
    return {"m": m + most, "s": s, "o": o}


def _lengths(rng, most, batch):
    """Lengths of which one is 0 and one is all, if there are that many."""
    return np.resize(np.array([most, 0, most // 2], np.int32), batch)


def _segments(rng, length, batch):
    return np.sort(rng.integers(0, 3, (batch, length)), axis=1).astype(np.int32)


# What else there is.
FIXED = {
    "causal": lambda rng, z: {"is_causal": True},
    "window": lambda rng, z: {"local_window_size": (2, 1)},
    "wide window": lambda rng, z: {"local_window_size": 3},
    "window to the left": lambda rng, z: {"local_window_size": (3, None)},
    "query lengths": lambda rng, z: {"query_seq_lengths": _lengths(rng, z.t, z.b)},
    "key lengths": lambda rng, z: {"key_value_seq_lengths": _lengths(rng, z.s, z.b)[::-1].copy()},
    "segments": lambda rng, z: {
        "query_segment_ids": _segments(rng, z.t, z.b),
        "key_value_segment_ids": _segments(rng, z.s, z.b),
    },
    "mask": lambda rng, z: {"mask": rng.random((z.b, z.n, z.t, z.s)) < 0.6},
    "mask of keys": lambda rng, z: {"mask": rng.random((z.b, 1, 1, z.s)) < 0.6},
    "no key": lambda rng, z: {"mask": np.zeros((1, 1, z.t, 1), bool)},
    "cap": lambda rng, z: {"logits_soft_cap": 1.5},
    "offset": lambda rng, z: {"query_offset": 3, "is_causal": True},
    "offsets": lambda rng, z: {"query_offset": np.arange(z.b, dtype=np.int32) * 4, "local_window_size": (4, 0)},
}
OPTIONS = (*MOVING, *FIXED)
# What is no option of every call: keys whose weight is some 1e-10.
MOVING["state of nearly all weight"] = lambda rng, z: _state(rng, z, 22)
# By which `magnified` multiplies the values.
_MAGNIFIED = 2.0**23


def case(
    options: Sequence[str] = (),
    sizes: Sizes = SMALL,
    dtype=np.float64,
    implementation: str | None = None,
    seed: int = 0,
    deterministic: bool = True,
    function: Callable = jaxsoft.dot_product_attention,
    more: Mapping[str, object] = types.MappingProxyType({}),
) -> Case:
    """A call with these options, of which no two set one argument, as a function of its floating-point operands.

    `function` is called as `jaxsoft.dot_product_attention` is. `more` are further arguments without derivatives.
    """
    rng = np.random.default_rng(seed)
    z = sizes
    shapes = (z.b, z.t, z.n, z.h), (z.b, z.s, z.k, z.h), (z.b, z.s, z.k, z.d)
    base = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    moving, fixed = arguments_of(options, rng, z)
    fixed |= more
    wide = np.float64 if dtype == np.float64 else np.float32
    extra = [v.astype(dtype if name == "bias" else wide) for name, v in moving.items()]

    arguments = functools.partial(named_arguments, moving)

    def ours(query, key, value, *values):
        given = arguments(values) | fixed | {"implementation": implementation, "deterministic": deterministic}
        return function(query, key, value, **given, return_residual=True)

    def theirs(query, key, value, *values):
        return attention(query, key, value, **arguments(values), **fixed)

    return Case(
        f"attention({', '.join(options)}, {dict(more)}), {sizes}, {implementation}", ours, theirs, [*base, *extra]
    )


def magnified(call: Case) -> Case:
    """A call as a function of small numbers in f32 that become the values when they are multiplied: their gradients
    are as much larger than those of the values.
    """

    def of_small(function):
        return lambda query, key, small, *v: function(query, key, (small * _MAGNIFIED).astype(of_values(small)), *v)

    def of_values(small):
        return small.dtype if small.dtype == np.float64 else call.operands[2].dtype

    query, key, value, *others = call.operands
    small = value.astype(np.float32) / np.float32(_MAGNIFIED)
    return Case(f"magnified {call.what}", of_small(call.ours), of_small(call.theirs), [query, key, small, *others])


def check_rows(call: Case, options: Sequence[str], dtype) -> None:
    """Compares the output and the log-sum-exp of a call with float64, each query's output relative to its norm.

    Args:
      call: as `case` makes it, in 16 bits.
      options: its options.
      dtype: of its queries.
    """
    scaled = "scale" in options  # a traced one multiplies the queries, which are then rounded
    allowed = (2e-3 if dtype == np.float16 else 1e-2) * (8 if scaled else 1)
    output, lse, *_ = (wide(v) for v in jax.jit(call.ours)(*call.operands))
    expected, expected_lse, *_ = in_float64(call.theirs, *call.operands)
    of_error, of_row = (np.linalg.norm(x, axis=-1) for x in (output - expected, expected))
    assert (of_error <= allowed * of_row).all(), (call.what, (of_error / of_row).max())
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=5e-2 if scaled else 1e-4)


def arguments_of(options: Sequence[str], rng, sizes, tables: Sequence[dict] = (MOVING, FIXED)) -> tuple[dict, dict]:
    """The arguments that options set, those that have derivatives and the others."""
    found: tuple[dict, dict] = {}, {}
    for option in options:
        for arguments, table in zip(found, tables, strict=True):
            if option in table:
                arguments |= table[option](rng, sizes)
    return found


def named_arguments(names: Iterable[str], values: Sequence) -> dict:
    """Values by the names of arguments, of which three are parts of a state."""
    named = dict(zip(names, values, strict=True))
    if "o" in named:
        named["state"] = AttentionState(*(named.pop(name) for name in ("m", "s", "o")))
    return named


def conflict(options: Sequence[str], sizes=SMALL, tables: Sequence[dict] = (MOVING, FIXED)) -> bool:
    """Whether two options set the same argument."""
    rng = np.random.default_rng(0)
    names = [name for option in options for found in arguments_of([option], rng, sizes, tables) for name in found]
    return len(set(names)) < len(names)
