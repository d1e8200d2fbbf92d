"""Every GPU kernel once, for NVIDIA's compute-sanitizer: each operation, dtype, form and strategy.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py pallas
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py attention
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py attention ffi
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py attention ffi paged
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py attention ffi blocks
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py linear

and likewise synccheck and, with --check-api-memory-access no, as XLA copies workspaces that nobody has written,
initcheck. The kernels are those of "ffi", unless "pallas" or "triton" is named, or "attention", for Pallas's kernels of
attention, or with "ffi" beside it those in CUDA; of both, options can be named as well, such as `segments`, or `paged`,
for keys and values in pages, or `blocks`, for keys that come block by block; or "linear", for the kernel in CUDA of the
linear layer. racecheck takes long, so a dtype and a shape can be named, and the kernels that it looks at by a part of
their mangled names, here those of `ring`:

    compute-sanitizer --tool racecheck --kernel-name kns=4ringI python tests/sanitize.py bfloat16 130x70000

With a part of a name, racecheck (2025.3) itself ends with an illegal access in rows that `ring` serves, unless the part
takes in `ring`: `jaxsoft` takes in all kernels. memcheck with the same part, and racecheck of all, find nothing there.
racecheck has also ended with a segmentation fault of its own at float64 70x20001, where memcheck finds nothing. With
attention's calls both have, while a program was compiled. So let JAX keep its programs, in a run without the tool:

    export JAX_COMPILATION_CACHE_DIR=/tmp/programs
    export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
    python tests/sanitize.py attention

Then all calls of attention took 2 minutes of an H200 under both tools, eight processes with an option each.

memcheck (2025.3) has ended so as well: on two machines, in every run, at the calls of `sample` of 1x17000001 float32,
also where that shape was named alone, and once each at two places of float64. The shapes behind such a place can be
named.

Of "ffi", racecheck does not see that one lane's arrival at a barrier comes after what its whole warp has read, so it
reports hazards in `ring` and `grid_ring` where slots are filled again, unless the library is built for it:

    pip install . -C cmake.define.CMAKE_CUDA_FLAGS=-DJAXSOFT_RACECHECK

Then one is left, in `grid_ring`: `send_states` reads a chunk's states before other warps write the next ones there.
They do when a slot has been given back by a writer that has waited for the row's values, which come after `send_states`
has published what it read, but by way of device memory, where racecheck does not look. initcheck finds that the last 16
bytes of an array are read as a whole where the array ends within them.

Of attention by "ffi", racecheck (2025.3) takes no notice of named barriers that several warp groups share: it reported
hazards in `many_rows` of decode, and none once a barrier in shared memory had the place of the named one. In the
gradients it reports the number by which one thread tells another whose turn it is, which is released and acquired.
initcheck takes no notice of what bulk copies write from shared memory, so it reports the kernel behind those that reads
the sums they made, `round_sums` or `store_sums`. All results had the same bits under the tool as without it. The
reports are so many that printing them takes longer than the calls: `--show-backtrace no` helps.
synccheck stops in decode, at a barrier of all warps of a block to which they come at different places of the code: for
PTX that is one barrier, and for the tool divergence.

synccheck (2025.3) itself ends with an illegal access, of which it reports nothing, where many clusters of more than 8
blocks run, if there is nothing in the kernel but a barrier in each block's shared memory that the block arrives at and
waits for; without the tool, and under memcheck, such a kernel runs. So no shape here has many such clusters.

Not a test of pytest's: it needs a GPU, and the tool around it.
"""

import concurrent.futures
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import attention_calls
import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
from attention_in_blocks import Blocks
from cases import Case

