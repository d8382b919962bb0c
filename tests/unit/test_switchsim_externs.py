"""Registers, counters and meters.

Oracle: RFC 2698's token arithmetic, worked out by hand for a few packets.
"""

from __future__ import annotations

import pytest
from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.externs import CounterArray, ExternError, Rate, RegisterArray
from kvcast.switchsim.reference.externs import Meter, MeterArray

GREEN, YELLOW, RED = 0, 1, 2


def test_register_cuts_to_its_width_and_refuses_a_bad_index() -> None:
    registers = RegisterArray(ir.RegisterArray("r", 4, 12))
    registers.write(3, 0x12345)
    assert [registers.read(i) for i in range(4)] == [0, 0, 0, 0x345]
    with pytest.raises(ExternError, match="no index 4"):
        registers.read(4)
    with pytest.raises(ExternError, match="no index -1"):
        registers.write(-1, 0)
    registers.reset()
    assert registers.read(3) == 0


def test_counter_reads_what_was_written() -> None:
    counters = CounterArray(ir.CounterArray("c", 2, None))
    counters.write(1, 5, 500)
    assert (counters.read(0), counters.read(1)) == ((0, 0), (5, 500))
    with pytest.raises(ExternError):
        counters.write(2, 0, 0)


def test_unconfigured_meter_is_green() -> None:
    assert Meter().execute(10**9, 0) == GREEN


def test_two_rates_mark_green_yellow_and_red() -> None:
    meter = Meter()
    # 1 byte/us committed with a burst of 100, 2 bytes/us peak with a burst of 200
    meter.configure([Rate(1.0, 100), Rate(2.0, 200)])
    # Full buckets: 100 and 200. The first takes 100 of both.
    assert meter.execute(100, 1000) == GREEN
    # C has 0, P has 100: the peak bucket still pays.
    assert meter.execute(60, 1000) == YELLOW
    # P has 40: not enough, and a red packet takes nothing.
    assert meter.execute(60, 1000) == RED
    # 10 us later C has 10 and P has 60.
    assert meter.execute(60, 1010) == YELLOW
    # 200 us later both are full again.
    assert meter.execute(100, 1210) == GREEN


def test_a_clock_that_goes_back_gives_no_tokens() -> None:
    meter = Meter()
    meter.configure([Rate(1.0, 10)])
    assert meter.execute(10, 1000) == GREEN
    assert meter.execute(1, 500) == YELLOW
    assert meter.execute(1, 1000) == YELLOW
    assert meter.execute(1, 1001) == GREEN


def test_meter_refuses_rates_that_fall() -> None:
    with pytest.raises(ExternError, match="lowest to the highest"):
        Meter().configure([Rate(2.0, 1), Rate(1.0, 1)])


@pytest.mark.parametrize("rate", [Rate(-1.0, 1), Rate(float("nan"), 1), Rate(1.0, -1)])
def test_meter_refuses_nonsense(rate: Rate) -> None:
    with pytest.raises(ExternError):
        Meter().configure([rate])


def test_meter_array_counts_packets_or_bytes() -> None:
    packets = MeterArray(ir.MeterArray("m", 8, "packets", 2, None, None))
    bytes_ = MeterArray(ir.MeterArray("m", 8, "bytes", 2, None, None))
    for meters in (packets, bytes_):
        meters.configure(3, [Rate(0.0, 2), Rate(0.0, 2)])
        assert meters.rates(3) == (Rate(0.0, 2), Rate(0.0, 2))
    assert [packets.execute(3, 100, 0) for _ in range(3)] == [GREEN, GREEN, RED]
    assert [bytes_.execute(3, 1, 0) for _ in range(3)] == [GREEN, GREEN, RED]
    assert bytes_.execute(4, 100, 0) == GREEN
    packets.clear(3)
    assert packets.rates(3) == ()
    with pytest.raises(ExternError, match="takes 2 rates"):
        packets.configure(0, [Rate(1.0, 1)])
