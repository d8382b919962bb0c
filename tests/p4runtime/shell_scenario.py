"""A session of p4runtime-shell with a switch, run by its own Python (see test_p4runtime_shell).

Usage: shell_scenario.py ADDRESS P4INFO BLOB. Prints one line for each step; a failed step raises.
Run it with -P: this repository's p4/ folder must not stand for the shell's p4 package.
"""

from __future__ import annotations

import sys
from typing import Any

import p4runtime_sh.shell as sh
from p4runtime_sh.p4runtime import P4RuntimeWriteException


def scenario(address: str, p4info: str, blob: str) -> None:
    sh.setup(
        device_id=1,
        grpc_addr=address,
        election_id=(0, 7),
        config=sh.FwdPipeConfig(p4info, blob),
        verbose=False,
    )
    incoming = sh.PacketIn()
    try:
        table_entries()
        counters(incoming)
        multicast(incoming)
        errors()
    finally:
        sh.teardown()


def table_entries() -> None:
    entry = sh.TableEntry("forward")(action="set_port")
    entry.match["dst"] = "02:00:00:00:00:05"
    entry.action["port"] = "5"
    entry.insert()
    entry.action["port"] = "6"
    entry.modify()
    [seen] = list(sh.TableEntry("forward").read())
    assert seen.action["port"].value == b"\x06"
    entry.delete()
    assert list(sh.TableEntry("forward").read()) == []

    acl = sh.TableEntry("acl")(action="set_ternary", priority=3)
    acl.match["key"] = "0xab000000&&&0xff000000"
    acl.match["op"] = "1"
    acl.action["mark"] = "7"
    acl.insert()
    [seen] = list(sh.TableEntry("acl").read())
    assert (seen.priority, seen.match["key"].ternary.value) == (3, b"\xab\x00\x00\x00")

    route = sh.TableEntry("route")(action="set_lpm")
    route.match["key"] = "10.0.0.0/8"
    route.action["mark"] = "1"
    route.insert()
    window = sh.TableEntry("window")(action="set_range", priority=1)
    window.match["value"] = "10..20"
    window.match["op"] = "1"
    window.action["mark"] = "1"
    window.insert()
    choice = sh.TableEntry("choice")(action="set_optional", priority=1)
    choice.match["index"] = "4"
    choice.action["mark"] = "1"
    choice.insert()
    default = sh.TableEntry("route")(action="set_lpm", is_default=True)
    default.action["mark"] = "9"
    default.modify()
    for name in ("route", "window", "choice"):
        assert len(list(sh.TableEntry(name).read())) == 1, name
    print("table entries")


def to_cpu(dst: str) -> None:
    entry = sh.TableEntry("forward")(action="to_cpu")
    entry.match["dst"] = dst
    entry.action["reason"] = "2"
    entry.insert()


def send(dst: bytes) -> None:
    sh.PacketOut(payload=dst + bytes(6) + b"\x08\x00hello").send()


def received(incoming: Any, count: int) -> list[Any]:
    packets: list[Any] = []
    for _ in range(20):
        packets += list(incoming.sniff(timeout=0.5))
        if len(packets) >= count:
            break
    assert len(packets) == count, packets
    return [message.packet for message in packets]


def counters(incoming: Any) -> None:
    to_cpu("00:00:00:00:00:01")
    for _ in range(3):
        send(bytes(5) + b"\x01")
    packets = received(incoming, 3)
    assert packets[0].payload.endswith(b"hello")
    [counter] = list(sh.DirectCounterEntry("forward_counter").read())
    assert counter.data.packet_count == 3
    cell = sh.CounterEntry("cells")
    cell.index = 4
    cell.packet_count = 12
    cell.byte_count = 99
    cell.modify()
    [seen] = [c for c in sh.CounterEntry("cells").read() if c.packet_count]
    assert (seen.index, seen.packet_count, seen.byte_count) == (4, 12, 99)
    print("counters")


def multicast(incoming: Any) -> None:
    group = sh.MulticastGroupEntry(11)
    group.add(255, 1).add(255, 2)
    group.insert()
    entry = sh.TableEntry("forward")(action="multicast")
    entry.match["dst"] = "00:00:00:00:00:02"
    entry.action["group"] = "11"
    entry.insert()
    send(bytes(5) + b"\x02")
    received(incoming, 2)
    [seen] = list(sh.MulticastGroupEntry().read())
    assert sorted((r.port, r.instance) for r in seen.replicas) == [(255, 1), (255, 2)]
    group.delete()
    assert list(sh.MulticastGroupEntry().read()) == []
    print("multicast")


def errors() -> None:
    """What the shell makes of refusals: it parses the details of each update."""
    group = sh.MulticastGroupEntry(5)
    group.add(1, 1)
    group.insert()
    refusal = ""
    try:
        group.insert()
    except P4RuntimeWriteException as error:
        refusal = str(error)
    assert "ALREADY_EXISTS" in refusal
    print("errors")


if __name__ == "__main__":
    scenario(*sys.argv[1:])
    print("done")
