"""ring_attention and ring_order: attention over sequences that lie over several devices."""

import dataclasses
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from jaxsoft._attention.derivative import attention
from jaxsoft._attention.form import SequenceShards
from jaxsoft._attention.layouts import LAYOUTS, order
from jaxsoft._core.implementations import Implementation
from jaxsoft._core.mesh import varying_over
from jaxsoft._ops.attention_arguments import (
    Array,
    Arrays,
    AttentionArguments,
    AttentionOptions,
    Dtype,
    SegmentIds,
    Window,
    attend,
)  # fmt: skip

_METHODS = ("ring", "all_gather", "all_to_all")
# Devices with fewer tokens than this exchange all keys at once. Of two H200s, with 32 heads and 8 of keys, a ring and a
# gather took 110 and 104 us forward and 465 and 412 with gradients where each had 1024 tokens, 191 and 214, 915 and 907
# with 2048, and from 4096 on the ring was faster (`benchmarks/results/h200x2_ring.jsonl`). Each further device is one
# more step of a ring, whose kernels and messages are then as short as their latencies.
_LEAST_TOKENS = 2048


class _RingOptions(AttentionOptions, total=False):
    """The options of the overloads."""

    layout: str
    method: str | None
    query_segment_ids: SegmentIds | None
    key_value_segment_ids: SegmentIds | None
    deterministic: bool | None
    dropout_rate: float


