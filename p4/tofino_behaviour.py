"""What the TNA program does, as its compiler and assembler write it: what the tests' model runs.

Owns: reading bfas's context.json and p4c's assembly for the ingress parser's states, the pipeline's
steps in the order in which the hardware takes them (tables, gateways, what comes next), what each
action does to which field, the tables of constants with their precedence, and the stateful ALUs'
instructions. Must not know: what any of it means.

Steps are numbered over the whole pipeline: 16 logical tables a stage. An action is a list of
primitives, each [operation, destination, mask, operands...]; an operand is a number, a field, or
`$` and the name of an action parameter. A mask says which bits of the destination change, 0 stands
for 64 or more. context.json counts them from the lowest that changes; where the assembly names the
slice, they are put in their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TABLES_A_STAGE = 16
END = {255, 511}
"""What stands for no next table on a Tofino 1 and 2."""

_STATEFUL = re.compile(r"  stateful \S+\$salu\.(\S+):$")
_SLICE = re.compile(r"^(.*)\.(\d+)-(\d+)$")
WORDS = {"phv_lo": range(32), "phv_hi": range(32, 64)}
"""Bits that a stateful ALU takes as its low, and as its high, word, counted from where the crossbar
brings the first: bit 64 of a group on a Tofino 1, bit 0 on a Tofino 2."""
FIRST_BITS = (64, 0)


def _inputs(line: str) -> dict[str, str]:
    """Which field, or `field.low-high` bits of one, is each word that a stateful ALU takes."""
    slices: dict[int, str] = {}
    for part in line.split("{", 1)[1].rsplit("}", 1)[0].split(","):
        at, name = part.split(": ")
        slices[int(at)] = name.strip()
    named: dict[str, str] = {}
    base = next(bit for bit in FIRST_BITS if min(slices) >= bit)
    slices = {offset - base: name for offset, name in slices.items()}
    for word, bits in WORDS.items():
        pieces = [(offset, slices[offset]) for offset in sorted(slices) if offset in bits]
        if not pieces:
            continue
        if pieces[0][0] != bits.start:
            raise ValueError(f"{line.strip()}: a word that does not begin at its first bit")
        if len(pieces) == 1:
            named[word] = pieces[0][1]
            continue
        first = _SLICE.match(pieces[0][1])
        last = first
        for offset, piece in pieces[1:]:
            found = _SLICE.match(piece)
            if first is None or last is None or found is None or found[1] != first[1]:
                raise ValueError(f"{line.strip()}: not one field")
            low = int(first[2])
            if int(found[2]) != int(last[3]) + 1 or offset - bits.start != int(found[2]) - low:
                raise ValueError(f"{line.strip()}: bits of {first[1]} out of order")
            last = found
        assert first is not None
        assert last is not None
        named[word] = f"{first[1]}.{first[2]}-{last[3]}"
    return named


def stateful_programs(assembly: str) -> dict[str, Any]:
    """Of each register: its format, what it takes from the packet, and its ALU's instructions."""
    programs: dict[str, Any] = {}
    program: dict[str, Any] | None = None
    actions: dict[str, list[str]] | None = None
    inside_inputs = False
    for line in assembly.splitlines():
        started = _STATEFUL.match(line)
        if started:
            program = {"format": "", "inputs": {}, "actions": {}}
            programs[started[1]] = program
            actions = None
        elif not line.startswith("    "):
            program = None
        if program is None:
            continue
        if line.startswith("    ") and line[4] != " ":
            actions = program["actions"] if line == "    actions:" else None
            inside_inputs = line == "    input_xbar:"
            if line.startswith("    format: "):
                program["format"] = line.split(": ", 1)[1]
        elif inside_inputs and line.startswith("      exact group "):
            program["inputs"] |= _inputs(line)
        elif actions is not None:
            if line.startswith("      - "):
                list(actions.values())[-1].append(line[8:])
            else:
                actions[line.strip().rstrip(":")] = []
    return dict(sorted(programs.items()))


