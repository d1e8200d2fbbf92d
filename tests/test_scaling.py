"""What devices send each other is what the formulas say, and the model of its time gives numbers computed by hand."""

import os
import pathlib
import subprocess
import sys

import pytest
from common import slow

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import collectives
import transfers
from transfers import Call, Link, Rates

CALL = Call(devices=4, tokens=1024, heads=16, key_heads=8, size=128)
BLOCK = 2 * 1024 * 8 * 128  # numbers of a device's keys and values
LINK = Link(1e-6, ((1e6, 1e9), (2e6, 2e9)))
PROGRAM = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main_spmd (x: bf16[2,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} all-gather(%x), replica_groups=mesh['x_0'=2,'x_1'=2] {'x_0','x_1'}, dimensions={0}
  %b = f32[3]{0} all-reduce(%y), replica_groups=[1,4]<=[4], to_apply=%add
  %c = (s32[2,2]{1,0}, /*index=1*/pred[4]{0}) all-to-all(%z, %w), replica_groups={{0,1,2,3}}
  %d = f16[5]{0} collective-permute(%v), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %e = f32[2]{0} reduce-scatter(%u), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  ROOT %f = f32[2]{0} all-reduce(%t), to_apply=%add
}
"""


@pytest.mark.parametrize("only", [("rows", "attention"), pytest.param((), marks=slow)], ids=str)
def test_quick(only):
    """The command, over eight virtual devices. What rings and linear layers send is counted in their own tests, too."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_X64"}
    command = [sys.executable, str(pathlib.Path(collectives.__file__).with_name("scaling.py")), "--quick"]
    command += ["--only", *only] if only else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    kinds = ("all-gather", "all-reduce") if only else ("all-gather", "all-reduce", "collective-permute", "all-to-all")
    assert all(any(kind in line for line in lines) for kind in kinds)
    assert all(line.endswith("| nothing") for line in lines if "rows sharded" in line and "linear" not in line)


def test_what_disagrees():
    import scaling

    sent = {"all-reduce": 8.0}
    assert scaling.agrees(sent, sent)
    assert not scaling.agrees(sent, {"all-reduce": 7.0})
    assert not scaling.agrees(sent, {}) and not scaling.agrees({}, sent)


def test_what_a_program_sends():
    found = collectives.read(PROGRAM, 4)
    assert found == {
        "all-gather": 3 / 4 * 8 * 8 * 2,
        "all-reduce": 2 * 3 / 4 * (3 * 4 + 2 * 4),
        "all-to-all": 3 / 4 * (4 * 4 + 4),
        "collective-permute": 5 * 2,
        "reduce-scatter": 3 * 2 * 4,
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PROGRAM.replace("ENTRY ", ""), "own computation"),
        (PROGRAM.replace("all-gather(", "all-gather-start("), "asynchronous"),
        (PROGRAM.replace("[1,4]<=[4]", "[2,2]<=[4]"), "among 2 of 4"),
        (PROGRAM.replace("collective-permute(", "collective-broadcast("), "nothing is known"),
    ],
)
def test_what_cannot_be_read(text, why):
    with pytest.raises(ValueError, match=why):
        collectives.read(text, 4)


@pytest.mark.parametrize(
    ("method", "forward", "both"),
    [
        ("ring", {"collective-permute": 12582912}, {"collective-permute": 12582912 + 12582912 + 25165824}),
        ("all_gather", {"all-gather": 12582912}, {"all-gather": 2 * 12582912, "reduce-scatter": 25165824}),
        # (2 * 16 + 2 * 8) heads there and back, then (4 * 16 + 4 * 8), and five numbers of a query
        ("all_to_all", {"all-to-all": 9437184}, {"all-to-all": 9437184 + 18874368 + 245760}),
    ],
)
def test_formulas(method, forward, both, monkeypatch):
    monkeypatch.setattr(transfers, "KEPT_BLOCKS", 0)
    assert CALL.sent(method, False) == forward
    assert CALL.sent(method, True) == both


def test_time_of_a_message():
    assert LINK.seconds(0) == 0
    assert LINK.seconds(5e5) == pytest.approx((1e-6 + 1e-3) / 2)
    assert LINK.seconds(1e6) == LINK.seconds(2e6) == pytest.approx(1e-3)
    assert LINK.seconds(8e6) == pytest.approx(4e-3)


def test_time_of_a_pass():
    """2 x 16 x 128 x 1024**2 operations a block forward; keys and values of 4 MiB, and with sums of 8 MiB beside."""
    slow, fast = Rates(1e12, 1e12), Rates(1e13, 1e13)
    work = 4.294967296e-3
    message, sums = 4194304 / 2e9, 8388608 / 2e9
    assert transfers.step(CALL, slow, LINK, False) == pytest.approx((work, message))
    assert transfers.step(CALL, slow, LINK, True) == pytest.approx((2.5 * work, message + sums))
    assert transfers.seconds(CALL, "ring", slow, LINK, False) == pytest.approx(4 * work)
    assert transfers.seconds(CALL, "ring", fast, LINK, False) == pytest.approx(work / 10 + 3 * message)
    assert transfers.seconds(CALL, "all_gather", slow, LINK, False) == pytest.approx(4 * work + 3 * message)
    assert transfers.seconds(CALL, "all_gather", slow, LINK, True) == pytest.approx(10 * work + 3 * (message + sums))
    assert transfers.seconds(CALL, "all_to_all", slow, LINK, False) == pytest.approx(4 * work + 9437184 / 2e9)
    assert transfers.share(CALL, "ring", slow, LINK, False) == pytest.approx(1)
    both = 4 * work / 10 * 3.5 / (work / 10 + 3 * message + work / 4 + 3 * (message + sums))
    assert transfers.share(CALL, "ring", fast, LINK, True) == pytest.approx(both)


def test_where_a_ring_hides_its_messages():
    """At 2e9 bytes a second, work of T**2 x 4096e-13 seconds covers T x 4096 bytes from T = 5000 on."""
    link = Link(0.0, ((1.0, 2e9),))
    assert transfers.hidden_from(16, 8, Rates(1e13, 1e13), link, False, unit=8) == 5000
    assert transfers.hidden_from(16, 8, Rates(1e13, 1e13), link, False) == 5120
