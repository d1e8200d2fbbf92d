"""The public functions' calls with their options, each beside its definition."""

import definitions
import jax.numpy as jnp
import numpy as np
from common import OPS

import jaxsoft
from jaxsoft import fold

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 6))
MASK = np.array([[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]], bool)
SCALE, BIAS = RNG.standard_normal((3, 1)), RNG.standard_normal((1, 6))
LABELS, SOME = np.array([0, 5, 3], np.int32), np.array([0, -100, 3], np.int32)
Q, WEIGHTS = RNG.random((3, 6)), RNG.uniform(0.2, 2, 6)
HIDDEN, WEIGHT = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 6))
CAPPED = {"label_smoothing": 0.1, "z_loss": 0.1, "logit_softcap": 3.0}


def row_operation(op, *operands, **options):
    """Of x, scale and bias, or of x."""

    def call(function, **more):
        return lambda x, *v: (function(x, -1, **dict(zip(("scale", "bias"), v, strict=False)), **options, **more),)

    return lambda name: (call(getattr(jaxsoft, op), implementation=name), call(getattr(definitions, op)), operands)


def integer(*operands, labels=LABELS, where=None, **options):
    """Loss and logsumexp, of x and class weights, or of x."""

    def ours(name):
        return lambda x, w=None: jaxsoft.softmax_cross_entropy_with_integer_labels(
            x, labels, where=where, class_weights=w, return_lse=True, implementation=name, **options
        )

    def theirs(x, w=None):
        return definitions.integer_cross_entropy(x, w, labels, where=where, **options)

    return lambda name: (ours(name), theirs, operands)


def dense(*operands, where=None, **options):
    """Loss and logsumexp, of x, labels and class weights, or without weights."""

    def ours(name):
        return lambda x, q, w=None: jaxsoft.softmax_cross_entropy(
            x, q, where=where, class_weights=w, return_lse=True, implementation=name, **options
        )

    def theirs(x, q, w=None):
        return definitions.cross_entropy(x, q, w, where=where, **options)

    return lambda name: (ours(name), theirs, operands)


def linear(*operands, kept=False, **options):
    """Loss and logsumexp, of hidden, weight, bias and class weights."""

    def ours(h, w, b, c):
        more = {"chunk_size": 4, "recompute": not kept, "return_lse": True, **options}
        return jaxsoft.linear_softmax_cross_entropy(h, w, SOME, b, ignore_index=-100, class_weights=c, **more)

    def theirs(h, w, b, c):
        return definitions.linear_cross_entropy(h, w, b, c, SOME, ignore_index=-100, **options)

    return lambda name: (ours, theirs, operands)


def top_k(name):
    """Values and probabilities."""
    return (
        lambda x: jaxsoft.top_k_softmax(x, 3, implementation=name)[:2],
        lambda x: definitions.top_k_softmax(x, 3),
        [X],
    )


def merged(name):
    """A softmax of two blocks, its logsumexp, and the same by the running update; and beside a block of nothing."""
    del name

    def ours(x):
        a, b = x[:, :2], x[:, 2:]
        y, st = fold.merge_softmax([jaxsoft.softmax(a), jaxsoft.softmax(b)], [fold.state(a), fold.state(b)])
        lses = jaxsoft.logsumexp(a, -1), fold.cumlogsumexp(b)[:, -1]
        o, lse = fold.update_output(x, lses[0], jnp.ones_like(x), lses[1])
        return (
            y,
            fold.lse(st),
            o,
            lse,
            fold.lse(fold.combine(fold.state(x[:, :0]), fold.state(x))),
        )

    def theirs(x):
        p, lse = definitions.softmax(x), definitions.logsumexp(x)
        share = jnp.sum(p[:, 2:], axis=-1, keepdims=True)
        return p, lse, (1 - share) * x + share, lse, lse

    return ours, theirs, [X]


CASES = {
    **{op: row_operation(op, X) for op in OPS},
    **{f"{op}, extras": row_operation(op, X, SCALE, BIAS, where=MASK) for op in OPS},
    "integer": integer(X),
    "integer, smoothing": integer(X, label_smoothing=0.1),
    "integer, z_loss": integer(X, z_loss=0.1),
    "integer, ignored, capped": integer(X, labels=SOME, ignore_index=-100, **CAPPED),
    "integer, mask": integer(X, where=MASK, **CAPPED),
    "integer, weights": integer(X, WEIGHTS),
    "integer, weights, mask": integer(X, WEIGHTS, labels=SOME, where=MASK, ignore_index=-100, **CAPPED),
    "dense": dense(X, Q),
    "dense, weights, mask": dense(X, Q, WEIGHTS, where=MASK, **CAPPED),
    "linear": linear(HIDDEN, WEIGHT, BIAS[0], WEIGHTS),
    "linear, smoothing": linear(HIDDEN, WEIGHT, BIAS[0], WEIGHTS, **CAPPED),
    "linear, kept": linear(HIDDEN, WEIGHT, BIAS[0], WEIGHTS, kept=True, label_smoothing=0.1),
    "top_k": top_k,
    "fold": merged,
}
