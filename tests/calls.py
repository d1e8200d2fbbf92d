"""Every public function with its arguments, beside its definition: the one table that tests go through.

A function that is added here, and in definitions.py, is tested in every transformation: by test_every_function (values
and first derivatives in each dtype, maps), test_higher_orders, test_disable_jit, test_shard_map and test_fuzz.

Each function below takes an implementation and fixed arguments, and gives two functions of the arguments that have
derivatives: jaxsoft's, and the definition. Labels and masks may be traced.
"""

from collections.abc import Callable, Sequence

import attention_calls
import definitions
import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import pytest
from cases import Case, Function
from common import ATTENTION_IMPLEMENTATIONS, IMPLEMENTATIONS, PAGED_IMPLEMENTATIONS, slow
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import MESH, mesh_of

import jaxsoft
from jaxsoft import fold

type Pair = tuple[Function, Function]


def row_function(implementation: str | None, name: str, named: Sequence[str] = (), axis=-1, **options) -> Pair:
    """One of `definitions.ROW_FUNCTIONS`, of x and of the arguments that are named."""

    def call(function, **more):
        return lambda x, *v: (function(x, axis, **dict(zip(named, v, strict=True)), **options, **more),)

    return call(getattr(jaxsoft, name), implementation=implementation), call(definitions.ROW_FUNCTIONS[name])


# What else losses have derivatives by, unless an entry of the table names other arguments.
_LAST = ("class_weights",)


def integer(
    implementation: str | None, labels, named: Sequence[str] = _LAST, *, where=None, counts=None, entropy=False,
    **options,
) -> Pair:  # fmt: skip
    """Loss and logsumexp, and perhaps the entropy, of x, or of x and some of the arguments that are named.

    `counts` is `where` in full, if that is not.
    """
    beside = {"return_lse": True, "return_entropy": entropy}

    def ours(x, *v):
        given = dict(zip(named, v, strict=False)) | options
        return jaxsoft.softmax_cross_entropy_with_integer_labels(
            x, labels, where=where, implementation=implementation, **beside, **given
        )

    def theirs(x, *v):
        given = dict(zip(named, v, strict=False)) | options
        w, shown = given.pop("class_weights", None), where if counts is None else counts
        found = definitions.integer_cross_entropy(x, w, labels.astype(np.int32), where=shown, **given)
        return found if entropy else found[:2]

    return ours, theirs


def dense(
    implementation: str | None, named: Sequence[str] = _LAST, *, where=None, counts=None, entropy=False, **options
) -> Pair:
    """Loss and logsumexp, and perhaps the entropy, of x, labels, and some of the arguments that are named."""
    beside = {"return_lse": True, "return_entropy": entropy}

    def ours(x, q, *v):
        given = dict(zip(named, v, strict=False)) | options
        return jaxsoft.softmax_cross_entropy(x, q, where=where, implementation=implementation, **beside, **given)

    def theirs(x, q, *v):
        given = dict(zip(named, v, strict=False)) | options
        w, shown = given.pop("class_weights", None), where if counts is None else counts
        found = definitions.cross_entropy(x, jnp.broadcast_to(q, x.shape), w, where=shown, **given)
        return found if entropy else found[:2]

    return ours, theirs


def kl_divergence(implementation: str | None, named: Sequence[str] = (), **options) -> Pair:
    """Of two arrays of logits, and of the scale if that is named."""

    def call(function, **more):
        return lambda x, y, *v: (function(x, y, **dict(zip(named, v, strict=True)), **options, **more),)

    return call(jaxsoft.softmax_kl_divergence, implementation=implementation), call(definitions.kl_divergence)


