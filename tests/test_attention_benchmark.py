"""The benchmark of attention: its cases and what is counted of them, its peers, and what its record says of them.

The peers are stand-ins here: what they are called with and what becomes of it is tested, and nothing is measured.
"""

import dataclasses
import itertools
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "docs" / "generate"))

import attention
import attention_cases
import attention_report
import flash_attention
import readme
import records
import report
from attention_cases import Case
from flash_attention import IN_JAX, IN_TORCH, SAME_BITS

SMALL = Case("training", "", "bfloat16", 2, 64, 4, 2, 16, True, False)


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """JAX's usual promotion, as in a benchmark's own process; a window that is shorter than the small cases."""
    monkeypatch.setattr(attention_cases, "WINDOW", 7)
    monkeypatch.setattr(flash_attention, "WINDOW", 7)
    reasons = flash_attention.why_not
    reasons.cache_clear()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield
    reasons.cache_clear()


def small(extra="", **changes):
    return dataclasses.replace(SMALL, extra=extra, what=extra, **changes)


@pytest.mark.parametrize(
    ("extra", "causal"),
    [("window", True), ("key lengths", False), *itertools.product(("", "segments", "documents"), (False, True))],
)
def test_counted(extra, causal):
    """The scores that count are those that the definition of the check leaves."""
    case = small(extra, causal=causal)
    arrays = attention_cases.operands(case)
    every = [attention_cases.scores(case, arrays, row, 0, np.arange(case.length)) for row in range(case.batch)]
    assert case.counted() == np.isfinite(every).sum()


def test_packed():
    """The sums of lengths are where the numbers of the segments change."""
    case = small("documents", batch=3)
    sums, longest = flash_attention.lengths(case)
    ids = np.asarray(attention_cases.operands(case)["segment_ids"])
    lengths = np.concatenate([np.bincount(row, minlength=16) for row in ids])
    assert sums.dtype == np.int32 and sums[0] == 0 and np.array_equal(np.diff(sums), lengths)
    assert longest == lengths.max() and len(lengths) == 3 * attention_cases.PACKED["documents"]


@pytest.mark.parametrize("groups", [attention_cases.GROUPS, attention_cases.CPU_GROUPS], ids=["gpu", "cpu"])
def test_cases(groups):
    """No case is there twice in a group, and each extra is known."""
    for group, cases in groups.items():
        every = list(cases(False))
        assert len(set(every)) == len(every) and {case.group for case in every} == {group}
        assert {case.extra for case in every} <= {"", "documents", *attention_cases.EXTRAS}


def all_here(monkeypatch):
    monkeypatch.setattr(flash_attention, "why_not", lambda name: None)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, [IN_JAX, IN_TORCH]),
        ({"gradients": True}, [IN_JAX, IN_TORCH, SAME_BITS]),
        ({"extra": "documents"}, [IN_JAX, IN_TORCH]),
        ({"extra": "sinks", "dtype": "float16"}, [IN_JAX, IN_TORCH]),
        ({"extra": "cap"}, [IN_TORCH]),
        ({"size": 192, "values": 128}, [IN_TORCH]),
        ({"extra": "bias"}, []),
        ({"extra": "mask"}, []),
        ({"dtype": "float32"}, []),
        ({"size": 512}, []),
    ],
    ids=str,
)
def test_what_peers_take(changes, found, monkeypatch):
    all_here(monkeypatch)
    case = dataclasses.replace(SMALL, **changes)
    assert flash_attention.peers(case) == found
    monkeypatch.setattr(attention, "CPU", False)
    assert [name for name in attention.implementations(case) if name in records.FLASH_ATTENTION] == found


