"""The Triton kernels: the row operations in their plain form.

A program goes over its rows in tiles:

- Rows of one tile, the *whole-row* kernel: they stay in registers between the reduction and the writing, so they are
  read once. Several short ones go into a program.
- A row of several tiles, the *two-pass* kernel: the first pass folds the tiles into one state a lane. The second writes
  the tiles, in reverse order, so that it finds the end of the row in the L2, where the first pass has left it.

Each operation is both: which one is known from the plan, when it is compiled. Arrays are contiguous, of shape (rows, n),
or (rows,) for one number a row. Programs without a row left do the last one again, to the same bits, so that only what
lies beyond the end of a row is masked.
"""

import triton
import triton.language as tl

from .fold import accumulate, add, combine, identity, lane_sum, reference, row_sum, state, wide


@triton.jit
def softmax_kernel(rows, x, y, PLAN: tl.constexpr):
    """X -> y."""
    _forward("softmax", rows, x, y, None, None, PLAN)


@triton.jit
def log_softmax_kernel(rows, x, y, m, s, PLAN: tl.constexpr):
    """X -> y, m, s."""
    _forward("log_softmax", rows, x, y, m, s, PLAN)


@triton.jit
def state_kernel(rows, x, m, s, PLAN: tl.constexpr):
    """X -> m, s."""
    _forward("state", rows, x, None, m, s, PLAN)


@triton.jit
def softmax_vjp_kernel(rows, y, g, dx, PLAN: tl.constexpr):
    """Y, g -> y * (g - <y, g>)."""
    _backward("softmax_vjp", rows, y, None, None, g, dx, PLAN)


@triton.jit
def log_softmax_vjp_kernel(rows, x, m, s, g, dx, PLAN: tl.constexpr):
    """X, m, s, g -> g - p * sum(g), with p = exp(x - m) / s."""
    _backward("log_softmax_vjp", rows, x, m, s, g, dx, PLAN)


@triton.jit
def logsumexp_vjp_kernel(rows, x, m, s, g, dx, PLAN: tl.constexpr):
    """X, m, s, g -> p * g, with one g a row."""
    _backward("logsumexp_vjp", rows, x, m, s, g, dx, PLAN)


@triton.jit
def _forward(OPERATION: tl.constexpr, rows, x_ptr, y_ptr, m_ptr, s_ptr, PLAN: tl.constexpr):
    row = _rows(rows, PLAN)
    if PLAN.tiles == 1:
        xs = _load(x_ptr, row, 0, -float("inf"), PLAN)
        m, s = state(xs)
        if OPERATION != "state":
            _write_forward(OPERATION, y_ptr, row, 0, xs, m, s, PLAN)
    else:
        top, ref, sums, errors = identity(x_ptr, PLAN.lanes)
        for tile in range(PLAN.tiles):
            xs = _load(x_ptr, row, tile, -float("inf"), PLAN)
            top, ref, sums, errors = accumulate(top, ref, sums, errors, xs)
        m, s = combine(top, ref, sums, errors)
        if OPERATION != "state":
            for step in range(PLAN.tiles):
                tile = PLAN.tiles - 1 - step
                xs = _load(x_ptr, row, tile, -float("inf"), PLAN)
                _write_forward(OPERATION, y_ptr, row, tile, xs, m, s, PLAN)
    if OPERATION != "softmax":
        tl.store(m_ptr + row, tl.where(s == s, m, s))  # the maximum does not see a NaN
        tl.store(s_ptr + row, s)


@triton.jit
def _write_forward(OPERATION: tl.constexpr, y_ptr, row, tile, xs, m, s, PLAN: tl.constexpr):
    shift = reference(m)[:, None, None]
    # inf / inf has no value, nor has the logarithm of a probability in a row without a finite maximum.
    scale = tl.where(m == float("inf"), float("nan"), 1.0 / s)[:, None, None]
    log_s = tl.where(tl.abs(m) < float("inf"), tl.log(s), float("nan"))[:, None, None]
    for i in tl.static_range(tl.constexpr(PLAN.units)):
        x = wide(xs[i]) - shift
        if OPERATION == "softmax":
            _store(y_ptr, row, tile, i, tl.exp(x) * scale, PLAN)
        else:
            _store(y_ptr, row, tile, i, x - log_s, PLAN)