def stage_tables_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    """What a table is in each stage where it lies."""
    attributes = table.get("match_attributes") or {}
    return [*(table.get("stage_tables") or ()), *(attributes.get("stage_tables") or ())]


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _numbers(value: Any) -> list[int]:
    """The steps that a gateway chooses; context.json has a list on one target, a string on the
    other."""
    found = value if isinstance(value, list) else [value]
    return [int(number) for number in found if int(number) not in END]


def _operand(operand: dict[str, str]) -> int | str:
    name = operand["name"]
    if operand["type"] == "action_param":
        return f"${name}"
    if operand["type"] != "immediate":
        return name
    return int(re.sub(r"^\d+[ws]", "", name), 0)


Slices = dict[tuple[str, str, int], set[int]]
"""(action, field, width): the lowest bits of the slices of that width that the action sets."""
_ACTION = re.compile(r"^ {6}([\w.$]+)\(.*\):$")
_SET_SLICE = re.compile(r"^ {6}- set ([\w.$]+)\.(\d+)-(\d+), ")


def set_slices(assembly: str) -> Slices:
    """Where the assembly says which bits of a field an action sets."""
    found: Slices = {}
    action = ""
    for line in assembly.splitlines():
        if named := _ACTION.match(line):
            action = _short(named[1])
        elif sliced := _SET_SLICE.match(line):
            low, high = int(sliced[2]), int(sliced[3])
            found.setdefault((action, sliced[1], high - low + 1), set()).add(low)
    return found


def _primitive(primitive: dict[str, Any], action: str, slices: Slices) -> list[Any]:
    """One primitive of an action."""
    kind = primitive["name"].removesuffix("Primitive")
    target = primitive["dst"]["name"]
    if kind in ("ModifyField", "DirectAlu", "Shift"):
        operands = [_operand(primitive[key]) for key in ("src1", "src2") if key in primitive]
        mask = int(primitive["dst_mask"]["name"], 0)
        lowest = slices.get((action, target, mask.bit_length()), set())
        if len(lowest) == 1:
            mask <<= next(iter(lowest))
        return [primitive["operation"], target, mask, *operands]
    if kind in ("AddHeader", "RemoveHeader"):
        return [kind, target]
    if kind in ("Count", "CountFromHash"):
        return ["Count", target, *primitive.get("hash_inputs", ())]
    if kind == "Drop":
        return [kind, target]
    if kind == "SetFieldToHashIndex":
        return ["Hash", target, primitive["idx"]["algorithm"], *primitive["hash_inputs"]]
    if kind == "ExecuteStatefulAluFromHash":
        details = primitive["stateful_alu_details"]
        result = details.get("output_dst", "")
        return ["Execute", target, details["name"], result, *primitive["hash_inputs"]]
    raise ValueError(f"unknown primitive {primitive['name']}")


def _actions(table: dict[str, Any], stage_table: dict[str, Any], slices: Slices) -> dict[str, Any]:
    indirection = stage_table.get("ternary_indirection_stage_table") or {}
    formats = stage_table.get("action_format") or indirection.get("action_format") or ()
    following = {
        each["action_name"]: _numbers(each["next_table_full"])
        + [
            TABLES_A_STAGE * one["next_table_stage_no"] + one["next_table_logical_id"]
            for one in each["next_tables"]
        ]
        for each in formats
    }
    otherwise = _numbers(stage_table.get("default_next_table", 255))
    return {
        _short(action["name"]): {
            "parameters": [
                [parameter["name"], int(parameter.get("default_value") or "0", 0)]
                for parameter in action["p4_parameters"]
            ],
            "does": [
                _primitive(primitive, _short(action["name"]), slices)
                for primitive in action["primitives"]
            ],
            "next": following.get(action["name"], otherwise),
        }
        for action in table["actions"]
    }