def test_missing(monkeypatch):
    """What is not installed, or not for this device, is left out of each case, and why is said."""
    monkeypatch.setitem(sys.modules, flash_attention.MODULES[IN_TORCH], None)
    monkeypatch.setitem(sys.modules, flash_attention.MODULES[IN_JAX], types.SimpleNamespace())
    device = types.SimpleNamespace(compute_capability="8.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    found = flash_attention.missing()
    assert "flash-attn-4 cannot be imported: ModuleNotFoundError" in found[IN_TORCH]
    assert "for compute capability 9.0, and this device has 8.0" in found[IN_JAX]
    assert flash_attention.peers(small(gradients=True)) == []
    flash_attention.why_not.cache_clear()
    device.compute_capability = "9.0"
    assert flash_attention.peers(small(gradients=True)) == [IN_JAX]


def attend(query, key, value, *, is_causal=False, window_size=None, sinks=None, segments=None):
    """What stands for FlashAttention-3: the definition, by `jax.nn` where that has it."""
    if sinks is not None:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        z = jnp.einsum("btnh,bsnh->bnts", query, key).astype(jnp.float32) / np.sqrt(query.shape[-1])
        z = jnp.where(jnp.tril(jnp.ones(z.shape[2:], bool)) | (not is_causal), z, -jnp.inf)
        z = jnp.concatenate([z, jnp.broadcast_to(sinks[:, None, None], (*z.shape[:3], 1))], axis=3)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(z)[..., :-1].astype(value.dtype), value)
    mask = None if segments is None else segments[:, None] == segments
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal, local_window_size=window_size, implementation="xla"
    )


def attend_packed(query, key, value, sums, longest, **options):
    assert query.ndim == 3 and longest == np.diff(sums).max()
    segments = jnp.asarray(np.repeat(np.arange(len(sums) - 1), np.diff(sums)))
    return attend(query[None], key[None], value[None], segments=segments, **options)[0]


def measured(case, monkeypatch, *names):
    """What the benchmark writes of a case, with some implementations."""
    monkeypatch.setattr(attention, "implementations", lambda case: list(names))
    monkeypatch.setattr(attention, "REPEATS", 2)
    return attention.run(case, attention.compiled([case]))


def here(monkeypatch, **functions):
    all_here(monkeypatch)
    module = types.SimpleNamespace(**{"flash_mha": attend, "flash_mha_varlen": attend_packed} | functions)
    monkeypatch.setitem(sys.modules, flash_attention.MODULES[IN_JAX], module)


@pytest.mark.parametrize("extra", ["", "window", "sinks", "segments", "documents"])
def test_peer_in_jax(extra, monkeypatch):
    """Its results pass the check against float64, and it takes its turns."""
    here(monkeypatch)
    found = measured(small(extra, gradients=True), monkeypatch, IN_JAX, "jaxsoft")
    assert not found["failed"] and found["errors"][IN_JAX] < 1 and found["seconds"].keys() == {IN_JAX, "jaxsoft"}
    assert records.peer(found) == IN_JAX and "value_size" not in found


def test_wrong_peer(monkeypatch):
    """A peer that forgets the causal rule ends nothing and has no time."""
    here(monkeypatch, flash_mha=lambda *arrays, is_causal, **others: attend(*arrays, **others))
    found = measured(small(), monkeypatch, IN_JAX, "jaxsoft")
    assert "wrong" in found["failed"][IN_JAX] and found["seconds"].keys() == {"jaxsoft"}
    assert records.peer(found) is None


