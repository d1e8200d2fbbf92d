"""Writing into pages: what is written where, the edges, 8-bit floats, and that it happens in place."""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import as_usual, needs_little_memory, on_cpu, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_calls import Sizes, table_and_lengths, writing

import jaxsoft

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.float8_e4m3fn, jnp.float8_e5m2)


def arrays(z, dtype=np.float32, of_pages=None, seed=0):
    """Pages of keys and values, and new ones."""
    rng = np.random.default_rng(seed)
    shapes = [(z.pages, z.size, z.k, size) for size in (z.h, z.d)] + [(z.b, z.t, z.k, size) for size in (z.h, z.d)]
    dtypes = [of_pages or dtype] * 2 + [dtype] * 2
    return [rng.standard_normal(shape).astype(d) for shape, d in zip(shapes, dtypes, strict=True)]


def check(operands, table, lengths, counts=None, offset=None, run=lambda f: f):
    """Compares with the definition: the same numbers, and the same pages where nothing is written.

    `run` says how the definition is called: under jit where shapes change from call to call, if tokens are few.
    """
    found = jaxsoft.write_pages(*operands, table, lengths, query_seq_lengths=counts, query_offset=offset)
    at = None if offset is None else np.broadcast_to(offset, lengths.shape)
    with as_usual():
        write = functools.partial(definitions.write_pages, page_table=table, lengths=lengths, counts=counts, offset=at)
        expected = run(write)(*operands)
    assert same_bits(found, expected)


@pytest.mark.costly(1)
@pytest.mark.parametrize("size", [3, 1, 16])
@pytest.mark.parametrize("t", [2, 1, 5, 40])
def test_places(size, t):
    """The last tokens of sequences that end within a page, at its end, and before there are enough of them."""
    z = Sizes(b=6, t=t, number=7, size=size, pages=60)
    table, lengths = table_and_lengths(
        np.random.default_rng(size), z, lengths=np.array([0, z.s, size, size + 1, 2, -3])
    )
    check(arrays(z), table, lengths)
    check(arrays(z), table, lengths, counts=np.array([t, t - 1, 1, 0, t + 7, 1]))
    check(arrays(z), table, lengths, offset=np.array([0, z.s - 2, -1, 1, 2**31 - 1, -(2**31)]))
    whole, longer = table_and_lengths(np.random.default_rng(size), z, lengths=lengths + z.s + 3)  # no page twice
    check(arrays(z), whole, longer, offset=3)
    check(arrays(z), whole, longer, counts=np.array([2] * 6), offset=np.array([0]))
    check(arrays(z), whole, longer)
    check(arrays(z), whole, lengths + z.s + 1, counts=np.array([t, t - 1, 1, 0, t + 7, 1]))


@pytest.mark.costly
@pytest.mark.parametrize("counts", [(5, 4, 5, 3, 2, 1, 0), None], ids=str)
@pytest.mark.parametrize("offset", [None, 4, 2**31 - 1])
def test_more_columns_of_no_pages(offset, counts):
    """They change nothing: of tokens past the table none is written, and those before them are where they belong."""
    z = Sizes(b=7, t=5, number=2, pages=20)
    lengths = np.array([z.s + 1, z.s + 4, z.s + 7, 2**31 - 1, -(2**31), -1, 3], np.int32)
    table, _ = table_and_lengths(np.random.default_rng(0), z, lengths=lengths)
    wider = np.concatenate([table, np.full((z.b, 3), -1, np.int32)], axis=1)
    given_ = {"query_seq_lengths": None if counts is None else np.array(counts), "query_offset": offset}
    found, expected = (jaxsoft.write_pages(*arrays(z), t, lengths, **given_) for t in (table, wider))
    assert same_bits(found, expected)


def test_tokens_past_the_table():
    """The last one that it has room for is where it belongs."""
    pages, new = np.zeros((2, 2, 1, 1), np.float32), np.array([7, 8, 9], np.float32)[None, :, None, None]
    found, _ = jaxsoft.write_pages(pages, pages, new, new, np.array([[0, 1]]), np.array([6]))
    np.testing.assert_array_equal(np.ravel(found), [0, 0, 0, 7])


