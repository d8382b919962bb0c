"""A model of the TNA program, in Python: what a Tofino would do with a frame, without a Tofino.

Taken from the compiler's and assembler's output (p4/generated/tofino*/behaviour.json), and run as
they say: the instructions of every stateful ALU, and every table of constant entries. Written by
hand from p4/tna: the parse graph, the order of `apply`, the conditions, what each action assigns,
the replication engine, and egress. So a wrong comparison, a wrong constant or a wrong precedence in
what was compiled shows here; a wrong placement, or a wrong gateway, does not.

It is a model: no Tofino, and no vendor's simulator, has run the program.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvcast.p4 import build, profiles
from kvcast.protocol import wire

Phv = defaultdict[str, int]

# p4/types.p4, p4/tna/headers.p4
KIND_ORDINARY, KIND_MALFORMED, KIND_READ, KIND_PARTIAL_READ = 0, 1, 2, 3
NOWHERE, UNICAST, FLOOD, SERVE, SERVE_GROUP, SHARED = range(6)
TASK_NONE, TASK_NEXT, TASK_GATHER, TASK_STORE = range(4)
HIT, SERVING, DROPPED = 1, 13, 11
ALL_PORTS_GROUP = 1
ROUND_FIELDS = (
    "task",
    "again",
    "delivery",
    "row",
    "index",
    "bank",
    "rewritten",
    "last",
    "serve_group",
    "ingress_port",
    "port_bits",
    "generation",
)
CRC16_POLYNOMIALS = {"index": (0x8005, 0), "print": (0x1021, 0xFFFF), "other_hash": (0x0589, 1)}
HOST_HEADERS = (wire.ETHERNET, wire.IPV4, wire.UDP, wire.KVCAST)


class StatefulAlu:
    """One register with its ALU: the instructions are the assembler's."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.actions: dict[str, list[str]] = program["actions"]
        self.inputs: dict[str, str] = program["inputs"]
        widths = {
            key: int(width) for key, width in re.findall(r"(lo|hi): ?(\d+)", program["format"])
        }
        self.mask = (1 << widths["lo"]) - 1
        self.memory: dict[int, dict[str, int]] = defaultdict(lambda: {"lo": 0, "hi": 0})

    def execute(self, action: str, index: int, phv: Phv) -> int:
        """Change the word at `index`; what the packet gets."""
        old = self.memory[index]
        new = dict(old)
        known = {**old, **{word: field_value(phv, name) for word, name in self.inputs.items()}}
        conditions = {"cmplo": False, "cmphi": False}
        output = 0
        for instruction in self.actions[action]:
            operation, _, rest = instruction.partition(" ")
            operands = [part.strip() for part in rest.split(",")]
            if operation in ("equ", "grt.u"):
                total = sum(signed(operand, known) for operand in operands[1:])
                conditions[f"cmp{operands[0]}"] = total == 0 if operation == "equ" else total > 0
                continue
            if operation == "output":
                what = operands.pop()
                if not operands or holds(operands[0], conditions):
                    words = {"mem_lo": old["lo"], "mem_hi": old["hi"]}
                    words |= {"alu_lo": new["lo"], "alu_hi": new["hi"]}
                    words["predicate"] = 1 << (conditions["cmplo"] + 2 * conditions["cmphi"])
                    output = words[what]
                continue
            if operands[0] not in ("lo", "hi") and not holds(operands.pop(0), conditions):
                continue
            values = [signed(operand, known) for operand in operands[1:]]
            new[operands[0]] = {
                "alu_a": lambda v: v[0],
                "or": lambda v: v[0] | v[1],
                "saddu": lambda v: min(v[0] + v[1], self.mask),
            }[operation](values) & self.mask
        self.memory[index] = new
        return output


def signed(operand: str, known: dict[str, int]) -> int:
    sign, name = (-1, operand[1:]) if operand.startswith("-") else (1, operand)
    return sign * (int(name) if name.isdigit() else known[name])


