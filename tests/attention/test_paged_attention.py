"""Attention over pages and writing into these, against the definitions in float64: every option, every edge."""

import functools

import chex
import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from common import PAGED_IMPLEMENTATIONS, as_usual, on_cpu, precision, same_bits, served, slow, some
from paged_calls import OPTIONS, SMALL, Sizes, case, table_and_lengths
from truth import in_float64, wide

import jaxsoft

each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=slow if name in ("xla", "reference") else (), id=str(name))
        for name in PAGED_IMPLEMENTATIONS
    ],
)
EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def both(call: Case) -> Case:
    """The results of a call and its gradients, compiled once."""
    return Case.together(call.what, [call, call.through("grad")])


@slow  # tests below have several at once, and test_paged_sharding.py and test_every_function.py others and none
@pytest.mark.parametrize("option", [None, *OPTIONS], ids=str)
@each_implementation
def test_every_option(option, implementation):
    """Output, log-sum-exp and all gradients."""
    with precision(np.float64), served(implementation):
        both(case([option] if option else [], SMALL, np.float64, implementation)).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("more", [("window to the left",), ("query lengths",), ("state", "out of range")], ids=str)
@pytest.mark.parametrize("which", ["past the table", "lengths"])
def test_lengths_past_the_table(which, more):
    """The queries are the last tokens of the sequences, whether or not the table has their keys."""
    with precision(np.float64):
        both(case(["causal", which, *more], SMALL._replace(b=6, pages=30), np.float64)).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    "options", [{"local_window_size": (2, 0)}, {"is_causal": True}, {"local_window_size": (4, 1)}], ids=str
)
@pytest.mark.parametrize("counts", [(1, 2, 3, 1, 2, 0), None], ids=str)
@each_implementation
def test_more_columns_of_no_pages(implementation, counts, options):
    """They change nothing, in the output and in gradients: with lengths past the table, and as far as 32 bits go."""
    with served(implementation):
        z = Sizes(b=6, h=64, d=64, size=16, number=2, pages=12)
        rng = np.random.default_rng(0)
        lengths = np.array([z.s + 1, z.s + z.t + 4, 2**31 - 1, -(2**31), -1, 5], np.int32)
        table, _ = table_and_lengths(rng, z, lengths=lengths)
        wider = np.concatenate([table, np.full((z.b, 3), -1, np.int32)], axis=1)
        dtype = jnp.bfloat16 if implementation == "ffi" else np.float32
        query, *pages = case([], z, np.float32).operands
        query, *pages = (np.nan_to_num(x).astype(dtype) for x in (query, *pages))

        def attend(*operands, table):
            given = options | {"query_seq_lengths": None if counts is None else np.array(counts, np.int32)}
            y, lse = jaxsoft.paged_attention(
                *operands, table, lengths, return_residual=True, implementation=implementation, **given
            )
            y = y.astype(np.float32)
            return jnp.sum(jnp.sin(y)), (y, lse)

        def results(table, *operands):
            return jax.value_and_grad(functools.partial(attend, table=table), (0, 1, 2), has_aux=True)(*operands)

        found, expected = jax.jit(lambda *v: (results(table, *v), results(wider, *v)))(query, *pages)
        bound = 2e-2 if dtype == jnp.bfloat16 else 1e-5
        chex.assert_trees_all_close(found, expected, rtol=bound, atol=bound)


@slow  # test_every_function.py has it without options
def test_reference():
    """The definition by a scan, which XLA compiles slowly."""
    with precision(np.float64):
        options = ["bias", "sinks", "causal", "key scale", "out of range"]
        both(case(options, Sizes(b=2, t=2, number=2, size=2), np.float64, "reference")).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@each_implementation
def test_every_dtype(dtype, implementation):
    with served(implementation):
        sizes = Sizes(t=4, h=64, d=64, size=16, number=5, pages=20)
        call = case(["bias of a head", "sinks", "causal", "value scale"], sizes, dtype, implementation)
        both(call).check()
        output, lse = jax.eval_shape(call.ours, *call.operands)
        assert output.dtype == dtype
        assert lse.dtype == jnp.float32


# Blocks of plain JAX have 128 keys on a CPU for many queries, and up to 8192 for few: whole pages of these, or a page.
PAGES = [(1, 1, 1), (1, 7, 3), (2, 1, 130), (512, 1, 300), (512, 16, 20), (512, 100, 5), (512, 130, 3), (3, 16, 520)]


