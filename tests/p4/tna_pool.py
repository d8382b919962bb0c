"""`PoolSwitch`, with the model of the TNA program in place of the v1model program.

So that the tests of tests/p4 can be carried out on both: whatever they ask of a switch becomes a
call of `TnaModel`, as a controller on that target would have it (serving groups do not go round).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from kvcast.protocol.messages import ethernet, wire
from kvcast.switchsim.ir import Exact, Lpm
from pool_switch import (
    LEASE_US,
    Entry,
    PoolSwitch,
    Received,
    pool_entries,
    pool_groups,
)
from tna_model import TnaModel

PARAMETERS = {
    "to_port": ("port", "port_bit"),
    "to_nexthop": ("port", "port_bit", "dst_mac", "src_mac"),
    "admit": ("port_bit", "serve_group"),
    "set_reader_group": ("port_bits", "serve_group"),
    "resident_at": ("slot", "generation", "chunk_mask", "digest", "size"),
    "set_group": ("group",),
    "rewrite": ("mac", "ip", "udp_port", "port_bit"),
    "readdress": (
        *("mac", "src", "dst", "queue_pair", "write_key"),
        *("identification", "src_port", "port_bit"),
    ),
}
LEASE_TICKS = 16 << 10
"""A lease that the TNA program counts exactly."""
TICKS_A_LEASE = 17 << 10
"""What LEASE_US lasts here: the program's leases end between 16 and 17 sixteenths."""


class Found(NamedTuple):
    """An entry of a table."""

    handle: int
    key: tuple[Exact, ...]
    packets: int


class DigestMessage(NamedTuple):
    fields: tuple[int, ...]


class SlotCounter(NamedTuple):
    """The counter resident_hits."""

    model: TnaModel

    def read(self, slot: int) -> tuple[int, int]:
        return self.model.counters[f"resident_hits {slot}"], 0


class Stats(NamedTuple):
    dropped_egress: int


@dataclass
class ModelTable:
    """One table of the model, as switchsim's `Table` is used by the tests."""

    model: TnaModel
    name: str
    keys: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, match: Iterable[Any], _priority: int, action: str, params: Any) -> int:
        key: list[int] = []
        for part in match:
            key += [part.value, part.prefix_len] if isinstance(part, Lpm) else [part.value]
        names = PARAMETERS.get(action, ())
        values = dict(zip(names, params, strict=True))
        self.model.entries[self.name][tuple(key)] = (action, values)
        self.keys.append(tuple(key))
        return len(self.keys) - 1

    def delete(self, handle: int) -> None:
        del self.model.entries[self.name][self.keys[handle]]

    def clear(self) -> None:
        self.model.entries[self.name].clear()

    def find(self, match: list[Exact]) -> Found:
        kinds = {"decisions": "decision", "fills": "fill"}
        if self.name in kinds:
            count = self.model.counters[f"{kinds[self.name]} {match[0].value}"]
            return Found(-1, tuple(match), count)
        return Found(self.keys.index(tuple(part.value for part in match)), tuple(match), 0)

    def __iter__(self) -> Iterator[Found]:
        for handle, key in enumerate(self.keys):
            if key in self.model.entries[self.name]:
                yield Found(handle, tuple(Exact(value) for value in key), 0)

    def reset_default(self) -> None:
        self.model.settings = {"enabled": 0, "lease_ticks": 312, "heat_threshold": 0}


@dataclass
class ModelSwitch:
    """The model, as switchsim's `Switch` is used by the tests."""

    model: TnaModel
    ticks_a_lease: int = TICKS_A_LEASE

    def process(self, port: int, data: bytes, now_us: int) -> list[tuple[int, bytes]]:
        self.model.now = now_us * self.ticks_a_lease // LEASE_US
        return self.model.inject(port, data)

    def set_multicast_group(self, group: int, replicas: Iterable[tuple[int, int]]) -> None:
        self.model.groups[group] = [copy for copy in replicas if copy[1] != self.model.rid]

    @property
    def stats(self) -> Stats:
        return Stats(self.model.filtered)

    @property
    def counters(self) -> dict[str, SlotCounter]:
        return {"resident_hits": SlotCounter(self.model)}

    def take_digests(self) -> list[DigestMessage]:
        taken = [DigestMessage(tuple(digest.values())) for digest in self.model.digests]
        self.model.digests.clear()
        return taken


class TnaPool(PoolSwitch):
    """`PoolSwitch` on the model."""

    device = "tofino1"
    ticks_a_lease = TICKS_A_LEASE
    compiled: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        hosts: int = 4,
        *,
        enabled: bool = True,
        heat_threshold: int = 0,
        lease_ticks: int = LEASE_TICKS,
        target: str = "",
    ) -> None:
        del target
        self.model = TnaModel(self.device, self.compiled)
        self.switch = ModelSwitch(self.model, self.ticks_a_lease)  # type: ignore[assignment]
        self.tables: dict[str, ModelTable] = {}
        self.now_us = 10_000_000
        self.hosts = hosts
        self.model.settings = {
            "enabled": int(enabled),
            "lease_ticks": lease_ticks,
            "heat_threshold": heat_threshold,
        }
        for entry in pool_entries(hosts):
            self.add(entry.table, entry.key, entry.action, *entry.params)
        for group, replicas in pool_groups(hosts).items():
            self.switch.set_multicast_group(group, replicas)

    def table(self, alias: str) -> ModelTable:  # type: ignore[override]
        return self.tables.setdefault(alias, ModelTable(self.model, alias))

    def action(self, table: str, alias: str) -> str:
        del table
        return alias

    def send_raw(self, port: int, data: bytes) -> list[Received]:
        out = []
        for out_port, frame in self.switch.process(port, data, self.now_us):
            datagram = ethernet.unwrap(frame)
            out.append(
                Received(out_port, datagram.src, datagram.dst, wire.decode(datagram.payload))
            )
        return out


__all__ = ["Entry", "TnaPool"]