def linear(labels, named: Sequence[str] = (), *, lse=True, entropy=False, chunk_size=None, recompute=True,
           **options) -> Pair:  # fmt: skip
    """Loss, and perhaps logsumexp and entropy, of hidden, weight, and what is named of the other arguments."""

    def ours(h, w, *v):
        given = dict(zip(named, v, strict=True)) | {"chunk_size": chunk_size, "recompute": recompute}
        beside = {"return_lse": lse, "return_entropy": entropy}
        found = jaxsoft.linear_softmax_cross_entropy(h, w, labels, **given, **beside, **options)
        return found if lse or entropy else (found,)

    def theirs(h, w, *v):
        given = dict.fromkeys(("bias", "class_weights", "row_weights")) | dict(zip(named, v, strict=True)) | options
        arrays = [given.pop(name) for name in ("bias", "class_weights", "row_weights")]
        found = definitions.linear_cross_entropy(h, w, *arrays, labels.astype(np.int32), **given)
        return found[0], *found[1:2] * lse, *found[2:] * entropy

    return ours, theirs


def top_k(implementation: str | None, k: int) -> Pair:
    """Values and probabilities, of x."""
    return (
        lambda x: jaxsoft.top_k_softmax(x, k, implementation=implementation)[:2],
        lambda x: definitions.top_k_softmax(x, k),
    )


def attention(implementation: str | None, options: Sequence[str] = ()) -> Pair:
    """Output and log-sum-exp, of query, key, value and what the options add to them."""
    case = attention_calls.case(options, implementation=implementation)
    return case.ours, case.theirs


def in_layout(layout: str, method: str) -> Callable:
    """`jaxsoft.ring_attention` of tokens that are brought into the layout and back, in shard_map over the mesh."""
    devices, mesh = MESH[0], mesh_of(AxisType.Auto)
    how = {"axis_name": "a", "layout": layout, "method": method}

    def over_devices(query, key, value, **given):
        order = jaxsoft.ring_order(query.shape[1], devices, layout)
        tokens = {"query": query, "key": key, "value": value}
        tokens |= {name: given.pop(name) for name in list(given) if "segment" in name}
        others = {name: given.pop(name) for name in ("sinks", "scale") if name in given}
        mapped = jax.shard_map(
            lambda tokens, others: jaxsoft.ring_attention(**tokens, **others, **given, **how),
            mesh=mesh,
            in_specs=(P(None, "a"), P()),
            out_specs=P(None, "a"),
        )
        results = mapped({name: x[:, order] for name, x in tokens.items()}, others)
        return tuple(y[:, np.argsort(order)] for y in results)

    return over_devices


def ring_attention(implementation: str | None, options: Sequence[str] = ()) -> Pair:
    """What `attention` is, over devices."""
    ring = in_layout("zigzag", "ring")
    case = attention_calls.case(options, _OF_RING, implementation=implementation, function=ring)
    return case.ours, case.theirs


def paged_attention(implementation: str | None, options: Sequence[str] = ()) -> Pair:
    """Output and log-sum-exp, of query, pages and what the options add to them."""
    case = paged_calls.case(options, implementation=implementation)
    return case.ours, case.theirs


def write_pages(**how) -> Pair:
    """Pages, of pages and of keys and values that are written into them."""
    case = paged_calls.writing(**how)
    return case.ours, case.theirs


def folded(cut: int) -> Pair:
    """The functions of the fold, which put together the rows of x that are cut in two, perhaps at an end."""

    def ours(x):
        first, second = x[..., :cut], x[..., cut:]
        parts = [v for v in (first, second) if v.shape[-1]]
        y, total = fold.merge_softmax([jaxsoft.softmax(v) for v in parts], [fold.state(v) for v in parts])
        joined = fold.lse(fold.combine(fold.state(first), fold.state(second)))
        o, lse = fold.update_output(x, jaxsoft.logsumexp(first, -1), jnp.ones_like(x), fold.lse(fold.state(second)))
        return y, fold.lse(total), joined, fold.cumlogsumexp(x)[..., -1], o, lse

    def theirs(x):
        lse, p = definitions.logsumexp(x), definitions.softmax(x)
        share = jnp.sum(p[..., cut:], axis=-1, keepdims=True)
        return p, lse, lse, lse, (1 - share) * x + share, lse

    return ours, theirs