@pytest.mark.costly
@pytest.mark.parametrize(("t", "size", "number"), PAGES, ids=str)
@each_implementation
def test_pages_of_any_size(t, size, number, implementation):
    """With lengths of nothing, of all, and around the ends of pages."""
    with precision(np.float32), served(implementation):
        z = Sizes(b=5, t=t, n=2, k=1, h=4, d=4, number=number, size=size, pages=3 * number + 1)
        lengths = np.clip([0, z.s, size, size - 1, z.s - size + 1], 0, z.s)
        rng = np.random.default_rng(size)
        table, _ = table_and_lengths(rng, z, shared=True, lengths=lengths)
        pages = [rng.standard_normal((z.pages, size, 1, 4)).astype(np.float32) for _ in range(2)]
        query = rng.standard_normal((5, t, 2, 4)).astype(np.float32)
        key, value = (x[np.clip(table, 0, z.pages - 1)].reshape(5, z.s, 1, 4) for x in pages)

        def both_ways(query, key_pages, value_pages, key, value):
            found = jaxsoft.paged_attention(
                query, key_pages, value_pages, table, lengths, is_causal=True, implementation=implementation,
                return_residual=True,
            )  # fmt: skip
            expected = jaxsoft.dot_product_attention(
                query, key, value, is_causal=True, key_value_seq_lengths=lengths, query_offset=lengths - t,
                implementation="xla", return_residual=True,
            )  # fmt: skip
            return *found, *expected

        y, lse, expected, expected_lse = map(np.asarray, jax.jit(both_ways)(query, *pages, key, value))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-5)
        assert not y[0].any()


ONE = Sizes(b=1, t=1, n=1, k=1)


@pytest.mark.parametrize(
    "sizes",
    some([Sizes(n=4, k=4), Sizes(n=6, k=1), Sizes(h=3, d=5), ONE], [Sizes(h=3, d=5)]),
    ids=str,
)
@each_implementation
def test_heads(sizes, implementation):
    with precision(np.float64), served(implementation):
        both(case(["bias", "causal", "shared"], sizes, np.float64, implementation)).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("of_pages", EIGHT_BITS, ids=lambda dtype: dtype.__name__)
@each_implementation
def test_pages_of_8_bits(of_pages, dtype, scaled, implementation):
    """They are exactly what they hold, times the scales."""
    with served(implementation):
        sizes = Sizes(t=2, h=64, d=64, size=16, number=5, pages=20)
        call = case(["causal", *["key scale", "value scale"] * scaled], sizes, dtype, implementation, of_pages=of_pages)
        y, lse = jax.jit(call.ours)(*call.operands)
        true = in_float64(call.theirs, *call.operands)
        bound = {2: 2e-2, 4: 1e-5}[y.dtype.itemsize]
        np.testing.assert_allclose(wide(y), true[0], rtol=bound, atol=bound)
        np.testing.assert_allclose(lse, true[1], rtol=1e-2 if y.dtype == jnp.bfloat16 else 1e-3, atol=bound)


@pytest.mark.costly(1)
@pytest.mark.parametrize("of_pages", EIGHT_BITS, ids=lambda dtype: dtype.__name__)
def test_gradients_of_pages_of_8_bits(of_pages):
    """They are summed in f32, and rounded once."""
    call = case(["shared", "key scale", "value scale"], Sizes(b=5, pages=6), np.float32, of_pages=of_pages)
    query, *pages, key_scale, value_scale = call.operands

    def total(*operands):
        return jnp.sum(jnp.sin(call.ours(*operands)[0]))

    gradients = jax.jit(jax.grad(total, (0, 1, 2, 3, 4)))
    ours = gradients(*call.operands)
    exact = gradients(query, *(x.astype(np.float32) for x in pages), key_scale, value_scale)
    assert [v.dtype for v in ours] == [v.dtype for v in call.operands]
    chex.assert_trees_all_close((ours[0], *ours[3:]), (exact[0], *exact[3:]), rtol=1e-5, atol=1e-6)
    for a, e in zip(ours[1:3], exact[1:3], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e).astype(of_pages))


