"""What a run by default keeps of a product of parameters: a few cases, in which everything that is named occurs."""

import itertools

from covering import covering

OPS, IMPLEMENTATIONS, DTYPES = ("softmax", "logsumexp", "entropy"), (None, "ffi"), ("f16", "bf16", "f32", "f64")
PRODUCT = [
    {"op": op, "implementation": implementation, "dtype": dtype}
    for op, implementation, dtype in itertools.product(OPS, IMPLEMENTATIONS, DTYPES)
]


def test_named_parameters():
    """Each combination once, as there are fewer values of the others, which take turns."""
    kept = [PRODUCT[i] for i in covering(PRODUCT, ("op", "implementation"))]
    pairs = [(case["op"], case["implementation"]) for case in kept]
    assert sorted(map(str, pairs)) == sorted(map(str, itertools.product(OPS, IMPLEMENTATIONS)))
    assert {case["dtype"] for case in kept} == {*DTYPES}


def test_no_name():
    """Each value of each parameter."""
    kept = [PRODUCT[i] for i in covering(PRODUCT, ())]
    assert len(kept) == len(DTYPES)
    for name, values in (("op", OPS), ("implementation", IMPLEMENTATIONS), ("dtype", DTYPES)):
        assert {case[name] for case in kept} == {*values}


def test_cases_that_are_no_product():
    cases = [case for case in PRODUCT if case["op"] != "entropy" or case["dtype"] == "f64"]
    kept = [cases[i] for i in covering(cases, ("dtype",))]
    assert {case["dtype"] for case in kept} == {*DTYPES} and {case["op"] for case in kept} == {*OPS}
    assert covering(cases[-1:], ("op", "dtype")) == {0}


def test_a_limit():
    """Two cases that have no value in common, as far as there is another."""
    first, second = (PRODUCT[i] for i in sorted(covering(PRODUCT, (), 2)))
    assert all(first[name] != second[name] for name in first)
    assert covering(PRODUCT[:1], (), 2) == {0}