_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((3, 6))
_MASK = np.array([[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]], bool)
_SCALE, _BIAS = _RNG.standard_normal((3, 1)), _RNG.standard_normal((1, 6))
_Y = np.random.default_rng(1).standard_normal((3, 6))
_LABELS, _SOME = np.array([0, 5, 3], np.int32), np.array([0, -100, 3], np.int32)
_Q, _WEIGHTS = _RNG.random((3, 6)), _RNG.uniform(0.2, 2, 6)
_HEAD = (_RNG.standard_normal((3, 4)), _RNG.standard_normal((4, 6)), _BIAS[0], _WEIGHTS)
_CAPPED = {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 3.0}
_SMOOTHED, _IGNORED = {"label_smoothing": 0.1}, {"ignore_index": -100}
_MEAN, _SUM = {"reduction": "mean", "scale": 0.7}, {"reduction": "sum", "scale": -0.7}
_NAMED = ("bias", "class_weights")
_EVERY = (*_NAMED, "row_weights")
_REDUCED = (*_HEAD, _RNG.uniform(0.2, 2, 3))
# Numbers that are traced.
_TWO = ("label_smoothing", "z_loss")
_NUMBERS = (np.array(0.2), np.array(0.3))
_SCALED_TOO = (*_NUMBERS, np.array(-0.7))

# Together every option that `attention_calls` has for an argument, and every gradient.
_ATTENTION = {
    "attention": (),
    "attention, bias, sinks": ("bias of a head", "sinks", "causal", "scale"),
    "attention, segments": ("segments", "cap", "bias of a query", "query lengths"),
    "attention, state": ("state", "mask of keys", "offsets", "key lengths"),
}

_OF_RING = attention_calls.SMALL._replace(t=4 * MESH[0], s=4 * MESH[0])
_RING = {
    "ring attention": ("causal", "sinks"),
    "ring attention, segments": ("segments", "cap", "scale", "window"),
}

_SCALED = {"scales": True, "holes": True}
_PAGED = {
    "paged attention": ("causal",),
    "paged attention, bias, sinks": ("bias of a head", "sinks", "cap", "out of range", "shared"),
    "paged attention, scales": ("key scale", "value scale", "query lengths", "lengths"),
    "paged attention, state": ("state", "scale", "mask of keys", "offsets"),
}