@each_implementation
def test_where_no_key_counts(implementation):
    """Of a sequence without keys, or all of whose entries are out of range: 0, -inf, and gradients of 0."""
    with served(implementation):
        z = Sizes(b=3, h=64, d=64, size=16)
        rng = np.random.default_rng(0)
        table = np.array([[5, 2, 1], [-1, z.pages, 2**31 - 1], [3, 3, 0]], np.int32)
        lengths = np.array([0, z.s, 20], np.int32)
        pages = [rng.standard_normal((z.pages, z.size, z.k, 64)).astype(jnp.bfloat16) for _ in range(2)]
        query = rng.standard_normal((z.b, z.t, z.n, 64)).astype(jnp.bfloat16)

        def attend(query, *pages):
            return jaxsoft.paged_attention(
                query, *pages, table, lengths, return_residual=True, implementation=implementation
            )

        def total(*operands):
            finite = (jnp.where(jnp.isfinite(x), x, 0).astype(np.float32) for x in attend(*operands))
            return sum(jnp.sum(x**2) for x in finite)

        found = jax.jit(lambda *v: (*attend(*v), *jax.grad(total, (0, 1, 2))(*v)))(query, *pages)
        y, lse, *gradients = map(np.asarray, found)
        assert not y[:2].any() and (lse[:2] == -np.inf).all()
        assert y[2].any() and np.isfinite(lse[2]).all()
        chex.assert_tree_all_finite(gradients)
        assert not gradients[0][:2].any()
        for gradient in gradients[1:]:
            assert gradient[3].any() and not gradient[[1, 2, 4, 5]].any()


def test_integers_of_every_dtype():
    """A table and lengths of any, where numbers that 32 bits do not hold are out of range."""
    z = Sizes(pages=120)
    rng = np.random.default_rng(0)
    pages = [rng.standard_normal((z.pages, z.size, z.k, size)).astype(np.float32) for size in (z.h, z.d)]
    query = rng.standard_normal((z.b, z.t, z.n, z.h)).astype(np.float32)
    table, lengths = rng.permutation(z.pages)[: z.b * z.number].reshape(z.b, z.number), np.array([9, 4, 7])
    expected = jaxsoft.paged_attention(query, *pages, table.astype(np.int32), lengths)
    wrong = table.copy()
    wrong[0, 1] = -1
    without = jaxsoft.paged_attention(query, *pages, wrong, lengths)
    assert not np.allclose(without, expected)
    with jax.enable_x64(True):
        for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
            y = jaxsoft.paged_attention(query, *pages, table.astype(dtype), lengths.astype(dtype))
            assert same_bits(y, expected)
            for number in {np.iinfo(dtype).min, np.iinfo(dtype).max} - {0}:
                wrong = table.astype(dtype)
                wrong[0, 1] = number
                if number >= z.pages or number < 0:
                    assert same_bits(jaxsoft.paged_attention(query, *pages, wrong, lengths), without)
        for number in (2**32 + int(table[0, 1]), -(2**32) + int(table[0, 1])):
            wrong = table.copy()
            wrong[0, 1] = number
            assert same_bits(jaxsoft.paged_attention(query, *pages, wrong, lengths), without)
        assert same_bits(
            jaxsoft.paged_attention(query, *pages, table, np.array([9, 4, 7 + 2**33])),
            jaxsoft.paged_attention(query, *pages, table, np.array([9, 4, z.s])),
        )


@pytest.mark.parametrize("name", some(["b", "t", "number", "pages"], ["number"]))
def test_nothing(name):
    """No sequences, queries, pages of a sequence, or pages at all."""
    z = SMALL._replace(**{name: 0})
    pages = [np.ones((z.pages, z.size, z.k, size), np.float32) for size in (z.h, z.d)]
    query, table = np.ones((z.b, z.t, z.n, z.h), np.float32), np.zeros((z.b, z.number), np.int32)
    lengths = np.full(z.b, 4, np.int32)

    def attend(*v):
        return jaxsoft.paged_attention(*v, table, lengths, return_residual=True)

    def results(*v):
        gradients = jax.grad(lambda *v: attend(*v)[0].sum(), (0, 1, 2))
        return attend(*v), gradients(*v), jax.vmap(gradients)(*(jnp.stack([x, x]) for x in v))

    (y, lse), gradients, mapped = jax.tree.map(np.asarray, jax.jit(results)(query, *pages))
    assert y.shape == (z.b, z.t, z.n, z.d) and not y.any() and (lse == -np.inf).all()
    assert [v.shape for v in gradients] == [v.shape for v in (query, *pages)] and not any(v.any() for v in gradients)
    assert [v.shape[1:] for v in mapped] == [v.shape for v in gradients] and not any(v.any() for v in mapped)
    new = [np.ones((z.b, z.t, z.k, size), np.float32) for size in (z.h, z.d)]
    for before, after in zip(pages, jaxsoft.write_pages(*pages, *new, table, lengths), strict=True):
        assert before.shape == after.shape and np.array_equal(before, after)