@overload
def ring_attention(
    query: Array, key: Array, value: Array, *, axis_name: str, return_residual: Literal[False] = False,
    **options: Unpack[_RingOptions],
) -> jax.Array: ...  # fmt: skip
@overload
def ring_attention(
    query: Array, key: Array, value: Array, *, axis_name: str, return_residual: Literal[True],
    **options: Unpack[_RingOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def ring_attention(
    query: Array, key: Array, value: Array, *, axis_name: str, return_residual: bool,
    **options: Unpack[_RingOptions],
) -> jax.Array | tuple[Any, ...]: ...  # fmt: skip
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: str,
    layout: str = "contiguous",
    method: str | None = None,
    scale: Array | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    query_segment_ids: SegmentIds | None = None,
    key_value_segment_ids: SegmentIds | None = None,
    deterministic: bool | None = None,
    dropout_rate: float = 0.0,
    dtype: Dtype | None = None,
) -> jax.Array | tuple[Any, ...]:
    r"""`jaxsoft.dot_product_attention` over sequences that are sharded along an axis of a mesh.

    .. math::
      o_i = \sum_j \frac{e^{z_{ij}}}{\sum_k e^{z_{ik}}} v_j, \qquad z_{ij} = scale \cdot q_i^T k_j

    where j goes over the keys of all devices. Each device has T / P tokens of every sequence, of P devices, and keeps
    its queries and its part of the output. Keys and values go from device to device, and while a block of them is
    attended to, the next one is on its way. The letters of the shapes are those of `jaxsoft.dot_product_attention`; T,
    the number of queries and of keys, is that of the whole sequence under `jax.jit`, and that of a device's part inside
    `jax.shard_map`.

    It is called in one of two ways, which compute the same:

    * inside `jax.shard_map` with the axis among the manual ones, with a device's part of each array;
    * else, as under `jax.jit`, with whole arrays, where `jax.set_mesh` has set the mesh. Each device then works on its
      part of the sequence. Arrays that are not sharded along T over the axis become so, but over explicit axes stay as
      they are. Batch and heads may be sharded over other axes.

    Args:
      query: of shape (B, T, N, H) or (T, N, H), in f16, bf16, f32 or f64; the three arrays have one dtype.
      key: of shape (B, T, K, H) or (T, K, H).
      value: of shape (B, T, K, D) or (T, K, D).
      axis_name: the axis of the mesh over which sequences are sharded.
      layout: which tokens each device has. "contiguous": the sequence is cut into P parts. "zigzag": into 2 P parts,
        and a device has one from the front and the one as far from the back. "striped": every P-th token. Under a
        causal rule the last two give each device as much work, and a device's part of "contiguous" is up to twice that.
        `jaxsoft.ring_order` has the order of tokens.
      method: how devices get at the keys of others. "ring": block by block, while they compute. "all_gather": all of
        them at once, for few tokens a device; not with "striped" if there are limits by position. "all_to_all": devices
        exchange tokens for heads, of which N and K must be multiples of P. None for "ring" from 2048 tokens of a device
        on, else "all_gather" where it can be.
      scale: of the products; None for 1 / sqrt(H). As `jaxsoft.dot_product_attention` has it.
      is_causal: count a key only if its token is not after the query's.
      local_window_size: (left, right), or one number for both: only keys from `left` before to `right` after a query's
        token count. None, and not -1, is no limit. A ring leaves out blocks that no query reaches.
      implementation: of the kernels on each device, as `jaxsoft.dot_product_attention` has it.
      return_residual: also return the log-sum-exp of every query's scores.
      logits_soft_cap: cap the scaled products, as cap * tanh(product / cap), by a number that is not traced.
      sinks: of shape (N,): one more score for each head, with the value 0.
      query_segment_ids, key_value_segment_ids: of shape (B, T), integers, sharded and laid out as query: packed
        sequences. A key is valid only for queries with the same number. They also say which tokens are padding.
      deterministic, dropout_rate: as `jaxsoft.dot_product_attention` has them.
      dtype: of the output; None for that of query.

    Returns:
      The output, of query's shape with D in place of H, and with `return_residual` also the log-sum-exp (B, T, N) in
      f32 (f64). Both are sharded and laid out as query. The state of blocks is carried in f32 (f64), so the output
      differs from that on one device by no more than the order of sums.

    Raises:
      TypeError, ValueError: an argument does not fit the others, the sequence cannot be cut evenly, there is no such
        axis, or the named implementation cannot serve the call.

    Derivatives by query, key, value, sinks and a traced scale, of every order, in both modes. Reverse mode keeps what
    attention on one device keeps, of a device's part of the sequence, and of a ring the keys and values that arrived
    last: with these the gradients begin, which are carried and sent in f32 (f64). For policies of `jax.checkpoint` it
    has the same name, "jaxsoft_attention".

    Sources: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context"
    (arXiv:2310.01889); Brandon et al., "Striped attention" (arXiv:2311.09431); for the zigzag layout and gathered keys
    Llama Team, "The Llama 3 herd of models" (arXiv:2407.21783), section 3.3.2; Jacobs et al., "DeepSpeed Ulysses"
    (arXiv:2309.14509), for the exchange of heads.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("sequence",))
    >>> length = 8 * jax.device_count()
    >>> order = ring_order(length, jax.device_count(), "zigzag")
    >>> x = jax.random.normal(jax.random.key(0), (1, length, 2, 32))
    >>> with jax.set_mesh(mesh):
    ...     laid = jax.device_put(x[:, order], jax.P(None, "sequence"))
    ...     y = ring_attention(laid, laid, laid, axis_name="sequence", layout="zigzag", is_causal=True)
    >>> z = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    >>> bool(jnp.allclose(y, z[:, order], atol=1e-5))
    True
    """
    arguments = AttentionArguments(
        scale=scale, is_causal=is_causal, local_window_size=local_window_size, implementation=implementation,
        return_residual=return_residual, logits_soft_cap=logits_soft_cap, sinks=sinks, dtype=dtype,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        deterministic=deterministic, dropout_rate=dropout_rate,
    )  # fmt: skip
    given = Arrays.of(query, key, value, sequence_whole=False)
    length, length_of_keys = given.query.shape[1], given.key.shape[1]
    if length != length_of_keys:
        raise ValueError(
            f"key must have as many tokens as query, {length}, since they are sharded alike; got {length_of_keys}"
        )
    shards = _shards(given, axis_name, layout, method)
    if shards.method == "all_gather" and shards.layout == "striped" and arguments.limits() != (None, None):
        raise ValueError("method='all_gather' takes layout='contiguous' or 'zigzag' beside limits; got 'striped'")
    arguments = dataclasses.replace(arguments, shards=shards)
    extras = arguments.operands(given)
    if shards.inside:
        query, *others = varying_over(axis_name, given.query, given.key, given.value, *extras.values())
        given = given._replace(query=query, key=others[0], value=others[1])
        extras = dict(zip(extras, others[2:], strict=True))
    return attend(attention, given, extras, arguments)


def ring_order(length: int, devices: int, layout: str) -> np.ndarray:
    """The order in which `jaxsoft.ring_attention` takes the tokens of a sequence.

    Args:
      length: how many tokens the sequence has.
      devices: over how many devices it is sharded.
      layout: "contiguous", "striped" or "zigzag".

    Returns:
      int32 of shape (length,): the number in the sequence of each token, those of the first device first. `x[:, order]`
      lays out the tokens of x (B, T, ...), and their positions, as for rotary embeddings, are `order` itself.
      `y[:, numpy.argsort(order)]` brings them back.

    Raises:
      ValueError: there is no such layout, or the length is no multiple of the devices (for "zigzag", of twice as many).

    >>> ring_order(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    >>> ring_order(8, 2, "striped")
    array([0, 2, 4, 6, 1, 3, 5, 7], dtype=int32)
    """
    _check_layout(layout)
    _check_length("length", length, devices, layout)
    return order(length, devices, layout)


def _shards(given: Arrays, axis_name: str, layout: str, method: str | None) -> SequenceShards:
    """How the arrays lie over devices, after checking that they can."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        has = f"the mesh has {mesh.axis_names}" if mesh.axis_names else "there is no mesh"
        raise ValueError(
            f"axis_name must be an axis of the mesh that jax.set_mesh has set or that jax.shard_map is over; got "
            f"{axis_name!r}, and {has}"
        )
    _check_layout(layout)
    if method is not None and method not in _METHODS:
        raise ValueError(f"method must be None or one of {', '.join(map(repr, _METHODS))}; got {method!r}")
    devices, inside = mesh.shape[axis_name], axis_name in mesh.manual_axes
    whole = given.query.shape[1] * (devices if inside else 1)
    _check_length("query", whole, devices, layout)
    if method is None:
        method = "ring" if whole >= devices * _LEAST_TOKENS or layout == "striped" else "all_gather"
    if method == "all_to_all":
        for name, x in (("query", given.query), ("key", given.key)):
            if x.shape[2] % devices:
                raise ValueError(
                    f"method='all_to_all' takes multiples of {devices} heads, the size of axis {axis_name!r}; got "
                    f"{x.shape[2]} of {name}"
                )
    keeps = method == "ring" and devices > 1
    return SequenceShards(devices, layout, method, axis_name, inside, keeps)


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {layout!r}")


def _check_length(name: str, length: int, devices: int, layout: str) -> None:
    """Raises unless a sequence, which the argument of this name has, can be cut for a layout."""
    parts = 2 * devices if layout == "zigzag" else devices
    if length % parts:
        raise ValueError(
            f"{name} must have a multiple of {parts} tokens for layout={layout!r} over {devices} devices; got "
            f"{length}. A shorter sequence can be filled up, with segment ids of its own for what fills it"
        )