from jaxsoft._attention import ffi as attention_ffi
from jaxsoft._head.ffi import weight_gradient_in_place
from jaxsoft._rows import ffi
from jaxsoft._rows.forms import RowForm
from jaxsoft._rows.operation import RowOperation
from jaxsoft._rows.operations.entropy import ENTROPY, ENTROPY_VJP
from jaxsoft._rows.operations.kl_divergence import KL_DIVERGENCE, KL_DIVERGENCE_VJP, KL_DIVERGENCE_VJP_OTHER
from jaxsoft._rows.operations.labels import (
    LABEL_ENTROPY,
    LABEL_ENTROPY_VJP,
    LABEL_STATE,
    LABEL_STATE_VJP,
    LABEL_SUMS,
    LABEL_SUMS_VJP,
)
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX, LOG_SOFTMAX_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_VJP
from jaxsoft._rows.operations.top_k import TOP_K
from jaxsoft._rows.spec import NO_ROW, RowExtra
from jaxsoft.random import sample

ALL = tuple(RowExtra)
WITHOUT_BIAS = tuple(extra for extra in RowExtra if extra is not RowExtra.BIAS)

# (rows, n) by strategy: lanes of a warp, a block with 4, 5 and 8 packs a thread, clusters of few rows, split; n odd and
# even.
SHAPES = [(3, 5), (40, 33), (4, 100), (4, 128), (3, 1001), (70, 4096), (2, 20001), (2, 32768), (1, 100003)]
DTYPES = ("float32", "bfloat16", "float16", "float64")
EXTRAS = ((), *((extra,) for extra in ALL), ALL)
# Those that are too large for every dtype and form: tiled, over clusters, split, spread, over the grid.
LONG = [((70, 20001), "float64"), ((280, 70001), "float32"), ((130, 70000), "bfloat16"), ((1, 600_001), "float32")]
LONG += [((1, 4_000_001), "float32"), ((5, 1_000_001), "float32"), ((9, 2**21), "float16")]
LONG += [((1, 1_200_001), "float32"), ((1, 17_000_001), "float32")]
LONG += [((171, 49_152), "bfloat16"), ((130, 32_768), "float32"), ((2100, 32_000), "bfloat16")]  # many, aligned
# (x, result) of two dtypes, and (rows, n, trailing) of axes before the last.
PAIRS = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("float16", "float32")]
COLUMNS = [(2, 8, 1), (3, 33, 3), (3, 50, 130), (2, 1001, 64), (1, 70001, 5), (2, 130, 4097)]
# So many tiles that they are dealt out one by one: over clusters, of 8 blocks at most, and to single blocks.
TILES = [((400, 2048, 64), "float32"), ((500, 2048, 64), "bfloat16"), ((210, 8, 4104), "float32")]
CAPS = (None, 5.0)  # of the operations with labels
THREADS = 8  # that run calls of attention
# Of the others, by (rows, n): held by lanes of a warp, side by side, by warps, with rows left over; tiled in a block,
# in clusters that end with their row, or stay, with rows that fit them or do not; few rows, over clusters and split.
OTHERS = [(70, 24), (300, 50), (9, 1000), (70, 1001), (70, 4096), (700, 16384), (300, 50240), (300, 65544)]
OTHERS += [(70, 131072), (33, 524288), (9, 2**20), (2, 32000), (1, 65544), (2, 2**20), (1, 3_000_008)]


def forms() -> Iterator[tuple[tuple[int, ...], str, RowForm]]:
    """The shape and dtype of x, and the form."""
    for shape, dtype, extras in itertools.product([(3, 8), *SHAPES], DTYPES, EXTRAS):
        yield shape, dtype, RowForm(np.dtype(dtype), extras)
    for (shape, dtype), extras in itertools.product(LONG, ((), WITHOUT_BIAS, ALL)):  # rings take no bias
        yield shape, dtype, RowForm(np.dtype(dtype), extras)
    for shape, (dtype, result), extras in itertools.product(SHAPES, PAIRS, ((), ALL)):
        yield shape, dtype, RowForm(np.dtype(result), extras)
    for shape, dtype in [*itertools.product(COLUMNS, DTYPES), *TILES]:
        yield shape, dtype, RowForm(np.dtype(dtype), (), 1)


