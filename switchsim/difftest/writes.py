"""Random writes of the control plane: everything that it can set, most of it valid.

Must not know: what the engines make of it, which `compare.Pair` sees.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.externs import Rate
from kvcast.switchsim.control_plane.tables import Group, Member, Table
from kvcast.switchsim.difftest.compare import Pair
from kvcast.switchsim.difftest.frames import PORTS, Pools
from kvcast.switchsim.ir import Exact, Lpm, MatchValue, Range, Ternary

GROUPS = 6


class Writer:
    """Random writes to everything that a program has."""

    def __init__(self, rng: random.Random, pair: Pair, pools: Pools) -> None:
        self.rng = rng
        self.pair = pair
        self.pools = pools
        self.program = pair.program
        self.tables = [t.name for t in self.program.tables()]
        self.loose = [t.name for t in self.program.tables() if not t.key]
        self.keyed = [t.name for t in self.program.tables() if t.key and not t.const_entries]

    def set_up(self) -> None:
        for _ in range(2):
            self.replication()
        for profile in self.pair.reference.action_profiles:
            for _ in range(4):
                self.profile(profile)
        for name in self.keyed:
            for _ in range(self.rng.choice((0, 1, 2, 4, 12))):
                self.add(name)
        for name in self.tables:
            if self.rng.random() < 0.3:
                self.default(name)
        for _ in range(4):
            self.extern()

    def write(self) -> None:
        """One random write."""
        roll = self.rng.random()
        if roll < 0.15:
            self.replication()
        elif roll < 0.25:
            self.extern()
        elif roll < 0.3 and self.tables:
            self.default(self.rng.choice(self.tables))
        elif roll < 0.4 and self.pair.reference.action_profiles:
            self.profile(self.rng.choice(list(self.pair.reference.action_profiles)))
        elif self.keyed:
            name = self.rng.choice(self.keyed)
            self.rng.choice((self.add, self.add, self.change, self.remove))(name)

    def replication(self) -> None:
        rng = self.rng
        number = rng.randrange(1, GROUPS)
        replicas = [
            (rng.randrange(PORTS), rng.choice((0, 1, 2, 255)))
            for _ in range(rng.choice((0, 1, 2, 3, 8)))
        ]
        if rng.random() < 0.1:
            self.pair.both("delete group", lambda s: s.delete_multicast_group(number))
        else:
            self.pair.both("group", lambda s: s.set_multicast_group(number, replicas))
        length = rng.choice((0, 0, 20, 100))
        if rng.random() < 0.1:
            self.pair.both("delete session", lambda s: s.delete_clone_session(number))
        else:
            self.pair.both("session", lambda s: s.set_clone_session(number, replicas, length))

    def match(self, key: ir.KeyField) -> MatchValue:
        rng, width = self.rng, key.width
        full, value = (1 << width) - 1, self.pools.number(width)
        match key.match:
            case "exact":
                return Exact(value)
            case "lpm":
                return Lpm(value, rng.choice((0, width, width // 2, rng.randrange(width + 1))))
            case "ternary":
                mask = rng.choice((0, full, full & ~1, self.pools.number(width)))
                return Ternary(value, mask)
            case _:
                other = self.pools.number(width)
                return Range(min(value, other), max(value, other))

    def action(self, table: Table) -> tuple[str | Member | Group, list[int]]:
        """What an entry of the table may do."""
        if table.profile is None:
            return self.direct_action(table)
        number = self.rng.randrange(6)
        if table.profile.has_selector and self.rng.random() < 0.6:
            return Group(number), []
        return Member(number), []

    def direct_action(self, table: Table) -> tuple[str, list[int]]:
        spec = self.program.actions[self.rng.choice(table.spec.actions)]
        return spec.name, [self.argument(p.width) for p in spec.parameters]

    def argument(self, width: int) -> int:
        rng = self.rng
        if width == 9:
            return rng.choice((rng.randrange(PORTS), rng.randrange(PORTS), 511))
        if width == 16 and rng.random() < 0.5:
            return rng.randrange(GROUPS)
        return self.pools.number(width)

    def add(self, name: str) -> None:
        table = self.pair.reference.tables[name]
        if not table.spec.actions:
            return
        key = [self.match(k) for k in table.spec.key]
        priority = self.rng.randrange(6)
        action, arguments = self.action(table)
        self.pair.both(
            f"add to {name}", lambda s: s.tables[name].add(key, priority, action, arguments)
        )

    def _handle(self, name: str) -> int | None:
        entries = list(self.pair.reference.tables[name].entries)
        return self.rng.choice(entries) if entries else None

    def change(self, name: str) -> None:
        handle, rng = self._handle(name), self.rng
        table = self.pair.reference.tables[name]
        if handle is None or not table.spec.actions:
            return
        packets, bytes_ = rng.randrange(100), rng.randrange(10000)
        if table.has_counters and rng.random() < 0.3:
            self.pair.both(
                f"counter of {name}",
                lambda s: s.tables[name].write_counter(handle, packets, bytes_),
            )
        if table.has_meters and rng.random() < 0.5:
            rates = self._rates(2)
            self.pair.both(
                f"meter of {name}", lambda s: s.tables[name].configure_meter(handle, rates)
            )
        action, arguments = self.action(table)
        self.pair.both(
            f"change in {name}", lambda s: s.tables[name].modify(handle, action, arguments)
        )

    def remove(self, name: str) -> None:
        if self.rng.random() < 0.03:
            self.pair.both(f"clear {name}", lambda s: s.tables[name].clear())
            return
        handle = self._handle(name)
        if handle is not None:
            self.pair.both(f"delete from {name}", lambda s: s.tables[name].delete(handle))

    def default(self, name: str) -> None:
        table = self.pair.reference.tables[name]
        if not table.spec.actions:
            return
        action, arguments = self.direct_action(table)
        if self.rng.random() < 0.2:
            self.pair.both(f"reset {name}", lambda s: s.tables[name].reset_default())
        else:
            self.pair.both(
                f"default of {name}", lambda s: s.tables[name].set_default(action, arguments)
            )

    def profile(self, name: str) -> None:
        rng, pair = self.rng, self.pair
        profile = pair.reference.action_profiles[name]
        users = [
            t for t in pair.reference.tables.values() if t.profile is profile and t.spec.actions
        ]
        if not users:
            return
        member = rng.randrange(6)
        action, arguments = self.direct_action(rng.choice(users))

        def on(run: Callable[[Any], None]) -> None:
            pair.both(f"profile {name}", lambda s: run(s.action_profiles[name]))

        match rng.randrange(6):
            case 0 | 1:
                on(lambda p: p.add_member(member, action, arguments))
            case 2:
                on(lambda p: p.modify_member(member, action, arguments))
            case 3:
                on(lambda p: p.delete_member(member))
            case 4:
                known = list(profile.members)
                members = [rng.choice(known) for _ in range(rng.randrange(5))] if known else []
                on(lambda p: p.set_group(member, members))
            case _:
                on(lambda p: p.delete_group(member))

    def extern(self) -> None:
        rng, pair = self.rng, self.pair
        if self.program.registers:
            spec = rng.choice(self.program.registers)
            if spec.size:
                index = rng.randrange(min(spec.size, 8))
                value = self.pools.number(spec.width)
                pair.both(spec.name, lambda s: s.registers[spec.name].write(index, value))
        names = list(pair.reference.counters)
        if names:
            name = rng.choice(names)
            number = rng.randrange(max(1, min(8, len(pair.reference.counters[name]))))
            pair.both(name, lambda s: s.counters[name].write(number, 7, 700))
        meters = list(pair.reference.meters)
        if meters:
            meter = rng.choice(meters)
            count = pair.reference.meters[meter].rate_count
            rates = self._rates(count)
            at = rng.randrange(max(1, min(8, len(pair.reference.meters[meter]))))
            if rng.random() < 0.2:
                pair.both(meter, lambda s: s.meters[meter].clear(at))
            else:
                pair.both(meter, lambda s: s.meters[meter].configure(at, rates))

    def _rates(self, count: int) -> list[Rate]:
        rng = self.rng
        speeds = sorted(rng.choice((0.0, 0.001, 0.01, 0.5, 3.7)) for _ in range(count))
        return [Rate(speed, rng.choice((0, 1, 5, 300))) for speed in speeds]
