"""Writes the STF scenarios of the data plane: ``python tests/stf/p4_scenarios.py``.

A scenario is the text of an .stf file, one or two for each control. Frames are spelled with
`kvcast.protocol`, since a DATA frame is 2,236 hexadecimal digits; which frames are expected where
is written by hand, and never taken from a switch. Any STF runner can carry the files out on the
compiled program (p4c's own, too).

Hosts 1 to 4 are 10.77.0.N with MAC 02:6b:76:00:00:NN on port N. Host 1 owns the bucket of KEY and
of OTHER_KEY. STF can say neither what time it is nor what a digest holds: leases and heat are
tested in tests/p4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from kvcast.protocol.messages import ethernet, wire

FOLDER: Final = Path(__file__).resolve().parent / "kvcast"

NAMESPACE: Final = 7
KEY: Final = bytes(range(16))
OTHER_KEY: Final = bytes(range(1, 16)) + b"\x0f"
HOSTS: Final = (1, 2, 3, 4)
FULL: Final = wire.FULL_SEGMENT
CONTENT: Final = b"".join(bytes([number]) * 1024 for number in (0xA0, 0xA1, 0xA2))
SIZE: Final = len(CONTENT) - 100
DIGEST: Final = 0x1122334455667788
ROUTER: Final = b"\x02\x6b\x76\xff\x00\x01"


def host(number: int) -> ethernet.Endpoint:
    mac = b"\x02\x6b\x76\x00\x00" + bytes([number])
    return ethernet.Endpoint(mac, ethernet.parse_ip("10.77.0.0") + number)


def frame(source: ethernet.Endpoint, destination: ethernet.Endpoint, datagram: bytes) -> bytes:
    return ethernet.Encapsulation(source, destination).wrap(datagram)


def read(**fields: int) -> wire.Frame:
    fields.setdefault("wanted", FULL)
    fields.setdefault("flags", wire.FLAG_PADDED)
    return wire.Frame(wire.OP_READ, NAMESPACE, KEY, **fields)


def data(chunk: int, **fields: int) -> wire.Frame:
    fields.setdefault("digest", DIGEST)
    payload = CONTENT[chunk * 1024 : (chunk + 1) * 1024]
    return wire.Frame(
        wire.OP_DATA, NAMESPACE, KEY, size=SIZE, chunk=chunk, payload=payload, **fields
    )


def other_key(of: wire.Frame) -> wire.Frame:
    return wire.decode(
        wire.encode(of)[:10] + OTHER_KEY + wire.encode(of)[26:]
    )  # the key is at bytes 10 to 25


class Scenario:
    """Builds one .stf text."""

    def __init__(self, title: str, *, enabled: bool = True) -> None:
        self.lines: list[str] = [
            "# Written by tests/stf/p4_scenarios.py; do not edit.",
            f"# {title}",
        ]
        self.nodes = 0
        if enabled:
            self.line("setdefault settings set_settings(enabled:1, lease_ticks:100000, "
                      "heat_threshold:0)")  # fmt: skip
        self.group(1, [(number, 0) for number in HOSTS])
        self.add("l2_forward", "flood", (), **{"hdr.ethernet.dst": 0xFFFFFFFFFFFF})
        for number in HOSTS:
            self.add_host(number)
        for key in (KEY, OTHER_KEY):
            self.add("bucket_home", "home", (), bucket=wire.bucket_of(key), ingress_port=1)

    def add_host(self, number: int) -> None:
        at, bit = host(number), 1 << (number - 1)
        mac = int.from_bytes(at.mac, "big")
        self.add(
            "l2_forward", "to_port", (("port", number), ("port_bit", bit)),
            **{"hdr.ethernet.dst": mac},
        )  # fmt: skip
        self.add(
            "port_guard", "admit", (("port_bit", bit), ("serve_group", 256 + number)),
            **{"ingress_port": number, "hdr.ipv4.src": at.ip},
        )  # fmt: skip
        self.add("namespace_guard", "allow", (), ingress_port=number, namespace=NAMESPACE)
        self.add(
            "egress_host", "rewrite",
            (("mac", mac), ("ip", at.ip), ("udp_port", at.udp_port), ("port_bit", bit)),
            egress_port=number,
        )  # fmt: skip
        self.group(256 + number, [(number, 0), (number, 255)])

    def line(self, text: str) -> None:
        self.lines.append(text)

    def say(self, text: str) -> None:
        self.lines += ["", f"# {text}"]

    def add(self, table: str, action: str, params: Sequence[tuple[str, int]], **key: int) -> None:
        fields = " ".join(f"{name}:{value:#x}" for name, value in key.items())
        values = ", ".join(f"{name}:{value:#x}" for name, value in params)
        self.line(f"add {table} {fields} {action}({values})")

    def group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        self.line(f"mc_mgrp_create {group}")
        for port, rid in replicas:
            self.line(f"mc_node_create {rid} {port}")
            self.line(f"mc_node_associate {group} {self.nodes}")
            self.nodes += 1

    def resident(self, *, slot: int = 3, generation: int = 1, digest: int = DIGEST) -> None:
        self.add(
            "resident", "resident_at",
            (("slot", slot), ("generation", generation), ("chunk_mask", 0b111),
             ("digest", digest), ("size", SIZE)),
            namespace=NAMESPACE, key=int.from_bytes(KEY, "big"), segment=0,
        )  # fmt: skip

    def packet(self, port: int, raw: bytes) -> None:
        self.line(f"packet {port} {raw.hex()}")

    def expect(self, port: int, raw: bytes) -> None:
        self.line(f"expect {port} {raw.hex()}$")

    def send(self, sender: int, receiver: int, content: wire.Frame) -> bytes:
        raw = frame(host(sender), host(receiver), wire.encode(content))
        self.packet(sender, raw)
        return raw

    def pass_on(self, sender: int, receiver: int, content: wire.Frame) -> None:
        """A frame that comes out where it is addressed, as it went in."""
        self.expect(receiver, self.send(sender, receiver, content))

    def ask(self, sender: int, receiver: int, content: wire.Frame) -> None:
        """A READ that is sent on while the pending entry holds its sender: marked SHARED."""
        self.send(sender, receiver, content)
        marked = msgspec.structs.replace(content, flags=content.flags | wire.FLAG_SHARED)
        self.expect(receiver, frame(host(sender), host(receiver), wire.encode(marked)))

    def deliver(self, receiver: int, content: wire.Frame, home: int = 1) -> None:
        """Expect a frame from the home, addressed to the host on that port."""
        self.expect(receiver, frame(host(home), host(receiver), wire.encode(content)))

    def fill(self) -> None:
        """All three chunks pass by, on the way to host 2."""
        for chunk in range(3):
            self.pass_on(1, 2, data(chunk, flags=wire.FLAG_LAST if chunk == 2 else 0))

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


SCENARIOS: Final[dict[str, Callable[[], Scenario]]] = {}


def scenario(make: Callable[[], Scenario]) -> Callable[[], Scenario]:
    SCENARIOS[make.__name__] = make
    return make


@scenario
def settings_plain() -> Scenario:
    s = Scenario("settings: a switch with its program off passes everything on", enabled=False)
    for reader in (2, 3):
        s.pass_on(reader, 1, read())
        s.pass_on(1, reader, data(0))
    s.say("a READ from an address that is not the sender's")
    raw = frame(host(4), host(1), wire.encode(read()))
    s.packet(2, raw)
    s.expect(1, raw)
    return s


@scenario
def forwarding() -> Scenario:
    s = Scenario("forwarding: by MAC, to all, and nowhere")
    udp = frame(host(2), host(3)._replace(udp_port=53), b"x" * 60)
    s.packet(2, udp)
    s.expect(3, udp)
    s.say("broadcast: everywhere but back")
    arp = b"\xff" * 6 + host(2).mac + b"\x08\x06" + bytes(46)
    s.packet(2, arp)
    for port in (1, 3, 4):
        s.expect(port, arp)
    s.say("a MAC that nobody has: dropped")
    s.packet(2, frame(host(2), host(9), b"x" * 60))
    return s


@scenario
def routing() -> Scenario:
    s = Scenario("forwarding: IPv4 routes, longest prefix, TTL and checksum")
    s.add("l2_forward", "to_router", (), **{"hdr.ethernet.dst": int.from_bytes(ROUTER, "big")})
    for prefix, length, port in (("10.99.0.0", 16, 3), ("10.99.1.0", 24, 4)):
        mac = int.from_bytes(host(port).mac, "big")
        s.line(
            f"add ipv4_route hdr.ipv4.dst:{ethernet.parse_ip(prefix):#x}/{length} "
            f"to_nexthop(port:{port}, port_bit:{1 << (port - 1)}, dst_mac:{mac:#x}, "
            f"src_mac:{int.from_bytes(ROUTER, 'big'):#x})"
        )
    for address, port in (("10.99.1.9", 4), ("10.99.2.9", 3), ("10.98.0.9", 0)):
        far = ethernet.Endpoint(ROUTER, ethernet.parse_ip(address), 53)
        sent = frame(host(2), far, b"x" * 60)
        s.packet(2, sent)
        if port:
            near = frame(host(2)._replace(mac=ROUTER), far._replace(mac=host(port).mac), b"x" * 60)
            s.expect(port, with_ttl(near, 63))
    s.say("a TTL that ends here")
    s.packet(2, with_ttl(frame(host(2), ethernet.Endpoint(ROUTER, far.ip, 53), b"x" * 60), 1))
    return s


def with_ttl(raw: bytes, ttl: int) -> bytes:
    changed = bytearray(raw)
    changed[22] = ttl
    changed[24:26] = b"\0\0"
    total = int.from_bytes(changed[14:34], "big") % 0xFFFF
    changed[24:26] = (0xFFFF - total).to_bytes(2, "big")
    return bytes(changed)


@scenario
def frame_class() -> Scenario:
    s = Scenario("frame_class: what no agent would take goes no further, and leaves no entry")
    good = frame(host(2), host(1), wire.encode(read(flags=0)))
    answer = frame(host(1), host(2), wire.encode(data(0)))
    s.say("op 5")
    s.packet(2, good[:43] + b"\x05" + good[44:])
    s.say("version 2")
    s.packet(2, good[:42] + b"\x02" + good[43:])
    s.say("READ with LAST")
    s.packet(2, good[:44] + b"\x00\x04" + good[46:])
    s.say("READ that wants nothing")
    s.packet(2, frame(host(2), host(1), wire.encode(read(flags=wire.FLAG_PARTIAL, wanted=0))))
    s.say("READ of a part that does not say so")
    s.packet(2, frame(host(2), host(1), wire.encode(read(flags=0, wanted=5))))
    s.say("READ with a byte behind it")
    s.packet(2, good + b"\0")
    s.say("READ cut in its header")
    s.packet(2, good[:-1])
    s.say("DATA cut in its chunk")
    s.packet(1, answer[:-1])
    s.say("chunk 64")
    s.packet(1, answer[:80] + b"\x40" + answer[81:])
    s.say("wrong IPv4 checksum")
    s.packet(2, good[:24] + b"\x12\x34" + good[26:])
    s.say("priority tag in front")
    s.packet(2, good[:12] + b"\x81\x00\x00\x00" + good[12:])
    s.say("and the READ itself is still the first of its segment")
    s.ask(2, 1, read(flags=0))
    return s


@scenario
def port_guard() -> Scenario:
    s = Scenario("port_guard: address, namespace and bucket belong to a port")
    s.say("host 3's address on port 2")
    s.packet(2, frame(host(3), host(1), wire.encode(read())))
    s.say("a namespace that is not allowed")
    foreign = wire.Frame(wire.OP_READ, NAMESPACE + 1, KEY, wanted=FULL)
    s.packet(2, frame(host(2), host(1), wire.encode(foreign)))
    s.say("an answer from a port that owns no bucket")
    s.ask(2, 1, read())
    s.send(3, 2, data(0))
    s.send(3, 2, wire.Frame(wire.OP_MISS, NAMESPACE, KEY, chunk=1))
    s.pass_on(1, 2, data(0))
    return s


@scenario
def coalescing_join() -> Scenario:
    s = Scenario("coalescing: one READ goes out, its answer to everybody, its end ends the wait")
    s.ask(2, 1, read())
    s.send(3, 1, read())
    s.send(4, 1, read())
    for chunk, last in ((0, 0), (2, wire.FLAG_LAST)):
        s.send(1, 2, data(chunk, flags=last))
        for reader in (2, 3, 4):
            s.deliver(reader, data(chunk, flags=last | wire.FLAG_SHARED))
    s.say("nobody waits any more")
    s.pass_on(1, 2, data(1))
    s.ask(3, 1, read())
    return s


@scenario
def coalescing_retry() -> Scenario:
    s = Scenario("coalescing: a repeat is sent on, the same READ sent twice is not")
    s.ask(2, 1, read())
    s.send(3, 1, read())
    s.ask(3, 1, read(flags=wire.FLAG_RETRY))
    s.send(2, 1, read())
    s.send(3, 1, read())
    s.send(1, 3, data(0))
    for reader in (2, 3):
        s.deliver(reader, data(0, flags=wire.FLAG_SHARED))
    return s


@scenario
def coalescing_partial() -> Scenario:
    s = Scenario("coalescing: part of a segment is between one reader and the home")
    s.ask(2, 1, read())
    s.pass_on(3, 1, read(flags=wire.FLAG_PARTIAL, wanted=6))
    s.pass_on(1, 3, data(1, flags=wire.FLAG_PARTIAL))
    s.pass_on(1, 3, data(2, flags=wire.FLAG_PARTIAL | wire.FLAG_LAST))
    miss = wire.Frame(wire.OP_MISS, NAMESPACE, KEY, chunk=1, flags=wire.FLAG_PARTIAL)
    s.pass_on(1, 3, miss)
    s.say("host 2 still waits")
    s.send(4, 1, read())
    return s


@scenario
def coalescing_miss() -> Scenario:
    s = Scenario("coalescing: MISS goes to everybody who waits, OFFER to its addressee")
    s.ask(2, 1, read())
    s.send(3, 1, read())
    offer = wire.encode_offer(wire.Offer(wire.OFFER_TCP, 9000, 1, 2, 0))
    s.pass_on(
        1, 2, wire.Frame(wire.OP_OFFER, NAMESPACE, KEY, digest=DIGEST, size=SIZE, payload=offer)
    )
    miss = wire.Frame(wire.OP_MISS, NAMESPACE, KEY, chunk=wire.MISS_NOT_FOUND)
    s.send(1, 2, miss)
    shared = wire.Frame(
        wire.OP_MISS, NAMESPACE, KEY, chunk=wire.MISS_NOT_FOUND, flags=wire.FLAG_SHARED
    )
    for reader in (2, 3):
        s.deliver(reader, shared)
    s.ask(3, 1, read())
    return s


@scenario
def coalescing_keys() -> Scenario:
    s = Scenario("coalescing: segments and keys do not wait for each other")
    s.ask(2, 1, read())
    s.ask(3, 1, other_key(read(flags=0)))
    s.ask(4, 1, read(segment=1))
    s.pass_on(1, 2, data(0))
    return s


@scenario
def port_set() -> Scenario:
    s = Scenario("port_set: a tight group where there is one, with the same copies")
    s.group(2048, [(2, 0), (3, 0)])
    s.add("port_set", "set_group", (("group", 2048),), port_bits=0b110)
    s.ask(2, 1, read())
    s.send(3, 1, read())
    s.send(1, 2, data(0))
    for reader in (2, 3):
        s.deliver(reader, data(0, flags=wire.FLAG_SHARED))
    return s


@scenario
def reader_group() -> Scenario:
    s = Scenario("reader_group: one member's READ speaks for all, a stranger's does not")
    s.group(1024, [(2, 0), (3, 0), (3, 255)])
    members = (("port_bits", 0b110), ("serve_group", 1024))
    s.add("reader_group", "set_reader_group", members, namespace=NAMESPACE, group=9)
    s.ask(2, 1, read(group=9))
    s.send(3, 1, read(group=9))
    s.send(1, 2, data(0, group=9, flags=wire.FLAG_LAST))
    for reader in (2, 3):
        s.deliver(reader, data(0, group=9, flags=wire.FLAG_SHARED | wire.FLAG_LAST))
    s.say("host 4 is no member")
    s.ask(4, 1, read(group=9))
    s.pass_on(1, 4, data(0, group=9, flags=wire.FLAG_LAST))
    s.say("from switch memory, to the members")
    s.resident()
    s.fill()
    s.send(2, 1, read(group=9, tag=77))
    for reader in (2, 3):
        for chunk in range(3):
            last = wire.FLAG_LAST if chunk == 2 else 0
            s.deliver(reader, data(chunk, group=9, tag=77, flags=wire.FLAG_RESIDENT | last))
    return s


@scenario
def serving() -> Scenario:
    s = Scenario("serving: filled in passing, served whole or in part, counted once a READ")
    s.resident()
    s.ask(2, 1, read())
    s.fill()
    s.send(3, 1, read(tag=99))
    for chunk in range(3):
        last = wire.FLAG_LAST if chunk == 2 else 0
        s.deliver(3, data(chunk, tag=99, flags=wire.FLAG_RESIDENT | last))
    s.say("part of it, and more than there is")
    s.send(4, 1, read(flags=wire.FLAG_PADDED | wire.FLAG_PARTIAL, wanted=0xF5))
    for chunk in (0, 2):
        last = wire.FLAG_LAST if chunk == 2 else 0
        s.deliver(4, data(chunk, flags=wire.FLAG_RESIDENT | wire.FLAG_PARTIAL | last))
    s.say("this copy, and another")
    s.send(4, 1, read(digest=DIGEST))
    for chunk in range(3):
        last = wire.FLAG_LAST if chunk == 2 else 0
        s.deliver(4, data(chunk, flags=wire.FLAG_RESIDENT | last))
    s.ask(4, 1, read(digest=DIGEST + 1))
    s.line("check_counter resident_hits(3) packets == 3")
    return s


@scenario
def serving_validity() -> Scenario:
    s = Scenario("serving: only what is there; a new generation starts empty")
    s.resident()
    s.pass_on(1, 2, data(1))
    s.ask(3, 1, read())
    s.send(3, 1, read(flags=wire.FLAG_PADDED | wire.FLAG_PARTIAL, wanted=0b010))
    served = wire.FLAG_RESIDENT | wire.FLAG_PARTIAL | wire.FLAG_LAST
    s.deliver(3, data(1, flags=served))
    s.pass_on(3, 1, read(flags=wire.FLAG_PADDED | wire.FLAG_PARTIAL, wanted=0b011))
    return s


@scenario
def fill_decision() -> Scenario:
    s = Scenario("fill_decision: another copy's bytes stay out, and chunks that are not there")
    s.resident(digest=DIGEST + 1)
    s.fill()
    s.ask(3, 1, read())
    s.line("check_counter resident_hits(3) packets == 0")
    return s


@scenario
def egress_host() -> Scenario:
    s = Scenario("egress_host: copies are addressed to the host on their port")
    at = host(3)
    s.say("host 3 is behind another switch, whose pool address stands for it, on another UDP port")
    pool = ethernet.Endpoint(b"\x02\x00\x00\x00\x00\x99", ethernet.parse_ip("10.1.2.3"), 4000)
    text = s.text()
    old = (
        f"rewrite(mac:{int.from_bytes(at.mac, 'big'):#x}, ip:{at.ip:#x}, "
        f"udp_port:{at.udp_port:#x}, port_bit:0x4)"
    )
    assert old in text
    new = (
        f"rewrite(mac:{int.from_bytes(pool.mac, 'big'):#x}, ip:{pool.ip:#x}, "
        f"udp_port:{pool.udp_port:#x}, port_bit:0x4)"
    )
    s.lines = text.replace(old, new).splitlines()
    s.ask(2, 1, read())
    s.send(3, 1, read())
    s.send(1, 2, data(0))
    s.deliver(2, data(0, flags=wire.FLAG_SHARED))
    s.expect(3, frame(host(1), pool, wire.encode(data(0, flags=wire.FLAG_SHARED))))
    return s


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in SCENARIOS.items():
        (FOLDER / f"{name}.stf").write_text(make().text())


if __name__ == "__main__":
    main()