_PATTERN = re.compile(r"^ +(0[xbo][0-9a-f*]+):")
_FIELD = re.compile(r"^(\d+): (.*?)(?:\((\d+)(?:\.\.(\d+))?\))?$")


def _bits(pattern: str) -> str:
    """A pattern of the assembly as `0`, `1`, `*`, the lowest bit first."""
    if pattern == "*":
        return ""
    if pattern.startswith("0b"):
        return pattern[:1:-1]
    width = 3 if pattern.startswith("0o") else 4
    digits = (
        "*" * width if digit == "*" else f"{int(digit, 16):0{width}b}" for digit in pattern[2:]
    )
    return "".join(digits)[::-1]


def gateway_entries(assembly: str, widths: dict[str, int]) -> dict[str, Any]:
    """Of each table whose entries the compiler put into its gateway: matches by field, and the
    action's name in the assembly. Leading zeros of a pattern may be left out."""
    found: dict[str, Any] = {}
    table = ""
    fields: list[tuple[int, str, int, int | None]] = []
    pattern = ""
    for line in assembly.splitlines():
        named = re.match(r"^    p4: \{ name: ([^,]+),", line)
        if named:
            table = named[1]
        elif line.startswith("      match: {"):
            fields = []
            for part in line.split("{", 1)[1].rsplit("}", 1)[0].split(", "):
                match = _FIELD.match(part.strip())
                if match is None:
                    raise ValueError(f"{table}: a gateway matches {part}")
                low = int(match[3] or 0)
                width = None if match[3] is None else int(match[4] or match[3]) - low + 1
                fields.append((int(match[1]), match[2], low, width))
        elif started := _PATTERN.match(line):
            pattern = started[1]
        elif line.startswith("        action: ") and pattern:
            bits = _bits(pattern)
            wanted: dict[str, list[int]] = {}
            for at, name, low, width in fields:
                end = at + (width or (1 if name.endswith("$valid") else widths[name]))
                value, mask = wanted.get(name, [0, 0])
                for offset, bit in enumerate(bits[at:end].ljust(end - at, "0")):
                    if bit != "*":
                        mask |= 1 << low + offset
                        value |= int(bit) << low + offset
                wanted[name] = [value, mask]
            found.setdefault(table, []).append([wanted, line.split(": ", 1)[1].strip()])
        elif not line.startswith("      "):
            pattern = ""
    return found


def _entries(table: dict[str, Any], gateway: list[Any]) -> list[dict[str, Any]]:
    """Constant entries in order of precedence, from the table or from its gateway."""
    names = {action["handle"]: _short(action["name"]) for action in table["actions"]}
    if table.get("static_entries"):
        return [
            {
                "match": [
                    [int(value["value"], 16), int(value.get("mask", "-0x1"), 16)]
                    for value in entry["match_key_fields_values"]
                ],
                "action": names[entry["action_handle"]],
                "parameters": [
                    int(parameter["value"], 16) for parameter in entry["action_parameters_values"]
                ],
            }
            for entry in sorted(table["static_entries"], key=lambda entry: entry["priority"])
        ]
    keys = [key.get("global_name", key["name"]) for key in table["match_key_fields"]]
    entries = []
    for wanted, assembled in gateway:
        if set(wanted) - set(keys):
            raise ValueError(f"{table['name']}: its gateway matches {sorted(wanted)}")
        action = next((name for name in names.values() if assembled.endswith(name)), None)
        if action is None:
            raise ValueError(f"{table['name']}: its gateway runs {assembled}")
        match = [wanted.get(key, [0, 0]) for key in keys]
        entries.append({"match": match, "action": action, "parameters": []})
    return entries