def other_forms() -> Iterator[tuple[tuple[int, ...], str, RowForm]]:
    """Likewise for those of the others, which have fewer forms."""
    for shape, dtype in itertools.product(OTHERS, DTYPES[:3]):
        yield shape, dtype, RowForm(np.dtype(dtype))
        yield shape, dtype, RowForm(np.dtype(dtype), ALL)


def run(implementation: str, shape: Sequence[int], dtype: str, form: RowForm) -> None:
    """Every operation in a form that has those extras, or as many of them as the operation has."""
    axis = len(shape) - 1 - form.trailing
    rows, n, size = (*shape[:axis], *shape[axis + 1 :]), shape[axis], int(np.prod(shape))
    x = jnp.linspace(-4, 4, size, dtype=dtype).reshape(shape)
    g = jnp.cos(x)
    first = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < 8
    extras = {
        RowExtra.SCALE: jnp.full((1,) * len(rows), 0.5, jnp.promote_types(dtype, jnp.float32)),
        RowExtra.LIMIT: jnp.arange(1, np.prod(rows) + 1, dtype=jnp.int32).reshape(rows) * n // 2,
        RowExtra.WHERE: jnp.arange(n).reshape(*(1,) * len(rows), n) % 3 > 0,
        RowExtra.BIAS: jnp.sin(x),
        RowExtra.OTHER_SCALE: jnp.full((1,) * len(rows), -0.5, jnp.promote_types(dtype, jnp.float32)),
    }

    def call(operation, dtype, *operands, masked=False, cap=None):
        kept = tuple(extra for extra in form.extras if extra in operation.extras)
        of = RowForm(np.dtype(dtype), kept, form.trailing, masked, cap)
        return RowOperation(operation, of, implementation)(*operands, *(extras[name] for name in kept))

    # Scores so far above the row's first ones that f32 has no sum of their exponentials.
    call(SOFTMAX, form.dtype, jnp.where(first, 0, x + 1000))
    (y,) = call(SOFTMAX, form.dtype, x)
    _, m, s = call(LOG_SOFTMAX, form.dtype, x)
    call(STATE, dtype, x)
    call(SOFTMAX_VJP, dtype, y, g.astype(y.dtype), masked=bool({*form.extras} & {RowExtra.LIMIT, RowExtra.WHERE}))
    call(LOG_SOFTMAX_VJP, form.dtype, x, m, s, g)
    jax.block_until_ready(call(LOGSUMEXP_VJP, form.dtype, x, m, s, s))
    if form.trailing:
        return
    m, s, u = call(ENTROPY, dtype, x)
    jax.block_until_ready(call(ENTROPY_VJP, form.dtype, x, m, s, u, s))
    for y in (g, x, g - 1000) if form.dtype == dtype else ():  # some near x, some far
        found = call(KL_DIVERGENCE, dtype, x, y)
        jax.block_until_ready(call(KL_DIVERGENCE_VJP, dtype, x, y, *found, found[0]))
        jax.block_until_ready(call(KL_DIVERGENCE_VJP_OTHER, dtype, x, y, *found, found[0]))
    i = jnp.arange(rows[0], dtype=jnp.int32) * 7 % n
    i = i.at[1::5].set(NO_ROW).at[2::5].set(-1)
    for cap in CAPS:
        m, s, *_ = call(LABEL_STATE, dtype, x, i, cap=cap)
        call(LABEL_SUMS, dtype, x, i, cap=cap)
        call(LABEL_STATE_VJP, form.dtype, x, i, m, s, s, s, cap=cap)
        jax.block_until_ready(call(LABEL_SUMS_VJP, form.dtype, x, i, m, s, s, s, s, cap=cap))
        m, s, _, u = call(LABEL_ENTROPY, dtype, x, i, cap=cap)
        jax.block_until_ready(call(LABEL_ENTROPY_VJP, form.dtype, x, i, m, s, u, s, s, s, cap=cap))
    for k in {min(n, k) for k in (1, 5, 64, 256)} if implementation == "ffi" and not form.extras else ():
        of = RowForm(np.dtype(dtype), k=k)
        jax.block_until_ready(RowOperation(TOP_K, of, implementation)(x))
        if candidates := ffi.top_k_candidates(x, k):
            merged = ffi.top_k_of_candidates(x, of, 3)
            jax.block_until_ready(merged(jnp.stack([candidates(v) for v in (x, x[::-1], jnp.nan * x)])))
    for options in ({}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.1}) if implementation == "ffi" else ():
        # Also of rows whose elements are so much alike that they take the kernel's other way.
        jax.block_until_ready([sample(jax.random.key(0), v, **options) for v in (x, 0 * x)])