def holds(expression: str, conditions: dict[str, bool]) -> bool:
    """A predicate such as `cmplo`, `!cmplo` or `(cmplo | cmphi)`."""
    words = expression.strip("()").split()
    values = [conditions[word.lstrip("!")] != word.startswith("!") for word in words[::2]]
    return all(values) if "&" in words else any(values)


def field_value(phv: Phv, name: str) -> int:
    """A field, or bits of one: `state.chunk_bit.32-63`."""
    part = re.match(r"^(.*)\.(\d+)-(\d+)$", name)
    if part is None:
        return phv[name]
    low, high = int(part[2]), int(part[3])
    return phv[part[1]] >> low & ((1 << (high - low + 1)) - 1)


def crc16(data: bytes, polynomial: int, initial: int) -> int:
    value = initial
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1 ^ (polynomial if value & 0x8000 else 0)) & 0xFFFF
    return value


def checksum(header: bytes) -> int:
    """The Internet checksum (RFC 1071) of a header; 0 if it is right as it stands."""
    total = sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, len(header), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF - total


@dataclass
class Packet:
    """One on its way: header fields by name, which headers there are, and what lies behind them."""

    phv: Phv
    headers: list[wire.Header]
    payload: bytes

    def bytes(self) -> bytes:
        return b"".join(pack(header, self.phv) for header in self.headers) + self.payload


def name_of(header: wire.Header) -> str:
    return header.name.removesuffix("_h")


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
    return raw[header.size_bytes :]


@dataclass
class Round:
    """A frame on the recirculation port: the round header and the frame."""

    fields: dict[str, int]
    frame: bytes