def tables(context: dict[str, Any], assembly: str) -> dict[str, Any]:
    """Every match-action table: its key as (field, lowest bit, bits, kind), constant entries,
    default action, and actions."""
    slices = set_slices(assembly)
    gateways = gateway_entries(assembly, field_widths(context))
    found: dict[str, Any] = {}
    for table in context["tables"]:
        placed = stage_tables_of(table)
        if table["table_type"] != "match" or placed[0]["stage_number"] < 0:
            continue
        if len(placed) != 1:
            raise ValueError(f"{table['name']} lies in several stages")
        found[table["name"]] = {
            "key": [
                [
                    key.get("global_name", key["name"]),
                    key["start_bit"],
                    key["bit_width"],
                    key["match_type"],
                ]
                for key in table["match_key_fields"]
            ],
            "entries": _entries(table, gateways.get(table["name"], [])),
            "default": next(
                (
                    _short(action["name"])
                    for action in table["actions"]
                    if action["handle"] == table["default_action_handle"]
                ),
                "",
            ),
            "actions": _actions(table, placed[0], slices),
        }
    return dict(sorted(found.items()))


def _steps(context: dict[str, Any], direction: str) -> Iterator[dict[str, Any]]:
    for table in context["tables"]:
        if table["direction"] != direction or table["table_type"] not in ("match", "condition"):
            continue
        for placed in stage_tables_of(table):
            if placed["stage_number"] < 0:
                continue
            number = TABLES_A_STAGE * placed["stage_number"] + placed["logical_table_id"]
            step: dict[str, Any] = {"number": number}
            if table["table_type"] == "match":
                step |= {"table": table["name"], "always": bool(placed.get("always_run"))}
            elif table["condition"]:
                following = placed["next_tables"]
                step |= {
                    "condition": table["condition"],
                    "true": _numbers(following["true"]),
                    "false": _numbers(following["false"]),
                }
            yield step


def pipeline(
    context: dict[str, Any], found_tables: dict[str, Any], direction: str
) -> list[dict[str, Any]]:
    """The steps of ingress or egress. A step may have a condition, which says which steps follow
    (its own table may be among them), and a table. `always`: it is run unasked."""
    found: dict[int, dict[str, Any]] = {}
    for step in _steps(context, direction):
        found.setdefault(step["number"], {}).update(step)
    steps = [found[number] for number in sorted(found)]
    if any(step.get("always") for step in steps):
        # A gateway that nobody chooses has no mark of its own in context.json.
        chosen = {
            number for step in steps for side in ("true", "false") for number in step.get(side, ())
        }
        for table in found_tables.values():
            chosen.update(*(action["next"] for action in table["actions"].values()))
        for step in steps:
            step["always"] = step.get(
                "always", "table" not in step and step["number"] not in chosen
            )
    else:
        for step in steps:
            step["always"] = step is steps[0]
    return steps


def field_widths(context: dict[str, Any]) -> dict[str, int]:
    """Bits of each field that lies in a container."""
    widths: dict[str, int] = {}
    for stage in context["phv_allocation"]:
        for gress in ("ingress", "egress"):
            for container in stage.get(gress, ()):
                for record in container["records"]:
                    name, width = record["field_name"], record["field_msb"] + 1
                    widths[name] = max(width, widths.get(name, 0))
    return dict(sorted(widths.items()))


_ROW = re.compile(r"^ {6}(\*|0[xbo][0-9a-f*]+):$")
_EXTRACT = re.compile(r"^ {8}(\d+)(?:\.\.(\d+))?: \w+(?:\((\d+)\.\.\d+\))?(?:  # (.*))?$")
_CONSTANT = re.compile(r"value (\d+) -> \w+ bit\[[\d.]+\]: (?:in|e)gress::(\S+)")
_PLACED = re.compile(r"^bit\[[\d.]+\] -> \w+ bit\[(\d+)(?:\.\.(\d+))?\]: (?:in|e)gress::(\S+)$")
_NAMED = re.compile(r"^(?:in|e)gress::(\S+)$")
_PART = re.compile(r"^(.*?)(?:\[\d+:\d+\])?(?:\.(\d+)-(\d+))?$")


