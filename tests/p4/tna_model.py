"""A model of the TNA program, in Python: what a Tofino would do with a frame, without a Tofino.

Parsers, tables, gateways, actions and stateful ALUs are the compiler's and the assembler's output,
carried out by tna_mau.py. Written by hand from p4/tna: the deparsers, the replication engine, the
digest, and the checksums. So a wrong transition or
condition, a forgotten assignment, a wrong constant or a wrong precedence in what was compiled shows
here; what only hardware does does not: time, queues, containers that two fields share.

It is a model: no Tofino, and no vendor's simulator, has run the program.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvcast.p4 import profiles
from kvcast.p4.definitions import HEAT_DIGEST, RECIRCULATE_RID, ROUND
from kvcast.protocol.messages import roce, wire
from tna_mau import Entries, Mau, Phv, StatefulAlu

ROUND_BITS = {field.name: field.bits for field in ROUND.fields}
KVCAST_HEADERS = (wire.ETHERNET, wire.IPV4, wire.UDP, wire.KVCAST)
HOST_HEADERS = (*KVCAST_HEADERS, *roce.HEADERS)


def checksum(header: bytes) -> int:
    """The Internet checksum (RFC 1071) of a header; 0 if it is right as it stands."""
    total = sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, len(header), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF - total


@dataclass
class Packet:
    """One on its way: header fields by name, and what lies behind the headers."""

    phv: Phv
    payload: bytes

    def bytes(self) -> bytes:
        """As the deparser puts it together, without the round header."""
        found = (header for header in HOST_HEADERS if self.phv[valid(header)])
        return b"".join(pack(header, self.phv) for header in found) + self.payload


def valid(header: wire.Header) -> str:
    return f"hdr.{name_of(header)}.$valid"


def name_of(header: wire.Header) -> str:
    return header.name.removesuffix("_h")


def pack_fields(widths: dict[str, int], fields: dict[str, int]) -> bytes:
    value = 0
    for name, bits in widths.items():
        value = value << bits | fields[name]
    return value.to_bytes(sum(widths.values()) // 8, "big")


def pack(header: wire.Header, phv: Phv) -> bytes:
    value = 0
    for item in header.fields:
        value = value << item.bits | phv[f"hdr.{name_of(header)}.{item.name}"]
    return value.to_bytes(header.size_bytes, "big")


def unpack(header: wire.Header, raw: bytes, phv: Phv) -> bytes:
    """Put the header's fields in; the rest. ValueError if it is cut."""
    if len(raw) < header.size_bytes:
        raise ValueError(f"{header.name} is cut")
    value = int.from_bytes(raw[: header.size_bytes], "big")
    for item in reversed(header.fields):
        phv[f"hdr.{name_of(header)}.{item.name}"] = value & ((1 << item.bits) - 1)
        value >>= item.bits
    phv[valid(header)] = 1
    return raw[header.size_bytes :]


@dataclass
class Round:
    """A frame on the recirculation port: the round header and the frame."""

    fields: dict[str, int]
    frame: bytes


