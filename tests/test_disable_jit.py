"""`jax.disable_jit`, which people set to look for their own bugs: every public function and derivative, as with jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import case_of, choices
from chex import assert_trees_all_close
from common import served

import jaxsoft

FAST = ("softmax", "integer", "attention, segments")
CHOICES = choices(lambda name: name not in FAST)


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


def test_what_has_no_derivative():
    """Sampling, and the functions of the fold."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32))

    def results():
        key = jax.random.key(0)
        draws = [jaxsoft.random.sample(key, x, **o) for o in ({}, {"top_k": 5}, {"top_p": 0.9})]
        a, b = x[:, :7], x[:, 7:12]
        st = jaxsoft.fold.combine(jaxsoft.fold.state(a), jaxsoft.fold.state(b))
        merged = jaxsoft.fold.merge_softmax([jaxsoft.softmax(a), jaxsoft.softmax(b)], [st, st])
        return draws, st, jaxsoft.fold.lse(st), merged

    expected = results()
    with jax.disable_jit():
        assert_trees_all_close(results(), expected, rtol=1e-6)


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
    ]
    with jax.debug_nans(True), jax.disable_jit():
        for function in functions:
            derivative(lambda x, f=function: sum(map(jnp.sum, f(x))))(x)
        with pytest.raises(FloatingPointError):
            jaxsoft.softmax_cross_entropy_with_integer_labels(x, y - 1)