def test_without_a_rule_nothing_depends_on_positions():
    """So none is computed where each sequence has one query, as when decoding."""
    call = case((), SMALL, np.float32)
    query, *pages = call.operands
    table, lengths = table_and_lengths(np.random.default_rng(0), SMALL)
    programs = [
        jax.make_jaxpr(functools.partial(jaxsoft.paged_attention, **given))(query, *pages, table, lengths)
        for given in ({}, {"local_window_size": 2})
    ]
    (none, some) = (str(program).count("offset") for program in programs)
    assert none < some


def test_no_row_depends_on_others():
    """Neither on their lengths, nor on the number of sequences, nor on where pages are: the same bits."""
    z = Sizes(b=4, size=16, number=80, pages=400)
    rng = np.random.default_rng(0)
    table, lengths = table_and_lengths(rng, z)
    pages = [rng.standard_normal((z.pages, z.size, z.k, size)).astype(np.float32) for size in (z.h, z.d)]
    query = rng.standard_normal((z.b, z.t, z.n, z.h)).astype(np.float32)
    attend = jax.jit(functools.partial(jaxsoft.paged_attention, is_causal=True))
    y = attend(query, *pages, table, lengths)
    others = np.where(np.arange(z.b) == 1, lengths, 5)
    assert same_bits(attend(query, *pages, table, others)[1], y[1])
    order = rng.permutation(z.pages)
    moved = [x[np.argsort(order)] for x in pages]
    table = np.where((table >= 0) & (table < z.pages), order[np.clip(table, 0, z.pages - 1)], -1).astype(np.int32)
    assert same_bits(attend(query, *moved, table, lengths), y)


def test_same_bits_of_gradients():
    """From run to run, of pages that all sequences share: sums have an order of their own."""
    call = case(["shared", "causal"], Sizes(b=16, h=64, d=64, size=16, pages=5), jnp.bfloat16)
    run = jax.jit(call.through("grad").ours)
    assert all(same_bits(run(*call.operands), run(*call.operands)) for _ in range(3))


@on_cpu
def test_only_blocks_of_pages_are_gathered():
    """The memory of a program is neither that of the cache nor that of all keys, nor that of the scores of all."""
    x = jax.ShapeDtypeStruct
    pages = x((4096, 16, 1, 32), jnp.float32)
    operands = x((1, 512, 1, 32), jnp.float32), pages, pages, x((1, 1024), jnp.int32), x((1,), jnp.int32)
    f = functools.partial(jaxsoft.paged_attention, is_causal=True, implementation="xla")
    memory = jax.jit(f).lower(*operands).compile().memory_analysis().temp_size_in_bytes
    assert memory < 16384 * 32 * 4, memory


@slow  # by default test_attention_transformations and test_higher_orders have such loops
@pytest.mark.parametrize("mode", ["jvp", "grad"])
def test_second_derivatives_of_a_loop(mode):
    """Of layers that are scanned, each with pages of its own."""
    with precision(np.float64):
        call = case(["causal", "shared"], Sizes(b=2, t=2, number=2), np.float64)

        def looped(*operands):
            once = jax.tree.map(lambda x: x[None], operands)
            return jax.tree.map(lambda y: y[0], jax.lax.scan(lambda _, v: (None, call.ours(*v)), None, once)[1])

        in_loop = Case("a loop", looped, call.theirs, call.operands)
        in_loop.through("grad").through(mode).check()


