"""The Triton kernels: the row operations in their plain form.

A program goes over its rows in tiles:

- The *whole-row* kernel is for rows of one tile. They stay in registers between the reduction and the writing, so they
  are read once. A program takes several short rows.
- The *two-pass* kernel is for rows of several tiles. The first pass folds the tiles into one state a lane. The second
  writes the tiles in reverse order, so that it finds the end of the row in the L2, where the first pass has left it.

The kernel of an operation is compiled as one of the two, as the plan says. Arrays are contiguous, of shape (rows, n),
or (rows,) for one number a row. A program that has no row left does the last one again, to the same bits, so that masks
are needed only beyond the end of a row.
"""

import triton
import triton.language as tl

from .fold import accumulate, add, combine, identity, inverse, lane_sum, reference, row_sum, state, wide


@triton.jit
def softmax_kernel(rows, x, y, plan: tl.constexpr):
    """x -> y."""
    _forward("softmax", rows, x, y, None, None, plan)


@triton.jit
def log_softmax_kernel(rows, x, y, m, s, plan: tl.constexpr):
    """x -> y, m, s."""
    _forward("log_softmax", rows, x, y, m, s, plan)


@triton.jit
def state_kernel(rows, x, m, s, plan: tl.constexpr):
    """x -> m, s."""
    _forward("state", rows, x, None, m, s, plan)


@triton.jit
def softmax_vjp_kernel(rows, y, g, dx, plan: tl.constexpr):
    """y, g -> y * (g - <y, g>)."""
    _backward("softmax_vjp", rows, y, None, None, g, dx, plan)


@triton.jit
def log_softmax_vjp_kernel(rows, x, m, s, g, dx, plan: tl.constexpr):
    """x, m, s, g -> g - p * sum(g), with p = exp(x - m) / s."""
    _backward("log_softmax_vjp", rows, x, m, s, g, dx, plan)


@triton.jit
def logsumexp_vjp_kernel(rows, x, m, s, g, dx, plan: tl.constexpr):
    """x, m, s, g -> p * g, with one g a row."""
    _backward("logsumexp_vjp", rows, x, m, s, g, dx, plan)


# --8<-- [start:forward]
@triton.jit
def _forward(operation: tl.constexpr, rows, x_ptr, y_ptr, m_ptr, s_ptr, plan: tl.constexpr):
    row = _rows(rows, plan)
    if plan.tiles == 1:
        xs = _load(x_ptr, row, 0, -float("inf"), plan)
        m, s = state(xs)
        if operation != "state":
            _write_forward(operation, y_ptr, row, 0, xs, m, s, plan)
    else:
        top, ref, sums, errors = identity(x_ptr, plan.lanes)
        for tile in range(plan.tiles):
            xs = _load(x_ptr, row, tile, -float("inf"), plan)
            top, ref, sums, errors = accumulate(top, ref, sums, errors, xs)
        m, s = combine(top, ref, sums, errors)
        if operation != "state":
            for step in range(plan.tiles):
                tile = plan.tiles - 1 - step
                xs = _load(x_ptr, row, tile, -float("inf"), plan)
                _write_forward(operation, y_ptr, row, tile, xs, m, s, plan)
    if operation != "softmax":
        tl.store(m_ptr + row, tl.where(s == s, m, s))  # the maximum does not see a NaN
        tl.store(s_ptr + row, s)
    # --8<-- [end:forward]


@triton.jit
def _write_forward(operation: tl.constexpr, y_ptr, row, tile, xs, m, s, plan: tl.constexpr):
    shift = reference(m)[:, None, None, None]
    # inf / inf has no value, nor has the logarithm of a probability in a row without a finite maximum.
    scale = tl.where(m == float("inf"), float("nan"), inverse(s))[:, None, None, None]
    log_s = tl.where(tl.abs(m) < float("inf"), tl.log(s), float("nan"))[:, None, None, None]
    for i in tl.static_range(tl.constexpr(plan.units)):
        x = wide(xs[i]) - shift
        if operation == "softmax":
            _store(y_ptr, row, tile, i, tl.exp(x) * scale, plan)
        else:
            _store(y_ptr, row, tile, i, x - log_s, plan)