def test_values_of_another_size(monkeypatch):
    case = small(gradients=True, size=24, values=16)
    found = measured(case, monkeypatch, "jaxsoft")
    assert found["value_size"] == 16 and found["errors"]["jaxsoft"] < 1
    assert records.operations(found) == case.flops() == 2 * (4 * 24 + 3 * 16) * 4 * 2 * (64 * 65 // 2)


def attend_in_torch(torch):
    """What stands for FlashAttention-4: the definition, by PyTorch's autograd."""

    def of_masked(query, key, value, allowed, softcap, sink):
        query, key, value = (x.transpose(-2, -3).float() for x in (query, key, value))
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        z = query @ key.mT / query.shape[-1] ** 0.5
        z = softcap * torch.tanh(z / softcap) if softcap else z
        z = torch.where(allowed, z, -torch.inf)
        if sink is not None:
            z = torch.cat([z, sink[:, None, None].expand(*z.shape[:-1], 1)], -1)
        return (z.softmax(-1)[..., : key.shape[-2]] @ value).transpose(-2, -3)

    def rule(n, causal, window):
        i, j = torch.arange(n)[:, None], torch.arange(n)
        allowed = (j <= i) | torch.tensor(not causal)
        return allowed & (j >= i - window[0]) if window[0] is not None else allowed

    def flash_attn_func(q, k, v, *, causal, deterministic, window_size=(None, None), softcap=0.0, learnable_sink=None):
        allowed = rule(q.shape[1], causal, window_size)
        return of_masked(q, k, v, allowed, softcap, learnable_sink).to(q.dtype), None

    def flash_attn_varlen_func(q, k, v, *, causal, deterministic, seqused_k=None, cu_seqlens_q=None, **others):
        if seqused_k is not None:
            allowed = torch.arange(k.shape[1]) < seqused_k[:, None, None, None]
        else:
            assert others["max_seqlen_q"] == others["max_seqlen_k"] == cu_seqlens_q.diff().max()
            assert others["cu_seqlens_k"] is cu_seqlens_q and cu_seqlens_q.dtype == torch.int32
            segments = torch.repeat_interleave(cu_seqlens_q.diff())
            allowed = rule(len(q), causal, (None, None)) & (segments[:, None] == segments)
        return of_masked(q, k, v, allowed, 0.0, None).to(q.dtype), None

    return types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.mark.parametrize("extra", ["", "window", "cap", "sinks", "key lengths", "segments", "documents", "values"])
def test_peer_in_torch(extra, monkeypatch):
    """The tensors are the operands, and the results come back in their places. It needs PyTorch, and no GPU."""
    torch = pytest.importorskip("torch")
    all_here(monkeypatch)
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    monkeypatch.setitem(sys.modules, flash_attention.MODULES[IN_TORCH], attend_in_torch(torch))
    sizes = {"size": 24, "values": 16} if extra == "values" else {}
    case = small("" if extra == "values" else extra, gradients=True, causal=extra != "key lengths", **sizes)
    found = measured(case, monkeypatch, IN_TORCH, SAME_BITS, "jaxsoft")
    assert not found["failed"] and found["errors"][IN_TORCH] < 1 and found["errors"][SAME_BITS] < 1
    assert found["seconds"].keys() == {IN_TORCH, SAME_BITS, "jaxsoft"} and found["memory"].keys() == {"jaxsoft"}
    assert len(waited) > 6  # in each check and after each sample
    forward = measured(dataclasses.replace(case, gradients=False), monkeypatch, IN_TORCH)
    assert forward["errors"][IN_TORCH] < 1


@pytest.fixture
def record(monkeypatch):
    """The record on an H200 without FlashAttention, as if FlashAttention-4 had taken 0.9 times jaxsoft's time in a case
    and in a new one.
    """
    of_gpu = records.load("h200_attention")
    cases = [
        case | {"seconds": {name: s for name, s in case["seconds"].items() if name not in records.FLASH_ATTENTION}}
        for case in of_gpu.of("lengths", "dtypes")
        if case["group"] != "lengths" or case["shape"][3] == 128
    ]
    first = cases[0] | {"seconds": cases[0]["seconds"] | {IN_TORCH: 0.9 * cases[0]["seconds"]["jaxsoft"]}}
    packed = first | {"group": "training", "what": "16 packed documents", "causal": True}
    found = records.Record(of_gpu.header, [first, *cases[1:], packed])
    for module in (attention_report, records, report):
        monkeypatch.setattr(module, "load", lambda name: found)
    return found


def test_where_jaxsoft_is_behind(record):
    names = "cuDNN, XLA and FlashAttention-4"
    words = attention_report.standing("any")
    assert f"the fastest of {names} in each case, and takes longer than that in 2 of " in words
    assert "forward, heads of 128, in 1 by up to 11.1 %" in words and "16 packed documents" in words
    head, _, *rows = attention_report.slower("any").splitlines()
    assert "jaxsoft / fastest peer" in head and len(rows) == 2
    assert all("0.900 (FlashAttention-4)" in row for row in rows)
    assert "16 packed documents" in attention_report.training("any")
    row = next(row for row in readme.ROWS if row.operation == "`dot_product_attention`")
    assert row.instead_of() == f"{row.replaces}; FlashAttention-4"
    assert min(row.gains(gradients=False)) == pytest.approx(0.9)


def test_section(record):
    pytest.importorskip("matplotlib")
    text = attention_report.section("any")
    assert text.count("<figure") == 1 and "FlashAttention-4, TFLOP/s" in text and "What training uses" in text
    record.cases = [case for case in record.cases if IN_TORCH not in case["seconds"]]
    text = attention_report.section("any")
    assert "FlashAttention" not in text and "What training uses" not in text and "longer than that in none of" in text
