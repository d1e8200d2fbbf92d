"""`jax.disable_jit`, which people set to look for their own bugs: every public function and derivative, as with jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import case_of, choices
from chex import assert_trees_all_close
from common import served

import jaxsoft

FAST = ("softmax", "integer", "kl", "attention, segments")
CHOICES = choices(lambda name: name not in FAST)


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    ("name", "implementation"), [choice for choice in CHOICES if not choice.values[0].startswith("fold")]
)
def test_values_and_derivatives(name, implementation):
    """Value, gradient, tangent, the gradient of a map, and the derivative of the gradient."""
    x64 = implementation != "pallas"
    with jax.enable_x64(x64), served(implementation):
        case = case_of(name, implementation, np.float64 if x64 else np.float32)
        every = [case, *(case.through(t) for t in ("grad", "jvp")), case.through("vmap").through("grad")]
        with jax.disable_jit():
            for one in [*every, case.through("grad").through("jvp")]:
                one.check(lambda f: f)


X = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)


@pytest.mark.costly(1)
@pytest.mark.parametrize("options", [{"top_p": 0.9}, {}, {"top_k": 5}], ids=str)
def test_sampling(options):
    def results():
        return jaxsoft.random.sample(jax.random.key(0), jnp.asarray(X), **options)

    expected = jax.jit(results)()
    with jax.disable_jit():
        assert_trees_all_close(results(), expected, rtol=1e-6)


def test_fold():
    def results(a, b):
        st = jaxsoft.fold.combine(jaxsoft.fold.state(a), jaxsoft.fold.state(b))
        merged = jaxsoft.fold.merge_softmax([jaxsoft.softmax(a), jaxsoft.softmax(b)], [st, st])
        return st, jaxsoft.fold.lse(st), merged

    given = jnp.asarray(X[:, :7]), jnp.asarray(X[:, 7:12])
    expected = jax.jit(results)(*given)
    with jax.disable_jit():
        assert_trees_all_close(results(*given), expected, rtol=1e-6)


@pytest.mark.parametrize("derivative", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_nothing_but_a_result_is_nan(derivative):
    """jax.debug_nans finds no NaN where the losses and entropies of finite scores, and ignored rows, have none."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32))
    w, y, p = jnp.ones((5, 9), jnp.float32), jnp.array([0, 2, -100]), jnp.full((3, 5), 0.2, jnp.float32)
    options = {"ignore_index": -100, "return_entropy": True}
    functions = [
        lambda x: jaxsoft.softmax_cross_entropy_with_integer_labels(x, y, **options),
        lambda x: jaxsoft.linear_softmax_cross_entropy(x, w, y, **options),
        lambda x: [jaxsoft.linear_softmax_cross_entropy(x, w, y, reduction="mean", ignore_index=-100)],
        lambda x: jaxsoft.softmax_cross_entropy(x, p, return_entropy=True),
        lambda x: [jaxsoft.entropy(x)],
        lambda x: [jaxsoft.softmax_kl_divergence(x, jnp.cos(x)), jaxsoft.softmax_kl_divergence(x, x, scale=0.5)],
    ]
    with jax.debug_nans(True), jax.disable_jit():
        for function in functions:
            derivative(lambda x, f=function: sum(map(jnp.sum, f(x))))(x)
        with pytest.raises(FloatingPointError):
            jaxsoft.softmax_cross_entropy_with_integer_labels(x, y - 1)


NOTHING = {
    "lengths": {"key_value_seq_lengths": np.array([0, 3])},
    "query lengths": {"query_seq_lengths": np.array([0, 2])},
    "mask": {"mask": np.zeros((1, 1, 3, 1), bool)},
}


def nothing_of_attention():
    """Calls in which no key counts for some queries, whose output is 0."""
    x = np.ones((2, 3, 4, 8), np.float32)
    table, lengths = np.array([[0, 1], [1, 0]]), np.array([0, 3])
    empty = jaxsoft.fold.attention_identity((2, 3, 4), 8)
    masked = {"mask": np.zeros((1, 1, 3, 1), bool)}
    calls = {
        "no keys": lambda: jaxsoft.dot_product_attention(x, x[:, :0], x[:, :0]),
        "a state of nothing": lambda: jaxsoft.dot_product_attention(x, x, x, state=empty, **masked),
        "pages": lambda: jaxsoft.paged_attention(x, x, x, table, lengths),
    }
    return calls | {
        name: lambda o=options: jaxsoft.dot_product_attention(x, x, x, **o) for name, options in NOTHING.items()
    }


def nothing_of_losses():
    """Losses of rows that do not count, or that are ignored: 0."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32))
    w, y, p = jnp.ones((5, 9), jnp.float32), jnp.array([0, 2, -100]), jnp.full((3, 5), 0.2, jnp.float32)
    rows = jnp.array([True, True, False])
    integer = jaxsoft.softmax_cross_entropy_with_integer_labels
    return {
        "integer": lambda: integer(x, y, ignore_index=-100, label_smoothing=0.1, z_loss=0.1),
        "integer with rows": lambda: integer(x, abs(y) % 5, where=rows, return_entropy=True),
        "dense": lambda: jaxsoft.softmax_cross_entropy(x, p, where=rows, return_entropy=True),
        "kl": lambda: jaxsoft.softmax_kl_divergence(x, p, where=rows[:, None]),
        "linear": lambda: jaxsoft.linear_softmax_cross_entropy(x, w, y, ignore_index=-100, return_entropy=True),
    }


QUIET = nothing_of_attention() | nothing_of_losses()


@pytest.mark.parametrize("name", QUIET)
def test_what_is_not_asked_for_is_no_result(name):
    """jax.debug_infs does not stop at the log-sum-exp of nothing where it is not returned."""
    with jax.debug_infs(True):
        assert all(np.isfinite(v).all() for v in jax.tree.leaves(QUIET[name]()))


def test_a_result_that_is_infinite():
    """It is found."""
    x = np.ones((2, 3, 4, 8), np.float32)
    asked = ({"return_residual": True}, {"return_state": True}, {"return_max_logits": True})
    with jax.debug_infs(True):
        for options in asked:
            with pytest.raises(FloatingPointError):
                jaxsoft.dot_product_attention(x, x[:, :0], x[:, :0], **options)
        with pytest.raises(FloatingPointError):
            jaxsoft.softmax_cross_entropy(x, x, where=np.zeros((2, 3, 4), bool), return_lse=True)
