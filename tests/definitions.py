"""The public functions by their definitions: plain JAX on whole rows, with every option, for JAX to differentiate.

What they give in float64 is what jaxsoft is compared with, values and derivatives of every order. Nothing here is
fast, and nothing is taken from jaxsoft. Scores that do not count are replaced before anything is computed of them, so
that no derivative is NaN where jaxsoft's is not.
"""

import jax
import jax.numpy as jnp


def _scores(x, axis, where, scale, bias, is_causal):
    """z = x * scale + bias, and which of it counts."""
    z = x if scale is None else x * scale
    z = z if bias is None else z + bias
    counts = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    if is_causal:
        counts = counts & jnp.tri(*x.shape[-2:], dtype=bool)
    return z, counts


def _lse(z, axis, counts):
    """The logsumexp of what counts, with the reduced axes kept; -inf where nothing does."""
    m = jax.lax.stop_gradient(jnp.max(jnp.where(counts, z, -jnp.inf), axis, keepdims=True, initial=-jnp.inf))
    m = jnp.where(jnp.isfinite(m), m, 0)
    s = jnp.sum(jnp.where(counts, jnp.exp(jnp.where(counts, z, 0) - m), 0), axis, keepdims=True)
    return jnp.where(s == 0, -jnp.inf, m + jnp.log(jnp.where(s == 0, 1, s)))


def log_softmax(x, axis=-1, where=None, scale=None, bias=None, is_causal=False):
    """-inf where an element does not count."""
    z, counts = _scores(x, axis, where, scale, bias, is_causal)
    lse = _lse(z, axis, counts)
    return jnp.where(counts, jnp.where(counts, z, 0) - jnp.where(jnp.isfinite(lse), lse, 0), -jnp.inf)


def softmax(x, axis=-1, where=None, scale=None, bias=None, is_causal=False):
    """0 where an element does not count."""
    return jnp.exp(log_softmax(x, axis, where, scale, bias, is_causal))


def logsumexp(x, axis=-1, where=None, scale=None, bias=None, is_causal=False):
    """-inf where nothing counts."""
    z, counts = _scores(x, axis, where, scale, bias, is_causal)
    return jnp.squeeze(_lse(z, axis, counts), axis)


def entropy(x, axis=-1, where=None, scale=None, bias=None, is_causal=False):
    """0 where nothing counts."""
    z, counts = _scores(x, axis, where, scale, bias, is_causal)
    counts = counts & (z > -jnp.inf)
    lse = _lse(z, axis, counts)
    log_p = jnp.where(counts, jnp.where(counts, z, 0) - jnp.where(jnp.isfinite(lse), lse, 0), 0)
    return -jnp.sum(jnp.where(counts, jnp.exp(log_p) * log_p, 0), axis)


def kl_divergence(x, y, axis=-1, where=None, scale=None):
    """Of softmax(y) from softmax(x): 0 where nothing counts, infinite where an element has a share of x's alone."""
    x, y = jnp.broadcast_arrays(x, y)
    z, counts = _scores(x, axis, where, scale, None, False)
    of_y = _scores(y, axis, where, scale, None, False)[0]
    counts, also = counts & (z > -jnp.inf), counts & (of_y > -jnp.inf)

    def log(z, counts):
        lse = _lse(z, axis, counts)
        return jnp.where(counts, z, 0) - jnp.where(jnp.isfinite(lse), lse, 0)

    log_p, log_q = log(z, counts), log(of_y, also)
    k = jnp.sum(jnp.where(counts, jnp.exp(log_p) * (log_p - log_q), 0), axis)
    return jnp.where(jnp.any(counts & ~also, axis), jnp.inf, k)


# Functions (x, axis, where, scale, bias, is_causal), by their names in jaxsoft. Every test through calls.py has them.
ROW_FUNCTIONS = {f.__name__: f for f in (softmax, log_softmax, logsumexp, entropy)}


def top_k_softmax(x, k):
    """Values and probabilities."""
    indices = jax.lax.stop_gradient(jnp.argsort(-x, axis=-1, stable=True))[..., :k]
    return jnp.take_along_axis(x, indices, -1), jnp.take_along_axis(softmax(x), indices, -1)