# Of attention: what a call has beside query, key and value; heads of keys and of values; lengths, which are whole tiles
# or not, and query heads, of which many make blocks go on from item to item. All kinds of tiles, ranges and extras are
# there, and each kind of plan.
ATTENTION_OPTIONS = [(), ("causal",), ("window", "sinks"), ("key lengths", "query lengths"), ("segments", "cap")]
ATTENTION_OPTIONS += [("bias", "causal"), ("bias of a head", "mask"), ("bias of scores", "mask of keys", "offset")]
ATTENTION_HEADS = [(64, 64), (128, 128), (256, 256), (192, 128)]
ATTENTION_SHAPES = [(200, 331, 4), (256, 256, 34)]


# The same for the CUDA kernels: options that those for many queries take with gradients, and forward; queries, keys and
# heads of queries and of keys, of which the last make blocks go on from item to item; and for few queries, of sequences
# in one chunk and in several.
CUDA_OPTIONS = [(), ("causal",), ("window", "sinks"), ("key lengths", "query lengths"), ("offsets", "cap")]
CUDA_HEADS = [64, 128, 256]
CUDA_SHAPES = [(200, 331, 4, 2), (130, 150, 34, 34)]
FEW_SHAPES = [(1, 4000, 8), (5, 77, 4), (16, 1000, 32)]
# And for keys in pages: queries, heads of queries, pages of a sequence and keys of a page.
PAGED_OPTIONS = [(), ("shared", "out of range", "query lengths", "causal"), ("lengths", "bias", "mask of keys", "cap")]
PAGED_OPTIONS += [("window", "sinks", "key scale", "value scale")]
PAGED_SHAPES = [(1, 8, 60, 64), (16, 32, 20, 16)]
# And for keys in blocks.
BLOCK_OPTIONS = [(), ("begins",), ("lengths", "offset")]


def attention_in_cuda() -> Iterator[tuple[Case, bool]]:
    """The calls, and whether with gradients; without the promise of the same bits these are added up in any order."""
    attention_ffi._ANY_ORDER_FROM = 0
    dtypes = itertools.cycle((jnp.bfloat16, jnp.float16))
    heads = [*((size, size) for size in CUDA_HEADS), (192, 128)]
    for options, (h, d), (t, s, n, k) in itertools.product(CUDA_OPTIONS, heads, CUDA_SHAPES):
        sizes, dtype = attention_calls.Sizes(2, t, s, n, k, h, d), next(dtypes)
        for deterministic in (True, False):
            yield attention_calls.case(options, sizes, dtype, "ffi", deterministic=deterministic), True
    for options, size, (t, s, n) in itertools.product(ATTENTION_OPTIONS, CUDA_HEADS, FEW_SHAPES):
        sizes = attention_calls.Sizes(2, t, s, n, 2, size, size)
        yield attention_calls.case(options, sizes, next(dtypes), "ffi"), False
    for options in (("segments",), ("segments", "cap")):
        sizes = attention_calls.Sizes(2, 200, 331, 4, 2, 64, 64)
        yield attention_calls.case(options, sizes, jnp.bfloat16, "ffi"), False
    for options, size, (t, n, number, of_page) in itertools.product(PAGED_OPTIONS, CUDA_HEADS, PAGED_SHAPES):
        sizes = paged_calls.Sizes(3, t, n, 2, size, size, number, of_page, 3 * number + 2)
        for of_pages in (None, jnp.float8_e4m3fn, jnp.float8_e5m2):
            yield paged_calls.case(options, sizes, next(dtypes), "ffi", of_pages=of_pages), False


