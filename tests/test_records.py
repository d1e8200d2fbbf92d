"""Records of measurements: what benchmarks/compare.py says of two of them, and what is read and drawn of one.

They need no JAX, and nothing is measured here.
"""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import columns
import compare
import records

HEADER = {"device": "a GPU", "cores": 8, "versions": {"jax": "1.0"}, "flags": "", "commit": "abc", "date": "today"}
NAMES = sorted(path.stem for path in records.RESULTS.glob("*.jsonl"))


def case(length=1024, spread=0.01, **seconds):
    seconds = {"copy": 1e-3, "jax.nn": 2e-3, "jaxsoft": 1e-3, "pallas": 1.1e-3} | seconds
    which = {"group": "rows", "op": "softmax", "direction": "forward", "dtype": "float32", "shape": [64, length]}
    return which | {"seconds": seconds, "spread": dict.fromkeys(seconds, spread), "failed": {}}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Compares two lists of cases, as the command does, and returns its status and what it printed."""

    def run(old, new, *options, header=HEADER):
        paths = []
        for name, of, cases in (("old", HEADER, old), ("new", header, new)):
            record = records.Record(of, path=tmp_path / f"{name}.jsonl")
            for one in cases:
                record.add(one)
            paths.append(str(record.path))
        monkeypatch.setattr(sys, "argv", ["compare.py", *paths, *options])
        with pytest.raises(SystemExit) as end:
            compare.main()
        return end.value.code, "".join(capsys.readouterr())

    return run


def test_equal(run):
    status, said = run([case(), case(2048)], [case(), case(2048)])
    assert status == 0
    assert "4 values of jaxsoft's in 2 cases: 0 worse and 0 better beyond the noise" in said
    assert "WARNING" not in said and "Only in" not in said


def test_slower(run):
    """One implementation of one case is slower by a fifth, and another faster by a tenth."""
    status, said = run([case(), case(2048)], [case(jaxsoft=1.2e-3), case(2048, pallas=0.99e-3)])
    assert status == 1
    assert "1 worse and 1 better beyond the noise, 1 worse by more than 10%" in said
    slower, faster = (line for line in said.splitlines() if "softmax" in line)
    assert slower.split() == "+20.0% 1000.00 1200.00 µs 5.0% jaxsoft: rows softmax forward float32 64x1024".split()
    assert faster.split()[:6] == "-10.0% 1100.00 990.00 µs 5.0% pallas:".split()


def test_threshold_and_noise(run):
    """8 % are beyond the noise of 5 % and below the threshold of 10 %."""
    old, new = [case()], [case(jaxsoft=1.08e-3)]
    status, said = run(old, new)
    assert status == 0 and "1 worse" in said
    assert run(old, new, "--threshold", "7")[0] == 1
    status, said = run(old, new, "--threshold", "7", "--noise", "9")
    assert status == 0 and "0 worse" in said


def test_scattered_samples_are_noise(run):
    """Both records' samples scatter by 15 %, so that 25 % say nothing and 40 % do."""
    old = [case(spread=0.15)]
    assert run(old, [case(spread=0.15, jaxsoft=1.25e-3)])[0] == 0
    assert run(old, [case(spread=0.15, jaxsoft=1.4e-3)])[0] == 1


def test_peers_decide_nothing(run):
    status, said = run([case()], [case(copy=2e-3, **{"jax.nn": 4e-3})])
    assert status == 0
    assert "Not jaxsoft's, moved: 2" in said and "+100.0% copy" in said


def test_missing_cases(run):
    status, said = run([case(), case(2048)], [case(), case(4096)])
    assert status == 0
    assert "Only in old: 1\nrows softmax forward float32 64x2048" in said
    assert "Only in new: 1\nrows softmax forward float32 64x4096" in said


def test_nothing_to_compare(run):
    status, said = run([case()], [case(2048)])
    assert status == 2 and "Nothing could be compared" in said
    assert run([], [])[0] == 2


def test_what_failed(run):
    new = case()
    del new["seconds"]["pallas"]
    status, said = run([case()], [new | {"failed": {"pallas": "out of memory"}}])
    assert status == 1 and "pallas: rows softmax forward float32 64x1024: out of memory" in said


def test_other_device(run):
    status, said = run([case()], [case()], header=HEADER | {"device": "another", "versions": {"jax": "1.1"}})
    assert status == 0 and "WARNING: device, versions differ" in said