def _loss(z, q, w, counts, rows, nll, smoothing, z_loss):
    """Losses, logsumexps and entropies of scores z and a target q over the classes, which are last.

    Args:
      counts: which classes count.
      rows: which rows do.
      nll: the loss of a label, which need not count; None for that of q.
    """
    counts = counts & (z > -jnp.inf) & rows[..., None]
    lse = _lse(z, -1, counts)[..., 0]
    some = jnp.isfinite(lse)
    finite = jnp.where(some, lse, 0)
    above = jnp.where(counts, finite[..., None] - jnp.where(counts, z, 0), 0)  # -log(p)
    label = jnp.where(some, jnp.sum(w * q * above, -1) if nll is None else nll(finite), 0)
    k = jnp.maximum(jnp.sum(counts, -1), 1)
    smooth = jnp.sum(jnp.where(counts, w, 0) * above, -1) / k
    loss = (1 - smoothing) * label + smoothing * smooth + z_loss * finite**2
    return jnp.where(some, loss, 0), lse, entropy(z, where=counts)


def _capped(x, cap):
    return x if cap is None else cap * jnp.tanh(x / cap)


def integer_cross_entropy(x, weights, labels, *, where=None, ignore_index=None, label_smoothing=0.0, z_loss=0.0,
                          logits_soft_cap=None):  # fmt: skip
    """Losses, logsumexps and entropies.

    A label that does not count keeps its logit. One that is out of range, and not ignored, is NaN where anything
    counts, with the gradient of the logsumexp.
    """
    n = x.shape[-1]
    z, w = _capped(x, logits_soft_cap), jnp.ones(n, x.dtype) if weights is None else weights
    counts = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    rows = jnp.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    at = jnp.clip(labels, 0, n - 1)
    score = jnp.take_along_axis(z, at[..., None], -1)[..., 0]

    def nll(lse):
        return jnp.where(labels == at, w[at] * (lse - score), lse + jnp.nan)

    return _loss(z, None, w, counts, rows, nll, label_smoothing, z_loss)


def cross_entropy(x, q, weights, *, where=None, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None):
    """Losses, logsumexps and entropies for labels that are probabilities, or any other numbers."""
    z, w = _capped(x, logits_soft_cap), jnp.ones(x.shape[-1], x.dtype) if weights is None else weights
    counts = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    return _loss(z, q, w, counts, jnp.ones(x.shape[:-1], bool), None, label_smoothing, z_loss)