@dataclass
class TnaModel:
    """A switch. `compiled`: as Mau's; `now`: ticks; `groups`: copies as (port, replication id);
    `digests`: what was raised; `rounds`: bytes of each frame that went round; `filtered`: copies
    that egress dropped."""

    target: str = "tofino1"
    compiled: dict[str, Any] = field(default_factory=dict)
    now: int = 1 << 24
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    digests: list[dict[str, int]] = field(default_factory=list)
    passes: int = 0
    rounds: list[int] = field(default_factory=list)
    filtered: int = 0
    between: dict[int, Callable[[], object]] = field(default_factory=dict)
    """By number of passes through the pipeline: what happens then (a controller's write)."""

    def __post_init__(self) -> None:
        self.mau = Mau(self.target, self.compiled)
        tail = re.compile(r"cells\.cell_w(\d+)_")
        words = {int(match[1]) for match in map(tail.match, self.alus) if match}
        self.words = len(words)
        self.last_row = -(-256 // self.words) - 1
        self.head_words = 256 - self.last_row * self.words
        profile = profiles[self.target]
        self.rid = RECIRCULATE_RID
        for group, port in profile.loop_groups.items():
            self.groups[group] = [(port, self.rid)]
        self.interests = [name for name in self.mau.tables if ".interest_step" in name]

    @property
    def entries(self) -> Entries:
        return self.mau.entries

    @property
    def alus(self) -> dict[str, StatefulAlu]:
        return self.mau.alus

    @property
    def counters(self) -> Counter[str]:
        return self.mau.counters

    @property
    def settings(self) -> dict[str, int]:
        return self.mau.settings

    @settings.setter
    def settings(self, value: dict[str, int]) -> None:
        self.mau.settings = value

    def inject(self, port: int, raw: bytes) -> list[tuple[int, bytes]]:
        """All frames that leave because of this one, in order."""
        out: list[tuple[int, bytes]] = []
        waiting: deque[tuple[int, Round]] = deque([(port, Round({}, raw))])
        while waiting:
            at, arrived = waiting.popleft()
            if self.passes in self.between:
                self.between.pop(self.passes)()
            self.passes += 1
            for egress_port, left in self.one_pass(at, arrived):
                if isinstance(left, Round):
                    waiting.append((egress_port, left))
                    self.rounds.append(ROUND.size_bytes + len(left.frame))
                else:
                    out.append((egress_port, left))
        return out

    # --- ingress ----------------------------------------------------------------------------

    def parse(self, port: int, arrived: Round) -> Packet | None:
        """The ingress parser; None if the hardware drops the frame for being cut.

        Its states are the compiled ones.
        """
        raw = arrived.frame
        if arrived.fields:
            raw = pack_fields(ROUND_BITS, arrived.fields) + raw
        front = bytearray(self.mau.parsers["ingress"]["prefix"])
        front[0:2] = port.to_bytes(2, "big")
        parsed = self.mau.parse("ingress", bytes(front) + raw)
        if parsed is None:
            return None
        phv, extracted, consumed = parsed
        from_outside = "hdr.round.task" not in extracted
        if from_outside:
            assert phv["hdr.round.$valid"] == 1
        rest = self.compare(phv, extracted, raw, with_round=not from_outside)
        # The parser ends where the headers do.
        assert len(front) + len(raw) - len(rest) == consumed
        if phv["hdr.ipv4.$valid"] and from_outside and phv["hdr.ipv4.ihl"] == 5:
            phv["local_metadata.damaged"] = int(checksum(pack(wire.IPV4, phv)) != 0)
        phv["ig_intr_md.ingress_port"] = port
        phv["ig_intr_md_from_prsr.global_tstamp"] = self.now << 16
        return Packet(phv, rest)

    def compare(self, phv: Phv, extracted: set[str], raw: bytes, *, with_round: bool) -> bytes:
        """What the parser brought is what lies in the frame; what it left in the packet's buffer is
        added; what follows the headers."""
        headers = (*HOST_HEADERS, *self.row_headers)
        for header in (ROUND, *headers) if with_round else headers:
            if phv[valid(header)]:
                lies: Phv = defaultdict(int)
                raw = unpack(header, raw, lies)
                for name, value in lies.items():
                    assert name not in extracted or phv[name] == value, (name, phv[name], value)
                phv |= lies
        return raw

    @property
    def row_headers(self) -> tuple[wire.Header, wire.Header]:
        """The words of a chunk that a frame that stores has in its headers."""
        words = [wire.Field(f"w{word}", 32, "") for word in range(self.words)]
        head, tail = words[: self.head_words], words[self.head_words :]
        return (
            wire.Header("row_head_h", "", tuple(head)),
            wire.Header("row_tail_h", "", tuple(tail)),
        )

    def word_field(self, word: int) -> str:
        part = "row_head" if word < self.head_words else "row_tail"
        return f"hdr.{part}.w{word}"

    def emit_row(self, phv: Phv) -> bytes:
        """What the ingress deparser puts behind the other headers."""
        words = [w for w in range(self.head_words) if phv["hdr.row_head.$valid"]]
        words += [w for w in range(self.head_words, self.words) if phv["hdr.row_tail.$valid"]]
        return b"".join(phv[self.word_field(word)].to_bytes(4, "big") for word in words)

    def one_pass(self, port: int, arrived: Round) -> list[tuple[int, bytes | Round]]:
        packet = self.parse(port, arrived)
        if packet is None:
            return []
        phv = packet.phv
        self.mau.run("ingress", phv)
        packet.payload = self.emit_row(phv) + packet.payload
        if phv["ig_intr_md_for_dprsr.digest_type"] == HEAT_DIGEST:
            sources = {
                "port_bits": "local_metadata.heat_ports",
                "reader_bit": "local_metadata.reader_bit",
                "count": "local_metadata.heat_count",
            }
            names = ("namespace", "segment", "key")
            digest = {name: phv[f"hdr.kvcast.{name}"] for name in names}
            self.digests.append(digest | {name: phv[at] for name, at in sources.items()})
        return self.egress(packet, self.replicate(phv))

    def replicate(self, phv: Phv) -> list[tuple[int, int]]:
        """The traffic manager: all copies, as (port, rid). Metadata that no action set is not
        valid, and asks for nothing."""
        copies: list[tuple[int, int]] = []
        manager = "ig_intr_md_for_tm."
        # In the order in which v1model sends them, which the tests compare.
        for group in ("mcast_grp_b", "mcast_grp_a"):
            if manager + group in self.mau.written:
                copies += self.groups.get(phv[manager + group], [])
        if manager + "ucast_egress_port" in self.mau.written:
            copies.append((phv[manager + "ucast_egress_port"], 0))
        return copies

    # --- egress -----------------------------------------------------------------------------

    def egress(
        self, packet: Packet, copies: list[tuple[int, int]]
    ) -> list[tuple[int, bytes | Round]]:
        left: list[tuple[int, bytes | Round]] = []
        for port, rid in copies:
            raw = pack(ROUND, packet.phv) + packet.bytes()
            front = bytearray(self.mau.parsers["egress"]["prefix"])
            front[0:2], front[19:21] = port.to_bytes(2, "big"), rid.to_bytes(2, "big")
            parsed = self.mau.parse("egress", bytes(front) + raw)
            if parsed is None:
                continue  # the hardware drops it
            phv, extracted, consumed = parsed
            assert phv["hdr.round.$valid"] == 1
            rest = self.compare(phv, extracted, raw, with_round=True)
            # A short frame is parsed further, for the hardware wants a least depth.
            assert len(front) + len(raw) - len(rest) <= consumed
            phv["eg_intr_md.egress_port"], phv["eg_intr_md.egress_rid"] = port, rid
            self.mau.run("egress", phv)
            if "eg_intr_md_for_dprsr.drop_ctl" in self.mau.written:
                self.filtered += 1
                continue
            if phv["local_metadata.rewritten"]:
                phv["hdr.ipv4.checksum"] = 0
                phv["hdr.ipv4.checksum"] = checksum(pack(wire.IPV4, phv))
            frame = Packet(phv, rest).bytes()
            if phv["hdr.round.$valid"]:
                kept = {name: phv[f"hdr.round.{name}"] for name in ROUND_BITS}
                left.append((port, Round(kept, frame)))
            else:
                left.append((port, frame))
        return left


# --- STF ------------------------------------------------------------------------------------------

_CALL = re.compile(r"^(\w+)\((.*)\)$")


def unpadded(raw: bytes) -> bytes:
    """A PADDED READ as a target without padding gets it."""
    frame: Phv = defaultdict(int)
    rest = raw
    for header in KVCAST_HEADERS:
        if len(rest) < header.size_bytes:
            return raw
        rest = unpack(header, rest, frame)
    is_read = frame["hdr.udp.dst_port"] == wire.UDP_PORT and frame["hdr.kvcast.op"] == wire.OP_READ
    if not is_read or not frame["hdr.kvcast.flags"] & wire.FLAG_PADDED:
        return raw
    frame["hdr.kvcast.flags"] &= ~wire.FLAG_PADDED
    frame["hdr.udp.length"] -= wire.READ_PADDING_BYTES
    frame["hdr.ipv4.total_length"] -= wire.READ_PADDING_BYTES
    frame["hdr.ipv4.checksum"] = 0
    frame["hdr.ipv4.checksum"] = checksum(pack(wire.IPV4, frame))
    head = b"".join(pack(header, frame) for header in KVCAST_HEADERS)
    return head + rest[wire.READ_PADDING_BYTES :]


def _arguments(text: str) -> tuple[str, dict[str, int]]:
    call = _CALL.match(text)
    assert call is not None, text
    pairs = (part.split(":") for part in call[2].split(",") if part.strip())
    return call[1], {name.strip(): int(value, 0) for name, value in pairs}


def run_stf(model: TnaModel, text: str) -> list[str]:
    """Carry a scenario out; what went wrong, in words.

    As the controller does on this target: serving groups do not go round (loop groups do), and
    READs carry no padding.
    """
    nodes: list[tuple[int, int]] = []
    sent: dict[int, deque[bytes]] = defaultdict(deque)
    wrong: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] == "#" or line.startswith("#"):
            continue
        command, rest = words[0], words[1:]
        if command == "setdefault":
            model.settings = _arguments(line.split(" ", 2)[2])[1]
        elif command == "add":
            found = re.match(r"add (\w+) ((?:[\w.]+:\S+ )*)(\w+\(.*\))$", line)
            assert found is not None, line
            keys: list[Any] = []
            for part in found[2].split():
                value = part.split(":", 1)[1]
                if "/" in value:
                    want, length = value.split("/")
                    keys += [int(want, 0), int(length)]
                else:
                    keys.append(int(value, 0))
            model.entries[found[1]][tuple(keys)] = _arguments(found[3])
        elif command == "mc_mgrp_create":
            model.groups[int(rest[0])] = []
        elif command == "mc_node_create":
            nodes.append((int(rest[1]), int(rest[0])))
        elif command == "mc_node_associate":
            node = nodes[int(rest[1])]
            if node[1] != model.rid:
                model.groups[int(rest[0])].append(node)
        elif command == "packet":
            for port, raw in model.inject(int(rest[0]), unpadded(bytes.fromhex(rest[1]))):
                sent[port].append(raw)
        elif command == "expect":
            port, expected = int(rest[0]), unpadded(bytes.fromhex(rest[1].rstrip("$")))
            if not sent[port]:
                wrong.append(f"nothing came out of port {port} for: {line[:120]}")
            elif (got := sent[port].popleft()) != expected:
                wrong.append(f"port {port}: {got[:100].hex()} instead of {expected[:100].hex()}")
        elif command == "check_counter":
            counter, index = re.match(r"(\w+)\((\d+)\)", rest[0]).groups()  # type: ignore[union-attr]
            if model.counters[f"{counter} {index}"] != int(rest[-1]):
                wrong.append(f"{line}: {model.counters[f'{counter} {index}']}")
        else:
            raise AssertionError(line)
    wrong += [f"port {port}: {len(left)} frames too many" for port, left in sent.items() if left]
    return wrong