_PLAIN = {name: ((_X,), lambda i, name=name: row_function(i, name)) for name in definitions.ROW_FUNCTIONS}
_EXTRAS = {
    f"{name}, extras": ((_X, _SCALE, _BIAS), lambda i, name=name: row_function(i, name, ("scale", "bias"), where=_MASK))
    for name in definitions.ROW_FUNCTIONS
}
# By name: the arguments that have derivatives, and the two functions of them for an implementation.
CALLS: dict[str, tuple[Sequence[np.ndarray], Callable[[str | None], Pair]]] = {
    **_PLAIN,
    **_EXTRAS,
    "integer": ((_X,), lambda i: integer(i, _LABELS)),
    "integer, smoothing": ((_X,), lambda i: integer(i, _LABELS, label_smoothing=0.1)),
    "integer, z_loss": ((_X,), lambda i: integer(i, _LABELS, z_loss=0.1)),
    "integer, ignored, capped": ((_X,), lambda i: integer(i, _SOME, **_IGNORED, **_CAPPED)),
    "integer, mask": ((_X,), lambda i: integer(i, _LABELS, where=_MASK, **_CAPPED)),
    "integer, weights": ((_X, _WEIGHTS), lambda i: integer(i, _LABELS)),
    "integer, weights, mask": ((_X, _WEIGHTS), lambda i: integer(i, _SOME, where=_MASK, **_IGNORED, **_CAPPED)),
    "integer, entropy": ((_X,), lambda i: integer(i, _LABELS, entropy=True)),
    "integer, entropy, mask": (
        (_X, _WEIGHTS),
        lambda i: integer(i, _SOME, where=_MASK, entropy=True, **_IGNORED, **_CAPPED),
    ),
    "dense": ((_X, _Q), dense),
    "dense, entropy, mask": ((_X, _Q), lambda i: dense(i, where=_MASK, entropy=True, **_CAPPED)),
    "dense, weights, mask": ((_X, _Q, _WEIGHTS), lambda i: dense(i, where=_MASK, **_CAPPED)),
    "kl": ((_X, _Y), kl_divergence),
    "kl, scale, mask": ((_X, _Y, _SCALE), lambda i: kl_divergence(i, ("scale",), where=_MASK)),
    "linear": (_HEAD, lambda i: linear(_SOME, _NAMED, chunk_size=4, **_IGNORED)),
    "linear, smoothing": (_HEAD, lambda i: linear(_SOME, _NAMED, chunk_size=4, entropy=True, **_IGNORED, **_CAPPED)),
    "linear, kept": (_HEAD, lambda i: linear(_SOME, _NAMED, chunk_size=4, recompute=False, **_IGNORED, **_SMOOTHED)),
    "linear, entropy": (_HEAD[:2], lambda i: linear(_LABELS, lse=False, entropy=True, chunk_size=4)),
    "linear, mean": (_REDUCED, lambda i: linear(_SOME, _EVERY, lse=False, chunk_size=2, **_IGNORED, **_MEAN)),
    "linear, sum": (_REDUCED, lambda i: linear(_SOME, _EVERY, lse=False, chunk_size=1, **_IGNORED, **_CAPPED, **_SUM)),
    "integer, numbers": ((_X, *_NUMBERS), lambda i: integer(i, _SOME, _TWO, where=_MASK, **_IGNORED)),
    "integer, numbers, entropy": (
        (_X, _WEIGHTS, *_NUMBERS),
        lambda i: integer(i, _SOME, _LAST + _TWO, entropy=True, **_IGNORED),
    ),
    "dense, numbers": ((_X, _Q, *_NUMBERS), lambda i: dense(i, _TWO, where=_MASK)),
    "linear, numbers": (
        (*_HEAD, *_SCALED_TOO),
        lambda i: linear(_SOME, (*_NAMED, *_TWO, "scale"), chunk_size=4, entropy=True, **_IGNORED),
    ),
    "linear, numbers, mean": (
        (*_REDUCED, *_SCALED_TOO),
        lambda i: linear(
            _SOME, (*_EVERY, *_TWO, "scale"), lse=False, chunk_size=2, reduction="mean", logits_soft_cap=3.0, **_IGNORED
        ),
    ),
    "top_k": ((_X,), lambda i: top_k(i, 3)),
    **{name: (attention_calls.case(o).operands, lambda i, o=o: attention(i, o)) for name, o in _ATTENTION.items()},
    **{n: (attention_calls.case(o, _OF_RING).operands, lambda i, o=o: ring_attention(i, o)) for n, o in _RING.items()},
    **{n: (paged_calls.case(o).operands, lambda i, o=o: paged_attention(i, o)) for n, o in _PAGED.items()},
    "write": (paged_calls.writing().operands, lambda i: write_pages()),
    "write, scales": (paged_calls.writing(**_SCALED).operands, lambda i: write_pages(**_SCALED)),
    "fold": ((_X,), lambda i: folded(2)),
    "fold, nothing before": ((_X,), lambda i: folded(0)),
}


def choices(less: Callable[[str], bool]) -> list:
    """Every entry of the table with each implementation, as parameters of a test.

    Most run only when asked to: those entries of which `less` is true, and the implementations that are None or XLA's,
    one of which does what another does, or the reference.
    """
    chosen = []
    for name in CALLS:
        names, others = IMPLEMENTATIONS, (None, "xla", "reference")
        if name.startswith(("attention", "ring attention")):
            names, others = ATTENTION_IMPLEMENTATIONS, ("xla", "reference")
        if name.startswith("paged attention"):
            names, others = PAGED_IMPLEMENTATIONS, ("xla", "reference")
        if name.startswith(("linear", "fold", "write")):  # they have no such argument
            names, others = (None,), ()
        chosen += [pytest.param(name, i, marks=slow if less(name) or i in others else ()) for i in names]
    return chosen


def case_of(name: str, implementation: str | None, dtype=np.float64) -> Case:
    """An entry of the table for an implementation, with arguments of a dtype."""
    operands, functions = CALLS[name]
    return Case(name, *functions(implementation), [v.astype(dtype) for v in operands])