def linear_cross_entropy(hidden, weight, bias, class_weights, row_weights, labels, *, reduction=None, scale=1.0,
                         **options):  # fmt: skip
    """`integer_cross_entropy` of scale * (hidden @ weight + bias), its losses weighted by row, and perhaps reduced.

    A loss that is not finite does not count in a row with weight 0.
    """
    logits = hidden @ weight if bias is None else hidden @ weight + bias
    loss, lse, h = integer_cross_entropy(scale * logits, class_weights, labels, **options)
    u = jnp.ones(loss.shape, loss.dtype) if row_weights is None else jnp.broadcast_to(row_weights, loss.shape)
    u = u if options.get("ignore_index") is None else jnp.where(labels == options["ignore_index"], 0, u)
    loss = jnp.where((u == 0) & ~jnp.isfinite(loss), 0, loss)
    if reduction is None:
        return u * loss, lse, h
    mass = 1 if reduction == "sum" else jnp.sum(u)
    return jnp.where(mass == 0, 0, jnp.sum(u * loss) / jnp.where(mass == 0, 1, mass)), lse, h


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    logits_soft_cap=None,
    sinks=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    query_offset=0,
    state=None,
    return_max_logits=False,
):
    """The output (B, T, N, D) and the log-sum-exp (B, T, N) of attention; 0 and -inf where no score counts. And the
    largest score of each head (B, N), if it is asked for, as a constant.
    """
    (b, t, n, h), s = query.shape, key.shape[1]
    key, value = (jnp.repeat(x, n // key.shape[2], axis=2) for x in (key, value))
    z = jnp.einsum("btnh,bsnh->bnts", query, key) * (h**-0.5 if scale is None else scale)
    z = z if logits_soft_cap is None else logits_soft_cap * jnp.tanh(z / logits_soft_cap)
    z = z if bias is None else z + bias
    counts = jnp.ones((b, n, t, s), bool) if mask is None else jnp.broadcast_to(mask, (b, n, t, s))
    rows, keys = jnp.arange(t)[:, None], jnp.arange(s)[None]
    position = (rows + jnp.reshape(jnp.asarray(query_offset), (-1, 1, 1)))[:, None]
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    if is_causal:
        counts = counts & (keys <= position)
    if left is not None:
        counts = counts & (keys >= position - left)
    if right is not None:
        counts = counts & (keys <= position + right)
    if query_seq_lengths is not None:
        counts = counts & (rows < query_seq_lengths[:, None, None, None])
    if key_value_seq_lengths is not None:
        counts = counts & (keys < key_value_seq_lengths[:, None, None, None])
    if query_segment_ids is not None:
        counts = counts & (query_segment_ids[:, None, :, None] == key_value_segment_ids[:, None, None, :])
    largest = jax.lax.stop_gradient(jnp.max(jnp.where(counts, z, -jnp.inf), (2, 3), initial=-jnp.inf))
    counts = counts & (z > -jnp.inf)
    values = jnp.broadcast_to(jnp.moveaxis(value, 1, 2)[:, :, None], (b, n, t, s, value.shape[-1]))
    if sinks is not None:  # a key more, whose value is 0
        z = jnp.concatenate([z, jnp.broadcast_to(sinks[:, None, None], (b, n, t, 1))], -1)
        counts = jnp.concatenate([counts, jnp.ones((b, n, t, 1), bool)], -1)
        values = jnp.concatenate([values, jnp.zeros((b, n, t, 1, value.shape[-1]))], 3)
    if state is not None:  # as many keys with one value
        m, total, o = (jnp.moveaxis(v, 2, 1) for v in state)
        log = m + jnp.log(jnp.where(total == 0, 1, total))
        z = jnp.concatenate([z, jnp.where(total == 0, -jnp.inf, log)[..., None]], -1)
        counts = jnp.concatenate([counts, (total != 0)[..., None]], -1)
        mean = o / jnp.where(total == 0, 1, total)[..., None]
        values = jnp.concatenate([values, mean[:, :, :, None]], 3)
    lse = _lse(z, -1, counts)
    p = jnp.where(counts, jnp.exp(jnp.where(counts, z, 0) - jnp.where(jnp.isfinite(lse), lse, 0)), 0)
    found = jnp.einsum("bnts,bntsd->btnd", p, values), jnp.moveaxis(lse[..., 0], 1, 2)
    return (*found, largest) if return_max_logits else found


def paged_attention(
    query,
    key_pages,
    value_pages,
    page_table,
    key_value_seq_lengths,
    *,
    query_seq_lengths=None,
    query_offset=None,
    key_scale=None,
    value_scale=None,
    mask=None,
    **options,
):
    """As `attention`, of the keys and values that are in the pages of each sequence, whatever else these hold."""
    (b, t, n, _), (number, size) = query.shape, key_pages.shape[:2]
    s = page_table.shape[1] * size
    lengths = jnp.maximum(key_value_seq_lengths, 0)  # the table may have no room for them
    real = jnp.repeat((page_table >= 0) & (page_table < number), size, axis=1)
    there = real & (jnp.arange(s) < lengths[:, None])

    def held(pages, scale):
        x = pages[jnp.where((page_table >= 0) & (page_table < number), page_table, 0)]
        x = jnp.where(there[:, :, None, None], x.reshape(b, s, *x.shape[3:]), 0)
        return x if scale is None else x * jnp.reshape(jnp.asarray(scale), (-1, 1))

    if query_offset is None:
        query_offset = lengths - (t if query_seq_lengths is None else jnp.clip(query_seq_lengths, 0, t))
    counts = jnp.broadcast_to(True if mask is None else mask, (b, n, t, s)) & there[:, None, None]
    options |= {"query_seq_lengths": query_seq_lengths, "query_offset": query_offset}
    return attention(query, held(key_pages, key_scale), held(value_pages, value_scale), mask=counts, **options)


def write_pages(key_pages, value_pages, key, value, page_table, lengths, *, counts=None, offset=None, scales=(1, 1)):
    """The pages with the keys and values of tokens, put there one after the other. The integers are known."""
    key_pages, value_pages, key, value = map(jnp.asarray, (key_pages, value_pages, key, value))
    (b, t), (number, size) = key.shape[:2], key_pages.shape[:2]
    for i in range(b):
        length = max(0, int(lengths[i]))
        most = min(length, page_table.shape[1] * size)
        new = t if counts is None else max(0, min(int(counts[i]), t))
        first = length - new if offset is None else int(offset[i])
        for j in range(new):
            if 0 <= first + j < most and 0 <= (page := int(page_table[i, (first + j) // size])) < number:
                place = page, (first + j) % size
                key_pages = key_pages.at[place].set(key[i, j] / scales[0])
                value_pages = value_pages.at[place].set(value[i, j] / scales[1])
    return key_pages, value_pages