PAIRS = [
    ("grad", "vmap"),
    ("vmap", "grad"),
    ("vmap of the first operand", "grad"),
    ("grad", "vmap of the first operand"),
    ("grad", "grad"),
    ("jvp", "grad"),
    ("grad", "jvp"),
    ("vmap of the last axis", "vmap"),
    ("checkpoint", "grad"),
    ("map", "grad"),
]


@slow  # test_every_function.py has most of them without options, and test_fuzz.py with any
@pytest.mark.parametrize(
    "options", [("causal", "shared", "out of range"), ("key scale", "sinks", "query lengths")], ids=str
)
@pytest.mark.parametrize("pair", PAIRS, ids=" of ".join)
def test_two_transformations(pair, options):
    with precision(np.float64):
        small = Sizes(2, 2, 2, 1, 2, 2, 2, 2, 5)
        case(options, small, np.float64).through(pair[0]).through(pair[1]).check()


@pytest.mark.costly(1)
@pytest.mark.parametrize("which", [1, 0, 2, 3, 4])
@each_implementation
def test_maps_of_each_argument(which, implementation):
    """Of query, either of the pages, the table or the lengths alone: one call, of more sequences or of more pages."""
    with served(implementation):
        rng = np.random.default_rng(0)
        z = Sizes(h=64, d=64, size=16)
        many = [table_and_lengths(rng, z, shared=True, holes=True) for _ in range(3)]
        pages = rng.standard_normal((2, 3, z.pages, z.size, z.k, 64)).astype(np.float32)
        query = rng.standard_normal((3, z.b, z.t, z.n, 64)).astype(np.float32)
        every = [query, *pages, np.stack([t for t, _ in many]), np.stack([lengths for _, lengths in many])]
        given = [x if i == which else x[0] for i, x in enumerate(every)]
        axes = [0 if i == which else None for i in range(5)]
        f = functools.partial(jaxsoft.paged_attention, is_causal=True, implementation=implementation)
        found = jax.jit(jax.vmap(f, axes))(*given)
        for i in range(3):
            one = f(*(x[i] if j == which else x for j, x in enumerate(given)))
            np.testing.assert_allclose(found[i], one, rtol=1e-4, atol=1e-5)


def test_the_definition_is_attention():
    """Over contiguous pages, both definitions and jax.nn's function agree."""
    with precision(np.float64), as_usual():
        rng = np.random.default_rng(0)
        pages = [rng.standard_normal((6, 4, 2, 8)) for _ in range(2)]
        query, table = rng.standard_normal((2, 1, 4, 8)), np.array([[0, 1, 2], [3, 4, 5]])
        lengths = np.array([12, 7])
        theirs = functools.partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths.astype(np.int32))
        expected = jax.jit(theirs)(query, *(x.reshape(2, 12, 2, 8) for x in pages))
        found = in_float64(lambda *v: definitions.paged_attention(*v, table, lengths)[0], query, *pages)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


OF_EXPORT = Sizes(h=8, d=8, size=4), Sizes(b=1, t=1, h=8, d=8, number=1, size=4, pages=2)


@pytest.mark.parametrize("z", some(OF_EXPORT, OF_EXPORT[:1]), ids=str)
def test_export(z):
    """With sequences, queries, pages and pages of a sequence that are not known."""
    b, t, n, p = jax.export.symbolic_shape("b, t, n, p")
    x = jax.ShapeDtypeStruct
    pages = x((p, 4, 2, 8), jnp.float32)
    types = x((b, t, 4, 8), jnp.float32), pages, pages, x((b, n), jnp.int32), x((b,), jnp.int32)

    def f(query, key_pages, value_pages, table, lengths):
        new = query[:, :, :2]
        pages = jaxsoft.write_pages(key_pages, value_pages, new, new, table, lengths)
        attend = functools.partial(jaxsoft.paged_attention, page_table=table, key_value_seq_lengths=lengths)
        y, pullback = jax.vjp(functools.partial(attend, is_causal=True), query, *pages)
        return y, *pullback(y)

    exported = jax.export.deserialize(jax.export.export(jax.jit(f))(*types).serialize())
    query, *pages = case([], z, np.float32).operands
    pages = [np.nan_to_num(v) for v in pages]
    table, lengths = table_and_lengths(np.random.default_rng(0), z)
    given = query, *pages, table, lengths
    chex.assert_trees_all_close(exported.call(*given), jax.jit(f)(*given), rtol=1e-5, atol=1e-6)