@triton.jit
def _backward(OPERATION: tl.constexpr, rows, x_ptr, m_ptr, s_ptr, g_ptr, dx_ptr, PLAN: tl.constexpr):
    row = _rows(rows, PLAN)
    shift, scale = None, None
    if OPERATION != "softmax_vjp":
        m, s = tl.load(m_ptr + row), tl.load(s_ptr + row)
        shift = reference(m)[:, None, None]
        scale = tl.where(s == 0, 0.0, 1.0 / s)
        if OPERATION == "log_softmax_vjp":  # it has no value in a row without a finite maximum
            scale = tl.where(tl.abs(m) < float("inf"), scale, float("nan"))
        scale = scale[:, None, None]
    if OPERATION == "logsumexp_vjp":
        g = tl.load(g_ptr + row)[:, None, None]
        for tile in range(PLAN.tiles):
            xs = _load(x_ptr, row, tile, 0.0, PLAN)
            for i in tl.static_range(tl.constexpr(PLAN.units)):
                _store(dx_ptr, row, tile, i, tl.exp(wide(xs[i]) - shift) * scale * g, PLAN)
    elif PLAN.tiles == 1:
        xs, gs = _load(x_ptr, row, 0, 0.0, PLAN), _load(g_ptr, row, 0, 0.0, PLAN)
        sums, errors = lane_sum(_terms(OPERATION, xs, gs))
        _write_backward(OPERATION, dx_ptr, row, 0, xs, gs, row_sum(sums, errors), shift, scale, PLAN)
    else:
        _, _, sums, errors = identity(x_ptr, PLAN.lanes)
        for tile in range(PLAN.tiles):
            gs = _load(g_ptr, row, tile, 0.0, PLAN)
            xs = _load(x_ptr, row, tile, 0.0, PLAN) if OPERATION == "softmax_vjp" else gs
            part, part_error = lane_sum(_terms(OPERATION, xs, gs))
            sums, errors = add(sums, errors, part, part_error)
        total = row_sum(sums, errors)
        for step in range(PLAN.tiles):
            tile = PLAN.tiles - 1 - step
            xs, gs = _load(x_ptr, row, tile, 0.0, PLAN), _load(g_ptr, row, tile, 0.0, PLAN)
            _write_backward(OPERATION, dx_ptr, row, tile, xs, gs, total, shift, scale, PLAN)


@triton.jit
def _terms(OPERATION: tl.constexpr, xs, gs):
    """What a pullback sums over a row."""
    terms = ()
    for i in tl.static_range(len(gs)):
        g = wide(gs[i])
        terms = terms + ((wide(xs[i]) * g if OPERATION == "softmax_vjp" else g),)
    return terms


@triton.jit
def _write_backward(OPERATION: tl.constexpr, dx_ptr, row, tile, xs, gs, total, shift, scale, PLAN: tl.constexpr):
    total = total[:, None, None]
    for i in tl.static_range(tl.constexpr(PLAN.units)):
        x, g = wide(xs[i]), wide(gs[i])
        if OPERATION == "softmax_vjp":
            _store(dx_ptr, row, tile, i, x * (g - total), PLAN)
        else:
            _store(dx_ptr, row, tile, i, g - tl.exp(x - shift) * scale * total, PLAN)


@triton.jit
def _rows(rows, PLAN: tl.constexpr):
    """The program's rows, in 64 bits."""
    row = tl.program_id(0).to(tl.int64) * PLAN.rows + tl.arange(0, PLAN.rows)
    return tl.minimum(row, rows - 1)


@triton.jit
def _load(ptr, row, tile, other, PLAN: tl.constexpr):
    """The units of a tile of the rows, and `other` beyond their end."""
    units = ()
    for i in tl.static_range(tl.constexpr(PLAN.units)):
        place = _place(tile, i, PLAN)
        here = ptr + row[:, None] * PLAN.n + place
        unit = tl.load(here) if PLAN.exact else tl.load(here, place < PLAN.n, other)
        units = units + (tl.reshape(unit, [PLAN.rows, PLAN.lanes, PLAN.vector]),)
    return units


@triton.jit
def _store(ptr, row, tile, i: tl.constexpr, value, PLAN: tl.constexpr):
    """Writes one unit of a tile."""
    place = _place(tile, i, PLAN)
    here = ptr + row[:, None] * PLAN.n + place
    value = tl.reshape(value.to(ptr.dtype.element_ty), [PLAN.rows, PLAN.chunk])
    if PLAN.exact:
        tl.store(here, value)
    else:
        tl.store(here, value, place < PLAN.n)


@triton.jit
def _place(tile, i: tl.constexpr, PLAN: tl.constexpr):
    """Which elements of their rows a unit has. 64 bits only where the row needs them."""
    if PLAN.tiles * PLAN.tile >= 2**31:
        tile = tile.to(tl.int64)
    return (tile * PLAN.tile + i * PLAN.chunk + tl.arange(0, PLAN.chunk))[None, :]