@st.composite
def calls(draw):
    z = Sizes(
        b=draw(st.sampled_from([1, 4])),
        t=draw(st.sampled_from([1, 4, 9])),
        k=draw(st.sampled_from([1, 3])),
        number=draw(st.sampled_from([1, 4])),
        size=draw(st.sampled_from([1, 2, 5])),
        pages=draw(st.sampled_from([1, 5, 30])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    table, lengths = table_and_lengths(rng, z, holes=draw(st.booleans()), past=draw(st.booleans()))
    counts = rng.integers(-1, z.t + 2, z.b) if draw(st.booleans()) else None
    offset = rng.integers(-2, z.s + 1, z.b) if draw(st.booleans()) else None
    return arrays(z, seed=int(lengths[0])), table, lengths, counts, offset


@settings(max_examples=settings.default.max_examples // 2)
@given(calls())
def test_any_tables(call):
    check(*call, run=jax.jit)


@pytest.mark.costly(1)
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("of_pages", DTYPES, ids=lambda dtype: dtype.__name__)
def test_dtypes(dtype, of_pages):
    """New ones of any are rounded to that of the pages, which keep theirs, once divided by the scales."""
    with jax.enable_x64(jnp.float64 in (dtype, of_pages)):
        z = Sizes(t=4)
        operands = arrays(z, dtype, of_pages)
        table, lengths = table_and_lengths(np.random.default_rng(0), z, lengths=np.array([4, 7, 9]))
        plain = map(np.asarray, jaxsoft.write_pages(*operands, table, lengths))
        scaled = jaxsoft.write_pages(*operands, table, lengths, key_scale=0.5, value_scale=np.array([2.0, 0.25]))
        scaled = map(np.asarray, scaled)
        for pages, divided, x, of_before, scale in zip(
            plain, scaled, operands[2:], operands[:2], (np.array([0.5, 0.5]), np.array([2.0, 0.25])), strict=True
        ):
            assert pages.dtype == divided.dtype == of_pages
            for b, length in enumerate(lengths):
                for i in range(4):
                    place = table[b, (length - 4 + i) // z.size], (length - 4 + i) % z.size
                    assert same_bits(pages[place], x[b, i].astype(of_pages))
                    exact = x[b, i].astype(np.float64) / scale[:, None]  # by powers of 2
                    np.testing.assert_array_equal(divided[place], exact.astype(dtype).astype(of_pages))
            assert same_bits(pages[10], of_before[10]) == (10 not in table)


@pytest.mark.costly
@pytest.mark.parametrize("of_pages", DTYPES[4:], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_what_8_bits_cannot_hold(of_pages, dtype):
    """It becomes the largest number, as the Open Compute Project's format has it, and NaN stays one."""
    largest = float(jnp.finfo(of_pages).max)
    given_ = [largest, largest * 1.01, 1e30, np.inf, -largest, -1e30, -np.inf, np.nan, 0.0, -0.0, 1e-30]
    new = np.array(given_, dtype)[None, None, None]
    pages = np.zeros((1, 1, 1, len(given_)), of_pages)
    found = np.asarray(jaxsoft.write_pages(pages, pages, new, new, np.array([[0]]), np.array([1]))[0])[0, 0, 0]
    expected = [largest] * 4 + [-largest] * 3 + [np.nan, 0, 0, 0]
    np.testing.assert_array_equal(found.astype(np.float32), np.array(expected, np.float32))
    scaled = jaxsoft.write_pages(pages, pages, new, new, np.array([[0]]), np.array([1]), key_scale=1e-3)[0]
    assert np.asarray(scaled).astype(np.float32)[0, 0, 0, 1] == largest


def test_there_and_back():
    """What was written is attended to: as over keys and values that lie in one piece, chunk by chunk."""
    rng = np.random.default_rng(0)
    b, s, n, k, h, size = 3, 23, 4, 2, 8, 4
    query, key, value = (rng.standard_normal((b, s, heads, h)).astype(np.float32) for heads in (n, k, k))
    table = rng.permutation(20)[: b * 6].reshape(b, 6)
    pages = [jnp.full((20, size, k, h), jnp.nan) for _ in range(2)]
    step = jax.jit(jaxsoft.write_pages, donate_argnums=(0, 1))
    attend = jax.jit(functools.partial(jaxsoft.paged_attention, is_causal=True))
    expected = np.asarray(jaxsoft.dot_product_attention(query, key, value, is_causal=True))
    done = np.zeros(b, int)
    while (done < s).any():
        counts = np.minimum(rng.integers(0, 6, b), s - done)
        chunk = [np.zeros((b, 5, x.shape[2], h), np.float32) for x in (query, key, value)]
        for i in range(b):
            for part, x in zip(chunk, (query, key, value), strict=True):
                part[i, : counts[i]] = x[i, done[i] : done[i] + counts[i]]
        pages = step(*pages, *chunk[1:], table, done + counts, query_seq_lengths=counts)
        y = np.asarray(attend(chunk[0], *pages, table, done + counts, query_seq_lengths=counts))
        for i in range(b):
            np.testing.assert_allclose(y[i, : counts[i]], expected[i, done[i] : done[i] + counts[i]], 1e-4, 1e-5)
            assert not y[i, counts[i] :].any()
        done += counts


@pytest.mark.parametrize("of_pages", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=lambda dtype: dtype.__name__)
@needs_little_memory
def test_in_place(of_pages):
    """Donated pages are the result's memory, and no other is taken: on a CPU XLA still converts those of 8 bits."""
    if of_pages == jnp.float8_e4m3fn and jax.default_backend() == "cpu":
        pytest.skip("XLA's CPU backend has no scatter of 8-bit floats")
    z = Sizes(b=4, t=2, size=16, k=8, h=64, d=64, pages=256, number=8)
    operands = list(map(jnp.asarray, arrays(z, jnp.bfloat16, of_pages)))
    table, lengths = table_and_lengths(np.random.default_rng(0), z)
    write = jax.jit(jaxsoft.write_pages, donate_argnums=(0, 1))
    memory = write.lower(*operands, table, lengths).compile().memory_analysis()
    bytes_of_pages = 2 * operands[0].nbytes
    assert memory.alias_size_in_bytes == bytes_of_pages
    assert memory.temp_size_in_bytes < bytes_of_pages / 16, memory
    places = [x.unsafe_buffer_pointer() for x in operands[:2]]
    found = write(*operands, table, lengths)
    assert [x.unsafe_buffer_pointer() for x in found] == places
    assert all(x.is_deleted() for x in operands[:2])


@on_cpu
def test_in_place_within_a_step():
    """Written and attended to in a scan over layers, whose pages are donated: no copy of the cache is made."""
    z = Sizes(b=4, t=1, size=16, k=2, h=32, d=32, pages=512, number=4)
    layers = 3
    x = jax.ShapeDtypeStruct
    cache = x((layers, z.pages, z.size, z.k, 32), jnp.float32)

    def step(key_pages, value_pages, query, table, lengths):
        def layer(carry, i):
            query, *pages = carry
            of_layer = [jax.lax.dynamic_index_in_dim(p, i, keepdims=False) for p in pages]
            of_layer = jaxsoft.write_pages(*of_layer, query, query, table, lengths)
            query = jaxsoft.paged_attention(query, *of_layer, table, lengths)
            pages = [jax.lax.dynamic_update_index_in_dim(p, new, i, 0) for p, new in zip(pages, of_layer, strict=True)]
            return (query, *pages), None

        return jax.lax.scan(layer, (query, key_pages, value_pages), jnp.arange(layers))[0]

    types = cache, cache, x((z.b, 1, z.k, 32), jnp.float32), x((z.b, z.number), jnp.int32), x((z.b,), jnp.int32)
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(*types).compile().memory_analysis()
    of_cache = layers * z.pages * z.size * z.k * 32 * 4
    assert memory.alias_size_in_bytes == 2 * of_cache
    assert memory.temp_size_in_bytes < 2 * of_cache, memory  # at most the pages of one layer, several times


@pytest.mark.costly(1)
@pytest.mark.parametrize("which", [2, 0, 1, 3, 4, 5])
def test_maps_of_each_argument(which):
    """Of pages, new keys or values, the table or the lengths alone."""
    z = Sizes(t=4)
    rng = np.random.default_rng(0)
    many = [arrays(z, seed=i) for i in range(2)]
    tables, lengths = (np.stack(v) for v in zip(*(table_and_lengths(rng, z) for _ in range(2)), strict=True))
    every = [*(np.stack(v) for v in zip(*many, strict=True)), tables, lengths]
    operands = [x if i == which else x[0] for i, x in enumerate(every)]
    axes = [0 if i == which else None for i in range(6)]
    found = list(map(np.asarray, jax.vmap(jaxsoft.write_pages, axes)(*operands)))
    for i in range(2):
        one = jaxsoft.write_pages(*(x[i] if j == which else x for j, x in enumerate(operands)))
        assert same_bits([x[i] for x in found], one)


@pytest.mark.costly(1)
@pytest.mark.parametrize("how", [{"scales": True, "holes": True}, {"past": True}, {}], ids=str)
def test_gradients(how):
    """Of what is written the gradient goes to the new ones, and else to the pages."""
    with jax.enable_x64(True):
        writing(**how).through("grad").check()
