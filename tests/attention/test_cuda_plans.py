"""What the library says of the CUDA kernels without a GPU: the plans for one, workspaces and limits."""

import dataclasses
import functools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ATTENTION_IMPLEMENTATIONS, target

from jaxsoft import dot_product_attention
from jaxsoft._attention import ffi as attention
from jaxsoft._attention.form import AttentionForm, Extra
from jaxsoft._attention.spec import AttentionForward
from jaxsoft._core import library
from jaxsoft._head import ffi as head

pytestmark = pytest.mark.skipif(library.find("cpu") is None, reason="the library for CPUs was not built")

# GPUs of 132, 114 and 78 multiprocessors.
GPUS = (("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H100 PCIe", 114), ("NVIDIA H20", 78))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A call, as the library takes it."""

    target: str
    extras: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int
    left: int = -1
    right: int = -1
    capped: int = 0
    key_bytes: int = 2
    value_size: int | None = None  # as `size`

    def arguments(self, multiprocessors):
        *before, left, right, capped, key_bytes, value_size = dataclasses.astuple(self)
        return *before, value_size or self.size, left, right, capped, key_bytes, multiprocessors

    def workspace(self, multiprocessors):
        return library.number("attention_workspace", *self.arguments(multiprocessors))

    def plan(self, multiprocessors):
        return library.text("attention_plan", *self.arguments(multiprocessors))


def random_sizes(name, value_sizes=(None,)):
    draw = random.Random(name)
    for _ in range(300):
        key_heads, group = draw.choice([1, 2, 8, 16]), draw.choice([1, 4, 8, 16])
        yield Sizes(
            name,
            draw.choice(["", "key_lengths", "sinks", "query_lengths,key_lengths"]),
            draw.choice([1, 2, 7, 64, 256]),
            draw.choice([1, 2, 5, 17, 64, 256]),
            round(math.exp(draw.uniform(0, math.log(2**20)))),
            key_heads * group,
            key_heads,
            draw.choice([8, 64, 96, 128, 192, 256]),
            *draw.choice([(-1, -1), (-1, 0), (1000, 0), (64, 64)]),
            key_bytes=draw.choice([1, 2]),
            value_size=draw.choice(value_sizes),
        )


def parts(number, size):
    return -(-number // size)


def multiple(number, of):
    return parts(number, of) * of


def columns(size, value_size=None):
    if 128 < size <= 192 and value_size is not None and value_size <= 128:
        return 192
    return next(each for each in (64, 128, 256) if max(size, value_size or size) <= each)


def decode_workspace(call, processors):
    """As many bytes as the kernels for few queries need, written down once more."""
    rows = call.queries * call.heads // call.key_heads
    few, ragged = rows <= 16 or call.key_bytes == 1, "key_lengths" in call.extras and call.batch > 1
    tile = 16 if few else 64 if rows <= 64 else 128
    keys = call.keys
    if call.left >= 0 and call.right >= 0:
        keys = min(keys, call.left + call.right + call.queries + 64)
    items = call.batch * call.key_heads * parts(rows, tile)
    busy, wave = 94 if items < processors else 85, 1
    while wave * items * 100 < busy * processors * parts(wave * items, processors):
        wave += 1
    longest = 8192 if few else 32768
    if ragged:
        longest = 16384 if not few else 4096 if items >= 2 * processors else 1024
    chunks = min(wave, parts(keys, 128))
    if keys > wave * longest:
        least = max(512 if few else 4096, multiple(parts(keys * items * tile // 16, 32768), 128))
        beyond = min(max(parts(4 * processors, items), parts(keys, longest)), 256, parts(keys, least))
        chunks = max(chunks, beyond)
    states = items * chunks if chunks > 1 else 0
    room = min(rows, 16) if few else tile
    return 256 + multiple(8 * states * room, 256) + 4 * states * room * columns(call.size)


@pytest.mark.parametrize("processors", [132, 114, 78, 16])
@pytest.mark.parametrize("name", ["attention_decode", "paged_attention"])
def test_workspaces_of_few_queries(name, processors):
    for call in random_sizes(name):
        assert call.workspace(processors) == decode_workspace(call, processors), call


def most(count, size):
    """Of blocks of up to `size`, where segments may have blocks of their own."""
    return parts(count, size) + parts(count, size) // 4


def gradient_sums(call, blocks, tiles):
    """The bytes of sums in f32, two numbers a query, how far each block of keys is, and counters. Where heads share
    keys, also of sums of the gradients by keys and values, and how many heads each has.
    """
    padded = columns(call.size, call.value_size)
    heads, pair = call.batch * call.heads, 2 if padded > 128 else 1
    shared = call.batch * call.key_heads * blocks if call.heads > call.key_heads else 0
    counts = multiple(24 + 8 * heads + 8 * heads * blocks * pair + 8 * shared * pair, 256)
    return counts + heads * tiles * of_tile(call) * (4 * padded + 8) + 8 * shared * 128 * padded


def of_tile(call):
    """The queries of a tile of the gradients."""
    return 96 if columns(call.size, call.value_size) == 64 else 64


def test_workspaces_of_gradients():
    for call in random_sizes("attention_backward", (None, 8, 128, 136)):
        expected = gradient_sums(call, parts(call.keys, 128), parts(call.queries, of_tile(call)))
        assert call.workspace(132) == call.workspace(78) == expected, call
        blocks, tiles = most(call.keys, 128), most(call.queries, of_tile(call))
        of_segments = call.batch * ((40 + 16 + 4) * blocks + 4 * (blocks + 3 + tiles + 3) + tiles)
        segmented = dataclasses.replace(call, extras="query_segments,key_segments")
        assert segmented.workspace(132) == gradient_sums(call, blocks, tiles) + of_segments, call


def test_workspaces_of_many_queries():
    """A counter; and what keys segments leave to each block of queries, and where blocks of both begin."""
    for call in random_sizes("attention_forward", (None, 8, 72)):
        assert call.workspace(132) == 16
        of_block = 192 if max(call.size, call.value_size or 0) <= 64 else 128
        blocks, key_blocks = most(call.queries, of_block), most(call.keys, of_block)
        segmented = dataclasses.replace(call, extras="query_segments,key_segments")
        expected = 16 + call.batch * (40 * blocks + 4 * (blocks + 3 + key_blocks + 3))
        assert segmented.workspace(132) == expected, call


def test_plans_in_words():
    few = Sizes("attention_decode", "", 1, 1, 65536, 32, 8, 128)
    assert few.plan(132).startswith("decode_few_rows: 16 rows a block, up to ")
    many = dataclasses.replace(few, queries=8)
    assert many.plan(132).startswith("decode_many_rows: 64 rows a block")
    assert dataclasses.replace(many, target="paged_attention", key_bytes=1).plan(132).startswith("decode_few_rows")
    forward = Sizes("attention_forward", "", 1, 4096, 4096, 8, 8, 128)
    assert forward.plan(132) == "attention_forward: 2 groups of 64 queries a block, tiles of 176 keys"
    few_keys = dataclasses.replace(forward, keys=2048)
    assert few_keys.plan(132).endswith("tiles of 128 keys")
    assert dataclasses.replace(few_keys, extras="state_output,state_lse").plan(132).endswith("tiles of 176 keys")
    assert dataclasses.replace(few_keys, size=192, value_size=128).plan(132).endswith("tiles of 128 keys")
    for change in ({"right": 0}, {"extras": "key_lengths"}, {"capped": 1}, {"extras": "query_segments,key_segments"}):
        assert dataclasses.replace(forward, **change).plan(132).endswith("tiles of 128 keys")
    backward = dataclasses.replace(forward, target="attention_backward_of_block")
    name, around = backward.plan(132).split("; ")
    assert name == "attention_backward: tiles of 64 queries and 128 keys"
    assert around == "prepare_numbers precedes it, and round_sums or store_sums follows"
    assert dataclasses.replace(backward, size=256).plan(132).startswith("attention_backward_in_pairs:")
    assert dataclasses.replace(backward, value_size=256).plan(132).startswith("attention_backward_in_pairs:")
    latent = dataclasses.replace(forward, size=192, right=0)
    assert latent.plan(132).endswith("tiles of 96 keys")
    assert dataclasses.replace(latent, value_size=128).plan(132).endswith("tiles of 128 keys")


def operands(*shapes):
    return [jax.core.ShapedArray(shape, jnp.dtype(jnp.bfloat16)) for shape in shapes]


def test_plans_of_attention_change_with_the_gpu():
    operation = AttentionForward(AttentionForm(jnp.dtype(jnp.bfloat16), 1.0))
    given = operands((4, 1, 32, 128), *[(4, 65536, 8, 128)] * 2)
    found = []
    for gpu in GPUS:
        with target(*gpu):
            found.append(attention.plan(operation, given))
    assert len(set(found)) == 3, found


def test_plans_and_the_choice_of_the_linear_layer_change_with_the_gpu():
    shapes = (4096, 4096), (4096, 50_264)
    found = []
    for gpu in GPUS:
        with target(*gpu):
            found.append(head.plan(*operands(*shapes)))
    blocks = "groups of 32 blocks"
    assert found == [f"weight_gradient_in_place: {groups} {blocks}" for groups in (4, 3, 2)]
    # As many multiprocessors are at work: all groups that find room.
    at_work = [library.number("weight_gradient_multiprocessors", 4096, 4096, 50_264, n) for n in (132, 114, 78)]
    assert at_work == [128, 96, 64]
    for rows, width, classes in ((4097, 4096, 8), (4096, 4224, 8), (4096, 4096, 12), (0, 4096, 8)):
        assert library.number("weight_gradient_multiprocessors", rows, width, classes, 132) == 0


def test_the_workspace_of_the_linear_layer():
    for rows, classes in ((1, 8), (4096, 50_264), (8192, 8)):
        counters = 4 * (1 + 128 * (parts(classes, 256) + 2))
        assert library.number("weight_gradient_workspace", rows, classes, 2) == max(counters, rows * 512)


@pytest.mark.parametrize(
    ("rows", "n", "k", "words"),
    [
        (65536, 256, 8, "top_k_of_short_rows:"),
        (65536, 8192, 8, "top_k_by_warps:"),
        (8, 128_256, 64, "top_k_by_clusters: 8 blocks of 16 warps"),
        (32, 128_256, 64, "top_k_by_clusters: 8 blocks of 8 warps"),
        (132, 128_256, 64, "top_k_by_clusters: 2 blocks of 16 warps"),
        (2048, 128_256, 64, "top_k_by_blocks: up to 1 blocks"),
    ],
)
def test_plans_of_top_k(rows, n, k, words):
    assert library.text("top_k_plan", rows, n, k, 4, 90, 132, 1 << 20).startswith(words)


def test_plans_of_rows_change_with_the_gpu():
    top_k = [library.text("top_k_plan", 132, 128_256, 64, 4, 90, n, 1 << 20) for n in (132, 114, 78)]
    sample = [library.text("sample_plan", 32, 128_256, 2, 90, n) for n in (132, 114, 78)]
    assert top_k[0] != top_k[1]
    assert sample == [f"sample_rows: up to {blocks} blocks a row" for blocks in (4, 3, 2)]
    assert library.text("sample_plan", 32, 128_256, 2, 80, 132) == "sample_rows: a block a row"


def test_limits():
    limits = attention._limits()
    assert limits["largest_size"] == 256 and limits["smallest_scale"] == 1e-30 and limits["keys"] == 2**30
    assert library.number("top_k_limit", "short_part") == 1024
    assert library.number("top_k_limit", "most_received") == 2048
    assert library.number("top_k_limit", "other") == -1
    assert Extra.KEY_LENGTHS.value == "key_lengths"  # as the library looks for it


@pytest.mark.skipif("ffi" not in ATTENTION_IMPLEMENTATIONS, reason="no CUDA kernels for attention")
@pytest.mark.parametrize("multiprocessors", [8, 78, 400])
@pytest.mark.parametrize("heads", [2, 32])
def test_a_program_for_another_gpu(heads, multiprocessors):
    """Where the workspace is too small for the best plan, keys are cut into fewer chunks."""
    key, *keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(key, (2, 1, heads, 128), jnp.bfloat16)
    cache = [jax.random.normal(key, (2, 20_000, 2, 128), jnp.bfloat16) for key in keys]
    attend = jax.jit(functools.partial(dot_product_attention, implementation="ffi"))
    allowed = jax.export.DisabledSafetyCheck.custom_call("jaxsoft_attention_decode")
    with target("NVIDIA H20", multiprocessors):
        exported = jax.export.export(attend, platforms=["cuda"], disabled_checks=[allowed])(query, *cache)
    actual, expected = exported.call(query, *cache), attend(query, *cache)
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=1e-4)