@dataclass
class TnaModel:
    """A switch. `entries`: what a controller wrote; `now`: ticks; `digests`: what was raised."""

    target: str = "tofino1"
    now: int = 1 << 24
    entries: dict[str, dict[tuple[Any, ...], tuple[str, dict[str, int]]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    settings: dict[str, int] = field(
        default_factory=lambda: {"enabled": 0, "lease_ticks": 312, "heat_threshold": 0}
    )
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    digests: list[dict[str, int]] = field(default_factory=list)
    passes: int = 0
    filtered: int = 0
    between: dict[int, Callable[[], object]] = field(default_factory=dict)
    """By number of passes through the pipeline: what happens then (a controller's write)."""

    def __post_init__(self) -> None:
        path = build.generated(self.target) / build.BEHAVIOUR
        compiled = json.loads(path.read_bytes())
        self.tables = compiled["tables"]
        self.alus = {
            name.removeprefix("KvcastIngress."): StatefulAlu(program)
            for name, program in compiled["stateful"].items()
        }
        words = {int(m[1]) for m in map(re.compile(r"cells\.cell_w(\d+)").match, self.alus) if m}
        self.words = len(words)
        self.rows = -(-256 // self.words)
        self.last_row = self.rows - 1
        self.head_words = 256 - self.last_row * self.words
        self.stride = 64 * min(64, profiles[self.target].slots)
        loops = profiles[self.target].loop_groups
        self.loop_group, self.loop_port = next(iter(sorted(loops.items())))
        rid = profiles[self.target].recirculate_rid
        self.rid = rid
        for group, port in loops.items():
            self.groups[group] = [(port, rid)]
        self.cell_tables = [name for name in self.tables if ".cells.word" in name]
        self.interests = [name for name in self.tables if ".interest_step" in name]

    # --- tables -----------------------------------------------------------------------------

    def const(self, name: str, phv: Phv) -> tuple[str, list[int]]:
        """Look up a table of constant entries, as compiled."""
        table = self.tables[name]
        values = [phv[key] for key, _, _ in table["key"]]
        for entry in table["entries"]:
            wanted = entry["match"]
            if all(
                value & mask == want & mask
                for value, (want, mask) in zip(values, wanted, strict=True)
            ):
                return entry["action"], entry["parameters"]
        (default,) = table["default"]
        return default, []

    def lookup(self, name: str, *key: int) -> tuple[str, dict[str, int]]:
        return self.entries[name].get(key, ("", {}))

    def route_of(self, address: int) -> tuple[str, dict[str, int]]:
        """Longest prefix match."""
        best: tuple[int, tuple[str, dict[str, int]]] = (-1, ("", {}))
        for (want, length), action in self.entries["ipv4_route"].items():
            if length > best[0] and address >> (32 - length) == want >> (32 - length):
                best = (length, action)
        return best[1]

    # --- a frame from outside ---------------------------------------------------------------

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
                else:
                    out.append((egress_port, left))
        return out

    def parse(self, port: int, arrived: Round) -> Packet | None:
        """The ingress parser; None if the hardware drops the frame for being cut."""
        phv: Phv = defaultdict(int)
        for name in ROUND_FIELDS:
            phv[f"hdr.round.{name}"] = arrived.fields.get(name, 0)
        rest = arrived.frame
        headers: list[wire.Header] = []
        try:
            if arrived.fields:
                for header in HOST_HEADERS:
                    rest = unpack(header, rest, phv)
                    headers.append(header)
                task, row = phv["hdr.round.task"], phv["hdr.round.row"]
                phv["state.row_index"] = phv["hdr.round.index"]
                phv["state.row_bank"] = phv["hdr.round.bank"]
                phv["state.passing"] = int(task in (TASK_GATHER, TASK_STORE))
                if task == TASK_GATHER:
                    phv["state.serve_group"] = phv["hdr.round.serve_group"]
                if task == TASK_STORE:
                    count = self.head_words if row == self.last_row else self.words
                    if len(rest) < 4 * count:
                        return None
                    for word in range(count):
                        raw = rest[4 * word : 4 * word + 4]
                        phv[self.word_field(word)] = int.from_bytes(raw, "big")
                    rest = rest[4 * count :]
                return Packet(phv, headers, rest)
            rest = unpack(wire.ETHERNET, rest, phv)
            headers.append(wire.ETHERNET)
            ether_type = phv["hdr.ethernet.ether_type"]
            if ether_type in (0x8100, 0x88A8, 0x9100):
                phv["state.broken"] = 1
            if ether_type != wire.ETHERTYPE_IPV4:
                return Packet(phv, headers, rest)
            ipv4 = rest[:20]
            rest = unpack(wire.IPV4, rest, phv)
            headers.append(wire.IPV4)
            is_udp = phv["hdr.ipv4.protocol"] == wire.IP_PROTOCOL_UDP
            if phv["hdr.ipv4.ihl"] != 5:
                phv["state.broken"] = int(is_udp)
                return Packet(phv, headers, rest)
            phv["state.damaged"] = int(checksum(ipv4) != 0)
            if not is_udp or phv["hdr.ipv4.fragment_offset"]:
                return Packet(phv, headers, rest)
            rest = unpack(wire.UDP, rest, phv)
            headers.append(wire.UDP)
            if phv["hdr.udp.dst_port"] == wire.UDP_PORT:
                rest = unpack(wire.KVCAST, rest, phv)
                headers.append(wire.KVCAST)
        except ValueError:
            return None
        return Packet(phv, headers, rest)

    def word_field(self, word: int) -> str:
        part = "row_head" if word < self.head_words else "row_tail"
        return f"hdr.{part}.w{word}"

    # --- ingress ----------------------------------------------------------------------------

    def one_pass(self, port: int, arrived: Round) -> list[tuple[int, bytes | Round]]:
        packet = self.parse(port, arrived)
        if packet is None:
            return []
        phv = packet.phv
        phv["state.now"] = self.now
        for name, value in self.settings.items():
            phv[f"state.{name}"] = value
        self.forwarding(packet)
        is_kvcast = wire.KVCAST in packet.headers
        self.resident(phv)
        if is_kvcast and phv["hdr.round.task"] == TASK_NONE:
            action, parameters = self.const("frame_class", phv)
            if action == "classify":
                names = ("kind", "is_answer", "has_memory", "coalesces")
                for name, value in zip(names, parameters, strict=True):
                    phv[f"state.{name}"] = value
            else:
                phv["state.kind"] = KIND_MALFORMED
        self.port_guard(phv, port)
        action, parameters = self.const("chunk_bit", phv)
        bit = parameters[0] if action == "set_chunk_bit" else 0
        phv["state.chunk_bit"] = bit & phv["state.chunk_mask"]
        self.hashes(phv)
        shift = int(self.const("lease_scale", phv)[0].removeprefix("shift_"))
        phv["state.clock"] = self.now >> shift
        phv["state.heat_window"] = self.now >> 14 & 0xFFFF
        phv["state.heat_report"] = 1 << 15 | self.now >> 14 & 0x7FFF
        phv["state.heat_on"] = int(0 < phv["state.heat_threshold"] < 1 << 16)
        rows = {"gather": self.words, "gather_last_row": self.head_words}
        gathered = rows.get(self.const("round_task", phv)[0], 0)
        if phv["state.resident"] and phv["state.generation"] == phv["hdr.round.generation"]:
            phv["state.current"] = 1
        self.slot_validity(phv)
        self.judge(phv)
        if not (phv["state.refused"] or phv["state.serving"] or phv["state.passing"]):
            self.route(phv)
        self.memory(phv)
        self.cells(phv)
        self.pending(phv)
        self.heat(phv)
        self.coalescing(phv)
        if phv["state.is_answer"]:
            _, found = self.lookup("port_set", phv["state.shared_bits"])
            phv["state.group"] = found.get("group", ALL_PORTS_GROUP)
        if self.const("decisions", phv)[0] == "count_decision":
            self.counters[f"decision {phv['state.decision']}"] += 1
        if phv["hdr.round.task"] == TASK_NONE or phv["state.kind"] == KIND_PARTIAL_READ:
            for name in ("delivery", "rewritten", "serve_group", "port_bits", "generation"):
                phv[f"hdr.round.{name}"] = phv[f"state.{name}"]
            phv["hdr.round.ingress_port"] = port
        copies = self.departure(phv)
        if gathered:
            row = b"".join(phv[self.word_field(w)].to_bytes(4, "big") for w in range(gathered))
            packet.payload = row + packet.payload
        elif phv["hdr.round.task"] != TASK_STORE and arrived.fields.get("task") == TASK_STORE:
            raise AssertionError("a frame that stores has become another")
        return self.egress(packet, copies)

    def forwarding(self, packet: Packet) -> None:
        phv = packet.phv
        action, values = self.lookup("l2_forward", phv["hdr.ethernet.dst"])
        if action == "to_port":
            self.to_port(phv, values)
        elif action == "flood":
            phv["state.group"] = ALL_PORTS_GROUP
            phv["state.delivery"] = FLOOD
        elif action == "to_router":
            routed = wire.IPV4 in packet.headers and phv["hdr.ipv4.ttl"] > 1
            action, values = self.route_of(phv["hdr.ipv4.dst"])
            if routed and not phv["state.damaged"] and action == "to_nexthop":
                self.to_port(phv, values)
                phv["state.rewritten"] = 1
                phv["hdr.ethernet.dst"] = values["dst_mac"]
                phv["hdr.ethernet.src"] = values["src_mac"]
                phv["hdr.ipv4.ttl"] -= 1

    @staticmethod
    def to_port(phv: Phv, values: dict[str, int]) -> None:
        phv["state.out_port"] = values["port"]
        phv["state.out_bit"] = values["port_bit"]
        phv["state.delivery"] = UNICAST

    def resident(self, phv: Phv) -> None:
        key = (phv["hdr.kvcast.namespace"], phv["hdr.kvcast.key"], phv["hdr.kvcast.segment"])
        action, values = self.lookup("resident", *key)
        if action:
            phv["state.resident"] = 1
            phv["state.slot"] = values["slot"]
            phv["state.generation"] = values["generation"]
            phv["state.chunk_mask"] = values["chunk_mask"]
            phv["state.resident_digest"] = values["digest"]
            phv["state.resident_size"] = values["size"]
        phv["state.digest_difference"] = phv["hdr.kvcast.digest"] ^ phv["state.resident_digest"]

    def port_guard(self, phv: Phv, port: int) -> None:
        action, values = self.lookup("port_guard", port, phv["hdr.ipv4.src"])
        if action:
            phv["state.admitted"] = 1
            phv["state.reader_bit"] = phv["state.port_bits"] = values["port_bit"]
            phv["state.serve_group"] = values["serve_group"]
        if phv["hdr.kvcast.op"] == wire.OP_READ:
            found, _ = self.lookup("namespace_guard", port, phv["hdr.kvcast.namespace"])
        else:
            bucket = phv["hdr.kvcast.key"] & (wire.BUCKETS - 1)
            found, _ = self.lookup("bucket_owner", bucket, port)
        phv["state.permitted"] = int(bool(found))

    def hashes(self, phv: Phv) -> None:
        name = b"".join(
            phv[f"hdr.kvcast.{part}"].to_bytes(size, "big")
            for part, size in (("namespace", 2), ("key", 16), ("segment", 2))
        )
        for hashed, (polynomial, initial) in CRC16_POLYNOMIALS.items():
            phv[f"state.{hashed}"] = crc16(name, polynomial, initial)
        phv["state.fingerprint"] = phv["hdr.kvcast.namespace"] << 16 | phv["state.print"] | 1

    def slot_validity(self, phv: Phv) -> None:
        for half, shift in (("low", 0), ("high", 32)):
            action, _ = self.const(f"KvcastIngress.slot_validity.step_{half}", phv)
            if action == "NoAction":
                continue
            alu = self.alus[f"slot_validity.valid_{half}"]
            step = action.removeprefix("do_")
            value = alu.execute(f"slot_validity_{step}", phv["state.slot"], phv)
            if step.startswith("read"):
                phv["state.valid"] |= value << shift

    def judge(self, phv: Phv) -> None:
        """Gate, ServingPass, ReaderGroup."""
        if phv["hdr.round.task"] == TASK_NONE:
            action, parameters = self.const("gate", phv)
            if not phv["state.enabled"]:
                assert action == "plain"
            if action == "plain":
                for name in ("kind", "is_answer", "has_memory", "coalesces"):
                    phv[f"state.{name}"] = 0
            elif action == "refuse":
                # The default is refuse(DECISION_GUARDED); context.json leaves its argument out.
                phv["state.refused"] = 1
                phv["state.decision"] = parameters[0] if parameters else 10
                phv["state.has_memory"] = phv["state.coalesces"] = 0
        elif phv["hdr.round.task"] == TASK_NEXT:
            if phv["state.current"]:
                phv["state.serving"] = 1
                phv["state.decision"] = SERVING
                phv["state.remaining"] = phv["hdr.kvcast.wanted"]
            else:
                phv["state.kind"] = KIND_PARTIAL_READ
                padded = phv["hdr.kvcast.flags"] & wire.FLAG_PADDED
                phv["hdr.kvcast.flags"] = padded | wire.FLAG_PARTIAL
                phv["hdr.kvcast.size"] = phv["hdr.kvcast.chunk"] = 0
        if phv["hdr.kvcast.group"]:
            group = (phv["hdr.kvcast.namespace"], phv["hdr.kvcast.group"])
            _, values = self.lookup("reader_group", *group)
            members = values.get("port_bits", 0)
            if members & phv["state.reader_bit"] and phv["state.kind"] == KIND_READ:
                phv["state.grouped"] = 1
                phv["state.port_bits"] = members
                phv["state.serve_group"] = values["serve_group"]

    def route(self, phv: Phv) -> None:
        action, parameters = self.const("route", phv)
        if action == "decide":
            phv["state.decision"] = parameters[0]
        else:
            phv["state.decision"] = DROPPED
            phv["state.delivery"] = NOWHERE
            if action == "drop_read":
                phv["state.coalesces"] = 0

    def memory(self, phv: Phv) -> None:
        """FillDecision, ServingDecision, LowestChunk, and where the chunk's rows begin."""
        applies = phv["state.has_memory"] and phv["state.resident"]
        if applies and phv["state.is_answer"]:
            fills = {"store": 1, "wrong_digest": 2, "no_chunk": 3}
            phv["state.fill"] = fills[self.const("fill_verdict", phv)[0]]
        if self.const("fills", phv)[0] == "count_fill":
            self.counters[f"fill {phv['state.fill']}"] += 1
        wanted = phv["hdr.kvcast.wanted"] & phv["state.chunk_mask"]
        phv["serving_decision_wanted"] = wanted
        phv["serving_decision_missing"] = wanted & ~phv["state.valid"]
        may_serve = applies and not phv["state.is_answer"]
        if may_serve and self.const("serving_decision", phv)[0] == "serve":
            phv["state.serving"] = 1
            phv["state.decision"] = HIT
            phv["state.delivery"] = SERVE
            phv["hdr.kvcast.digest"] = phv["state.resident_digest"]
            phv["hdr.kvcast.size"] = phv["state.resident_size"]
            phv["state.remaining"] = wanted
            self.counters[f"resident_hits {phv['state.slot']}"] += 1
        if phv["state.serving"] and phv["state.grouped"]:
            phv["state.delivery"] = SERVE_GROUP
        action, parameters = self.const("lowest_chunk", phv)
        if action == "take":
            phv["hdr.kvcast.chunk"] = parameters[0]
            phv["hdr.kvcast.wanted"] = phv["state.remaining"] & parameters[1]
        phv["state.last"] = int(phv["hdr.kvcast.wanted"] == 0)
        phv["state.bank"] = phv["state.slot"] >> 6 & 1
        phv["state.first_row"] = (phv["state.slot"] & 63) << 6 | phv["hdr.kvcast.chunk"] & 63

    def cells(self, phv: Phv) -> None:
        for name in self.cell_tables:
            action, _ = self.const(name, phv)
            if action == "NoAction":
                continue
            # do_read_w3_lower, of register cells.cell_w3_lower, runs cells_read_w3_lower
            step, word = re.fullmatch(r"do_(read|write)_(w\d+\w*)", action).groups()
            alu = self.alus[f"cells.cell_{word}"]
            value = alu.execute(f"cells_{step}_{word}", phv["state.row_index"], phv)
            if step == "read":
                phv[self.word_field(int(re.findall(r"\d+", word)[0]))] = value

    def pending(self, phv: Phv) -> None:
        for name in self.interests:
            action, _ = self.const(name, phv)
            if action == "NoAction":
                continue
            part = name.rsplit("interest_step", 1)[1]
            alu = self.alus[f"pending.pending_interest{part}"]
            index = phv["state.index"]
            if len(self.interests) > 1:
                index &= 0x7FFF
            phv["state.match"] = alu.execute(f"pending_{action.removeprefix('do_')}", index, phv)
        action, _ = self.const("ports_step", phv)
        if action != "NoAction":
            alu = self.alus["pending.pending_ports"]
            step = f"pending_{action.removeprefix('do_')}"
            phv["state.waiting"] = alu.execute(step, phv["state.index"], phv)

    def heat(self, phv: Phv) -> None:
        counts = []
        for row, index in enumerate(("index", "print", "other_hash")):
            action, _ = self.const(f"KvcastIngress.heat.count{row}_step", phv)
            count = 0
            if action != "NoAction":
                alu = self.alus[f"heat.heat_row{row}"]
                count = alu.execute(f"heat_count_row{row}", phv[f"state.{index}"] & 0x3FFF, phv)
            counts.append(count)
            threshold = phv["state.heat_threshold"] & 0xFFFF
            phv[f"heat_missing{row}"] = max(threshold - count, 0)
        action, _ = self.const("heat_ports", phv)
        source = "waiting" if action == "take_waiting" else "port_bits"
        phv["state.heat_ports"] = phv[f"state.{source}"]
        parity = ("even", "odd")[phv["state.heat_window"] & 1]
        action, _ = self.const(f"KvcastIngress.heat.heat_verdict_{parity}", phv)
        if action == "not_hot":
            return
        index = phv["state.index" if parity == "even" else "state.print"] & 0x3FFF
        before = self.alus["heat.heat_reported"].execute("heat_say_once", index, phv)
        if before != phv["state.heat_report"]:
            self.digests.append(
                {
                    "namespace": phv["hdr.kvcast.namespace"],
                    "segment": phv["hdr.kvcast.segment"],
                    "key": phv["hdr.kvcast.key"],
                    "port_bits": phv["state.heat_ports"],
                    "reader_bit": phv["state.reader_bit"],
                    "count": min(counts),
                }
            )

    def coalescing(self, phv: Phv) -> None:
        phv["state.others"] = phv["state.waiting"] & ~phv["state.out_bit"]
        phv["state.shared_bits"] = phv["state.waiting"] | phv["state.out_bit"]
        action, parameters = self.const("coalescing", phv)
        if action == "sent_on":
            phv["state.decision"] = parameters[0]
            phv["hdr.kvcast.flags"] |= wire.FLAG_SHARED
            phv["hdr.udp.checksum"] = 0
        elif action == "join":
            phv["state.decision"] = 2
            phv["state.delivery"] = NOWHERE
        elif action == "collide":
            phv["state.decision"] = 4
            phv["hdr.kvcast.flags"] &= ~wire.FLAG_SHARED & 0xFFFF
            phv["hdr.udp.checksum"] = 0
        elif action == "share":
            phv["state.port_bits"] = phv["state.shared_bits"]
            phv["state.decision"] = 8
            phv["state.delivery"] = SHARED
            phv["hdr.kvcast.flags"] |= wire.FLAG_SHARED

    def departure(self, phv: Phv) -> list[tuple[int, int]]:
        """The copies that leave ingress: (port, rid)."""
        copies: list[tuple[int, int]] = []
        loop = self.groups[self.loop_group]
        if phv["state.fill"] == 1:
            phv["hdr.round.again"] = TASK_STORE
            phv["hdr.round.bank"] = phv["state.bank"]
            phv["hdr.round.index"] = phv["state.first_row"]
            copies += loop
        action, _ = self.const("departure", phv)
        # Within one action everything is read before anything is written.
        if action == "unicast":
            phv["hdr.round.task"] = TASK_NONE
            copies.append((phv["state.out_port"], 0))
        elif action == "multicast":
            phv["hdr.round.task"] = TASK_NONE
            copies += self.groups.get(phv["state.group"], [])
        elif action in ("split", "split_last"):
            phv["hdr.round.task"] = TASK_GATHER
            phv["hdr.round.row"] = self.last_row
            phv["hdr.round.bank"] = phv["state.bank"]
            phv["hdr.round.index"] = phv["state.first_row"] + self.last_row * self.stride
            copies.append((self.loop_port, 0))
            if action == "split":
                phv["hdr.round.again"] = TASK_NEXT
                copies += loop
            else:
                phv["hdr.round.last"] = 1
        elif action in ("gather_on", "store_on"):
            sign = -1 if action == "gather_on" else 1
            phv["hdr.round.row"] += sign
            phv["hdr.round.index"] += sign * self.stride
            copies.append((self.loop_port, 0))
        elif action == "gathered":
            phv["hdr.round.task"] = TASK_NONE
            copies += self.groups.get(phv["state.serve_group"], [])
        else:
            assert action == "nowhere"
        return copies

    # --- egress -----------------------------------------------------------------------------

    def egress(
        self, packet: Packet, copies: list[tuple[int, int]]
    ) -> list[tuple[int, bytes | Round]]:
        left: list[tuple[int, bytes | Round]] = []
        for port, rid in copies:
            phv: Phv = defaultdict(int, packet.phv)
            if rid == self.rid:
                phv["hdr.round.task"] = phv["hdr.round.again"]
            copy = Packet(phv, packet.headers, packet.payload)
            if phv["hdr.round.task"] != TASK_NONE:
                kept = {name: phv[f"hdr.round.{name}"] for name in ROUND_FIELDS}
                left.append((port, Round(kept, copy.bytes())))
            elif self.leaves(phv, port):
                if phv["hdr.round.rewritten"]:
                    phv["hdr.ipv4.checksum"] = 0
                    phv["hdr.ipv4.checksum"] = checksum(pack(wire.IPV4, phv))
                left.append((port, copy.bytes()))
        return left

    def leaves(self, phv: Phv, port: int) -> bool:
        """Rewrite a copy for its port; whether it leaves there."""
        delivery = phv["hdr.round.delivery"]
        if delivery in (SERVE, SERVE_GROUP):
            self.served_data(phv)
        if delivery in (SHARED, SERVE_GROUP):
            action, values = self.lookup("egress_host", port)
            if not action or not phv["hdr.round.port_bits"] & values["port_bit"]:
                self.filtered += 1
                return False
            phv["hdr.ethernet.dst"] = values["mac"]
            phv["hdr.ipv4.dst"] = values["ip"]
            phv["hdr.udp.dst_port"] = values["udp_port"]
            phv["hdr.udp.checksum"] = 0
            phv["hdr.round.rewritten"] = 1
        return delivery != FLOOD or port != phv["hdr.round.ingress_port"]

    @staticmethod
    def served_data(phv: Phv) -> None:
        for header, one, other in (
            ("ethernet", "dst", "src"),
            ("ipv4", "dst", "src"),
            ("udp", "dst_port", "src_port"),
        ):
            a, b = f"hdr.{header}.{one}", f"hdr.{header}.{other}"
            phv[a], phv[b] = phv[b], phv[a]
        phv["hdr.ipv4.ttl"] = 64
        length = wire.UDP.size_bytes + wire.KVCAST.size_bytes + wire.CHUNK_BYTES
        phv["hdr.ipv4.total_length"] = wire.IPV4.size_bytes + length
        phv["hdr.udp.length"] = length
        phv["hdr.udp.checksum"] = 0
        phv["hdr.round.rewritten"] = 1
        phv["hdr.kvcast.op"] = wire.OP_DATA
        flags = phv["hdr.kvcast.flags"] & wire.FLAG_PARTIAL | wire.FLAG_RESIDENT
        if phv["hdr.round.last"]:
            flags |= wire.FLAG_LAST
        phv["hdr.kvcast.flags"] = flags
        phv["hdr.kvcast.gather"] = phv["hdr.kvcast.wanted"] = 0


# --- STF ------------------------------------------------------------------------------------------

_CALL = re.compile(r"^(\w+)\((.*)\)$")


def unpadded(raw: bytes) -> bytes:
    """A PADDED READ as a target without padding gets it."""
    frame: Phv = defaultdict(int)
    rest = raw
    for header in HOST_HEADERS:
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
    head = b"".join(pack(header, frame) for header in HOST_HEADERS)
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
