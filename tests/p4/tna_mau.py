"""A model of a Tofino's match-action stages, run by what the compiler and the assembler wrote.

Taken as they are from p4/generated/tofino*/behaviour.json: the tables and gateways in the order of
the hardware's steps, what follows what, every action's primitives, constant entries with their
precedence, and the instructions of every stateful ALU. As in the hardware, all that one stage does
reads the fields as they were when the stage began.

Filled in by hand, because that output does not tell: the polynomials of the hashes (POLYNOMIALS),
and where a slice lies of which only the width is told (SHIFTS, SOURCES).
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from kvcast.p4 import build

Phv = defaultdict[str, int]
Entries = dict[str, dict[tuple[Any, ...], tuple[str, dict[str, int]]]]

POLYNOMIALS = {
    "local_metadata.index": (0x8005, 0),
    "local_metadata.print": (0x1021, 0xFFFF),
    "local_metadata.other_hash": (0x0589, 1),
}
"""CRC-16 of p4/tna/block_hash.p4: polynomial, and initial value."""
SHIFTS = {
    ("become_data", "hdr.kvcast.flags", 0x3FFF): 2,
    ("go_home", "hdr.kvcast.flags", 0x7FF): 5,
    ("slot_validity_read_high", "local_metadata.valid", 0): 32,
}
"""(action or ALU program, destination, mask): its lowest bit, where that is not 0."""
SOURCES = {
    ("heat_missing0", "local_metadata.heat_threshold"): ((0, 16),),
    ("heat_missing1", "local_metadata.heat_threshold"): ((0, 16),),
    ("heat_missing2", "local_metadata.heat_threshold"): ((0, 16),),
    ("local_metadata.heat_count", "local_metadata.heat_count"): ((0, 16),),
    ("local_metadata.now", "ig_intr_md_from_prsr.global_tstamp"): ((16, 32),),
    ("local_metadata.loop_group", "ig_intr_md.ingress_port"): ((7, 2),),
    ("lowest_chunk_rest", "hdr.kvcast.wanted"): ((32, 32), (0, 32)),
}
"""(destination, source): lowest bit and width of each mention of the source, in order."""
PARTIAL_WRITES = {
    ("become_data", "hdr.kvcast.flags", 0x3FFF),
    ("become_data", "hdr.kvcast.flags", 1),
    ("go_home", "hdr.kvcast.flags", 0xF),
    ("go_home", "hdr.kvcast.flags", 0x7FF),
    ("compare", "local_metadata.heat_count", 0xFFFF),
    ("finish_count", "local_metadata.heat_count", 0xFFFF),
    ("describe", "hdr.round.rewritten", 1),
    ("", "local_metadata.loop_port", 0x7F),
    ("", "local_metadata.loop_group", 3),
}
"""Writes of a part of a field, known and looked at: (action, or nothing if it has no name of its
own; destination; mask)."""


def cut(value: int, low: int, width: int) -> int:
    return value >> low & ((1 << width) - 1)


def signed(operand: str, known: dict[str, int]) -> int:
    sign, name = (-1, operand[1:]) if operand.startswith("-") else (1, operand)
    return sign * (int(name) if name.isdigit() else known[name])


def holds(expression: str, conditions: dict[str, bool]) -> bool:
    """A predicate such as `cmp0`, `!cmp0` or `(cmp0 | cmp1)`."""
    words = expression.strip("()").split()
    values = [conditions[word.lstrip("!")] != word.startswith("!") for word in words[::2]]
    return all(values) if "&" in words else any(values)


def field_value(phv: Phv, name: str) -> int:
    """A field, or bits of one as the assembler writes them: `local_metadata.chunk_bit.32-63`."""
    part = re.match(r"^(.*)\.(\d+)-(\d+)$", name)
    if part is None:
        return phv[name]
    low, high = int(part[2]), int(part[3])
    return cut(phv[part[1]], low, high - low + 1)


def crc16(data: bytes, polynomial: int, initial: int) -> int:
    value = initial
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1 ^ (polynomial if value & 0x8000 else 0)) & 0xFFFF
    return value


COMPARATORS = ("cmp0", "cmp1")


def _as_tofino2(instruction: str) -> str:
    compared = re.sub(r"^(equ|grt\.u) (lo|hi),", r"\1 cmp\2,", instruction)
    return compared.replace("cmplo", "cmp0").replace("cmphi", "cmp1").replace(" word0,", "")


class StatefulAlu:
    """One register with its ALU: the instructions are the assembler's, in a Tofino 2's words (a
    Tofino 1's comparators are called lo and hi)."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.actions: dict[str, list[str]] = {
            name: [_as_tofino2(instruction) for instruction in instructions]
            for name, instructions in program["actions"].items()
        }
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
        conditions = dict.fromkeys(COMPARATORS, False)
        output = 0
        for instruction in self.actions[action]:
            operation, _, rest = instruction.partition(" ")
            operands = [part.strip() for part in rest.split(",")]
            if operation in ("equ", "grt.u"):
                total = sum(signed(operand, known) for operand in operands[1:])
                conditions[operands[0]] = total == 0 if operation == "equ" else total > 0
                continue
            if operation == "output":
                what = operands.pop()
                if not operands or holds(operands[0], conditions):
                    words = {"mem_lo": old["lo"], "mem_hi": old["hi"]}
                    words |= {"alu_lo": new["lo"], "alu_hi": new["hi"]}
                    words["predicate"] = 1 << (conditions["cmp0"] + 2 * conditions["cmp1"])
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