def _extract(text: str, first: int, last: int, low: int) -> list[Any] | None:
    """[first bit in the input, last, field, lowest bit of the field], bits counted from where the
    state begins; None for what does not come from the packet. `first` and `last`: of what comes
    into a container, from its bit `low` on. (The input's bits that the assembly names beside them
    are those of the state as it was written, which the compiler may have joined with another.)"""
    placed, named = _PLACED.match(text), _NAMED.match(text)
    if placed:
        high, name = int(placed[1]), placed[3]
        first, last = last - (high - low), last - (int(placed[2] or high) - low)
    elif named:
        name = named[1]
    else:
        return None
    part = _PART.match(name)
    assert part is not None
    return [first, last, part[1], int(part[2] or 0)]


def parser(assembly: str, gress: str) -> dict[str, Any]:
    """The parser of ingress or egress: bytes in front of a frame, the first state, and each state's
    rows, in order of precedence. A row: what it matches of the registers (bits, the highest first;
    leading ones that are not there are 0), the bytes that must be there, extracted fields,
    constants, bytes loaded into registers, what becomes of the counter of bytes that must be parsed
    at least, bytes consumed, the next state."""
    found: dict[str, Any] = {"prefix": 0, "start": "", "states": {}}
    state: dict[str, Any] = {}
    row: dict[str, Any] = {}
    bits = (0, 0, 0)
    lines = iter(assembly.splitlines())
    for line in lines:
        if line.startswith(f"parser {gress}:"):
            break
    for line in lines:
        if line and line[0] != " ":
            break
        text = line.strip()
        if line.startswith("  start: "):
            found["start"] = text.split(": ", 1)[1]
        elif line.startswith("  hdr_len_adj: "):
            found["prefix"] = int(text.split(": ", 1)[1])
        elif re.match(r"^ {4}\S.*:$", line):
            state = {"match": [], "rows": []}
            found["states"][text.removesuffix(":")] = state
        elif line.startswith("      match: ["):
            state["match"] = [name.strip() for name in text[8:-1].split(",")]
        elif started := _ROW.match(line):
            row = {"pattern": _bits(started[1])[::-1], "extract": [], "set": [], "load": {}}
            row |= {"counter": [], "shift": 0, "needs": 0, "next": "end"}
            state["rows"].append(row)
        elif extracted := _EXTRACT.match(line):
            first, last = int(extracted[1]), int(extracted[2] or extracted[1])
            bits = (8 * first, 8 * last + 7, int(extracted[3] or 0))
            entry = _extract(extracted[4] or "", *bits)
            row["extract"] += [entry] if entry else []
        elif re.match(r"^ {8}\d", line):
            raise ValueError(f"an extraction that is not understood: {text}")
        elif constant := _CONSTANT.search(line):
            row["set"].append([constant[2], int(constant[1])])
        elif line.startswith("            # - bit["):
            entry = _extract(text.removeprefix("# - "), *bits)
            row["extract"] += [entry] if entry else []
        elif line.startswith("        load: {"):
            for part in text[7:-1].split(","):
                register, at = part.split(" : ")
                row["load"][register.strip(" {")] = [int(n) for n in at.strip().split("..")]
        elif line.startswith(("          imm: ", "        counter: dec ")):
            row["counter"] = [line.split()[0].rstrip(":"), int(text.split()[-1])]
        elif line.startswith("        shift: "):
            row["shift"] = int(text.split(": ", 1)[1])
        elif line.startswith("        buf_req: "):
            row["needs"] = int(text.split(": ", 1)[1])
        elif line.startswith("        next: "):
            row["next"] = text.split(": ", 1)[1]
    return found


def behaviour(context: dict[str, Any], assembly: str) -> dict[str, Any]:
    """All of the above."""
    found = tables(context, assembly)
    return {
        "parsers": {gress: parser(assembly, gress) for gress in ("ingress", "egress")},
        "ingress": pipeline(context, found, "ingress"),
        "egress": pipeline(context, found, "egress"),
        "tables": found,
        "stateful": stateful_programs(assembly),
        "fields": field_widths(context),
    }
