"""vmap: a mapped dimension is more rows, in the one kernel call, without loops.

The compiled program is read, as a loop over calls would give the same values.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from common import each_fast_implementation, each_implementation, each_op, loss, on_cpu, ours, served, theirs
from truth import in_float64


@pytest.mark.cover("op", "implementation")
@each_op
@each_fast_implementation
@pytest.mark.parametrize("in_axis", [0, 1, -1])
@pytest.mark.parametrize("axis", [-1, 0])
def test_every_axis(op, implementation, in_axis, axis):
    """Value, gradient, tangent and second derivative, for every axis mapped and every axis reduced."""
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((3, 4, 5))

        def everything(f):
            def of(x):
                first = jax.grad(loss(f))
                return f(x), first(x), jax.jvp(f, (x,), (jnp.cos(x),))[1], jax.jvp(first, (x,), (jnp.sin(x),))[1]

            return of

        actual = jax.jit(jax.vmap(everything(ours(op, implementation, axis=axis)), in_axis))(x)
        expected = in_float64(jax.vmap(everything(theirs(op, axis=axis)), in_axis), x)
        assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.costly
@each_op
@each_implementation
def test_nested_and_uneven(op, implementation):
    """vmap in vmap, under jit; and only one of x, its tangent and its cotangent mapped."""
    with jax.enable_x64(True), served(implementation):
        x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))

        def mapped(f, x):
            nested = jax.vmap(jax.vmap(jax.grad(loss(f)), 1), 0)(x)
            v, many = x[0, 0, 0], x[0, 0]
            tangents = jax.vmap(lambda t: jax.jvp(f, (v,), (t,))[1])(many)
            points = jax.vmap(lambda x: jax.jvp(f, (x,), (v,))[1])(many)
            cotangents = jax.vmap(jax.vjp(f, v)[1])(many if op != "logsumexp" else many[:, 0])
            return nested, tangents, points, cotangents

        actual = jax.jit(functools.partial(mapped, ours(op, implementation)))(x)
        expected = in_float64(functools.partial(mapped, theirs(op)), x)
        assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.costly
@each_op
@each_implementation
def test_mask_mapped_or_not(op, implementation):
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    where = np.random.default_rng(1).random((3, 4, 5)) < 0.7
    with served(implementation):
        f, f0 = ours(op, implementation), theirs(op)
        for axes, mask in (((0, 0), where), ((0, None), where[0]), ((None, 0), where)):
            v = x if axes[0] is not None else x[0]
            mapped = [jax.vmap(lambda x, w, h=h: jnp.nan_to_num(h(x, where=w)), axes) for h in (f, f0)]
            actual, expected = jax.jit(lambda x, w, mapped=mapped: [h(x, w) for h in mapped])(v, mask)
            assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.costly
@on_cpu
@each_op
@pytest.mark.parametrize("implementation", [None, "ffi"], ids=str)
def test_one_call_and_no_loop(op, implementation):
    """A mapped leading axis costs nothing: the same number of kernel calls, no loop, no transpose and no copy."""
    f = ours(op, implementation)
    x = np.ones((6, 4, 40), np.float32)
    for program, calls in ((f, 1), (jax.grad(loss(f)), 2)):
        once = jax.jit(program).lower(x[0]).compile().as_text()
        mapped = jax.jit(jax.vmap(program)).lower(x).compile().as_text()
        twice = jax.jit(jax.vmap(jax.vmap(program))).lower(x[None]).compile().as_text()
        for text in (once, mapped, twice):
            assert len(re.findall(r'custom_call_target="jaxsoft_', text)) == calls, text
            assert not re.search(r"= \S+ (while|transpose|copy|call)\(", text), text


@on_cpu
@each_op
def test_one_call_for_other_axes(op):
    """Any other mapped axis costs at most a transposition on either side, never a loop."""
    x = np.ones((6, 4, 40), np.float32)
    text = jax.jit(jax.vmap(ours(op), 1, 1)).lower(x).compile().as_text()
    assert len(re.findall(r'custom_call_target="jaxsoft_', text)) == 1
    assert " while(" not in text
