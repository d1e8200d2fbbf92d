"""Attention over pages by the CUDA kernels, in 16 bits and of pages in 8 bits, against the definition in float64.

Few queries of a key head are computed by one kernel and many by another, of which the latter takes no pages in 8 bits.
More still are computed after the pages have been gathered. Lengths here are around the borders of pages and of chunks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import pytest
from attention_calls import check_rows
from common import PAGED_IMPLEMENTATIONS, same_bits
from paged_calls import OPTIONS, Sizes, case, conflict, table_and_lengths

import jaxsoft

pytestmark = pytest.mark.skipif("ffi" not in PAGED_IMPLEMENTATIONS, reason="no CUDA kernels for attention")
SIZES = Sizes(b=3, t=1, n=8, k=2, h=64, d=64, number=40, size=16, pages=130)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
attend = functools.partial(jaxsoft.paged_attention, implementation="ffi")


def check(options, sizes=SIZES, dtype=jnp.bfloat16, of_pages=None, seed=0):
    """The output and the log-sum-exp of a call with these options."""
    check_rows(case(options, sizes, dtype, "ffi", seed, of_pages), options, dtype)


@pytest.mark.parametrize("option", [None, *OPTIONS], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_every_option(option, queries):
    """Of few rows, which are 16 at most, and of many."""
    check([option] if option else [], SIZES._replace(t=queries))


@pytest.mark.parametrize("option", [None, *OPTIONS], ids=str)
def test_every_option_with_pages_of_8_bits(option):
    check([option] if option else [], SIZES._replace(t=3), of_pages=E4M3)


@pytest.mark.parametrize(
    "options",
    [
        ("bias", "mask", "offsets", "sinks", "cap", "out of range"),
        ("bias of -inf", "query lengths", "causal", "shared", "key scale"),
        ("lengths", "window", "bias of a head", "sinks", "value scale"),
        ("no key", "bias", "out of range"),
        ("lengths", "out of range", "causal", "query lengths"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "of_pages"), [(jnp.float16, None), (jnp.bfloat16, None), (jnp.bfloat16, E5M2)])
@pytest.mark.parametrize("queries", [4, 17])
def test_options_together(options, queries, dtype, of_pages):
    assert not conflict(options)
    check(options, SIZES._replace(t=queries), dtype, of_pages)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(("queries", "of_pages"), [(1, None), (9, None), (32, None), (2, E4M3), (2, E5M2)])
def test_sizes_of_pages(size, head, queries, of_pages):
    sizes = Sizes(3, queries, 8, 2, head, head, -(-600 // size), size, 3 * -(-600 // size))
    check(("causal", "out of range"), sizes, of_pages=of_pages)


@pytest.mark.parametrize(
    ("head", "of_pages"), [(8, None), (72, None), (136, None), (200, None), (16, E4M3), (144, E5M2)]
)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (32, 1)])
def test_heads(head, heads, key_heads, of_pages):
    check(("causal",), SIZES._replace(t=2, n=heads, k=key_heads, h=head, d=head), of_pages=of_pages)


@pytest.mark.costly
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 127, 128, 129, 512, 640])
@pytest.mark.parametrize("window", [None, (0, 0), (200, 5), (None, 100)])
@pytest.mark.parametrize("queries", [1, 12])
def test_lengths_and_windows(length, window, queries):
    """What pages hold past the length is NaN; so the result is that of the sequence alone, whatever the others have."""
    z = SIZES._replace(t=queries)
    rng = np.random.default_rng(length)
    table, lengths = table_and_lengths(rng, z, lengths=np.array([length, 300, 640]))
    pages = [rng.standard_normal((z.pages, z.size, z.k, z.h)).astype(jnp.bfloat16) for _ in range(2)]
    pages = [paged_calls.stale(x, table, lengths) for x in pages]
    query = rng.standard_normal((z.b, z.t, z.n, z.h)).astype(jnp.bfloat16)
    call = functools.partial(attend, local_window_size=window, return_residual=True)
    output, lse = (np.asarray(x).astype(np.float32) for x in call(query, *pages, table, lengths))
    widened = [x.astype(np.float32) for x in (query, *pages)]
    expected = call(*widened, table, lengths, implementation="xla")
    np.testing.assert_allclose(output, expected[0], atol=2e-2)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4)
    others = np.array([length, 1, 0], np.int32)
    again = np.asarray(call(query, *pages, table, others)[0]).astype(np.float32)
    assert same_bits(again[0], output[0])


@pytest.mark.parametrize("of_pages", [None, E4M3], ids=str)
def test_chunks_of_many_queries(of_pages):
    """More than the kernel that reads pages is given."""
    check(("causal", "query lengths"), SIZES._replace(t=100), of_pages=of_pages)


def test_where_pages_are_does_not_matter():
    """Nor how many entries the table has past the lengths."""
    z = SIZES._replace(b=4, pages=400)
    rng = np.random.default_rng(0)
    table, lengths = table_and_lengths(rng, z)
    pages = [rng.standard_normal((z.pages, z.size, z.k, z.h)).astype(jnp.float16) for _ in range(2)]
    query = rng.standard_normal((z.b, z.t, z.n, z.h)).astype(jnp.float16)
    y = attend(query, *pages, table, lengths)
    order = rng.permutation(z.pages)
    moved = [x[np.argsort(order)] for x in pages]
    real = (table >= 0) & (table < z.pages)
    assert same_bits(attend(query, *moved, np.where(real, order[np.where(real, table, 0)], -1), lengths), y)


@pytest.mark.parametrize("of_pages", [None, E5M2], ids=str)
@pytest.mark.parametrize("queries", [1, 16])
def test_same_bits_on_every_run(queries, of_pages):
    """Whichever part is the last to arrive, also of sequences that share pages."""
    sizes = Sizes(b=5, t=queries, n=8, k=2, h=128, d=128, number=300, size=16, pages=400)
    call = case(("shared", "causal"), sizes, jnp.bfloat16, "ffi", of_pages=of_pages)
    run = jax.jit(call.ours)
    first = run(*call.operands)
    for _ in range(20):
        assert same_bits(run(*call.operands), first)


@pytest.mark.parametrize("of_pages", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-3, 3e4])
def test_scales(scale, of_pages):
    """Of queries in bfloat16 that float16, in which products are, would not hold."""
    rng = np.random.default_rng(0)
    z = SIZES
    table, lengths = table_and_lengths(rng, z)
    pages = [np.clip(rng.standard_normal((z.pages, z.size, z.k, z.h)), -2, 2).astype(of_pages) for _ in range(2)]
    query = (rng.standard_normal((z.b, z.t, z.n, z.h)) * 1e6).astype(jnp.bfloat16)
    given = {"scale": 1e-6, "key_scale": np.float32(1), "value_scale": np.float32(scale), "dtype": jnp.float32}
    found = attend(query, *pages, table, lengths, **given)
    expected = attend(query.astype(np.float32), *pages, table, lengths, **given, implementation="xla")
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2 * scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, E4M3], ids=lambda dtype: dtype.__name__)
def test_pages_that_are_written_where_they_lie(dtype):
    """Step by step, with donated pages that held NaN before."""
    z, rng = SIZES._replace(pages=120), np.random.default_rng(0)
    table = rng.permutation(z.pages).reshape(z.b, z.number).astype(np.int32)

    def step(pages, query, key, value, lengths, counts):
        pages = jaxsoft.write_pages(*pages, key, value, table, lengths, query_seq_lengths=counts)
        return pages, attend(query, *pages, table, lengths, is_causal=True, query_seq_lengths=counts)

    run = jax.jit(step, donate_argnums=0)
    pages = tuple(jnp.full((z.pages, z.size, z.k, z.h), jnp.nan, dtype) for _ in range(2))
    lengths = np.zeros(z.b, np.int32)
    keys = np.zeros((2, z.b, z.s, z.k, z.h), np.float32)
    for tokens in (20, 1, 1, 5):
        counts = rng.integers(0, tokens + 1, z.b).astype(np.int32)
        query, *new = (rng.standard_normal((z.b, tokens, heads, z.h)).astype(jnp.bfloat16) for heads in (z.n, z.k, z.k))
        for b in range(z.b):
            keys[:, b, lengths[b] : lengths[b] + counts[b]] = [x[b, : counts[b]].astype(dtype) for x in new]
        lengths = lengths + counts
        pages, found = run(pages, query, *new, lengths, counts)
        expected = jaxsoft.dot_product_attention(
            query.astype(np.float32),
            *keys,
            is_causal=True,
            query_seq_lengths=counts,
            key_value_seq_lengths=lengths,
            query_offset=lengths - counts,
            implementation="xla",
        )
        np.testing.assert_allclose(np.asarray(found).astype(np.float32), expected, atol=3e-2)


@pytest.mark.parametrize("which", range(5))
def test_maps_of_each_argument(which):
    """Of query, either of the pages, the table or the lengths alone."""
    rng = np.random.default_rng(0)
    z = SIZES._replace(t=2, number=4, pages=11)
    many = [table_and_lengths(rng, z, shared=True, holes=True) for _ in range(3)]
    pages = rng.standard_normal((2, 3, z.pages, z.size, z.k, z.h)).astype(jnp.bfloat16)
    query = rng.standard_normal((3, z.b, z.t, z.n, z.h)).astype(jnp.bfloat16)
    every = [query, *pages, np.stack([t for t, _ in many]), np.stack([lengths for _, lengths in many])]
    given = [x if i == which else x[0] for i, x in enumerate(every)]
    axes = [0 if i == which else None for i in range(5)]
    f = functools.partial(attend, is_causal=True)
    found = np.asarray(jax.jit(jax.vmap(f, axes))(*given)).astype(np.float32)
    for i in range(3):
        one = f(*(x[i] if j == which else x for j, x in enumerate(given)))
        np.testing.assert_allclose(found[i], np.asarray(one).astype(np.float32), atol=2e-2)