def test_bytes(run):
    """Memory that grows from nothing, and a collective operation that was not there; less than a MB is no change."""
    which = {"group": "rows", "devices": 8}
    old = which | {"memory": {"jaxsoft": 0, "ffi": 100}, "sent": {}}
    new = which | {"memory": {"jaxsoft": 5e6, "ffi": 200}, "sent": {"all-gather": 2e6}}
    status, said = run([old], [new])
    assert status == 1 and "2 worse and 0 better" in said
    assert "jaxsoft, memory: rows devices 8" in said and "all-gather, sent: rows devices 8" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("{", ":1: not a line of JSON"),
        ('{\n "header": {}\n}', ":1: not a line of JSON"),
        ("[]", ":1: not the header"),
        ('{"device": "a GPU"}', ":1: not the header"),
        (json.dumps(HEADER) + '\n{"seconds": {}}', ":2: not the case"),
        (json.dumps(HEADER) + '\n{"group": "rows"', ":2: not a line of JSON"),
        (json.dumps(HEADER) + '\n{"group": "rows"}' * 2, "two cases are the same"),
    ],
)
def test_malformed(text, why, tmp_path, monkeypatch, capsys):
    path = tmp_path / "record.jsonl"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(path), str(path)])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 2 and why in capsys.readouterr().err


def test_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "a"), str(tmp_path / "b")])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 2 and "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_records(name):
    """Of the repository's records each line is one case, which is there once, and each time is that of something."""
    record = records.load(name)
    lines = (records.RESULTS / f"{name}.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(record.cases) == 1 + len(compare.by_key(record)) > 2
    for one in record.cases:
        assert all(value > 0 for value in one.get("seconds", {}).values())
        assert one.get("errors", {}).keys() <= one.get("seconds", {}).keys() | one.get("failed", {}).keys()


def test_what_is_derived():
    one = case(jaxsoft=0.5e-3)
    assert records.fraction(one, "jaxsoft") == pytest.approx(2) and records.faster(one, "jaxsoft") == pytest.approx(4)
    assert records.fraction(one, "ffi") is None and records.faster(one, "ffi") is None
    ring = {"seconds": {"one device": 8e-3, "ring": 5e-3}, "devices": 2}
    assert records.fraction(ring, "ring") == pytest.approx(0.8)
    attention = {"shape": [1, 1024, 16, 128], "scores": 1000, "direction": "forward", "seconds": {"ffi": 1e-3}}
    assert records.rate(attention, "ffi") == 4 * 16 * 128 * 1000 / 1e-3
    attention["direction"] = "with gradients"
    assert records.rate(attention, "ffi") == 14 * 16 * 128 * 1000 / 1e-3
    # Four of the seven products are as long as a query, and three as a value.
    attention["value_size"] = 64
    assert records.rate(attention, "ffi") == 2 * (4 * 128 + 3 * 64) * 16 * 1000 / 1e-3
    attention["direction"] = "forward"
    assert records.rate(attention, "ffi") == 2 * (128 + 64) * 16 * 1000 / 1e-3


def test_fastest_peer():
    """Attention's speed-ups are over the fastest peer of the case, others over the first in the order of PEERS."""
    one = {"seconds": {"cudnn": 2e-3, "FlashAttention-3": 1.5e-3, "FlashAttention-4": 1.8e-3, "jaxsoft": 1e-3}}
    assert records.peer(one) == "FlashAttention-3" and records.faster(one, "jaxsoft") == pytest.approx(1.5)
    column = columns.over_fastest()
    assert column.text(column.value(one)) == "1.50 (FlashAttention-3)"
    assert records.peer({"seconds": {"optax": 2e-3, "composed": 1e-3, "xla": 1e-4}}) == "optax"
    alone = {"seconds": {"jaxsoft": 1e-3}}
    assert records.peer(alone) is None and column.text(column.value(alone)) == columns.NOTHING


def test_tables():
    found = columns.table([case(2**17)], ["shape", "row length", *columns.each("ms", ["jaxsoft", "ffi"])])
    heads = "| shape | row length | jaxsoft, ms | ffi, ms |\n| :-- | --: | --: | --: |"
    assert found == f"{heads}\n| 64{columns.TIMES}131072 | 128K | 1.00 | {columns.NOTHING} |"
    assert columns.table([], ["shape"]) == ""
    assert columns.line("one", case(), ["ms", "fraction"]).split("|")[2].split() == ["jaxsoft", "1.000", "1.000"]