ALU_OPERATIONS = {
    "set": lambda v: v[0],
    "or": lambda v: v[0] | v[1],
    "and": lambda v: v[0] & v[1],
    "xor": lambda v: v[0] ^ v[1],
    "andcb": lambda v: v[0] & ~v[1],
    "add": lambda v: v[0] + v[1],
    "ssubu": lambda v: max(v[0] - v[1], 0),
    "minu": lambda v: min(v),
    "shru": lambda v: v[0] >> v[1],
}
_TERM = re.compile(r"^([\w.$]+?)(?:\[(\d+):(\d+)\])? (==|!=|>) ([\w.$]+)$")


@functools.cache
def _committed(target: str) -> str:
    return (build.generated(target) / build.BEHAVIOUR).read_text()


def behaviour_of(target: str) -> dict[str, Any]:
    """The committed behaviour.json, anew at each call, so that it may be changed."""
    loaded: dict[str, Any] = json.loads(_committed(target))
    return loaded


@dataclass
class Mau:
    """The stages of one target. `compiled`: what it carries out, if not what is committed;
    `entries`: what a controller wrote, by table and key; `settings`: what it made the default of
    table settings; `written`: fields that an action has set in the
    present pass (metadata of the deparser is valid once it is)."""

    target: str
    compiled: dict[str, Any] = field(default_factory=dict)
    entries: Entries = field(default_factory=lambda: defaultdict(dict))
    settings: dict[str, int] = field(
        default_factory=lambda: {"enabled": 0, "lease_ticks": 312, "heat_threshold": 0}
    )
    counters: Counter[str] = field(default_factory=Counter)
    written: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        compiled = self.compiled or behaviour_of(self.target)
        self.tables: dict[str, Any] = compiled["tables"]
        self.widths: dict[str, int] = compiled["fields"]
        self.parsers: dict[str, Any] = compiled["parsers"]
        self.states_seen: dict[str, set[str]] = {"ingress": set(), "egress": set()}
        self.alus = {
            name.removeprefix("KvcastIngress."): StatefulAlu(program)
            for name, program in compiled["stateful"].items()
        }
        self._remembered: dict[str, dict[tuple[int, ...], tuple[str, list[int]]]] = defaultdict(
            dict
        )
        self.stages: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for gress in ("ingress", "egress"):
            by_stage: dict[int, list[dict[str, Any]]] = defaultdict(list)
            for step in compiled[gress]:
                by_stage[step["number"] // 16].append(step)
            self.stages[gress] = dict(sorted(by_stage.items()))

    # --- parser -----------------------------------------------------------------------------

    def parse(self, gress: str, raw: bytes) -> tuple[Phv, set[str], int] | None:
        """The states of a parser, over a frame with what the hardware puts in front of it: the
        fields, which of them came from the packet, and how many bytes were consumed; None for a
        frame that ends too soon."""
        parser = self.parsers[gress]
        phv: Phv = defaultdict(int)
        extracted: set[str] = set()
        registers: dict[str, int] = {}
        at, name = 0, parser["start"]
        while name != "end":
            self.states_seen[gress].add(name)
            state = parser["states"][name]
            row = next(row for row in state["rows"] if self._row_matches(state, row, registers))
            if at + row["needs"] > len(raw):
                return None
            for first, last, field_name, low in row["extract"]:
                window = int.from_bytes(raw[at + first // 8 : at + last // 8 + 1], "big")
                value = cut(window, 7 - last % 8, last - first + 1)
                phv[field_name] |= value << low
                extracted.add(field_name)
            for field_name, value in row["set"]:
                phv[field_name] |= value
            if row["counter"]:
                how, count = row["counter"]
                counted = count if how == "imm" else registers["counter"] - count
                registers |= {"counter": counted, "ctr_neg": counted < 0, "ctr_zero": counted == 0}
            for register, where in row["load"].items():
                registers[register] = int.from_bytes(raw[at + where[0] : at + where[-1] + 1], "big")
            at += row["shift"]
            name = row["next"]
        return phv, extracted, at

    @staticmethod
    def _row_matches(state: dict[str, Any], row: dict[str, Any], registers: dict[str, int]) -> bool:
        value = bits = 0
        for register in state["match"]:
            width = 16 if register.startswith("half") else 1 if register.startswith("ctr") else 8
            value, bits = value << width | registers[register], bits + width
        if not row["pattern"]:
            return True
        wanted = row["pattern"][-bits:].rjust(bits, "0")  # hexadecimal, so there may be more
        return all(
            bit in ("*", found) for bit, found in zip(wanted, f"{value:0{bits}b}", strict=True)
        )

    # --- steps ------------------------------------------------------------------------------

    def compiled_steps(self, gress: str) -> list[dict[str, Any]]:
        return [step for steps in self.stages[gress].values() for step in steps]

    def run(self, gress: str, phv: Phv) -> None:
        """All stages; `phv` becomes what the deparser gets."""
        self.written = set()
        chosen: set[int] = set()
        for steps in self.stages[gress].values():
            before: Phv = defaultdict(int, phv)
            for step in steps:
                if not step["always"] and step["number"] not in chosen:
                    continue
                condition = step.get("condition", "")
                if condition == "true(always hit)":
                    chosen.update(step["true"])
                elif condition:
                    following = step["true" if self.meets(condition, before) else "false"]
                    chosen.update(following)
                    if step["number"] not in following:
                        continue
                # The IPv4 checksum's table, which the compiler made, is done by hand.
                name = step.get("table", "")
                if name and not name.startswith("egresshdr."):
                    chosen.update(self.apply(name, before, phv))

    def meets(self, condition: str, phv: Phv) -> bool:
        """A gateway's condition: terms joined by one kind of connective."""
        terms = condition.removeprefix("(").removesuffix(")")
        connective = " || " if " || " in terms else " && "
        truths = (self._term(term, phv) for term in terms.split(connective))
        return any(truths) if connective == " || " else all(truths)

    @staticmethod
    def _term(term: str, phv: Phv) -> bool:
        found = _TERM.match(term)
        assert found is not None, term
        name, high, low, comparison, other = found.groups()
        left = phv[name] if high is None else cut(phv[name], int(low), int(high) - int(low) + 1)
        right = int(other) if other.isdigit() else phv[other]
        return {"==": left == right, "!=": left != right, ">": left > right}[comparison]

    # --- tables -----------------------------------------------------------------------------

    def key_of(self, name: str, phv: Phv) -> list[int]:
        return [cut(phv[key], low, width) for key, low, width, _ in self.tables[name]["key"]]

    def const(self, name: str, phv: Phv) -> tuple[str, list[int]]:
        """Look up a table of constant entries; the default's parameters are empty."""
        values = tuple(self.key_of(name, phv))
        remembered = self._remembered[name]
        if values not in remembered:
            if len(remembered) > 4096:
                remembered.clear()
            remembered[values] = self._matched(self.tables[name], values)
        return remembered[values]

    @staticmethod
    def _matched(table: dict[str, Any], values: tuple[int, ...]) -> tuple[str, list[int]]:
        for entry in table["entries"]:
            if all(
                value & mask == wanted & mask
                for value, (wanted, mask) in zip(values, entry["match"], strict=True)
            ):
                return entry["action"], entry["parameters"]
        return table["default"], []

    def find(self, name: str, phv: Phv) -> tuple[str, dict[str, int]]:
        """The action that a table chooses, and its parameters."""
        table = self.tables[name]
        default: str = table["default"]
        action, given = default, {}
        if table["entries"]:
            action, parameters = self.const(name, phv)
            names = [parameter for parameter, _ in table["actions"][action]["parameters"]]
            given = dict(zip(names, parameters, strict=False))
        elif name == "settings":
            action, given = "set_settings", self.settings
        elif not table["key"]:
            (action,) = table["actions"]
        elif any(kind == "lpm" for *_, kind in table["key"]):
            (address,) = self.key_of(name, phv)
            longest = -1
            for (want, length), entry in self.entries[name].items():
                if length > longest and address >> (32 - length) == want >> (32 - length):
                    longest, (action, given) = length, entry
        else:
            action, given = self.entries[name].get(tuple(self.key_of(name, phv)), (default, {}))
        defaults = dict(table["actions"][action]["parameters"])
        assert set(given) <= set(defaults), (name, action, given)
        return action, {**defaults, **given}

    def apply(self, name: str, before: Phv, phv: Phv) -> list[int]:
        """Look a table up and run its action; the steps that follow."""
        action, parameters = self.find(name, before)
        compiled = self.tables[name]["actions"][action]
        results: dict[str, int] = {}
        for primitive in compiled["does"]:
            self._primitive(name, action, primitive, parameters, results, before, phv)
        following: list[int] = compiled["next"]
        return following

    # --- actions ----------------------------------------------------------------------------

    def _primitive(
        self,
        table: str,
        action: str,
        primitive: list[Any],
        parameters: dict[str, int],
        results: dict[str, int],
        before: Phv,
        phv: Phv,
    ) -> None:
        operation, target, *rest = primitive
        if operation in ("AddHeader", "RemoveHeader"):
            phv[target] = int(operation == "AddHeader")
        elif operation == "Drop":
            self.written.add(target)
        elif operation == "Count":
            short = target.rsplit(".", 1)[-1].removesuffix("_counts")
            index = self.joined(rest, before)[0] if rest else self.key_of(table, before)[0]
            self.counters[f"{short} {index}"] += 1
        elif operation == "Hash":
            algorithm, *inputs = rest
            value, width = self.joined(inputs, before)
            if algorithm != "identity":
                value = self.crc(target, value.to_bytes(width // 8, "big"))
            self.write(action, target, 0, value, phv)
        elif operation == "Execute":
            program, output, *inputs = rest
            alu = self.alus[target.removeprefix("KvcastIngress.")]
            value = alu.execute(program, self.joined(inputs, before)[0], before)
            results[target] = value
            if output:
                low = SHIFTS.get((program, output, 0), 0)
                if output == "local_metadata.valid":  # its halves come from an ALU each
                    value = phv[output] & ~(0xFFFFFFFF << low) | value << low
                self.write(action, output, 0, value, phv)
        else:
            mask, *operands = rest
            values = []
            parts = [operand for operand in operands if (target, operand) in SOURCES]
            for operand in operands or ["$" + target.rsplit(".", 1)[-1]]:
                if isinstance(operand, int):
                    values.append(operand)
                elif operand.startswith("$") and operand[1:] in parameters:
                    values.append(parameters[operand[1:]])
                elif operand in results:
                    values.append(results[operand])
                elif operand in parts:
                    slices = SOURCES[target, operand]
                    low, width = slices[len(values) % len(slices)]
                    values.append(cut(before[operand], low, width))
                else:
                    values.append(before[operand])
            self.write(action, target, mask, ALU_OPERATIONS[operation](values), phv)

    def write(self, action: str, target: str, mask: int, value: int, phv: Phv) -> None:
        """Put `value` into the bits of a field that `mask` says; 0 stands for all of it."""
        self.written.add(target)
        mask <<= SHIFTS.get((action, target, mask), 0)
        if mask:
            low = (mask & -mask).bit_length() - 1
            phv[target] = phv[target] & ~mask | value << low & mask
        else:
            phv[target] = value & (1 << self.widths.get(target, 64)) - 1

    def joined(self, inputs: list[str], phv: Phv) -> tuple[int, int]:
        """Fields, slices and constants side by side: their value, and its bits."""
        value = bits = 0
        for name in inputs:
            constant = re.match(r"^(\d+)w(0x[0-9a-f]+|\d+)$", name)
            if constant:
                width, part = int(constant[1]), int(constant[2], 0)
            elif "$" in name:
                name, high, low = sliced(name)
                width = high - low + 1
                part = cut(phv[name], low, width)
            else:
                width, part = self.widths[name], phv[name]
            value, bits = value << width | part, bits + width
        return value, bits

    def crc(self, target: str, data: bytes) -> int:
        """A hash of a block's name, by the field that it becomes."""
        return crc16(data, *POLYNOMIALS[target])


def sliced(name: str) -> tuple[str, int, int]:
    """`local_metadata.now$2914`: bits 29 to 14 (of the ways to read it, that in which they
    descend)."""
    field_name, digits = name.split("$")
    for split in range(1, len(digits)):
        high, low = int(digits[:split]), int(digits[split:])
        if low <= high < 64:
            return field_name, high, low
    raise ValueError(name)