@triton.jit
def _backward(operation: tl.constexpr, rows, x_ptr, m_ptr, s_ptr, g_ptr, dx_ptr, plan: tl.constexpr):
    row = _rows(rows, plan)
    shift, scale = None, None
    if operation != "softmax_vjp":
        m, s = tl.load(m_ptr + row), tl.load(s_ptr + row)
        shift = reference(m)[:, None, None, None]
        scale = tl.where(s == 0, 0.0, inverse(s))
        if operation == "log_softmax_vjp":  # it has no value in a row without a finite maximum
            scale = tl.where(tl.abs(m) < float("inf"), scale, float("nan"))
        scale = scale[:, None, None, None]
    if operation == "logsumexp_vjp":
        g = tl.load(g_ptr + row)[:, None, None, None]
        for tile in range(plan.tiles):
            xs = _load(x_ptr, row, tile, 0.0, plan)
            for i in tl.static_range(tl.constexpr(plan.units)):
                _store(dx_ptr, row, tile, i, tl.exp(wide(xs[i]) - shift) * scale * g, plan)
    elif plan.tiles == 1:
        xs, gs = _load(x_ptr, row, 0, 0.0, plan), _load(g_ptr, row, 0, 0.0, plan)
        sums, errors = lane_sum(_terms(operation, xs, gs))
        _write_backward(operation, dx_ptr, row, 0, xs, gs, row_sum(sums, errors), shift, scale, plan)
    else:
        _, _, sums, errors = identity(x_ptr, plan.lanes)
        for tile in range(plan.tiles):
            gs = _load(g_ptr, row, tile, 0.0, plan)
            xs = _load(x_ptr, row, tile, 0.0, plan) if operation == "softmax_vjp" else gs
            part, part_error = lane_sum(_terms(operation, xs, gs))
            sums, errors = add(sums, errors, part, part_error)
        total = row_sum(sums, errors)
        for step in range(plan.tiles):
            tile = plan.tiles - 1 - step
            xs, gs = _load(x_ptr, row, tile, 0.0, plan), _load(g_ptr, row, tile, 0.0, plan)
            _write_backward(operation, dx_ptr, row, tile, xs, gs, total, shift, scale, plan)


@triton.jit
def _terms(operation: tl.constexpr, xs, gs):
    """The terms that a pullback sums over a row."""
    terms = ()
    for i in tl.static_range(len(gs)):
        g = wide(gs[i])
        terms += ((wide(xs[i]) * g if operation == "softmax_vjp" else g),)
    return terms


@triton.jit
def _write_backward(operation: tl.constexpr, dx_ptr, row, tile, xs, gs, total, shift, scale, plan: tl.constexpr):
    total = total[:, None, None, None]
    for i in tl.static_range(tl.constexpr(plan.units)):
        x, g = wide(xs[i]), wide(gs[i])
        if operation == "softmax_vjp":
            _store(dx_ptr, row, tile, i, x * (g - total), plan)
        else:
            _store(dx_ptr, row, tile, i, g - tl.exp(x - shift) * scale * total, plan)


@triton.jit
def _rows(rows, plan: tl.constexpr):
    """The indices of the program's rows, in 64 bits."""
    row = tl.program_id(0).to(tl.int64) * plan.rows + tl.arange(0, plan.rows)
    return tl.minimum(row, rows - 1)


@triton.jit
def _load(ptr, row, tile, other, plan: tl.constexpr):
    """Loads the units of a tile of the rows, with `other` beyond the end of a row."""
    units = ()
    for i in tl.static_range(tl.constexpr(plan.units)):
        place = _place(tile, i, plan)
        here = ptr + row[:, None] * plan.n + place
        unit = tl.load(here) if plan.exact else tl.load(here, place < plan.n, other)
        units += (tl.reshape(unit, [plan.rows, plan.packs, plan.lanes, plan.vector]),)
    return units


@triton.jit
def _store(ptr, row, tile, i: tl.constexpr, value, plan: tl.constexpr):
    """Writes one unit of a tile."""
    place = _place(tile, i, plan)
    here = ptr + row[:, None] * plan.n + place
    value = tl.reshape(value.to(ptr.dtype.element_ty), [plan.rows, plan.unit])
    if plan.exact:
        tl.store(here, value)
    else:
        tl.store(here, value, place < plan.n)


@triton.jit
def _place(tile, i: tl.constexpr, plan: tl.constexpr):
    """The indices of a unit's elements in their rows, in 64 bits where a row is that long."""
    if plan.tiles * plan.tile >= 2**31:
        tile = tile.to(tl.int64)
    return (tile * plan.tile + i * plan.unit + tl.arange(0, plan.unit))[None, :]
