"""What the TNA program takes of a Tofino, from what its compiler and assembler write.

Owns: reading bfas's context.json, in which every table, register and counter of each stage is named
with its memory, and the container allocation; and the figures of the pool that follow. Must not
know: how to compile, or what the tables mean. The budgets are those of the compiler's own device
description (p4lang/p4c, backends/tofino: mau/memories.h and specs/device.h).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcast.p4.tofino_behaviour import stage_tables_of
from kvcast.protocol.messages.wire import CHUNK_BYTES, CHUNKS_PER_SEGMENT

SRAM_BLOCKS = 80
"""A stage's SRAM blocks, of 1024 words of 128 bits."""
MAP_RAM_BLOCKS = 48
"""A stage's map RAMs; each block of a register or counter, and its spare, needs one."""
TCAM_BLOCKS = 24
"""A stage's TCAM blocks, of 512 words of 44 bits."""
STATEFUL_ALUS = 4
NO_STAGE = -1
"""Where context.json puts what the parser does."""
CELL = re.compile(r"\.cell_w(\d+)_(\w+)$")
"""A register of the cells: its word in a row, and its bank."""
WORD_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Blocks that one table holds in one stage: (kind, number) with kind sram, tcam or map_ram."""

    stage: int
    blocks: frozenset[tuple[str, int]]


def _units(node: Any) -> Iterator[tuple[str, int]]:
    """All memory units under a stage table, whatever they are for."""
    if isinstance(node, list):
        for item in node:
            yield from _units(item)
    elif isinstance(node, dict):
        allocation = node.get("memory_resource_allocation")
        if isinstance(allocation, dict):
            kind = allocation["memory_type"]
            for group in allocation.get("memory_units_and_vpns", ()):
                for unit in group["memory_units"]:
                    yield kind, unit
            spare = allocation.get("spare_bank_memory_unit")
            for unit in spare if isinstance(spare, list) else [spare]:
                if unit is not None:
                    yield kind, unit
        for key, value in node.items():
            if key != "memory_resource_allocation":
                yield from _units(value)


def memories(table: dict[str, Any]) -> list[Memory]:
    """The blocks of a table by stage. Registers and counters take a map RAM for each block."""
    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    has_map_rams = table["table_type"] in ("stateful", "statistics", "meter")
    for stage_table in stage_tables_of(table):
        blocks = found[stage_table["stage_number"]]
        for kind, unit in _units(stage_table):
            if kind in ("sram", "tcam"):
                blocks.add((kind, unit))
                if has_map_rams and kind == "sram":
                    blocks.add(("map_ram", unit))
    return [Memory(stage, frozenset(blocks)) for stage, blocks in sorted(found.items())]


def _count(blocks: Iterator[tuple[str, int]]) -> dict[str, int]:
    counts = Counter(kind for kind, _ in blocks)
    return {kind: counts[kind] for kind in ("sram", "tcam", "map_ram") if counts[kind]}


def containers(context: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Containers that hold any field in any stage, by gress and kind, and their bits."""
    seen: dict[str, dict[tuple[int, str], int]] = defaultdict(dict)
    for stage in context["phv_allocation"]:
        for gress in ("ingress", "egress"):
            for container in stage.get(gress, ()):
                key = (container["phv_number"], container["container_type"])
                seen[gress][key] = container["word_bit_width"]
    report: dict[str, dict[str, int]] = {}
    for gress, found in sorted(seen.items()):
        counts: Counter[str] = Counter()
        for (_, kind), width in found.items():
            counts[f"{kind}_{width}_bit"] += 1
            counts["bits"] += width
        report[gress] = dict(sorted(counts.items()))
    return report


def report(context: dict[str, Any], target: str, slots: int, compiler: str) -> dict[str, Any]:
    """The resource report of one target."""
    tables: dict[str, Any] = {}
    by_stage: dict[int, set[tuple[str, int]]] = defaultdict(set)
    alus: Counter[int] = Counter()
    cells: dict[tuple[int, str], int] = {}
    registers: dict[str, int] = {}
    last_stage = {"ingress": 0, "egress": 0}
    for table in context["tables"]:
        stage_tables = stage_tables_of(table)
        if not stage_tables:
            continue
        stages = sorted({stage["stage_number"] for stage in stage_tables} - {NO_STAGE})
        if not stages:
            continue
        direction = table["direction"]
        last_stage[direction] = max(last_stage[direction], *stages)
        held = memories(table)
        for memory in held:
            by_stage[memory.stage] |= memory.blocks
        kind = table["table_type"]
        entry: dict[str, Any] = {"kind": kind, "direction": direction, "stages": stages}
        if kind == "stateful":
            for stage in stages:
                alus[stage] += 1
            entry["stateful_alus"] = len(stages)
            registers[table["name"]] = table["size"]
            match = CELL.search(table["name"])
            if match:
                cells[int(match[1]), match[2]] = table["size"]
        entry["size"] = table.get("size", 0)
        entry |= _count(block for memory in held for block in memory.blocks)
        if kind != "condition" and not table["name"].startswith(("tbl_", "cond-")):
            tables[f"{table['name']} ({kind})"] = entry
    sizes = {table["name"]: table["size"] for table in context["tables"] if "size" in table}
    words = len({word for word, _ in cells})
    banks = len({bank for _, bank in cells})
    passes = -(-CHUNK_BYTES // (words * WORD_BYTES))
    rows = banks * min(cells.values())
    if rows < passes * slots * 64:
        raise ValueError(f"{slots} slots of 64 chunks of {passes} rows do not fit {rows} rows")
    pending = [size for name, size in registers.items() if ".pending_ports" in name]
    blocks = [block for held in by_stage.values() for block in held]
    return {
        "target": target,
        "compiler": compiler,
        "stages": 1 + max(last_stage.values()),
        "ingress_stages": 1 + last_stage["ingress"],
        "egress_stages": 1 + last_stage["egress"],
        "value_bytes_per_pipe": slots * CHUNKS_PER_SEGMENT * CHUNK_BYTES,
        "value_register_bytes_per_pipe": sum(cells.values()) * WORD_BYTES,
        "slots": slots,
        "pending_entries": sum(pending),
        "forwarded_hosts": sizes["l2_forward"],
        "ipv4_routes": sizes["ipv4_route"],
        "passes_per_chunk": passes,
        "bytes_per_pass": words * WORD_BYTES,
        "banks": banks,
        "totals": {**_count(iter(blocks)), "stateful_alus": sum(alus.values())},
        "containers": containers(context),
        "by_stage": {
            str(stage): {**_count(iter(held)), "stateful_alus": alus[stage]}
            for stage, held in sorted(by_stage.items())
        },
        "budget_by_stage": {
            "sram": SRAM_BLOCKS,
            "map_ram": MAP_RAM_BLOCKS,
            "tcam": TCAM_BLOCKS,
            "stateful_alus": STATEFUL_ALUS,
        },
        "tables": dict(sorted(tables.items())),
    }


def load(path: Path) -> dict[str, Any]:
    """A context.json."""
    loaded: dict[str, Any] = json.loads(path.read_bytes())
    return loaded