def blocks_in_cuda() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls whose keys come block by block: with a state, and with sums to which gradients are added."""
    dtypes = itertools.cycle((jnp.bfloat16, jnp.float16))
    for options, size, heads in itertools.product(BLOCK_OPTIONS, CUDA_HEADS, (4, 34)):
        call = Blocks.make((3, 200, 331, heads, 2, size), next(dtypes), options, (128, 256))
        number = np.zeros((3, heads, 200), np.float32)

        def both(call=call, number=number):
            last = call.forward("ffi", call.form.dtype)(), call.forward("ffi")()
            return last, call.gradients("ffi")(number, number, number)

        yield f"attention ffi blocks {' '.join(options)} {size} {heads}", both


def attention() -> Iterator[Case]:
    """The calls of Pallas's kernels."""
    for i, (options, (h, d), (t, s, n)) in enumerate(
        itertools.product(ATTENTION_OPTIONS, ATTENTION_HEADS, ATTENTION_SHAPES)
    ):
        dtype = (jnp.bfloat16, jnp.float16)[i % 2]
        yield attention_calls.case(options, attention_calls.Sizes(2, t, s, n, 2, h, d), dtype, "pallas")


def attended(call: Case, gradients: bool) -> tuple[str, Callable[[], object]]:
    """Which call it is, and a function that runs it: forward, and the gradients by all that has one."""

    def with_gradients(*operands):
        results, pullback = jax.vjp(call.ours, *operands)
        return results, pullback(jax.tree.map(jnp.ones_like, results))

    return call.what, lambda: jax.jit(with_gradients if gradients else call.ours)(*call.operands)


def products() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the in-place weight gradient: of more and fewer steps than shared memory holds, and of copied panels."""
    for (rows, width, classes), dtype in itertools.product(
        [(65, 256, 264), (320, 512, 2056), (1000, 1024, 33_000), (65, 17_408, 264)], (jnp.float16, jnp.bfloat16)
    ):
        given = jnp.ones((rows, width), dtype), jnp.ones((width, classes), dtype)
        yield f"linear {rows}x{width}x{classes} {dtype.__name__}", functools.partial(weight_gradient_in_place, *given)


def run_call(call: tuple[str, Callable[[], object]]) -> str:
    """Returns which call it was."""
    what, run = call
    jax.block_until_ready(run())
    return what


def main() -> None:
    """Runs them all. A wrong result is the test suite's to find; this only has to touch every kernel."""
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0]
    if device.platform != "gpu":  # the kernels of "ffi" run on a CPU, too, and nothing would be looked at
        sys.exit("sanitize.py: JAX finds no GPU here")
    named = {*sys.argv[1:]}
    if "attention" in named:
        if "ffi" in named:
            found = itertools.chain(itertools.starmap(attended, attention_in_cuda()), blocks_in_cuda())
        else:
            found = (attended(call, True) for call in attention())
        calls = [(what, run) for what, run in found if all(word in what for word in named)]
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:  # most of the time goes into compiling
            for what in pool.map(run_call, calls):
                print(what, "ok", flush=True)
        print(f"all of {len(calls)} calls ran on {device.device_kind}")
        sys.exit(0 if calls else "sanitize.py: no call of attention has these options")
    if "linear" in named:
        for call in products():
            print(run_call(call), "ok", flush=True)
        return
    implementation = next(iter(named & {"pallas", "triton"}), "ffi")
    listed = forms() if implementation == "ffi" else other_forms()
    cases = [case for case in listed if named <= {implementation, case[1], "x".join(map(str, case[0]))}]
    if not cases:
        sys.exit(f"sanitize.py: no case has {' and '.join(sorted(named))}; a dtype and a shape are, say, float16 40x33")
    for shape, dtype, form in cases:
        run(implementation, shape, dtype, form)
        print(*shape, dtype, form, "ok", flush=True)
    print(f"all of {len(cases)} cases ran on {device.device_kind}")


if __name__ == "__main__":
    main()
